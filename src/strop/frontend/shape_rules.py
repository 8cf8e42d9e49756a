"""Compute shapes of slices, pools, sums and some gradients while tracing, in arithmetic without a
guard.

torch 2.11 makes ``x[:, :8]`` of a symbolic size a length that depends on data, unless it can prove
that there are 8; later ones say min(8, size), as here. And it asks whether the sizes of a pool
divide, which made a graph for odd pictures and one for even ones.

Others are here for speed: half of the trace of a UNet's training step went into comparing sizes and
strides of operands that are alike, and into formulas of gradients that are like their inputs; two
fifths of its inference went into layer norms and activations, which torch takes apart for a shape.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from traceback import FrameSummary
from types import FrameType
from typing import Any

import sympy
import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch._guards import ShapeGuard
from torch._prims_common import (
    compute_elementwise_output_strides,
    suggest_memory_format,
)
from torch._subclasses import FakeTensor, fake_impls
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv, guard_or_false

from strop.frontend.fake_orders import Size, exact, fake, forget_sizes, like, order_of
from strop.frontend.numbers import Numbers, numbers_in
from strop.frontend.view_rules import viewed

aten = torch.ops.aten
COMPARISONS = "c10/core/SymInt.h"  # the file of those in C++; Python's have none
STROP = str(Path(__file__).parents[1]) + os.sep
WITHIN = tuple(f"{STROP}{name}{os.sep}" for name in ("frontend", "runtime"))  # a forward's trace
TORCH = str(Path(torch.__file__).parent) + os.sep
LAYERS = str(Path(torch.__file__).parent / "nn") + os.sep
Rule = Callable[..., Any]  # of the fake mode, the operator and its arguments; None: torch's own


@contextmanager
def shape_rules() -> Iterator[None]:
    """Put the shape rules in force, for one thread at a time: traces take turns."""
    try:
        with operator_rules(), _orders_of_larger_sizes():
            yield
    finally:
        forget_sizes()  # a trace of Dynamo's may be around this one


@contextmanager
def operator_rules() -> Iterator[None]:
    """Put those of operators alone in force: torch answers all questions about memory itself."""
    usual, fast = fake_impls.op_implementations_dict, fake_impls.get_fast_op_impls()
    forget_sizes()
    with (
        _replaced(
            usual, {operator: _first(rule, usual.get(operator)) for operator, rule in RULES.items()}
        ),
        _replaced(
            fast,
            {
                operator: _fast(operator, rule, fast.get(operator))
                for operator, rule in FAST_RULES.items()
            },
        ),
    ):
        yield


class TracedSizes(ShapeEnv):
    """Hold the sizes and the numbers of a trace of ours."""

    numbers = Numbers(())
    are_sizes_positive = True

    def evaluate_expr(self, orig_expr: Any, *args: Any, **kwargs: Any) -> Any:
        if numbers_in(orig_expr):
            return self.numbers.decided(orig_expr)
        return super().evaluate_expr(orig_expr, *args, **kwargs)

    def _get_user_frame(self) -> FrameType | None:
        """Find the frame that a guard is said to come from: the line of the module that asked about
        a size, or that of torch's module where nobody else did, but not ours around the
        question."""
        of_torch: FrameType | None = None
        frame = inspect.currentframe()
        while frame is not None:
            file = frame.f_code.co_filename
            if file.startswith(STROP):
                if not file.startswith(WITHIN):
                    break  # beyond it are those who called the module
            elif file.startswith(LAYERS):
                of_torch = of_torch or frame
            elif not file.startswith((TORCH, "<")):
                return frame
            frame = frame.f_back
        return of_torch or super()._get_user_frame()


def env_of(values: Iterable[Any]) -> ShapeEnv | None:
    """Return what holds the sizes of traced values, or None where all of them are numbers."""
    for value in values:
        for size in value.shape if isinstance(value, Tensor) else (value,):
            if isinstance(size, torch.SymInt):
                found: ShapeEnv = size.node.shape_env
                return found
    return None


def place(guard: ShapeGuard) -> str:
    """Return a place such as "model.py:12", or what torch says."""
    frame = guard.sloc.framework_loc
    if isinstance(frame, FrameSummary):
        return f"{Path(frame.filename).name}:{frame.lineno}"
    return str(guard.sloc)


@contextmanager
def _orders_of_larger_sizes() -> Iterator[None]:
    """Answer in which order memory lies where C++ asks whether a size is above 1, as strides of a
    size of 1 say nothing of that. Strides that are right for larger sizes are right for 1 too; with
    a guard, a batch of 1 would be another graph."""
    own = SymNode.guard_bool

    def guard_bool(self: SymNode, file: str, line: int) -> bool:
        env = self.shape_env
        if isinstance(env, TracedSizes) and file.endswith(COMPARISONS) and _is_above_one(self.expr):
            with env.suppress_guards():
                is_larger = own(self, file, line)
            if is_larger:
                return True
        return own(self, file, line)

    SymNode.guard_bool = guard_bool  # type: ignore[method-assign]
    try:
        yield
    finally:
        SymNode.guard_bool = own  # type: ignore[method-assign]


def _is_above_one(question: Any) -> bool:
    is_strict = isinstance(question, sympy.StrictGreaterThan | sympy.StrictLessThan)
    return is_strict and question.gts.is_Symbol and question.lts == 1


@contextmanager
def _replaced(table: dict[Any, Rule], rules: Mapping[Any, Rule]) -> Iterator[None]:
    before = {operator: table.get(operator) for operator in rules}
    table.update(rules)
    try:
        yield
    finally:
        for operator, own in before.items():
            table.pop(operator)
            if own is not None:
                table[operator] = own


def _first(rule: Rule, own: Rule | None) -> Rule:
    def apply(mode: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
        found = rule(mode, *args, **kwargs)
        if found is None:
            return own(mode, func, *args, **kwargs) if own else NotImplemented
        return found

    return apply


def _fast(operator: Any, rule: Rule, own: Rule | None) -> Rule:
    """Ask the rule before torch takes an operator apart, where a size is symbolic."""

    def apply(mode: Any, *args: Any, **kwargs: Any) -> Any:
        found = rule(mode, *args, **kwargs)
        if found is not None:
            return found
        if own is not None:
            return own(mode, *args, **kwargs)
        with mode:
            return decomposition_table[operator](*args, **kwargs)

    return apply


def _sliced(
    mode: Any, x: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Any:
    if not -x.dim() <= dim < x.dim() or step <= 0:
        return None  # torch's own error
    sizes, strides = list(x.shape), list(x.stride())
    size = sizes[dim]
    first = 0 if start is None else _bound(start, size)
    last = size if end is None or _is_the_end(end) else _bound(end, size)
    if first is None or last is None:
        return None
    offset = x.storage_offset() + first * strides[dim]
    sizes[dim] = (_length(first, last) + step - 1) // step
    strides[dim] *= step
    return x.as_strided(sizes, strides, offset)


def _is_the_end(end: Any) -> bool:
    return isinstance(end, int) and end == sys.maxsize


def _bound(index: Any, size: Size) -> Any:
    """Clamp an index to 0 to the size; None where it is not known from which end it counts."""
    if guard_or_false(index >= 0):
        if guard_or_false(index <= size):
            return index
        return size if guard_or_false(index >= size) else torch.sym_min(index, size)
    if guard_or_false(index < 0):
        index = index + size
        if guard_or_false(index >= 0):
            return index
        return 0 if guard_or_false(index <= 0) else torch.sym_max(index, 0)
    return None


def _length(first: Any, last: Any) -> Any:
    if guard_or_false(last >= first):
        return last - first
    return 0 if guard_or_false(first >= last) else torch.sym_max(last - first, 0)


def _into_slice(
    mode: Any,
    x: Tensor,
    part: Tensor,
    dim: int = 0,
    start: Any = None,
    end: Any = None,
    step: int = 1,
) -> Tensor | None:
    _check_fills(part, aten.slice.Tensor(x, dim, start, end, step))
    return like(mode, x) if order_of(x) else None


def _into_one(mode: Any, x: Tensor, part: Tensor, dim: int, index: Any) -> Tensor | None:
    _check_fills(part, aten.select.int(x, dim, index))
    return like(mode, x) if order_of(x) else None


def _check_fills(part: Tensor, place: Tensor) -> None:
    """Check that a part fills its place: torch's own rules, which say the shape of the result, ask
    for nothing."""
    torch._check(part.dim() == place.dim())
    for found, wanted in zip(part.shape, place.shape, strict=True):
        torch._check(found == wanted)


def _unshuffled(mode: Any, x: Tensor, factor: int) -> None:
    """Check that the factor divides both sides: torch's own rule compares numbers of elements,
    which does not say so."""
    if x.dim() >= 3 and factor > 0:
        for size in x.shape[-2:]:
            torch._check(size % factor == 0)


def _largest(
    mode: Any,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> Any:
    shape = _pooled(x, ceil_mode, kernel, stride, padding, dilation)
    if shape is None:
        return None
    return _empty(mode, x, shape, x.dtype), _empty(mode, x, shape, torch.int64)


def _average(
    mode: Any,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    shape = _pooled(x, ceil_mode, kernel, stride, padding, 1)
    return None if shape is None or divisor_override == 0 else _empty(mode, x, shape, x.dtype)


def _pooled(x: Tensor, upwards: bool, *geometry: Any) -> list[Size] | None:
    """Return the pooled sizes; None for what torch refuses: its own rule says why."""
    columns = [_both(value) for value in geometry]
    kernel, stride, padding, dilation = columns[0], columns[1] or columns[0], *columns[2:]
    if x.dim() not in (3, 4) or any(len(c) != 2 for c in (kernel, stride, padding, dilation)):
        return None
    shape: list[Size] = list(x.shape)
    for dim, width, step, pad, gap in zip((-2, -1), kernel, stride, padding, dilation, strict=True):
        span = gap * (width - 1) + 1
        if min(width, step, gap) < 1 or not 0 <= 2 * pad <= width:
            return None
        size = shape[dim]
        reach = size + 2 * pad + (step - 1 if upwards else 0)  # one window at least
        if not guard_or_false(reach >= span):
            torch._check(reach >= span)
        shape[dim] = (size + 2 * pad - span) // step + 1
        if upwards:  # one that is not whole counts too, if it begins inside
            more = (reach - span) // step + 1
            shape[dim] = torch.sym_min(more, (size + pad - 1) // step + 1)
    return shape


def _both(value: Any) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * 2 if len(values) == 1 else values


def _empty(mode: Any, x: Tensor, shape: Sequence[Size], dtype: torch.dtype) -> Tensor:
    order = suggest_memory_format(x) if x.dim() == 4 else torch.contiguous_format
    with mode:
        return torch.empty(shape, dtype=dtype, device=x.device, memory_format=order)


def _gradient(mode: Any, grad: Tensor, x: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
    """Give an activation's gradient the shape and layout of what arrives."""
    is_like = grad.dtype == x.dtype and exact(grad.shape) == exact(x.shape)
    return like(mode, grad) if is_like and order_of(grad) else None


