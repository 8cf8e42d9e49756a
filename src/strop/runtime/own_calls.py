"""Library calls that kernels written by hand do instead, at sizes where these are faster."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from strop.ir.dims import Expr
from strop.ir.program import CallStep, Program, Step
from strop.ir.source import KernelSource, has_boxes
from strop.kernels import own_kernels
from strop.runtime.box_attention import BoxAttention
from strop.runtime.box_convolution import BoxConvolution
from strop.runtime.gated_linear import GatedLinear
from strop.runtime.kernels import KernelLibrary

Call = Callable[..., Any]
OWN: Mapping[str, Callable[..., Call]] = {
    "attention": BoxAttention, "conv2d": BoxConvolution, "geglu": GatedLinear,
}  # fmt: skip


def chosen(program: Program, steps: Sequence[Step | None],
           sizes: Callable[[tuple[Expr, ...]], Sequence[int]], arch: int
           ) -> dict[int, list[KernelSource]]:  # fmt: skip
    """By step, the kernels that its call launches itself, for operands of these sizes."""
    found = {}
    for position, step in enumerate(steps):
        if isinstance(step, CallStep) and step.boxed:
            shapes = [sizes(ref.shape) for ref in step.inputs]
            dtype = program.buffers[step.inputs[0].buffer].dtype
            sources = own_kernels.sources_at(step.op, dict(step.attrs), shapes, dtype,
                                             boxed=has_boxes(arch))  # fmt: skip
            if sources:
                found[position] = sources
    return found


def sources_at(program: Program, env: Mapping[str, int], arch: int) -> tuple[KernelSource, ...]:
    """All kernels that run at these sizes on such a GPU, those of calls too."""

    def sizes(exprs: tuple[Expr, ...]) -> tuple[int, ...]:
        return tuple(expr.eval(env) for expr in exprs)

    own = chosen(program, program.at(env), sizes, arch).values()
    return tuple(dict.fromkeys((*program.sources_at(env), *itertools.chain(*own))))


def sources_elsewhere(program: Program, needed: Collection[KernelSource], arch: int
                      ) -> tuple[KernelSource, ...]:  # fmt: skip
    """All kernels that run at some sizes on such a GPU but those that are ``needed``."""
    here, all_kernels = set(needed), (*program.sources, *sources_anywhere(program, arch))
    return tuple(source for source in dict.fromkeys(all_kernels) if source not in here)


def sources_anywhere(program: Program, arch: int) -> tuple[KernelSource, ...]:
    """What calls launch at any sizes on such a GPU."""
    found = dict[KernelSource, None]()
    for step in program.call_steps:
        if step.boxed and has_boxes(arch):
            shapes = [ref.shape for ref in step.inputs]
            dtype = program.buffers[step.inputs[0].buffer].dtype
            found |= dict.fromkeys(
                own_kernels.sources_anywhere(step.op, dict(step.attrs), shapes, dtype)
            )
    return tuple(found)


def instead(step: CallStep, otherwise: Call, kernels: KernelLibrary, stream: int, *, early: bool
            ) -> Call:  # fmt: skip
    """For a call that ``chosen`` has found kernels for. It leaves to ``otherwise`` what does not
    lie in memory as they want it. ``early``: the launch before is one of ours."""
    scale = {"scale": dict(step.attrs)["scale"]} if step.op == "attention" else {}
    return OWN[step.op](otherwise, kernels, stream, is_early=early, **scale)
