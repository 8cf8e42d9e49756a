"""Results have eager's strides.

The plan of a graph says them, so that most cases need no kernel. Strides of sizes of 1 say nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from strop.backend import compile_captured
from strop.codegen.assemble import Signature
from strop.dispatch.signature import default_shapes
from strop.frontend.capture import capture
from strop.frontend.importer import import_graph
from strop.options import Options
from tests.frontend.tracing import Function

Operator = Callable[[Tensor], Any]


def steps(sizes: Sequence[int], strides: Sequence[int]) -> list[int]:
    """The strides that mean something."""
    return [stride for size, stride in zip(sizes, strides, strict=True) if size > 1]


def conv(rank: int, **how: Any) -> Operator:
    return lambda x: getattr(F, f"conv{rank}d")(x, torch.ones(4, 4, *[3] * rank), **how)


def transposed_conv(rank: int) -> Operator:
    return lambda x: getattr(F, f"conv_transpose{rank}d")(x, torch.ones(4, 6, *[3] * rank))


ANY: dict[str, Operator] = {  # of three dims or more
    "pointwise": lambda x: x * 2,
    "broadcast": lambda x: x + x[:1],
    "where": lambda x: torch.where(x > 0, x, 0),
    "cast": lambda x: x.double(),
    "clone": lambda x: x.clone(),
    "clone contiguous": lambda x: x.clone(memory_format=torch.contiguous_format),
    "contiguous": lambda x: (x * 2).contiguous(),
    "zeros_like": lambda x: torch.zeros_like(x),
    "softmax": lambda x: x.softmax(-1),
    "sum": lambda x: x.sum(1, keepdim=True),
    "mean": lambda x: x.mean(-1),
    "cumsum": lambda x: x.cumsum(1),
    "cat": lambda x: torch.cat([x, x * 2], 1),
    "stack": lambda x: torch.stack([x, x]),
    "flip": lambda x: x.flip(1),
    "roll": lambda x: x.roll(1, 0),
    "roll of all": lambda x: x.roll(1),
    "repeat": lambda x: x.repeat(2, *[1] * (x.dim() - 1)),
    "index_select": lambda x: x.index_select(1, torch.tensor([0, 1])),
    "linear": lambda x: F.linear(x, torch.ones(3, x.shape[-1])),
    "matmul": lambda x: x @ x.transpose(-1, -2),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "group_norm": lambda x: F.group_norm(x, 2),
    "pad": lambda x: F.pad(x, [1, 1]),
    "pad channels": lambda x: F.pad(x, [0, 0] * (x.dim() - 2) + [1, 1]),
    "pad nothing": lambda x: F.pad(x, [0, 0]),
    "crop": lambda x: F.pad(x, [-1, -1]),
    "pad and crop": lambda x: F.pad(x, [-1, 2]),
    "dropout": lambda x: F.dropout(x * 2, 0.5, False),
    "permute": lambda x: (x * 2).transpose(0, 1),
    "slice": lambda x: (x * 2)[:, 1:],
    "chunk": lambda x: (x + 1).chunk(2, 1)[1],
    "slice of a clone": lambda x: x.clone()[:, 1:],
    "slice of a transposed clone": lambda x: x.transpose(0, 1).clone()[:, 1:],
    "step": lambda x: (x * 2)[..., ::2],
    "expand": lambda x: (x * 2).unsqueeze(0).expand(3, *x.shape),
    "windows": lambda x: (x * 2).unfold(-1, 3, 1),
    "turned windows": lambda x: (x * 2).unfold(1, 2, 1).transpose(0, 1),
    "as_strided": lambda x: torch.as_strided(x * 2, (5, 7), (3, 1), 2),
    "diagonal": lambda x: (x * 2).diagonal(0, 0, 1),
    "reshape": lambda x: (x * 2).reshape(x.shape[0], -1),
    "flatten": lambda x: (x * 2).flatten(0, 1),
}
OF_RANK: dict[int, dict[str, Operator]] = {
    3: {
        "convolution": conv(1),
        "transposed convolution": transposed_conv(1),
        "linear interpolate": lambda x: F.interpolate(x, scale_factor=1.5, mode="linear"),
        "pooled": lambda x: F.max_pool1d(x, 2),
        "reflected": lambda x: F.pad(x, [1, 1], mode="reflect"),
        "around": lambda x: F.pad(x, [1, 1], mode="circular"),
    },
    4: {
        "convolution": conv(2, padding=1),
        "odd convolution": conv(2, padding="same", dilation=1),
        "transposed convolution": transposed_conv(2),
        "nearest": lambda x: F.interpolate(x, scale_factor=2),
        "nearest by 1.5": lambda x: F.interpolate(x, scale_factor=1.5),
        "bilinear": lambda x: F.interpolate(x, scale_factor=1.5, mode="bilinear"),
        "bicubic": lambda x: F.interpolate(x, size=(5, 9), mode="bicubic"),
        "max_pool": lambda x: F.max_pool2d(x, 2),
        "avg_pool": lambda x: F.avg_pool2d(x, 2),
        "adaptive pool": lambda x: F.adaptive_avg_pool2d(x, 1),
        "batch_norm": lambda x: F.batch_norm(x, torch.zeros(4), torch.ones(4)),
        "channel_shuffle": lambda x: F.channel_shuffle(x, 2),
        "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
        "pixel_unshuffle": lambda x: F.pixel_unshuffle(x, 2),
        "pad two": lambda x: F.pad(x, [1, 1, 2, 0]),
        "reflected": lambda x: F.pad(x, [1, 1, 1, 1], mode="reflect"),
        "replicated": lambda x: F.pad(x, [1, 1, 1, 1], mode="replicate"),
        "around": lambda x: F.pad(x, [1, 1, 1, 1], mode="circular"),
        "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
        "wide attention": lambda x: F.scaled_dot_product_attention(x, x, torch.cat([x, x], -1)),
        "rot90": lambda x: x.rot90(1, (2, 3)),
        "glu": lambda x: F.glu(x, 1),
    },
    5: {
        "nearest": lambda x: F.interpolate(x, scale_factor=2),
        "trilinear": lambda x: F.interpolate(x, scale_factor=1.5, mode="trilinear"),
        "reflected": lambda x: F.pad(x, [1] * 6, mode="reflect"),
        "pad three": lambda x: F.pad(x, [1] * 6),
        "max_pool": lambda x: F.max_pool3d(x, 2),
    },
}
SIZES = {3: (2, 4, 6), 4: (2, 4, 6, 8), 5: (2, 4, 6, 4, 8)}
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
# what docs/numerics.md says of gaps: eager's attention looks whether rows are dense
NOT_KEPT = {(4, "gaps"): {"attention"}}


def laid_out(x: Tensor, layout: str) -> Tensor:
    if layout == "channels-last":
        return x.contiguous(memory_format=LAST[x.dim()]) if x.dim() in LAST else x
    if layout == "gaps":
        wide = torch.randn([*x.shape[:-1], 2 * x.shape[-1]]).transpose(1, 2).contiguous()
        return wide.transpose(1, 2)[..., ::2]
    dims = {"swapped": (-1, -2), "heads": (1, 2), "turned": (0, 1)}.get(layout)
    return x if dims is None else x.transpose(*dims).contiguous().transpose(*dims)


def planned(function: Operator, x: Tensor) -> list[list[int]]:
    """The strides of each result in the plan of a graph for arguments like ``x``."""
    module, shapes = Function(function).eval(), default_shapes([x])
    captured = capture(module, module, shapes.specs, shapes.hints)
    imported = import_graph(captured.gm, captured.symbols, captured.hints, captured.origins, 0)
    compiled = compile_captured(
        captured.gm, imported.graph, Signature(imported.returned, ()), "cpu", Options(), "strides"
    )
    env = captured.hints
    found = []
    for item in compiled.program.returned:
        assert item.tensor is not None
        sizes, strides = (
            [s.eval(env) for s in of] for of in (item.tensor.shape, item.tensor.strides)
        )
        found.append(steps(sizes, strides))
    return found


@pytest.mark.parametrize("rank", SIZES)
@pytest.mark.parametrize(
    "layout", ["contiguous", "channels-last", "swapped", "heads", "turned", "gaps"]
)
def test_planned_strides(rank: int, layout: str) -> None:
    x = laid_out(torch.randn(SIZES[rank]), layout)
    wrong = {}
    for name, operator in {**ANY, **OF_RANK[rank]}.items():
        if layout == "gaps" and name == "as_strided":
            continue  # of memory that no program sees
        (got,), wanted = planned(operator, x), operator(x)
        if got != (want := steps(wanted.shape, wanted.stride())):
            wrong[name] = f"{got} for {want}"
    assert wrong.keys() == NOT_KEPT.get((rank, layout), set()), wrong


def test_convolutions_of_videos_are_contiguous() -> None:
    """Eager's depend on the processor."""
    x = laid_out(torch.randn(SIZES[5]), "channels-last")
    for operator in (conv(3), transposed_conv(3)):
        (got,) = planned(operator, x)
        assert got == steps(operator(x).shape, operator(x).contiguous().stride())
