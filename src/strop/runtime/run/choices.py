"""The library has kernels that run the calls of a program, at some sizes or at any: these are
chosen here."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from strop.ir.device import Device
from strop.ir.dims import Expr, const
from strop.ir.program import CallStep, Program, Step
from strop.ir.source import KernelSource
from strop.kernels import library
from strop.kernels.gemm import skinny
from strop.kernels.kernel import Call, mask_dtype
from strop.kernels.library import Choice
from strop.kernels.packed import rows as packed
from strop.runtime.loop.hoisting import written

BuildOrder = Callable[[Sequence[KernelSource]], dict[KernelSource, float]]
FACTORS = (1.5, 2, 0.5, 0.75)
ONE = const(1)
AskedCall = tuple[Call, tuple[str, ...]]  # with the rows that may not run it
MAGNITUDES = (1, 4, 16, 64, 0.25)  # of sizes, at which other kernels may be faster


def call_of(program: Program, step: CallStep) -> Call:
    """Return a step as the library is asked about it."""
    dtypes = [program.buffers[ref.buffer].dtype for ref in step.inputs]
    shapes = tuple(ref.shape for ref in step.inputs)
    result = program.buffers[step.outputs[0]].dtype
    mask = mask_dtype(step.op, dtypes)
    return Call(step.op, step.attrs, shapes, result, mask, _lies_by_columns(step))


def _lies_by_columns(step: CallStep) -> bool:
    """Tell whether the weights (N, K) of a linear lie as (K, N)."""
    if step.op not in skinny.ROW.ops:
        return False
    weights = step.inputs[1]
    return weights.strides == (ONE, weights.shape[0])


def asked_by(program: Program, step: Step | None, steady: Collection[int]) -> AskedCall | None:
    """Return what is asked about a step of which the library has rows, else None."""
    if not isinstance(step, CallStep) or step.op not in library.BY_OP:
        return None
    off = program.kernels_off
    if step.op in packed.OPS and step.inputs[packed.WEIGHT].buffer not in steady:
        off = (*off, packed.NAME)
    return call_of(program, step), off


def choices_of(
    program: Program,
    steps: Sequence[Step | None],
    sizes: Callable[[tuple[Expr, ...]], Sequence[int]],
    device: Device,
) -> dict[int, Choice]:
    """Return what runs each call that the library has rows for on this device, by its position
    among ``steps``."""
    steady = steady_weights(program)
    return answers([asked_by(program, step, steady) for step in steps], sizes, device)


def answers(
    asked: Sequence[AskedCall | None],
    sizes: Callable[[tuple[Expr, ...]], Sequence[int]],
    device: Device,
) -> dict[int, Choice]:
    """Return what runs each call of which something is asked, by its place."""
    found, chosen = dict[int, Choice](), dict[AskedCall, Choice]()
    for position, each in enumerate(asked if device.has_library else ()):
        if each is None:
            continue
        if each not in chosen:  # a model has many equal calls
            call, off = each
            problem = call.of_shapes(tuple(tuple(sizes(shape)) for shape in call.shapes))
            chosen[each] = library.select(call, problem, device, off)
        choice = chosen[each]
        if choice is not library.TORCH and choice.kernel != packed.PLAIN_NAME:
            found[position] = choice
    return found


def steady_weights(program: Program) -> frozenset[int]:
    """Return the buffers that are the module's, and that no step of the program writes."""
    changed = {number for step in program.steps for number in written(step)}
    return frozenset(
        number
        for number, buffer in enumerate(program.buffers)
        if buffer.kind == "input"
        and program.inputs[buffer.index].is_state
        and number not in changed
    )


def sources_at(
    program: Program, env: Mapping[str, int], device: Device
) -> tuple[KernelSource, ...]:
    """Return all kernels that run at these sizes on such a GPU, those of calls too."""

    def sizes(exprs: tuple[Expr, ...]) -> tuple[int, ...]:
        return tuple(expr.eval(env) for expr in exprs)

    found = choices_of(program, program.at(env), sizes, device).values()
    launched = itertools.chain.from_iterable(choice.sources for choice in found)
    return tuple(dict.fromkeys((*program.sources_at(env), *launched)))


def sources_at_magnitudes(
    program: Program, env: Mapping[str, int], device: Device
) -> tuple[KernelSource, ...]:
    """Return all kernels that run at these sizes, and at much larger and smaller ones."""
    scaled = [{n: max(round(size * f), 1) for n, size in env.items()} for f in MAGNITUDES]
    return tuple(dict.fromkeys(s for some in scaled for s in sources_at(program, some, device)))


def sources_anywhere(program: Program, device: Device) -> tuple[KernelSource, ...]:
    """Return what calls launch at any sizes on such a GPU."""
    found = dict[KernelSource, None]()
    for step in program.call_steps if device.has_library else ():
        if step.op in library.BY_OP:
            call = call_of(program, step)
            found |= dict.fromkeys(library.forms(call, device, program.kernels_off))
    return tuple(found)


def sources_elsewhere(
    program: Program, needed: Collection[KernelSource], device: Device
) -> tuple[KernelSource, ...]:
    """Return all kernels that run at some sizes on such a GPU but those that are ``needed``."""
    here, all_kernels = set(needed), (*program.sources, *sources_anywhere(program, device))
    return tuple(source for source in dict.fromkeys(all_kernels) if source not in here)


def likely_first(program: Program, env: Mapping[str, int], device: Device) -> BuildOrder:
    """Put kernels for other sizes in an order: first what most of some sizes near these need, with
    the share of these sizes. Half of the kernels are for sizes that are rare."""

    def ordered(sources: Sequence[KernelSource]) -> dict[KernelSource, float]:
        uses = Counter[KernelSource]()
        served = [some for some in near(env) if all(g.holds(some) for g in program.guards)]
        for sizes in served:
            uses.update(sources_at(program, sizes, device))
        wanted = sorted(sources, key=lambda source: -uses[source])
        return {source: uses[source] / max(len(served), 1) for source in wanted}

    return ordered


def near(env: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Yield all sizes by the same factor, then each by itself; and sizes a little larger, as what
    divides one of them need not divide the next."""
    for factor in FACTORS:
        yield {name: max(round(size * factor), 1) for name, size in env.items()}
        yield from ({**env, name: max(round(size * factor), 1)} for name, size in env.items())
    for more in (1, 3):
        yield {name: size + more for name, size in env.items()}
    yield from ({**env, name: size + 1} for name, size in env.items())
