"""Find what a trace does to objects besides computing, which compiled code would not do again.

Attention processors that count their calls, controllers that keep maps, counters outside of the
module: a call that changes them is refused, and eager serves it. Whatever a trace has changed is
put back, whether it is refused or not. Names that begin with ``_`` are caches by custom, and may
be written, unless they hold a number that the code asks for again, or what comes of a call's own
tensors: that is no cache. So may the tables that a library makes when they are wanted first, as
Z-Image's of its positions: attributes that were None, and get tensors of fixed sizes.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from strop.dispatch.drawn_from import DrawnFrom
from strop.dispatch.global_guards import GlobalGuards, GuardChange, is_private
from strop.dispatch.identities import CONSTANTS
from strop.errors import CaptureError

_NAMED = 3  # of what a forward writes, in a message
_DEPTH = 4  # of objects within objects, where tensors are looked for


class Effects:
    """Finds what traces of one copy of a module change. ``written``: the labels of all of it."""

    def __init__(self, module: nn.Module) -> None:
        self._before = self._begun = GlobalGuards(module.named_modules())
        self._drawn_from = DrawnFrom(self._before.drawn_from)
        self._of_calls = set[str]()
        self.written = set[str]()
        self._kept = set[str]()
        self._tensors = list(_private_tensors(module))
        self._seen: list[Any] = []  # what ``so_far`` has named by ids

    def begin(self) -> None:
        """Begin a forward: what others have put in the copy for it is none of its changes."""
        self._begun = self._before.again() if self._before.have_changed() else self._before

    def so_far(self) -> Hashable:
        """Return what the forward has changed until now: equal where that is the same."""
        if not self._begun.have_changed():
            return ()
        changes = [(change.label, change.now) for change in self._begun.changes()]
        self._seen.append(changes)
        return tuple(
            (label, *map(id, now)) if isinstance(now, list) else (label, id(now))
            for label, now in changes
        )

    def look(self, arguments: Sequence[Tensor]) -> None:
        """Note what holds tensors of this very call. Called at a forward's end, while traced."""
        for change in self._before.changes():
            if _is_cache(change) and _any_from(_tensors(_new(change)), arguments):
                self._of_calls.add(change.label)
        for label, held, name, before in self._tensors:
            now = held.get(name)
            if now is not before and _any_from(_tensors(now), arguments):
                self._kept.add(label)

    def undo(self) -> None:
        """Put back what a trace has changed, however it has ended."""
        for change in self._before.changes():
            self.written.add(change.label)
            if not _is_cache(change) or self._is_state(change):
                self._kept.add(change.label)
            change.undo()
        for _, held, name, before in self._tensors:
            held[name] = before
        drawn = set(self._drawn_from.undo())
        self.written |= drawn
        self._kept |= drawn
        self._before.forget_memos()

    def check(self, *, private: bool = False) -> set[str]:
        """Raises CaptureError where a call has effects; names of caches that it writes.
        ``private``: these are effects, too."""
        effects = self.written if private else self._kept
        if effects:
            first, others = sorted(effects)[:_NAMED], len(effects) - _NAMED
            more = f" and {others} more" if others > 0 else ""
            raise CaptureError(
                f"it writes {', '.join(first)}{more} when it runs, which compiled code would not:"
                " keep such state outside of what the forward calls"
            )
        return self.written

    def _is_state(self, change: GuardChange) -> bool:
        if change.label in self._of_calls:
            return True
        is_number = change.before is not None and isinstance(change.before, CONSTANTS)
        return is_number and change.label.rpartition(".")[2] in self._before.consulted


def _private_tensors(module: nn.Module) -> Iterator[tuple[str, dict[str, Any], str, Tensor]]:
    """Yield what others may read when a call has put another tensor there, and no code reads."""
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if isinstance(value, Tensor) and name.startswith("_"):
                yield f"{path or type(part).__name__}.{name}", vars(part), name, value


def _is_cache(change: GuardChange) -> bool:
    if is_private(change.label):
        return True
    return not change.is_own and change.before is None and _is_table(change.now)


def _is_table(value: Any) -> bool:
    """Tell whether a value is a tensor of a size that no call decides, or a list of such."""
    if isinstance(value, list | tuple):
        return bool(value) and all(map(_is_table, value))
    return isinstance(value, Tensor) and all(type(size) is int for size in value.shape)


def _new(change: GuardChange) -> Any:
    """Return what a change has brought."""
    if isinstance(change.now, list) and isinstance(change.before, list):
        known = set(map(id, change.before))
        return [item for item in change.now if id(item) not in known]
    return change.now


def _tensors(value: Any, depth: int = _DEPTH) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, list | tuple | set):
        for item in value:
            yield from _tensors(item, depth - 1)
    elif depth and isinstance(value, dict):
        yield from _tensors(list(value.values()), depth)
    elif depth and hasattr(value, "__dict__") and not isinstance(value, type | nn.Module):
        yield from _tensors(list(vars(value).values()), depth - 1)


def _any_from(tensors: Iterator[Tensor], arguments: Sequence[Tensor]) -> bool:
    """Tell whether one of the tensors comes of an argument, by the graph that is being traced. One
    that the graph does not know may."""
    given = {_node_of(argument) for argument in arguments}
    for tensor in tensors:
        node = _node_of(tensor)
        seen, stack = set[Node](), [] if node is None else [node]
        if node is None and None not in given:
            continue  # a tensor of before, or made of numbers alone
        while stack:
            current = stack.pop()
            if current in given:
                return True
            if current not in seen:
                seen.add(current)
                stack += current.all_input_nodes
        if None in given:
            return True
    return False


def _node_of(tensor: Tensor) -> Node | None:
    mode = get_proxy_mode()
    proxy: Any = None if mode is None else mode.tracer.tensor_tracker.get(tensor)
    return None if proxy is None else proxy.proxy.node
