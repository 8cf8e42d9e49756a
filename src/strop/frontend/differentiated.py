"""Let torch's own operators take the place of ours inside a gradient.

An operator that is kept whole has no rule for autograd, for forward-mode tangents or for vmap, and
without one torch drops the gradient and says nothing. Where a forward takes gradients itself, or
runs under a transform of ``torch.func``, each operator of ``torch.ops.strop`` therefore becomes the
torch operators that it stands for, which have all of these rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._C import _functorch as functorch
from torch._functorch import predispatch
from torch.autograd import forward_ad
from torch.fx import GraphModule

from strop.errors import CaptureError


@contextmanager
def levels_closed() -> Iterator[None]:
    """Close what a failing trace of a graph leaves open. A graph enters and leaves levels of
    forward-mode AD and of ``torch.func`` by nodes, so that no ``with`` closes them."""
    depth, before = functorch.get_dynamic_layer_stack_depth(), forward_ad._current_level
    try:
        yield
    except BaseException:
        while functorch.get_dynamic_layer_stack_depth() > depth:
            functorch.pop_dynamic_layer_stack()
        if forward_ad._current_level > before:
            forward_ad.exit_dual_level(level=forward_ad._current_level)
        elif before < 0:  # nodes that call torch._C tell nobody of the level, which is the only one
            with suppress(RuntimeError):  # there is none
                torch._C._exit_dual_level(level=0)
        raise


def is_transformed() -> bool:
    """Tell whether tangents go forward, or a transform of ``torch.func`` is at work."""
    return forward_ad._current_level >= 0 or functorch.peek_interpreter_stack() is not None


def is_differentiated(arguments: Any) -> bool:
    """Tell whether autograd would record an operator of these arguments, or a tangent pass
    through."""
    if forward_ad._current_level >= 0:
        return True
    return torch.is_grad_enabled() and any(
        isinstance(leaf, Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(arguments)
    )


def define(
    library: torch.library.Library,
    name: str,
    as_torch: Callable[..., Any],
    shapes: Callable[..., Any],
    differentiated: Callable[..., Any] | None = None,
) -> None:
    """Define the kernels of operator ``name`` of ``library``, which has its schema: ``as_torch``
    computes it with operators of torch's, and so does ``differentiated``, if given, inside a
    gradient. ``shapes`` says how the results of a trace look."""
    overload = getattr(torch.ops.strop, name).default
    inside = differentiated or as_torch

    def record(keys: Any, *arguments: Any) -> Any:
        if is_differentiated(arguments):
            return inside(*arguments)
        with torch._C._AutoDispatchBelowAutograd():
            return overload.redispatch(keys & torch._C._after_autograd_keyset, *arguments)

    library.impl(name, as_torch, "CompositeExplicitAutograd")
    library.impl(name, record, "Autograd", with_keyset=True)
    library.impl(name, as_torch, "FuncTorchBatched")
    torch.library.register_fake(f"strop::{name}", shapes)


_SET_REQUIRES_GRAD = Tensor.requires_grad.__set__  # type: ignore[attr-defined]


def asks_for_gradients(function: Any, keywords: Any) -> bool:
    """Tell whether a call makes a tensor that requires a gradient."""
    if function is Tensor.requires_grad_ or function == _SET_REQUIRES_GRAD:
        return True
    return bool(keywords) and bool(keywords.get("requires_grad"))


def refuse_gradients_outside(results: Sequence[Any], given: Iterable[Any]) -> None:
    """Raises CaptureError where a forward under ``no_grad`` leaves a graph of autograd's behind: in
    ``results`` that require a gradient, or in the ``grad`` of a tensor that it was ``given``."""
    if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in results):
        raise CaptureError(
            "its results require gradients, although the caller enables none: its forward turns"
            " them on (torch.enable_grad), and compiled code would give results without a graph"
        )
    tensors = (tensor for tensor in given if isinstance(tensor, Tensor))
    if any(tensor.grad is not None for tensor in tensors if tensor.is_leaf):
        raise CaptureError(
            "its forward calls backward(), which leaves gradients in weights or arguments: take"
            " torch.autograd.grad, or call requires_grad_(False) on the module"
        )


def refuse_wrapped(gm: GraphModule) -> None:
    """Raises CaptureError where a trace holds a value of one transform's own as a constant: torch
    computes some tangents (``group_norm``'s) where no trace can follow."""
    for node in gm.graph.find_nodes(op="get_attr"):
        value = getattr(gm, node.target, None)
        if isinstance(value, Tensor) and functorch.is_functorch_wrapped_tensor(value):
            raise CaptureError(
                "it takes derivatives by torch.func or forward-mode AD of an operator whose rule"
                " torch cannot trace"
            )


def _enter_level() -> int:
    level: int = forward_ad.enter_dual_level()
    return level


def _leave_level(level: int) -> None:
    forward_ad.exit_dual_level(level=level)


# Dynamo calls what is below these, so that nobody would know of the level. torch 2.11 has them in
# one of the two places only.
LEVELS: dict[Callable[..., Any], Callable[..., Any]] = {
    getattr(place, name): ours
    for place in (predispatch, torch._C)
    for name, ours in (("_enter_dual_level", _enter_level), ("_exit_dual_level", _leave_level))
    if hasattr(place, name)
}
