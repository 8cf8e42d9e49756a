"""Trace through what torch would compile in the middle of a forward.

TorchScript runs a function in an interpreter of its own, which on a GPU fuses it by what it saw in
earlier calls: its kernels read the memory of tensors, and those of a trace have none. An
associative scan whose function works element by element goes to Dynamo, which does not follow the
modes of a trace. Here the Python code of both runs instead, as Dynamo has it when it inlines them.
A scan that is a linear recurrence is one operator (``linear_scans``).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.jit._state import _try_get_jit_cached_function as scripted

from strop.frontend.linear_scans import scanned
from strop.frontend.quick import replaced_here

# the package has the function under this name
scans: Any = importlib.import_module("torch._higher_order_ops.associative_scan")
_Run = Callable[..., Any]


@contextmanager
def inlined() -> Iterator[None]:
    """Have both in Python within the body, in this thread."""
    with (
        replaced_here(torch._C.ScriptFunction, "__call__", _as_written),
        replaced_here(scans, "generic_associative_scan", _whole),
        replaced_here(scans, "_maybe_compile_and_run_fn", _taken_apart),
    ):
        yield


def _as_written(usual: _Run, function: Any, *args: Any, **kwargs: Any) -> Any:
    own = _written(function)
    return usual(function, *args, **kwargs) if own is None else own(*args, **kwargs)


def _taken_apart(usual: _Run, run: _Run, combine: _Run, leaves: Sequence[Tensor]) -> Any:
    return scans.generic_associative_scan(combine, leaves, additional_inputs=())


def _whole(usual: _Run, combine: _Run, leaves: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
    may_be = not any(args) and not any(kwargs.values())
    found = scanned(combine, leaves) if may_be else None
    return usual(combine, leaves, *args, **kwargs) if found is None else found


def _written(function: Any) -> _Run | None:
    """Return the Python function that was scripted, or None for one that ``torch.jit.trace`` has
    made: it is what was recorded, which need not be what the function would do."""
    own: _Run | None = getattr(function, "_torchdynamo_inline", None)
    known = own and scripted(own)  # another object that stands for the same compiled function
    return own if known and known.qualified_name == function.qualified_name else None