def _added_product(
    mode: Any, c: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1
) -> Tensor | None:
    """Give the product of two matrices, to which a row is added, a contiguous shape."""
    is_row = c.dim() == 1 and exact(c.shape) == exact(b.shape[1:]) and c.dtype == a.dtype
    return _product(mode, a, b) if is_row else None


def _product(mode: Any, a: Tensor, b: Tensor) -> Tensor | None:
    fits = a.dim() == b.dim() == 2 and exact(a.shape[1:]) == exact(b.shape[:1])
    if not fits or a.dtype != b.dtype or a.device != b.device or a.layout is not b.layout:
        return None
    return fake(mode, a, (a.shape[0], b.shape[1]), (b.shape[1], 1))


def _group_norm(
    mode: Any,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    n: Any,
    c: Any,
    pixels: Any,
    groups: int,
    eps: float,
) -> tuple[Tensor, ...] | None:
    """Give a result like what arrives, and statistics in its type: to take the norm apart takes
    forty times as long."""
    given = [parameter for parameter in (weight, bias) if parameter is not None]
    of_one_type = x.is_floating_point() and all(p.dtype == x.dtype for p in given)
    divides = isinstance(c, int) and groups > 0 and c % groups == 0
    if not (of_one_type and divides and order_of(x) == "contiguous"):
        return None
    return like(mode, x), *(fake(mode, x, (n, groups), (groups, 1)) for _ in range(2))


