"""Library calls that kernels written by hand do instead, at sizes where these are faster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from strop.ir.dims import Expr
from strop.ir.program import CallStep, Step
from strop.ir.source import BOXES_ARCH, KernelSource
from strop.kernels import own_kernels
from strop.runtime.box_attention import BoxAttention
from strop.runtime.box_convolution import BoxConvolution
from strop.runtime.gated_linear import GatedLinear
from strop.runtime.kernels import KernelLibrary
from strop.runtime.narrow_convolution import NarrowConvolution
from strop.runtime.wide_attention import WideAttention, is_wide

Call = Callable[..., Any]
OWN: Mapping[str, Callable[..., Call]] = {
    "attention": BoxAttention, "conv2d": BoxConvolution, "geglu": GatedLinear,
}  # fmt: skip


class Place(NamedTuple):
    """Where a call runs. ``early``: the launch before is one of ours."""

    kernels: KernelLibrary
    stream: int
    early: bool


def chosen(steps: Sequence[Step | None], sizes: Callable[[tuple[Expr, ...]], Sequence[int]],
           dtype: Callable[[CallStep], torch.dtype], arch: int
           ) -> dict[int, list[KernelSource]]:  # fmt: skip
    """By step, the kernels that its call launches itself, for operands of these sizes."""
    found = {}
    for position, step in enumerate(steps):
        if isinstance(step, CallStep) and step.op in OWN:
            shapes = [sizes(ref.shape) for ref in step.inputs]
            boxed = step.boxed and arch >= BOXES_ARCH
            sources = own_kernels.sources_at(step.op, dict(step.attrs), shapes, dtype(step),
                                             boxed=boxed)  # fmt: skip
            if sources:
                found[position] = sources
    return found


def instead(step: CallStep, dtype: torch.dtype, otherwise: Call, place: Place,
            narrow: KernelSource | None, *, is_own: bool) -> Call:  # fmt: skip
    """The call, or one of ours that does the same and leaves to ``otherwise`` what does not lie in
    memory as it wants it. ``narrow``: for a convolution of few channels; ``is_own``: what
    ``chosen`` has found."""
    kernels, stream, early = place
    if narrow is not None:
        return NarrowConvolution(narrow, otherwise, kernels, stream)
    attrs, shapes = dict(step.attrs), [ref.shape for ref in step.inputs]
    if is_own:
        scale = {"scale": attrs["scale"]} if step.op == "attention" else {}
        return OWN[step.op](otherwise, kernels, stream, is_early=early, **scale)
    if step.op == "attention" and is_wide(attrs, shapes, dtype):
        return WideAttention(attrs["scale"], otherwise, kernels, stream)
    return otherwise
