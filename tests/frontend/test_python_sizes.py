"""int, len, min and max of a traced module: symbolic for sizes, Python's own for all else."""

from __future__ import annotations

import builtins
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import strop
from strop.frontend.python_sizes import symbolic_builtins


class Module(nn.Module):
    pass


HERE = vars(sys.modules[__name__])


def test_names_are_there_while_tracing_and_gone_after() -> None:
    with symbolic_builtins(Module()), symbolic_builtins(Module()):
        assert HERE["int"] is not builtins.int
    assert not {"int", "len", "min", "max"} & HERE.keys()


def test_other_values_meet_what_python_has() -> None:
    with symbolic_builtins(Module()):
        assert int("17", 8) == 15
        assert int(2.9) == 2
        assert isinstance(3, int)
        assert issubclass(bool, int)
        assert int == int  # noqa: E721
        assert {int: "number"}[builtins.int] == "number"
        assert len([torch.ones(2)]) == 1
        with pytest.raises(TypeError):
            len(torch.ones(()))
        assert min([3, 1], key=lambda x: -x) == 3
        assert max((x for x in (1, 5, 2)), default=0) == 5
        assert min(4, 2.5) == 2.5
        with pytest.raises(ValueError, match="empty"):
            max([])


class FromTheLongerSide(nn.Module):
    """Reads a table from where the longer side ends, as the places of Qwen-Image's text are."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(64.0))

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[2:]
        first = max(height // 2, width // 2, 1)
        return self.table[first : first + width] * x.sum(2) + first


class Squared(nn.Module):
    """Pads a picture to a square: the longer side is a size of a tensor, and torch asks which side
    needs no padding."""

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[2:]
        side = max(height, width)
        square = F.pad(x, (0, side - width, 0, side - height))
        return (square * 2).softmax(-1).sum(2) + side


class PaddedRows(nn.Module):
    """Pads rows to a multiple of eight, as Z-Image does with tokens: ``len`` of a tensor counts
    them."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.permute(2, 3, 0, 1).flatten(0, 1)
        missing = -len(rows) % 8
        if missing > 0:
            rows = torch.cat([rows, rows[-1:].repeat(missing, 1, 1)])
        return rows.softmax(0) + (len(rows) - missing)


@pytest.mark.parametrize(("kind", "count"), [(FromTheLongerSide, 1), (Squared, 3), (PaddedRows, 1)])
def test_either_side_may_be_the_longer(kind: type[nn.Module], count: int, tmp_path: Path) -> None:
    options, eager = strop.Options(cache_dir=str(tmp_path), strict=True), kind().eval()
    for folder in ("made", "from disk"):
        fast = strop.optimize(kind().eval(), options=options)
        for height, width in ((5, 7), (9, 4), (6, 6), (3, 12), (12, 5)):
            x = torch.randn(2, 3, height, width)
            with torch.no_grad():
                torch.testing.assert_close(fast(x), eager(x))
        assert len(fast.forward.variants.all) == count
        if folder == "from disk":
            assert fast.forward.variants.num_captures == 0
