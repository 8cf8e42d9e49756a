"""Runs generated Triton text on CPU tensors with Triton's interpreter. For tests: it is slow."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from strop.codegen.triton_worker import jit_function
from strop.ir.functions import SM_90
from strop.ir.source import KernelSource

_LOCK = threading.Lock()
_NUMPY_REDUCTIONS = {"larger": np.max, "smaller": np.min, "times": np.prod}
# NVIDIA's math library, which the interpreter cannot run, by the torch functions of the same name
_LIBDEVICE = (
    "acos",
    "acosh",
    "asin",
    "asinh",
    "atan",
    "atan2",
    "atanh",
    "copysign",
    "cosh",
    "erfc",
    "erfinv",
    "exp",
    "expm1",
    "fmod",
    "hypot",
    "lgamma",
    "log10",
    "log1p",
    "pow",
    "signbit",
    "sinh",
    "tan",
    "tanh",
    "trunc",
)


def interpret(
    source: KernelSource, tensors: Sequence[torch.Tensor], scalars: Mapping[str, int]
) -> list[torch.Tensor]:
    """Run every program of the grid in order. Returns the scratch tensors, as they were left."""
    from triton.runtime.interpreter import InterpretedFunction

    source = source.with_constants(EARLY=0, **{SM_90: 0})
    scratch = [_scratch(s.dtype, s.numel.eval(scalars), s.zeroed) for s in source.scratch]
    numbers = [scalars[f"s{i}"] for i in range(len(source.scalars))]
    numbers += [scalars["splits"]] if source.split else []
    grid = tuple(size.eval(scalars) for size in source.grid)
    kernel = jit_function(source.name, source.text)
    kernel.fn.__globals__["libdevice"] = SimpleNamespace(
        **{name: _twin(getattr(torch, name)) for name in _LIBDEVICE}, rint=_twin(torch.round)
    )
    # Lanes behind a mask compute with zeros, which on a GPU nobody sees.
    with _LOCK, _interpreting(), np.errstate(all="ignore"):
        run = InterpretedFunction(kernel.fn)[grid]
        run(*tensors, *scratch, *numbers, **dict(source.constants))
    return scratch


def _twin(function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """Make the twin of a torch function on the interpreter's tensors."""

    def call(*args: Any) -> Any:
        import triton.language as tl
        from triton.runtime.interpreter import TensorHandle

        arrays = np.broadcast_arrays(*(arg.handle.data for arg in args))
        found = function(*(torch.from_numpy(array.copy()) for array in arrays)).numpy()
        widest = max(args, key=lambda arg: arg.handle.data.size)
        if found.dtype == bool:
            found = found.astype(np.int32)
        scalar = tl.int32 if found.dtype == np.int32 else widest.dtype
        kind = widest.type.with_element_ty(scalar) if widest.type.is_block() else scalar
        return tl.tensor(TensorHandle(found, scalar), kind)

    return call


def _scratch(dtype: torch.dtype, numel: int, zeroed: bool) -> torch.Tensor:
    """Fill memory that nothing may rely on with what would show if something did."""
    garbage = math.nan if dtype.is_floating_point else 77
    return torch.full((numel,), 0 if zeroed else garbage, dtype=dtype)


@contextmanager
def _interpreting() -> Iterator[None]:
    """Let functions that were jitted for compilation be called by interpreted ones."""
    from triton.runtime import interpreter
    from triton.runtime.jit import JITFunction

    call, patch = JITFunction.__call__, interpreter._patch_lang_tensor
    reduce = interpreter.ReduceOps.apply_impl
    JITFunction.__call__ = _call
    interpreter._patch_lang_tensor = lambda tensor, scope: _patch_tensor(patch, tensor, scope)
    interpreter.ReduceOps.apply_impl = lambda self, input: _reduce(reduce, self, input)
    try:
        yield
    finally:
        JITFunction.__call__, interpreter._patch_lang_tensor = call, patch
        interpreter.ReduceOps.apply_impl = reduce


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function of Triton; its random numbers see the core of the language by themselves, so
    that is patched as well."""
    from triton.runtime import interpreter

    if self.fn.__module__ != "triton.language.random":
        return self.fn(*args, **kwargs)
    scope = interpreter._patch_lang(self.fn)
    try:
        return self.fn(*args, **kwargs)
    finally:
        scope.restore()


def _patch_tensor(patch: Any, tensor: Any, scope: Any) -> None:
    """Patch the interpreter's tensor: numpy >= 2.4 turns only 0-dimensional arrays into an index,
    and scalars here have one dimension."""
    patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _reduce(original: Any, self: Any, input: Any) -> Any:
    """Reduce by a twin in numpy; custom reductions otherwise run element by element in Python."""
    found = _NUMPY_REDUCTIONS.get(self.combine_fn.fn.__name__)
    if found is None:
        return original(self, input)
    return self.min_max(input[0], val_reduce_op=found)