def _group_norm_gradients(
    mode: Any,
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    n: Any,
    c: Any,
    pixels: Any,
    groups: int,
    mask: Sequence[bool],
) -> tuple[Tensor | None, ...] | None:
    """Do the same for a group norm, whose formula takes a tenth of a second."""
    if not order_of(x):
        return None
    of_x = like(mode, x) if mask[0] else None
    return of_x, *(fake(mode, x, (c,), (1,)) if wanted else None for wanted in mask[1:])


def _layer_norm_gradients(
    mode: Any,
    grad: Tensor,
    x: Tensor,
    normalized: Sequence[Any],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: Sequence[bool],
) -> tuple[Tensor | None, ...] | None:
    own = (x, weight, bias)
    is_whole = all(value is not None for wanted, value in zip(mask, own, strict=True) if wanted)
    if not is_whole or order_of(x) != "contiguous":
        return None
    return tuple(
        like(mode, value) if wanted and value is not None else None
        for wanted, value in zip(mask, own, strict=True)
    )


def _layer_norm(
    mode: Any,
    x: Tensor,
    normalized: Sequence[Any],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, ...] | None:
    """Give contiguous results, as eager does, and statistics in the type that torch keeps them
    in."""
    count, ends = len(normalized), exact(normalized)
    parameters = [parameter for parameter in (weight, bias) if parameter is not None]
    of_one_type = all(p.dtype == x.dtype and exact(p.shape) == ends for p in parameters)
    is_whole = 0 < count <= x.dim() and exact(x.shape[x.dim() - count :]) == ends
    if not (of_one_type and is_whole and x.is_floating_point()):
        return None
    wide = x.dtype if x.device.type == "cpu" else torch.promote_types(x.dtype, torch.float32)
    shape = (*x.shape[: x.dim() - count], *[1] * count)
    results = ((x.shape, x.dtype), (shape, wide), (shape, wide))
    return tuple(
        FakeTensor(mode, torch.empty(sizes, dtype=dtype, device="meta"), x.device)
        for sizes, dtype in results
    )


