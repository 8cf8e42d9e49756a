"""Ways to run a bound program that is nothing but kernels on a CPU, without a walk over its steps.

Small calls take a few microseconds, and so would finding out at each what is the same at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._dynamo.guards import _empty_strided_cpu  # type: ignore[attr-defined]

from strop.runtime.build.native import BoundKernel
from strop.runtime.run.bounds_checks import BoundsChecks
from strop.runtime.run.memory import Workspace

Run = Callable[[Sequence[Tensor]], Any]
Look = tuple[Sequence[int], Sequence[int], torch.dtype]  # shape, strides, dtype
FIRST = itemgetter(0)  # what is made of the results where there is one, in no container
Patch = tuple[int, BoundKernel, int, int]  # tensor, and where its address goes, moved by so much


class Watched(Protocol):
    """``around``: a debugger's place between the steps, who would miss them here."""

    around: Any


def of_many(
    watched: Watched,
    kernels: Sequence[BoundKernel],
    looks: Sequence[Look],
    patches: Sequence[Patch],
    count: int,
    structured: Callable[[list[Any]], Any],
    workspace: Workspace,
    memory: Tensor | None,
    faults: BoundsChecks,
) -> Run:
    """From ``count`` arguments to results that look so. ``memory``: that the kernels work in, if
    they do; None comes of a call where it has moved."""
    calls = [kernel.call for kernel in kernels]
    places = [(which, kernel.pointers, place, move) for which, kernel, place, move in patches]
    lock, address = workspace.lock, Tensor.data_ptr

    def run(inputs: Sequence[Tensor]) -> Any:
        with lock:
            has_moved = memory is not None and workspace.memory is not memory
            if has_moved or watched.around is not None:
                return None
            tensors = [*inputs]
            for shape, strides, dtype in looks:
                tensors.append(_empty_strided_cpu(shape, strides, dtype))
            for which, array, place, move in places:
                array[place] = address(tensors[which]) + move
            for call in calls:
                call()
            faults.check()
            return structured(tensors[count:])

    return run


def of_one(watched: Watched, kernel: BoundKernel, look: Look, argument: int, place: int) -> Run:
    """``of_many`` for one kernel from one argument to one result, which uses no working memory:
    without loops, and with a set of arguments for each thread instead of a lock."""
    shape, strides, dtype = look
    spare = [kernel.again()]

    def run(inputs: Sequence[Tensor]) -> Any:
        if watched.around is not None:
            return None
        try:
            own = spare.pop()
        except IndexError:  # other threads are in the middle of a call
            own = kernel.again()
        result = _empty_strided_cpu(shape, strides, dtype)
        pointers = own.pointers
        pointers[argument] = inputs[0].data_ptr()
        pointers[place] = result.data_ptr()
        own.call()
        spare.append(own)
        return result

    return run
