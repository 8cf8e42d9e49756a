"""Find the convolutions whose weights have to lie as they were given.

Weights of convolutions are laid out channels-last on a GPU, in place, and eager's convolutions give
channels-last results for these. Code that views such a result across its channels, as in
``conv(x).view(len(x), -1)``, fails on it, which is no matter while the forward is compiled. But
parts of a module are called by themselves, and calls run in eager. So these weights stay as they
were given, and a program reads a copy of them that it makes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental import proxy_tensor

import strop.frontend.operators  # noqa: F401  (defines torch.ops.strop)
from strop.frontend.formats import UnknownSizeError
from strop.frontend.layouts import can_view, lies_as, traced_sizes

VIEWS = frozenset((Tensor.view, Tensor.view_as))
KEEPS_ORDER = "keeps_order"  # in the meta of a node: a convolution whose weight stays as given
_CONVOLUTIONS = frozenset((torch.ops.strop.conv2d.default, torch.ops.aten.convolution.default))


def node_of(value: Tensor) -> Node | None:
    """Return the node that makes a traced value, or None where the trace wraps it."""
    mode = proxy_tensor.get_proxy_mode()
    slot = mode and proxy_tensor.get_proxy_slot(value, mode.tracer, None)
    return slot.proxy.node if isinstance(slot, proxy_tensor._ProxyTensor) else None


class ChannelViews:
    """Note the convolutions whose results a forward views as no channels-last one can be."""

    def __init__(self) -> None:
        self._found: dict[Node, None] = {}

    def note(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Note a call, and tell whether its argument comes from a convolution that was none yet."""
        if func not in VIEWS or not _crosses_channels(args):
            return False
        node = node_of(args[0])
        known = len(self._found)
        self._found |= dict.fromkeys(_convolutions_behind(node) if node is not None else ())
        return len(self._found) > known

    def mark(self, gm: GraphModule) -> None:
        """Mark these convolutions in their graph."""
        for node in gm.graph.nodes:
            if node in self._found and node.meta["val"].device.type == "cuda":
                node.meta[KEEPS_ORDER] = True


def _crosses_channels(args: tuple[Any, ...]) -> bool:
    x, *wanted = args
    if not isinstance(x, Tensor) or x.dim() != 4 or any(isinstance(a, torch.dtype) for a in wanted):
        return False
    first = wanted[0] if wanted else ()
    shape: Sequence[Any] = first.shape if isinstance(first, Tensor) else wanted
    if isinstance(first, tuple | list):
        shape = first
    try:
        if not lies_as(x, torch.contiguous_format):
            return False
        sizes = traced_sizes(x.shape)
        channels, width = sizes[1], sizes[3]
        strides = (math.prod(sizes[1:]), 1, width * channels, channels)
        return not can_view([*zip(sizes, strides, strict=True)], traced_sizes(shape))
    except UnknownSizeError:
        return True


def _convolutions_behind(node: Node) -> list[Node]:
    """Return the convolutions from which a picture comes by way of pictures."""

    def pictures(of: Node) -> list[Node]:
        is_convolution = of.target in _CONVOLUTIONS
        return [n for n in of.all_input_nodes[: 1 if is_convolution else None] if has_dims(n, 4)]

    return [n for n in walked_back(node, pictures) if n.target in _CONVOLUTIONS]


def has_dims(node: Node, count: int) -> bool:
    """Tell whether a node is a tensor of so many dims."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dim() == count


def walked_back(first: Node, sources: Callable[[Node], Iterable[Node]]) -> Iterator[Node]:
    """Yield a node and what it comes from, each once, by way of the ``sources`` of each."""
    left, seen = [first], set[Node]()
    while left:
        node = left.pop()
        if node not in seen:
            seen.add(node)
            yield node
            left += sources(node)
