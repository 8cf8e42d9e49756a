"""Quantise the linears of a model in the ways that the benchmark of quantised weights compares.

A scheme says what it needs, how it quantises a linear, and what its weights are in fp32, by which
errors are judged. All schemes quantise the same linears.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

UNIT = 256  # numbers: what a row of quantised weights is a multiple of, as blocks of Q4_K are
F32, FP8 = torch.float32, torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Quantisation:
    """``made`` gives what stands for a linear, ``exact`` the weights of that in fp32.
    ``capability`` is the least that it wants of a GPU; without one it runs anywhere."""

    needs: tuple[str, ...] = ()
    made: Callable[[nn.Linear], nn.Module] = lambda linear: linear
    exact: Callable[[Any], Tensor] = lambda layer: layer.weight.to(F32)
    capability: tuple[int, int] = field(default=(0, 0))

    def missing(self, device: torch.device) -> str:
        """Return why it cannot run here, or nothing."""
        for package in self.needs:
            if importlib.util.find_spec(package) is None:
                return f"{package} is not installed"
        if self.capability > (0, 0):
            if device.type != "cuda":
                return f"needs a GPU of compute capability {self.capability}"
            if torch.cuda.get_device_capability(device) < self.capability:
                return f"needs compute capability {self.capability}"
        return ""


class PlainInt8(nn.Module):
    """Multiplies int8 weights as numbers of x's type, and scales columns of the product."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().to(F32)
        scale = weight.abs().amax(1) / 127
        self.bias = linear.bias
        self.register_buffer("codes", (weight / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scale", scale.to(linear.weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.linear(x, self.codes.to(x.dtype)) * self.scale
        return y if self.bias is None else y + self.bias


class ScaledFp8(nn.Module):
    """Decodes weights of 8 bits and scales them before the product, as ComfyUI does."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().to(F32)
        scale = weight.abs().max() / 448
        self.bias = linear.bias
        self.register_buffer("codes", (weight / scale).to(FP8))
        self.register_buffer("scale", scale.to(linear.weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.codes.to(x.dtype) * self.scale, self.bias)


def _of_torchao(name: str, linear: nn.Linear, **how: Any) -> nn.Module:
    """Quantise, and leave Inductor's settings of the process as they are: see ``tune_inductor``."""
    from torchao import quantization

    inside = nn.Sequential(linear)
    config = getattr(quantization, name)(**how, set_inductor_config=False)
    quantization.quantize_(inside, config)
    return inside[0]


def tune_inductor(scheme: Quantisation) -> None:
    """Set what torchao's ``quantize_`` sets in the process unless it is told not to. Inductor then
    compiles each of its kernels some 10 to 40 times in the first call, one after the other."""
    if "torchao" in scheme.needs:
        from torchao.quantization.utils import recommended_inductor_config_setter

        recommended_inductor_config_setter()


def _blocks_of_q8_0(weight: Tensor) -> Tensor:
    blocks = weight.to(F32).reshape(-1, 32)
    scale = (blocks.abs().amax(1, keepdim=True) / 127).half()
    codes = (blocks / scale.to(F32)).nan_to_num().round().clamp(-127, 127).to(torch.int8)
    return torch.cat([scale.view(torch.uint8), codes.view(torch.uint8)], 1)


def _blocks_of_q4_k(weight: Tensor) -> Tensor:
    """Return random blocks, whose numbers are about as large as those of random weights: nothing
    here quantises to K blocks, and times do not ask for values."""
    count, device = weight.numel() // 256, weight.device
    made = torch.Generator(device).manual_seed(weight.shape[0])
    blocks = torch.randint(0, 256, (count, 144), dtype=torch.uint8, device=device, generator=made)
    spread = weight.shape[1] ** -0.5 / 300
    scales = torch.tensor([spread, 7.5 * spread], device=device).half()
    blocks[:, :4] = scales.view(torch.uint8)
    return blocks


_BLOCKS = {"Q8_0": _blocks_of_q8_0, "Q4_K": _blocks_of_q4_k}


def _of_gguf(name: str, linear: nn.Linear) -> nn.Module:
    import gguf
    from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter

    rows, columns = linear.weight.shape
    dtype, kind = linear.weight.dtype, gguf.GGMLQuantizationType[name]
    layer = GGUFLinear(columns, rows, linear.bias is not None, compute_dtype=dtype, device="meta")
    codes = _BLOCKS[name](linear.weight.detach()).reshape(rows, -1)
    layer.weight, layer.bias = GGUFParameter(codes, quant_type=kind), linear.bias
    return layer.requires_grad_(False)


def _of_gguf_exact(layer: Any) -> Tensor:
    import gguf
    from diffusers.quantizers.gguf.utils import dequantize_functions

    kind = layer.weight.quant_type
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = layer.weight.as_tensor().reshape(-1, size)
    exact: Tensor = dequantize_functions[kind](blocks, block, size, dtype=F32)
    return exact.to(F32).reshape(layer.out_features, layer.in_features)


def _of_bitsandbytes(kind: str, linear: nn.Linear) -> nn.Module:
    import bitsandbytes

    dtype, device = linear.weight.dtype, linear.weight.device
    layer = bitsandbytes.nn.Linear4bit(
        linear.in_features,
        linear.out_features,
        linear.bias is not None,
        compute_dtype=dtype,
        quant_type=kind,
        device="meta",
    )
    layer.weight = bitsandbytes.nn.Params4bit(
        linear.weight.detach(), requires_grad=False, quant_type=kind, module=layer
    )
    layer.bias = linear.bias
    return layer.to(device).requires_grad_(False)


def _of_bitsandbytes_exact(layer: Any) -> Tensor:
    from bitsandbytes.functional import dequantize_4bit

    exact: Tensor = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    return exact.to(F32)


def _of_int8(linear: nn.Linear) -> nn.Module:
    """Quantise as diffusers does by ``BitsAndBytesConfig(load_in_8bit=True)``."""
    import bitsandbytes

    layer = bitsandbytes.nn.Linear8bitLt(
        linear.in_features,
        linear.out_features,
        linear.bias is not None,
        has_fp16_weights=False,
        threshold=6.0,
        device="meta",
    )
    layer.weight = bitsandbytes.nn.Int8Params(  # quantised where they move from a host
        linear.weight.detach().cpu(), requires_grad=False, has_fp16_weights=False
    ).to(linear.weight.device)
    layer.bias = linear.bias
    return layer.requires_grad_(False).eval()


def _of_int8_exact(layer: Any) -> Tensor:
    held = layer.weight if layer.weight.CB is not None else layer.state
    exact: Tensor = held.CB.to(F32) * (held.SCB / 127)[:, None]
    return exact


def _torchao(name: str, *, capability: tuple[int, int] = (0, 0), **how: Any) -> Quantisation:
    def exact(layer: nn.Linear) -> Tensor:
        weight: Any = layer.weight
        values: Tensor = weight.dequantize(F32)
        return values

    return Quantisation(("torchao",), partial(_of_torchao, name, **how), exact, capability)


def _gguf(name: str) -> Quantisation:
    return Quantisation(("gguf", "diffusers"), partial(_of_gguf, name), _of_gguf_exact)


SCHEMES: dict[str, Quantisation] = {
    "bf16": Quantisation(),
    "int8-plain": Quantisation(
        (), PlainInt8, lambda layer: layer.codes * layer.scale[:, None].to(F32)
    ),
    "fp8-scaled": Quantisation(
        (), ScaledFp8, lambda layer: layer.codes.to(F32) * layer.scale.to(F32)
    ),
    "torchao-int8": _torchao("Int8WeightOnlyConfig", version=2),
    "torchao-int8-dynamic": _torchao("Int8DynamicActivationInt8WeightConfig", version=2),
    "torchao-fp8": _torchao("Float8WeightOnlyConfig"),
    "torchao-fp8-dynamic": _torchao("Float8DynamicActivationFloat8WeightConfig", capability=(8, 9)),
    "gguf-q8_0": _gguf("Q8_0"),
    "gguf-q4_k": _gguf("Q4_K"),
    "nf4": Quantisation(
        ("bitsandbytes",), partial(_of_bitsandbytes, "nf4"), _of_bitsandbytes_exact
    ),
    "bnb-int8": Quantisation(("bitsandbytes",), _of_int8, _of_int8_exact),
}


def linears(model: nn.Module) -> Iterator[str]:
    """Yield the names of the linears that every scheme quantises."""
    for name, part in model.named_modules():
        if type(part) is nn.Linear and part.in_features % UNIT == part.out_features % 16 == 0:
            yield name


def quantise(model: nn.Module, scheme: Quantisation, names: list[str]) -> None:
    for name in names:
        linear: Any = model.get_submodule(name)
        model.set_submodule(name, scheme.made(linear).eval())  # libraries make layers that train


def widen(model: nn.Module, scheme: Quantisation, names: list[str]) -> None:
    """Put plain linears in fp32, with the very weights that were quantised, in their place again,
    and turn all else to fp32."""
    for name in names:
        layer: Any = model.get_submodule(name)
        weight = nn.Parameter(scheme.exact(layer).to(F32), requires_grad=False)
        plain = nn.Linear(*weight.shape[::-1], bias=layer.bias is not None, device="meta")
        plain.weight, plain.bias = weight, layer.bias
        model.set_submodule(name, plain)
    model.to(F32)