def _unary(mode: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
    """Give what is computed of floating-point numbers, element by element, the shape and layout of
    what arrives."""
    if not x.is_floating_point():
        return None
    if order_of(x):
        return like(mode, x)
    with mode:
        return torch.empty_like(x)


def _binary(mode: Any, a: Any, b: Any, **kwargs: Any) -> Tensor | None:
    """Give a result the layout of the operand that has its shape, if that lies in a usual order;
    for operands of one shape, that in which torch lays out what is made of both."""
    if not isinstance(a, Tensor):
        a, b = b, a
    if not isinstance(a, Tensor) or not a.is_floating_point():
        return None
    if not isinstance(b, Tensor):
        return like(mode, a) if isinstance(b, int | float) and order_of(a) else None
    if a.dtype != b.dtype or a.device != b.device:
        return None
    sizes, others = exact(a.shape), exact(b.shape)
    if len(sizes) < len(others) or (sizes != others and not _spreads(others, sizes)):
        a, b, sizes, others = b, a, others, sizes
    if sizes == others:
        if order_of(a) and order_of(a) == order_of(b):
            return like(mode, a)
        return fake(mode, a, a.shape, compute_elementwise_output_strides(a, b))
    return like(mode, a) if _spreads(others, sizes) and order_of(a) else None


def _cloned(mode: Any, x: Tensor, *, memory_format: Any = None) -> Tensor | None:
    """Give a copy of what lies in a usual order the same order, or that which is asked for."""
    is_kept = memory_format in (None, torch.preserve_format) and order_of(x)
    if is_kept or (memory_format is torch.contiguous_format and order_of(x) == "contiguous"):
        return like(mode, x)
    if memory_format is not torch.contiguous_format:
        return None
    return FakeTensor(mode, torch.empty(x.shape, dtype=x.dtype, device="meta"), x.device)


def _written(mode: Any, x: Tensor, part: Tensor, non_blocking: bool = False) -> Tensor | None:
    """Give ``y[..., 0::2] = part`` a shape: torch's own rule asks in which order both lie, and so
    for sizes of at least 2. It refuses what has an element at several places."""
    is_own = all(stride != 0 for stride in exact(x.stride()))
    return x if is_own and _spreads(exact(part.shape), exact(x.shape)) else None


def _normed(
    mode: Any, x: Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, **more: Any
) -> Tensor | None:
    """Count dims from the front: torch 2.11 keeps a dim of size 1 that is counted from the end."""
    if not dim or all(each >= 0 for each in dim):
        return None
    with mode:
        dims = [each % x.dim() for each in dim]
        result: Tensor = aten.linalg_vector_norm.default(x, ord, dims, keepdim, **more)
    return result


def _overwritten(mode: Any, x: Tensor, part: Tensor, non_blocking: bool = False) -> Tensor | None:
    """Do the same for a value of its own."""
    if not _spreads(exact(part.shape), exact(x.shape)):
        return None
    with mode:
        return torch.empty_like(x)


def _spreads(sizes: Sequence[Any], over: Sequence[Any]) -> bool:
    """Tell whether each size is 1 or that of the other shape, without asking what symbols are."""
    if len(sizes) > len(over):
        return False
    ends = over[len(over) - len(sizes) :]
    return all(a == 1 or a == b for a, b in zip(sizes, ends, strict=True))


RULES: dict[Any, Rule] = {
    aten.view.default: viewed,
    aten._unsafe_view.default: viewed,
    aten.slice.Tensor: _sliced,
    aten.slice_scatter.default: _into_slice,
    aten.select_scatter.default: _into_one,
    aten.max_pool2d_with_indices.default: _largest,
    aten.avg_pool2d.default: _average,
    aten.mm.default: _product,
    aten.copy_.default: _written,
    aten.copy.default: _overwritten,
}
FAST_RULES: dict[Any, Rule] = {
    aten.linalg_vector_norm.default: _normed,
    aten.pixel_unshuffle.default: _unshuffled,
    aten.clone.default: _cloned,
    aten.addmm.default: _added_product,
    aten.silu_backward.default: _gradient,
    aten.gelu_backward.default: _gradient,
    aten.native_group_norm_backward.default: _group_norm_gradients,
    aten.native_layer_norm_backward.default: _layer_norm_gradients,
    aten.native_layer_norm.default: _layer_norm,
    aten.native_group_norm.default: _group_norm,
    **dict.fromkeys(
        (
            aten.gelu.default,
            aten.silu.default,
            aten.sigmoid.default,
            aten.tanh.default,
            aten.relu.default,
            aten.exp.default,
            aten.neg.default,
            aten.rsqrt.default,
            aten.sin.default,
            aten.cos.default,
        ),
        _unary,
    ),
    aten.add.Tensor: _binary,
    aten.sub.Tensor: _binary,
    aten.mul.Tensor: _binary,
    aten.div.Tensor: _binary,
}
