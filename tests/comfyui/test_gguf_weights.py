"""Weights of the node pack ComfyUI-GGUF, by a stand-in for its classes: codes are compiled."""

from __future__ import annotations

import itertools
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.comfyui.stand_in import BaseModel, Linear, ModelPatcher, OriginalUNet
from tests.comfyui.test_model_node import (
    WrappersMP,
    assert_same,
    counters,
    draw,
    optimize,
    plain_calls,
    random,
)

__all__ = ["optimize"]
BLOCK, BYTES = 32, 34  # a scale in fp16, then as many codes in int8: blocks of the kind Q8_0


class GGMLTensor(Tensor):
    """Holds codes, the kind of them, the shape of the weight, and adapters beside it."""

    @staticmethod
    def holding(codes: Tensor, kind: str | None, shape: Any) -> GGMLTensor:
        found = codes.as_subclass(GGMLTensor)
        found.tensor_type, found.tensor_shape, found.patches = kind, torch.Size(shape), []
        return found

    def detach(self) -> GGMLTensor:  # type: ignore[override]
        return self

    def to(self, *args: Any, **kwargs: Any) -> GGMLTensor:
        moved = super().to(*args, **kwargs)
        moved.tensor_type, moved.tensor_shape = self.tensor_type, self.tensor_shape
        moved.patches = [*self.patches]
        return moved


def coded(weight: Tensor) -> GGMLTensor:
    blocks = weight.reshape(-1, BLOCK)
    scales = (blocks.abs().amax(1, keepdim=True) / 127).half()
    codes = (blocks / scales.float()).round().to(torch.int8)
    both = torch.cat([scales.view(torch.uint8), codes.view(torch.uint8)], 1)
    return GGMLTensor.holding(both.reshape(len(weight), -1), "Q8_0", weight.shape)


