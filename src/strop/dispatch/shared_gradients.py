"""Refuse to show a part of a gradient for the whole of it.

Where one result of a module is computed from another, as a loss is from logits, the gradient of the
latter is what the loss gives it and what other code does. A compiled step has one node for all of
its results, in which the former share is computed and used; autograd knows the latter alone. So a
hook on such a result, or ``retain_grad``, would see a share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import ref

from torch import Tensor

from strop.errors import UnsupportedError

_REASON = (
    "a result of a compiled module has a hook, or retains its gradient, and another result that is"
    " differentiated is computed from it: the hook would see a part of its gradient. Run the module"
    " in eager for this, or register the hook in the module's forward"
)


def _mark(gradient: Tensor) -> None:
    """Do nothing: it has torch make the table of a tensor's hooks."""


_mark.__torch_unserializable__ = True  # type: ignore[attr-defined]  # saved without a warning


def watch_shared(result: Tensor, outer: Sequence[int]) -> None:
    """Watch a result of a step, from which the results with the numbers ``outer`` are computed."""
    result.register_hook(_mark)
    node: Any = result.grad_fn
    hooks: Any = result._backward_hooks  # outlives the tensor
    node.shared = [*getattr(node, "shared", ()), (hooks, ref(result), outer)]


def refuse_shared(node: Any, gradients: Sequence[Tensor | None]) -> None:
    """Raises UnsupportedError where somebody looks at the gradient of a result that is watched, and
    one of those that are computed from it has a gradient."""
    for hooks, result, outer in getattr(node, "shared", ()):
        kept = result()
        is_read = _has_readers(hooks) or (kept is not None and kept.retains_grad)
        if is_read and any(gradients[number] is not None for number in outer):
            raise UnsupportedError(_REASON)


def _has_readers(hooks: Mapping[int, Any]) -> bool:
    """Tell whether there are hooks that read a gradient. Those of sharded modules await it."""
    own = (getattr(hook, "__module__", None) or "" for hook in hooks.values() if hook is not _mark)
    return any(not module.startswith("torch.distributed") for module in own)
