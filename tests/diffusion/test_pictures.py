"""Pictures become bytes where they are: the same bytes as diffusers' own."""

from __future__ import annotations

import copy
import pickle
import types
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.image_processor import PixArtImageProcessor, VaeImageProcessor
from torch import Tensor

import strop
from strop.diffusion.changes import Changes
from strop.diffusion.pictures import Pictures, convert_on_device
from strop.models import sprites

KEPT = Changes()


def pipe_of(processor: Any) -> SimpleNamespace:
    return SimpleNamespace(image_processor=processor)


def pictures(dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """All halves and thirds of a level among them, and beyond black and white."""
    torch.manual_seed(0)
    levels = torch.linspace(-1.1, 1.1, 2 * 3 * 60 * 102).reshape(2, 3, 60, 102)
    return (levels + torch.randint(0, 2, levels.shape) / 765).to(device, dtype)


def judge(given: Tensor, **kwargs: Any) -> None:
    ours, theirs = VaeImageProcessor(), VaeImageProcessor()
    assert convert_on_device(pipe_of(ours), KEPT)
    found, wanted = ours.postprocess(given, **kwargs), theirs.postprocess(given, **kwargs)
    assert len(found) == len(wanted) == len(given)
    for one, other in zip(found, wanted, strict=True):
        assert (one.mode, one.size) == (other.mode, other.size)
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_same_bytes(dtype: torch.dtype) -> None:
    judge(pictures(dtype))
    judge(pictures(dtype), do_denormalize=[True, True])
    judge(pictures(dtype).to(memory_format=torch.channels_last))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_same_bytes_from_a_gpu(dtype: torch.dtype) -> None:
    judge(pictures(dtype, "cuda"))


@pytest.mark.parametrize(
    ("given", "kwargs"),
    [
        (pictures(torch.float32), {"output_type": "np"}),
        (pictures(torch.float32), {"output_type": "pt"}),
        (pictures(torch.float32), {"output_type": "latent"}),
        (pictures(torch.float32).clamp(0, 1), {"do_denormalize": [True, False]}),
        (pictures(torch.float32)[:, :1], {}),  # grey
    ],
)
def test_all_else_is_left_to_diffusers(
    given: Tensor, kwargs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = VaeImageProcessor()
    assert convert_on_device(pipe_of(processor), KEPT)
    asked, original = list[Any](), processor.postprocess.original
    monkeypatch.setattr(
        processor.postprocess, "original", lambda *args: asked.append(args) or original(*args)
    )
    processor.postprocess(given, **kwargs)
    assert len(asked) == 1


def test_numpy_still_warns_of_nan() -> None:
    processor, given = VaeImageProcessor(), pictures(torch.float32)
    assert convert_on_device(pipe_of(processor), KEPT)
    given[0, 0, 0, 0] = float("nan")
    with pytest.warns(RuntimeWarning, match="invalid value"):
        processor.postprocess(given)


def test_other_processors_stay() -> None:
    for pipe in (pipe_of(PixArtImageProcessor()), pipe_of(None), SimpleNamespace()):
        assert not convert_on_device(pipe, KEPT)
    changed = VaeImageProcessor()
    changed.postprocess = own = lambda *args: args
    assert not convert_on_device(pipe_of(changed), KEPT)
    assert changed.postprocess is own


def test_a_diffusers_that_converts_otherwise_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VaeImageProcessor, "denormalize", staticmethod(lambda x: x * 0.25 + 0.5))
    assert convert_on_device(pipe_of(VaeImageProcessor()), KEPT)  # it is asked itself
    monkeypatch.setattr(
        VaeImageProcessor, "pt_to_numpy", staticmethod(lambda x: x.permute(0, 2, 3, 1).numpy() ** 2)
    )
    assert not convert_on_device(pipe_of(VaeImageProcessor()), KEPT)


def test_two_may_want_the_same() -> None:
    """It stays until nobody wants it; whoever has kept it gets diffusers' own from then on."""
    processor, one, other = VaeImageProcessor(), Changes(), Changes()
    for changes in (one, other, one):
        assert convert_on_device(pipe_of(processor), changes)
    ours: Any = processor.postprocess
    one.undo()
    one.undo()
    assert processor.postprocess is ours
    other.undo()
    assert "postprocess" not in vars(processor)
    asked = list[Any]()
    ours.original = lambda *args: asked.append(args)
    ours(pictures(torch.float32))
    assert len(asked) == 1


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_has_its_own(copied: Any) -> None:
    processor = VaeImageProcessor()
    assert convert_on_device(pipe_of(processor), KEPT)
    other = copied(processor)
    assert other.postprocess == types.MethodType(VaeImageProcessor.postprocess, other)
    assert convert_on_device(pipe_of(other), KEPT)


def test_of_a_pipeline() -> None:
    pipe = sprites.load()
    for _ in range(2):
        strop.optimize(pipe)
        assert isinstance(pipe.image_processor.postprocess, Pictures)
    strop.restore(pipe)
    assert "postprocess" not in pipe.image_processor.__dict__