def _plain(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(Tensor) if isinstance(tensor, GGMLTensor) else tensor


def dequantize_tensor(tensor: Any, dtype: Any = None, dequant_dtype: Any = None) -> Tensor:
    """Return the weight of codes, as eager does: in fp16 first."""
    if tensor.tensor_type is None:
        return tensor.to(dtype)  # type: ignore[no-any-return]
    blocks = _plain(tensor.data).reshape(-1, BYTES)
    scales, codes = blocks[:, :2].view(torch.float16), blocks[:, 2:].view(torch.int8)
    return (scales * codes).reshape(tensor.tensor_shape).to(dtype)


def _delta(
    strength: float, adapter: Any, _: float, offset: Any, function: Any, like: Tensor
) -> Tensor:
    """Return what ComfyUI adds to a weight for a patch."""
    up, down, alpha, *_rest = adapter.weights
    found = torch.zeros_like(like)
    rows = found if offset is None else found.narrow(*offset)
    rows += strength * (1.0 if alpha is None else alpha / len(down)) * (up.float() @ down.float())
    return found


class GGMLLayer(nn.Module):
    """Dequantises its weights while it runs."""

    dequant_dtype = None

    def is_ggml_quantized(self) -> bool:
        return True

    def cast_bias_weight(self, input: Any = None, dtype: Any = None, **_: Any) -> Any:
        found = []
        for own in (self.weight, self.bias):
            moved = own.to(input.device)
            weight = _plain(dequantize_tensor(moved, input.dtype))
            for patch in (each for patches, _ in moved.patches for each in patches):
                weight = weight + _delta(*patch, like=weight)
            found.append(weight)
        return found


class CodedLinear(GGMLLayer):
    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight_function: list[Any] = []
        self.bias_function: list[Any] = []
        self.weight = nn.Parameter(coded(weight), requires_grad=False)
        own = GGMLTensor.holding(bias.clone(), None, bias.shape)
        self.bias = nn.Parameter(own, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, *self.cast_bias_weight(x))


@pytest.fixture
def patcher() -> ModelPatcher:
    torch.manual_seed(0)
    unet = OriginalUNet().eval().requires_grad_(False)
    for owner in [*unet.modules()]:
        for name, layer in [*owner.named_children()]:
            if type(layer) is Linear and layer.in_features % BLOCK == 0:
                bias = torch.zeros(layer.out_features) if layer.bias is None else layer.bias.data
                setattr(owner, name, CodedLinear(layer.weight.data, bias))
    assert sum(isinstance(part, CodedLinear) for part in unet.modules()) > 4
    return ModelPatcher(BaseModel(unet))


def test_codes_are_compiled_at_every_size(patcher, optimize) -> None:
    fast = optimize(patcher)
    for size in ((8, 8), (8, 12), (12, 8)):
        assert_same(draw(fast, *size), draw(patcher, *size))
    found, variants = counters(fast)
    assert not found.fallbacks
    assert (found.eager_calls, len(variants.all)) == (0, 1)
    assert not plain_calls(fast)


def test_what_is_written_to_codes_is_read(patcher, optimize) -> None:
    fast = optimize(patcher)
    before = draw(fast)
    layers = [part for part in patcher.model.modules() if isinstance(part, CodedLinear)]
    with torch.inference_mode():
        layers[0].weight.as_subclass(Tensor)[:, 2:] = 3
    after = draw(fast)
    assert_same(after, draw(patcher))
    assert not torch.allclose(after, before, rtol=0.01)
    layers[1].weight = nn.Parameter(coded(random(*layers[1].weight.tensor_shape, seed=9)), False)
    assert_same(draw(fast), draw(patcher))
    assert not torch.allclose(draw(fast), after, rtol=0.01)
    assert counters(fast)[0].eager_calls == 0


def _layers(patcher: ModelPatcher) -> list[CodedLinear]:
    return [part for part in patcher.model.modules() if isinstance(part, CodedLinear)]


def patch(layer: CodedLinear, rank: int, seed: int, strength: float = 1.0, **more: Any) -> Any:
    """Return a LoRA for a layer as ComfyUI keeps it."""
    offset, name = more.get("offset"), more.get("name", "lora")
    rows, columns = layer.weight.tensor_shape
    up = random(offset[2] if offset else rows, rank, seed=seed).half()
    down = random(rank, columns, seed=seed + 1).half()
    weights = (up, down, more.get("alpha"), None, more.get("lengths"), None)
    return strength, SimpleNamespace(name=name, weights=weights), 1.0, offset, more.get("function")


def set_patches(patcher: ModelPatcher, *made: Any) -> None:
    """Put what each of ``made`` makes of a layer and its number beside all codes."""
    for number, layer in enumerate(_layers(patcher)):
        found = [one(layer, number) for one in made]
        layer.weight.patches = [(found, "key")] if found else []


def lora(rank: int, seed: int, **more: Any) -> Any:
    return lambda layer, number: patch(layer, rank, seed + 2 * number, **more)


def half_rows(layer: CodedLinear, number: int) -> Any:
    rows = layer.weight.tensor_shape[0]
    return patch(layer, 4, number, offset=(0, rows // 2, rows - rows // 2))


def test_adapters_beside_codes_are_data(patcher, optimize) -> None:
    """Strengths, other adapters and several of them compile one more graph in all; a higher rank
    compiles another one."""
    fast, plain = optimize(patcher), draw(patcher)
    assert_same(draw(fast), plain)
    sets = [
        [lora(4, 1)],
        [lora(4, 1, strength=0.25)],
        [lora(8, 50, alpha=2.0)],
        [lora(4, 1), lora(8, 50, strength=-0.5)],
        [half_rows],
        [lora(20, 7)],
        [],
        [lora(4, 1)],
    ]
    drawn = []
    for made in sets:
        set_patches(patcher, *made)
        drawn.append(draw(fast))
        assert_same(drawn[-1], draw(patcher))
        assert_same(draw(fast, 8, 12), draw(patcher, 8, 12))
    assert all(not torch.allclose(a, b, rtol=0.01) for a, b in itertools.pairwise(drawn))
    found, variants = counters(fast)
    assert not found.fallbacks
    assert (found.eager_calls, len(variants.all)) == (0, 3)
    assert not plain_calls(fast)


def test_nothing_stays_on_a_model_that_leaves(patcher, optimize) -> None:
    fast = optimize(patcher)
    before = [dict(vars(layer)) | {"_buffers": {}} for layer in _layers(patcher)]
    set_patches(patcher, lora(4, 1))
    adapted = draw(fast)
    assert all(len(layer._buffers) == 2 for layer in _layers(patcher))
    assert not any("strop" in name for name in patcher.model.state_dict())
    (compiled,) = fast.wrappers[WrappersMP.DIFFUSION_MODEL]["strop"]
    compiled.forget_weights()
    now = [dict(vars(layer)) for layer in _layers(patcher)]
    assert [*map(set, now)] == [*map(set, before)]
    assert not any(layer._buffers for layer in _layers(patcher))
    assert_same(draw(fast), adapted)


@pytest.mark.parametrize(
    ("made", "word"),
    [
        (lora(4, 1, name="loha"), "of the kind loha"),
        (lora(4, 1, lengths=torch.ones(3)), "DoRA"),
        (lora(4, 1, function=torch.neg), "a function"),
    ],
)
def test_other_patches_run_as_before(made, word, patcher, optimize) -> None:
    fast, plain = optimize(patcher), draw(patcher)
    assert_same(draw(fast), plain)
    (layer, *_) = _layers(patcher)
    layer.weight.patches = [([made(layer, 0)], "key")]
    adapted = draw(fast)
    assert torch.equal(adapted, draw(patcher))
    assert not torch.allclose(adapted, plain, rtol=0.01)
    (reason,) = plain_calls(fast)
    assert word in reason
    layer.weight.patches = []
    assert_same(draw(fast), plain)
    assert len(counters(fast)[1].all) == 1


def test_text_encoders_and_vaes_with_codes_are_compiled(pack) -> None:
    layers = nn.Sequential(
        *(CodedLinear(random(64, 64, seed=n), random(64, seed=n)) for n in (1, 2))
    )
    part = sys.modules[f"{pack.__name__}.parts"].CompiledPart(layers, "forward")
    for rows in (3, 5):
        x = random(rows, 64, seed=rows)
        assert_same(part(x), layers(x))
    found = part.module.forward.counters
    assert (found.calls, found.eager_calls) == (2, 0)
