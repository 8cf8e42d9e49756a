"""Note what a forward asks about how tensors lie in memory.

Arguments are traced dense in their order, and made dense for kernels where they have gaps. A
forward that asks for strides, of an argument or of what it has computed from some, would be
answered for dense ones: such a program serves arguments that are dense, from the beginning of their
memory.
Where eager's answer depends on what computes a value, or on who else holds its memory, the trace
has none: the forward is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from strop.errors import CaptureError
from strop.frontend.asked_of_tensors import (
    asks_who_requires,
    attributes_of,
    refuse_attributes,
    refuse_unknown,
)
from strop.frontend.composed_tensors import ComposedCalls
from strop.frontend.formats import traced
from strop.frontend.functional import memory_of
from strop.frontend.given_orders import ChannelViews, has_dims, node_of, walked_back
from strop.frontend.operators import Retarget
from strop.frontend.other_memory import refuse_other_memory

READS: dict[Callable[..., Any], str] = {
    Tensor.stride: "stride",
    Tensor.storage_offset: "storage_offset",
    Tensor.is_contiguous: "is_contiguous",
    Tensor.as_strided: "as_strided",
    torch.as_strided: "as_strided",
    torch.as_strided_copy: "as_strided_copy",
    torch.as_strided_scatter: "as_strided_scatter",
    Tensor.as_strided_scatter: "as_strided_scatter",
    Tensor.data_ptr: "data_ptr",
    Tensor.dim_order: "dim_order",
}
OF_STRIDES = ("stride", "is_contiguous", "dim_order")  # alike wherever in its memory a tensor lies
_strop, aten = torch.ops.strop, torch.ops.aten


def _is_on_gpu(value: Tensor) -> bool:
    return value.device.type == "cuda"


# operators whose library chooses how the result lies: for which results eager's order is not known
CHOSEN_BY_LIBRARIES: dict[Any, Callable[[Tensor], bool]] = {
    _strop.attention.default: _is_on_gpu,
    _strop.conv2d.default: _is_on_gpu,
    _strop.convolution.default: lambda value: _is_on_gpu(value) or value.dim() == 5,
}


class LayoutReads(Retarget):
    """Retarget calls, and note what a forward with these ``arguments`` asks. Calls on composed
    tensors are left to their classes, and what these call is retargeted."""

    has_composed = False  # whether the module holds composed tensors

    def __init__(self, arguments: Sequence[Tensor]) -> None:
        super().__init__()
        self._own = {memory_of(tensor) for tensor in arguments}
        self.asked: dict[str, None] = {}
        self.num_asked = 0
        self.views = ChannelViews()
        self._composed = ComposedCalls()
        self._is_forward = self._is_made_dense = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self._is_forward:
            refuse_unknown(func)
            self.has_gradients |= asks_who_requires(func)
            self._note(func, args)
        if self.has_composed and self._composed.are_in((*args, *(kwargs or {}).values())):
            self.has_gradients |= torch.is_grad_enabled()
            return self._composed.run(self, func, types, args, kwargs or {})
        return super().__torch_function__(func, types, args, kwargs)

    def _note(self, func: Any, args: tuple[Any, ...]) -> None:
        refuse_other_memory(func)
        if func in READS:
            self.num_asked += 1
            _refuse_chosen(READS[func], args[0])
            if not (READS[func] in OF_STRIDES and _is_contiguous_anyway(args[0])):
                self.asked[READS[func]] = None
        elif func is Tensor.contiguous:
            self._is_made_dense |= self.is_own(args[0])
        else:
            self.num_asked += self.views.note(func, args)

    def is_own(self, tensor: Tensor) -> bool:
        """Tell whether a tensor lies in the memory of an argument."""
        return memory_of(tensor) in self._own

    @contextmanager
    def of_forward(self, given: Iterable[Any]) -> Iterator[None]:
        """Watch the forward of arguments and weights, which are ``given``, in the body; before and
        after it the tracer asks."""
        self._usual = attributes_of(given)
        self._is_forward = True
        try:
            yield
        finally:
            self._is_forward = False

    def results(
        self, leaves: Sequence[Any], arguments: Sequence[Any], weights: Iterable[Tensor]
    ) -> None:
        """Note where the caller's own tensor is wanted: programs read a copy of an argument that
        has gaps, and it, or a view of it, is returned. Raises EagerOnlyError where the forward
        leaves attributes of its own on a tensor."""
        refuse_attributes((*leaves, *arguments, *weights), self._usual)
        given = {id(argument) for argument in arguments}
        for leaf in leaves:
            if isinstance(leaf, Tensor) and memory_of(leaf) in self._own:
                if self._is_made_dense:
                    self.asked["contiguous"] = None
                elif id(leaf) not in given:
                    self.asked["a view is returned"] = None


def _refuse_chosen(question: str, value: Tensor) -> None:
    """Raises CaptureError for a question about what was computed by an operator of
    CHOSEN_BY_LIBRARIES, if what comes of it may lie as it does."""
    first = node_of(value)
    for node in () if first is None else walked_back(first, _deciding):
        chosen = CHOSEN_BY_LIBRARIES.get(node.target)
        if chosen and chosen(node.meta["val"]):
            raise CaptureError(
                f"it asks for {question} of what {node.target} has made, which the"
                " library that computes it decides"
            )


def _deciding(node: Node) -> list[Node]:
    """Return the operands that may decide how a value lies."""
    return [] if _is_settled(node) else node.all_input_nodes


# Operators whose results are contiguous in eager, however their operands lie.
_CONTIGUOUS = frozenset(
    (
        _strop.linear.default,
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten._scaled_mm.default,
        aten.native_layer_norm.default,
        aten._unsafe_view.default,
    )
)


def _is_contiguous_anyway(value: Tensor) -> bool:
    """Tell whether a value is contiguous in eager however the arguments lie."""
    node = node_of(value)
    while node is not None and node.target is aten.view.default:
        (node,) = node.all_input_nodes[:1]
    return node is not None and _is_settled(node)


def _is_settled(node: Node) -> bool:
    """Tell whether a value lies as it does however the operands lie that it is computed of."""
    if node.target is aten.clone.default:
        return node.kwargs.get("memory_format") is torch.contiguous_format
    return node.target in _CONTIGUOUS or (node.target is aten.view.default and _joins_heads(node))


def _joins_heads(node: Node) -> bool:
    """Tell whether a view makes rows (B, S, H D) of heads (B, S, H, D). Libraries write attention's
    result as (B, H, S, D) or as (B, S, H, D): rows are a contiguous copy of the first, and a view
    of the second, which is contiguous. cuDNN writes it as the queries lie, which may be neither."""
    heads, rows = node.all_input_nodes[0].meta["val"], node.meta["val"]
    if heads.dim() != 4 or rows.dim() != 3 or heads.shape[:2] != rows.shape[:2]:
        return False
    num_heads, size = heads.shape[2:]
    if not (isinstance(num_heads, int) and isinstance(size, int) and min(num_heads, size) > 1):
        return False
    return all(map(_lies_by_batches, _attention_queries(node.all_input_nodes[0])))


def _attention_queries(node: Node) -> Iterator[Tensor]:
    """Yield the queries of attention from whose result a value comes by way of heads."""

    def heads(of: Node) -> list[Node]:
        is_attention = of.target is _strop.attention.default
        return [] if is_attention else [n for n in of.all_input_nodes if has_dims(n, 4)]

    for each in walked_back(node, heads):
        if each.target is _strop.attention.default:
            yield each.all_input_nodes[0].meta["val"]


def _lies_by_batches(queries: Tensor) -> bool:
    batch, _, step, _ = map(traced, queries.stride())
    return traced(queries.shape[0]) == 1 or batch >= step
