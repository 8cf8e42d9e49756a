"""A random program as data: Python source that runs in any precision, its arguments, its sizes.

A program says ``f16`` and ``f32`` for types: the same source with fp64 for both is the judge.
Arguments lie on a coarse grid, exact in every float type, so that what is rounded nowhere
(comparisons and casts to integers of such values) has one right answer.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strop.ir.dims import Expr, const, parse, product

DTYPES = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "f64": torch.float64,
    "i64": torch.int64,
    "i32": torch.int32,
    "u8": torch.uint8,
    "i8": torch.int8,
    "bool": torch.bool,
}
FLOATS = ("f16", "bf16", "f32", "f64")
SIZES = {"b": 3, "s": 4}  # the traced ones


@dataclass(frozen=True)
class Argument:
    shape: tuple[str, ...]
    dtype: str
    layout: str = "dense"


@dataclass(frozen=True, eq=False)
class Program:
    """``lines`` compute v0, v1, ... from x0, x1, ... and weights self.w0, self.w1, ..."""

    arguments: tuple[Argument, ...]
    weights: tuple[tuple[int, ...], ...]
    lines: tuple[str, ...]
    results: tuple[str, ...]
    sizes: tuple[Mapping[str, int], ...] = (SIZES,)

    @property
    def source(self) -> str:
        names = "".join(f", x{i}" for i in range(len(self.arguments)))
        weights = [
            f"self.w{i} = nn.Parameter(weight({shape}, {i}))"
            for i, shape in enumerate(self.weights)
        ]
        return "\n".join(
            [
                "class Net(nn.Module):",
                "    def __init__(self):",
                "        super().__init__()",
                *(f"        {line}" for line in weights),
                "",
                f"    def forward(self{names}):",
                *(f"        {line}" for line in self.lines),
                f"        return ({', '.join(self.results)},)",
            ]
        )

    def module(self, *, exact: bool = False) -> nn.Module:
        """``exact``: everything that is a float in fp64."""
        namespace: dict[str, Any] = {"__name__": "fuzzed", "torch": torch, "nn": nn, "F": F}
        namespace |= {"weight": weight, **DTYPES}
        if exact:
            namespace |= dict.fromkeys(FLOATS, torch.float64)
        exec(self.source, namespace)
        module: nn.Module = namespace["Net"]().eval().requires_grad_(False)
        return module.double() if exact else module

    def inputs(self, sizes: Mapping[str, int], *, exact: bool = False) -> list[Tensor]:
        made = [
            argument(tuple(parse(s).eval(sizes) for s in a.shape), DTYPES[a.dtype], a.layout, i)
            for i, a in enumerate(self.arguments)
        ]
        wide = [x.double() if exact and x.is_floating_point() else x for x in made]
        return [_as_strided_like(x, y) for x, y in zip(wide, made, strict=True)]

    @property
    def script(self) -> str:
        """A file that needs torch and strop only; it ends with an error while the case fails."""
        types = "\n".join(f"{name} = {dtype}" for name, dtype in DTYPES.items())
        calls = [
            [
                f"argument({_concrete(a, sizes)}, {a.dtype}, {a.layout!r}, {i})"
                for i, a in enumerate(self.arguments)
            ]
            for sizes in self.sizes
        ]
        return _SCRIPT.format(
            types=types,
            weight=inspect.getsource(weight),
            argument=inspect.getsource(argument),
            source=self.source,
            specs=[list(a.shape) for a in self.arguments],
            hints=self.sizes[0],
            calls="\n".join(f"    ({', '.join(c)},)," for c in calls),
        )


def _concrete(a: Argument, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(parse(size).eval(sizes) for size in a.shape)


def weight(shape: tuple[int, ...], seed: int) -> Tensor:
    """Multiples of 1/8 in [-1, 1]: every float type has them."""
    generator = torch.Generator().manual_seed(100 + seed)
    return torch.randint(-8, 9, shape, generator=generator) / 8


def argument(shape: tuple[int, ...], dtype: torch.dtype, layout: str, seed: int) -> Tensor:
    """Multiples of 1/8 in [-4, 4], or integers from -4 to 4."""
    generator = torch.Generator().manual_seed(seed)
    wide = list(shape)
    if layout == "every_second":
        wide[-1] *= 2
    if layout == "expanded":
        wide[0] = 1
    value = torch.randint(-32, 33, wide, generator=generator)
    if dtype.is_floating_point:
        value = (value / 8).to(dtype)
    elif dtype is torch.bool:
        value = value > 0
    else:
        value = (value % 9 - (0 if dtype is torch.uint8 else 4)).to(dtype)
    if layout == "transposed":
        return value.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "channels_last":
        return value.contiguous(memory_format=torch.channels_last)
    if layout == "every_second":
        return value[..., ::2]
    if layout == "offset":
        return torch.cat([value.flatten(), value.flatten()])[value.numel() :].view(shape)
    return value.expand(shape) if layout == "expanded" else value


def _as_strided_like(x: Tensor, pattern: Tensor) -> Tensor:
    """x in memory of the same steps, so that views of it are views in both precisions."""
    if x is pattern:
        return x
    room = 1 + sum(s * (n - 1) for s, n in zip(pattern.stride(), pattern.shape, strict=True))
    flat = torch.zeros(max(room, 0) if pattern.numel() else 0, dtype=x.dtype)
    view = flat.as_strided(pattern.shape, pattern.stride())
    if 0 in pattern.stride() and pattern.numel():
        first = tuple(slice(0, 1) if s == 0 else slice(None) for s in pattern.stride())
        view[first] = x[first]
        return view
    return view.copy_(x)


def numel(shape: tuple[Expr, ...]) -> int:
    """At the traced sizes."""
    return product(shape).eval(SIZES) if shape else 1


ONE = const(1)

_SCRIPT = '''"""A random program that strop gets wrong."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strop.api import optimize_module
from strop.ir.tensor_spec import TensorSpec
from strop.options import Options
from strop.dispatch.adapter import Adapter
from strop.dispatch.signature import Shapes

{types}


{weight}

{argument}

{source}


class Sizes(Adapter):
    def shapes(self, tensors, skeleton=()):
        specs = tuple(TensorSpec(tuple(sizes), t.dtype, t.device)
                      for sizes, t in zip({specs}, tensors, strict=True))
        roots = {{root for spec in specs for size in spec.sizes for root in size.roots}}
        return Shapes(specs, {{k: v for k, v in {hints}.items() if k in roots}})


MAKE = lambda: [
{calls}
]
fast = Net().eval().requires_grad_(False)
dispatcher = optimize_module(fast, Options(), adapter=Sizes())
for mine, theirs in zip(MAKE(), MAKE(), strict=True):
    with torch.no_grad():
        results, expected = fast(*mine), Net().eval()(*theirs)
    for found, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=2e-2, atol=1e-2, equal_nan=True)
    for found, wanted in zip(mine, theirs, strict=True):  # what was written into arguments
        assert torch.equal(found, wanted)
print("no failure; calls left to eager:", dispatcher.counters.fallbacks)
'''
