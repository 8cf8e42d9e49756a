"""Library calls that kernels written by hand do instead, at sizes where these are faster."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strop.ir.device import Device
from strop.ir.dims import Expr
from strop.ir.program import CallStep, Program, Step
from strop.ir.source import KernelSource
from strop.kernels import library
from strop.runtime.build.loader import KernelLoader
from strop.runtime.loop.hoisting import written
from strop.runtime.run import wide_attention
from strop.runtime.run.gated_linear import GatedLinear
from strop.runtime.run.skinny_gemm import SkinnyGemm
from strop.runtime.run.tma_attention import TmaAttention
from strop.runtime.run.wgmma_gemm import WgmmaGemm

Call = Callable[..., Any]
Order = Callable[[Sequence[KernelSource]], list[KernelSource]]
FACTORS = (1.5, 2, 0.5, 0.75)


@dataclass(frozen=True, slots=True)
class Own:
    """Which family of kernels does a call, and what it launches. ``is_steady``: what it reads
    second, weights, is the module's, and no step of the program writes it."""

    family: str
    sources: tuple[KernelSource, ...]
    is_steady: bool


def chosen(
    program: Program,
    steps: Sequence[Step | None],
    sizes: Callable[[tuple[Expr, ...]], Sequence[int]],
    device: Device,
) -> dict[int, Own]:
    """By step, what does its call for operands of these sizes, where that is one of ours."""
    found, changed = {}, {number for step in program.steps for number in written(step)}
    for position, step in enumerate(steps):
        if isinstance(step, CallStep) and step.families:
            shapes = [sizes(ref.shape) for ref in step.inputs]
            dtype = program.buffers[step.inputs[0].buffer].dtype
            family, sources = library.chosen_at(
                step.families, step.op, dict(step.attrs), shapes, dtype, boxed=device.has_wgmma
            )
            if sources:
                weights = step.inputs[1].buffer
                is_steady = _is_state(program, weights) and weights not in changed
                found[position] = Own(family, tuple(sources), is_steady)
    return found


def _is_state(program: Program, number: int) -> bool:
    buffer = program.buffers[number]
    return buffer.kind == "input" and program.inputs[buffer.index].is_state


def sources_at(
    program: Program, env: Mapping[str, int], device: Device
) -> tuple[KernelSource, ...]:
    """All kernels that run at these sizes on such a GPU, those of calls too."""

    def sizes(exprs: tuple[Expr, ...]) -> tuple[int, ...]:
        return tuple(expr.eval(env) for expr in exprs)

    steps = program.at(env)
    own = chosen(program, steps, sizes, device)
    launched = itertools.chain.from_iterable(each.sources for each in own.values())
    wide = wide_attention.sources_at(program, steps, own, sizes)
    return tuple(dict.fromkeys((*program.sources_at(env), *launched, *wide)))


def sources_elsewhere(
    program: Program, needed: Collection[KernelSource], device: Device
) -> tuple[KernelSource, ...]:
    """All kernels that run at some sizes on such a GPU but those that are ``needed``."""
    here, all_kernels = set(needed), (*program.sources, *sources_anywhere(program, device))
    return tuple(source for source in dict.fromkeys(all_kernels) if source not in here)


def likely_first(program: Program, env: Mapping[str, int], device: Device) -> Order:
    """Has kernels for other sizes in an order: first what most of some sizes near these need. Half
    of them are for sizes that are rare."""

    def ordered(sources: Sequence[KernelSource]) -> list[KernelSource]:
        uses = Counter[KernelSource]()
        for sizes in near(env):
            if all(guard.holds(sizes) for guard in program.guards):
                uses.update(sources_at(program, sizes, device))
        return sorted(sources, key=lambda source: -uses[source])

    return ordered


def near(env: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """All sizes by the same factor, and each by itself; and a little more, as what divides one of
    them need not divide the next."""
    for factor in FACTORS:
        yield {name: max(round(size * factor), 1) for name, size in env.items()}
        yield from ({**env, name: max(round(size * factor), 1)} for name, size in env.items())
    for more in (1, 3):
        yield {name: size + more for name, size in env.items()}
    yield from ({**env, name: size + 1} for name, size in env.items())


def sources_anywhere(program: Program, device: Device) -> tuple[KernelSource, ...]:
    """What calls launch at any sizes on such a GPU."""
    found = dict[KernelSource, None]()
    for step in program.call_steps:
        if step.families and device.has_wgmma:
            shapes = [ref.shape for ref in step.inputs]
            dtype = program.buffers[step.inputs[0].buffer].dtype
            found |= dict.fromkeys(
                library.sources_anywhere(step.families, step.op, dict(step.attrs), shapes, dtype)
            )
    return tuple(found | dict.fromkeys(wide_attention.sources_anywhere(program)))


def instead(
    step: CallStep, own: Own, otherwise: Call, kernels: KernelLoader, stream: int, *, early: bool
) -> Call:
    """A call by the kernels that ``chosen`` has found for it. It leaves to ``otherwise`` what does
    not lie in memory as they want it. ``early``: the launch before is one of ours."""
    if own.family in ("geglu", "tma_geglu"):
        return GatedLinear(
            otherwise, kernels, stream, is_early=early, is_one=own.family == "tma_geglu"
        )
    if own.family == "wgmma_gemm":
        if step.op == "geglu":
            otherwise = GatedLinear(otherwise, kernels, stream, is_early=early, is_one=False)
        return WgmmaGemm(
            step.op,
            dict(step.attrs),
            otherwise,
            kernels,
            stream,
            is_early=early,
            is_steady=own.is_steady,
        )
    if own.family == "skinny_gemm":
        return SkinnyGemm(otherwise, kernels, stream, is_early=early, is_steady=own.is_steady)
    scale = dict(step.attrs)["scale"]
    return TmaAttention(otherwise, kernels, stream, is_early=early, scale=scale)
