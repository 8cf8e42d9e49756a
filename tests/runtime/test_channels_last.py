"""cuDNN reads pictures as they lie, where a size of 1 leaves their strides open too."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch._prims_common import suggest_memory_format

import strop
from strop.runtime.run.library_calls import channels_last
from strop.testing import assert_as_accurate_as_eager

SHAPES = [(2, 1, 1, 7), (1, 1, 5, 4), (3, 4, 1, 1), (2, 3, 5, 1), (2, 8, 4, 4), (3, 1, 6, 1)]
CONVOLUTIONS = {
    "a wave": (nn.Conv1d(1, 16, 10, stride=5, bias=False), (2, 1, 800)),
    "a gray picture": (nn.Conv2d(1, 8, 3, padding=1), (2, 1, 12, 9)),
    "one channel to one": (nn.Conv2d(1, 1, 3, padding=1), (2, 1, 12, 9)),
    "one channel in half": (nn.Conv2d(1, 8, 5, padding=2).half(), (3, 1, 16, 16)),
    "channels each": (nn.Conv2d(8, 8, 3, padding=1, groups=8), (2, 8, 12, 9)),
    "each of one": (nn.Conv1d(1, 4, 3, padding=1, groups=1), (1, 1, 33)),
    "one place": (nn.Conv2d(4, 6, 3, padding=1), (2, 4, 1, 1)),
    "one column": (nn.Conv2d(4, 6, 3, padding=1), (2, 4, 9, 1)),
    "one row": (nn.Conv1d(4, 6, 16, padding=8, groups=2), (2, 4, 39)),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_strides_say_how_pictures_lie(shape: tuple[int, ...], order: torch.memory_format) -> None:
    x = torch.randn(shape).contiguous(memory_format=order)
    found = channels_last(x)
    assert torch.equal(found, x)
    if x.is_contiguous(memory_format=torch.channels_last):
        assert found.data_ptr() == x.data_ptr()
        assert suggest_memory_format(found) == torch.channels_last
    else:
        assert found is x


def test_pieces_of_pictures_stay_what_they_are() -> None:
    wide = torch.randn(2, 8, 6, 5).contiguous(memory_format=torch.channels_last)
    piece = wide[:, :1]
    assert channels_last(piece) is piece
    later = torch.randn(3, 1, 6, 5)[1:]
    assert torch.equal(channels_last(later), later)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_where_a_size_is_one(name: str) -> None:
    module, shape = CONVOLUTIONS[name]
    eager = copy.deepcopy(module).cuda().eval()
    ours, exact = copy.deepcopy(eager), copy.deepcopy(eager).double()
    strop.optimize(ours)
    for batch in (shape[0], shape[0] + 1):
        x = torch.randn(batch, *shape[1:], device="cuda", dtype=eager.weight.dtype)
        with torch.no_grad(), torch.backends.cudnn.flags(allow_tf32=False):
            assert_as_accurate_as_eager(ours(x), eager(x), exact(x.double()))
