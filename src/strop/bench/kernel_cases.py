"""List what kernels are measured on: one normalisation, softmax or activation as a user writes it.

A grid of rows x cols for what works on rows, and the GroupNorms of SD1.5, SDXL and the VAE.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Shape = tuple[int, ...]
Inputs = tuple[Tensor, ...]
GROUPS = 32


@dataclass(frozen=True, slots=True)
class KernelCase:
    """Describe a case; ``shape`` is that of a result; ``num_moved`` counts elements read and
    written, each once."""

    name: str
    family: str
    shape: Shape
    module: Callable[[int], nn.Module]  # of the number of features
    inputs: Callable[[Shape, torch.device, torch.dtype], Inputs]
    num_moved: int  # without weights

    def bytes_moved(self, dtype: torch.dtype) -> int:
        """Return the least that memory has to carry."""
        return self.num_moved * dtype.itemsize


def make(case: KernelCase, device: torch.device, dtype: torch.dtype) -> tuple[nn.Module, Inputs]:
    """Return the module and the arguments of one call."""
    inputs = case.inputs(case.shape, device, dtype)
    is_image = len(case.shape) == 4
    module = case.module(case.shape[1 if is_image else -1])
    return module.to(device, dtype).eval().requires_grad_(False), inputs


# ---- modules -----------------------------------------------------------------------------------


class _WithWeights(nn.Module):
    """Hold ``weight`` and ``bias`` as training leaves them: about 1, about 0."""

    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(self, features: int) -> None:
        super().__init__()
        source = torch.Generator().manual_seed(features)
        self.weight = nn.Parameter(1 + torch.randn(features, generator=source) / 4)
        self.bias = nn.Parameter(torch.randn(features, generator=source) / 4)


class LayerNorm(_WithWeights):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias)


class RMSNorm(_WithWeights):
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, 1e-6)


class Softmax(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.softmax(x, -1)


class GEGLU(nn.Module):
    def forward(self, projected: Tensor) -> Tensor:
        h, gate = projected.chunk(2, -1)
        return h * F.gelu(gate)


class BiasGELU(_WithWeights):
    def __init__(self, features: int, approximate: str) -> None:
        super().__init__(features)
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x + self.bias, approximate=self.approximate)


class ResidualLayerNorm(_WithWeights):
    def forward(self, x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        y = x + r
        return F.layer_norm(y, self.weight.shape, self.weight, self.bias), y


class ResidualRMSNorm(_WithWeights):
    def forward(self, x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        y = x + r
        return F.rms_norm(y, self.weight.shape, self.weight, 1e-6), y


class GroupNormSiLU(_WithWeights):
    def forward(self, x: Tensor) -> Tensor:
        return F.silu(F.group_norm(x, GROUPS, self.weight, self.bias))


# ---- arguments ---------------------------------------------------------------------------------


def _random(shape: Shape, device: torch.device, dtype: torch.dtype, seed: int = 1) -> Tensor:
    """Draw a tensor on the device where it is used: the largest have 10^9 elements."""
    source = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=source, device=device, dtype=dtype)


def _one(shape: Shape, device: torch.device, dtype: torch.dtype) -> Inputs:
    return (_random(shape, device, dtype),)


def _two(shape: Shape, device: torch.device, dtype: torch.dtype) -> Inputs:
    return _random(shape, device, dtype, 1), _random(shape, device, dtype, 2)


def _double(shape: Shape, device: torch.device, dtype: torch.dtype) -> Inputs:
    *rows, cols = shape
    return (_random((*rows, 2 * cols), device, dtype),)


def _image(shape: Shape, device: torch.device, dtype: torch.dtype) -> Inputs:
    return (_random(shape, device, dtype).contiguous(memory_format=torch.channels_last),)


# ---- families and shapes -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Family:
    name: str
    module: Callable[[int], nn.Module]
    inputs: Callable[[Shape, torch.device, torch.dtype], Inputs]
    num_tensors: int  # of the result's size, that are read or written


ROW_FAMILIES = (
    Family("layer_norm", LayerNorm, _one, 2),
    Family("rms_norm", RMSNorm, _one, 2),
    Family("softmax", lambda features: Softmax(), _one, 2),
    Family("geglu", lambda features: GEGLU(), _double, 3),
    Family("bias_gelu", partial(BiasGELU, approximate="none"), _one, 2),
    Family("bias_gelu_tanh", partial(BiasGELU, approximate="tanh"), _one, 2),
    Family("residual_layer_norm", ResidualLayerNorm, _two, 4),
    Family("residual_rms_norm", ResidualRMSNorm, _two, 4),
)
GROUP_NORM = Family("group_norm_silu", GroupNormSiLU, _image, 2)

ROWS = {"cuda": (32, 512, 4096, 16384, 100_000), "cpu": (32, 512, 4096)}
COLS = {"cuda": (64, 320, 768, 1280, 4096, 10_240, 40_960), "cpu": (64, 320, 1280, 4096, 40_960)}
LIMIT_BYTES = {"cuda": 4 << 30, "cpu": 64 << 20}

# Every GroupNorm of a model at 512 x 512 pixels: side of the image -> its numbers of channels.
SD15 = {
    64: (320, 640, 960),
    32: (320, 640, 960, 1280, 1920),
    16: (640, 1280, 1920, 2560),
    8: (1280, 2560),
}
SDXL = {64: (320, 640, 960), 32: (320, 640, 960, 1280, 1920), 16: (640, 1280, 1920, 2560)}
VAE = {512: (128, 256), 256: (128, 256, 512), 128: (256, 512), 64: (512,)}
IMAGES = ((2, SD15), (2, SDXL), (1, VAE))  # batch: a UNet sees a prompt and its absence


def row_shapes(device_type: str) -> Iterator[Shape]:
    for rows in ROWS[device_type]:
        for cols in COLS[device_type]:
            yield rows, cols


def image_shapes() -> tuple[Shape, ...]:
    """Return every GroupNorm at 512 and at 1024 pixels, those of several models once."""
    return tuple(
        dict.fromkeys(
            (batch, channels, side * scale, side * scale)
            for scale in (1, 2)
            for batch, model in IMAGES
            for side, all_channels in model.items()
            for channels in all_channels
        )
    )


def kernel_cases(device_type: str, dtype: torch.dtype) -> tuple[KernelCase, ...]:
    """Return the cases of a kind of device, without those that move more than its limit."""
    shapes = tuple(row_shapes(device_type))
    cases = [case_of(family, shape) for family in ROW_FAMILIES for shape in shapes]
    cases += [case_of(GROUP_NORM, shape) for shape in image_shapes()]
    limit = LIMIT_BYTES[device_type]
    return tuple(case for case in cases if case.bytes_moved(dtype) <= limit)


def cases_at(shapes: Iterable[Shape]) -> tuple[KernelCase, ...]:
    """Return every family at these shapes of a result: rows x cols, or an image of four sizes."""
    families = (*ROW_FAMILIES, GROUP_NORM)
    return tuple(
        case_of(family, shape)
        for family in families
        for shape in shapes
        if len(shape) == (4 if family is GROUP_NORM else 2)
    )


def case_of(family: Family, shape: Shape) -> KernelCase:
    """Return one case; its name is the family and the shape of a result."""
    name = f"{family.name}-{'x'.join(map(str, shape))}"
    moved = family.num_tensors * math.prod(shape)
    return KernelCase(name, family.name, shape, family.module, family.inputs, moved)
