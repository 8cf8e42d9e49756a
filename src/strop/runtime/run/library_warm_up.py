"""The first library calls of a program are made here, while its kernels are compiled.

A library loads its kernels when they are first called, and cuDNN makes a plan for each new form of
operands, 60 ms for an attention, and keeps it for the thread that called. Both need a core, while
the thread that will run the program has nothing to do but to wait for compilers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from strop.ir.device import Device
from strop.ir.dims import Expr
from strop.ir.ops import OF_ROWS, OPS
from strop.ir.program import CallStep, Program, TensorRef
from strop.runtime.run import choices
from strop.runtime.run.library_calls import CUDA_PLANNED_OUT, allocating_on

# The other operators have nothing to load.
LONGEST_FIRST = tuple(
    sorted(
        (name for name, row in OPS.items() if row.anchor.warm_up),
        key=lambda name: -OPS[name].anchor.warm_up,
    )
)
MOST_BYTES = 64 << 20  # of a call's operands and result: more would be memory that nobody expects

Look = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # sizes, strides


class CallForm(NamedTuple):
    """A library makes a plan for each of these. ``kernel``: its row of the kernel library."""

    op: str
    kernel: str
    attrs: tuple[tuple[str, Any], ...]
    operands: tuple[Look, ...]
    result: Look

    @property
    def num_bytes(self) -> int:
        looks = (*self.operands, self.result)
        return sum(math.prod(sizes) * dtype.itemsize for sizes, _, dtype in looks)


def prime(
    program: Program,
    env: Mapping[str, int],
    place: torch.device,
    device: Device,
    is_open: Callable[[], bool],
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> int:
    """Call the libraries as ``program`` does at these sizes, each form of operands once, on memory
    of no meaning, as long as ``is_open()``, and say how many calls that were.

    They run in this thread, and each within ``around()``, on the current stream. Calls of more than
    64 MiB are left out, and those that kernels of ours do on this device.
    """
    forms = sorted(forms_of(program, env, device), key=lambda form: LONGEST_FIRST.index(form.op))
    num_calls = 0
    with torch.device(place):
        for form in forms:
            if not is_open():
                break
            with around():
                _call(form, device)
            num_calls += 1
    return num_calls


def forms_of(program: Program, env: Mapping[str, int], device: Device) -> list[CallForm]:
    """Return the forms of the library calls of a program for CUDA at these sizes, each once, in its
    order. They are those that ``prime`` makes."""

    def sizes(exprs: tuple[Expr, ...]) -> tuple[int, ...]:
        return tuple(expr.eval(env) for expr in exprs)

    def look(ref: TensorRef) -> Look:
        return sizes(ref.shape), sizes(ref.strides), program.buffers[ref.buffer].dtype

    def whole(number: int) -> Look:
        buffer = program.buffers[number]
        return sizes(buffer.shape), sizes(buffer.strides), buffer.dtype

    steps, found = program.at(env), dict[CallForm, None]()
    chosen = choices.choices_of(program, steps, sizes, device)
    for position, step in enumerate(steps):
        if (
            isinstance(step, CallStep)
            and step.op in LONGEST_FIRST
            and not chosen[position].launches
        ):
            form = CallForm(
                step.op,
                chosen[position].kernel,
                step.attrs,
                tuple(map(look, step.inputs)),
                look(step.place) if step.place else whole(step.outputs[0]),
            )
            if form.num_bytes <= MOST_BYTES:
                found[form] = None
    return list(found)


def _call(form: CallForm, device: Device) -> None:
    operands, attrs = [torch.empty_strided(s, t, dtype=d) for s, t, d in form.operands], form.attrs
    if form.op not in CUDA_PLANNED_OUT:
        allocating_on(device, form.kernel)[form.op](dict(attrs))(operands)
        return
    if form.op == "conv2d":
        operands[1] = operands[1].contiguous(memory_format=torch.channels_last)  # as weights lie
    CUDA_PLANNED_OUT[form.op](dict(attrs))(operands, _result(form))


def _result(form: CallForm) -> Tensor:
    sizes, strides, dtype = form.result
    if form.op in OF_ROWS and len(sizes) != 2:  # a piece of a larger buffer is seen as rows
        return torch.empty(math.prod(sizes[:-1]), sizes[-1], dtype=dtype)
    return torch.empty_strided(sizes, strides, dtype=dtype)
