"""accelerate takes the weights of each module to a GPU when it is called, and leaves tensors
without memory in their places afterwards (``cpu_offload``, which diffusers'
``enable_sequential_cpu_offload`` is made of). A map by names has the weights meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from strop.dispatch.group_offload import arguments_at, with_index
from strop.frontend.moving_hooks import moving_hooks
from strop.frontend.stable_text import qualified

REASON = "offloading by accelerate"
ARGUMENTS = (
    "a hook of accelerate is in front of modules and moves their arguments:"
    " accelerate.hooks.remove_hook_from_module removes it"
)
_MAP = "accelerate.utils.offload.PrefixedDataset"


@dataclass(frozen=True, slots=True)
class Row:
    """This is one weight: ``table[name]`` has a tensor without memory, and ``map[key]`` it."""

    hook: Any
    part: nn.Module
    table: dict[str, Any]
    name: str
    map: dict[str, Any]
    key: str

    @property
    def is_in_force(self) -> bool:
        """Tell whether the hook still is one of its module."""
        return any(hook is self.hook for hook in moving_hooks(self.part))


@dataclass(frozen=True, slots=True)
class SequentialOffload:
    """Say how hooks of accelerate move the weights of a module. ``around`` are those of its own
    forward that do."""

    device: torch.device
    hooks: tuple[Any, ...]
    around: tuple[Any, ...]
    rows: tuple[Row, ...]
    most_bytes: int
    name: str = "enable_sequential_cpu_offload"
    _empty: dict[int, Any] = field(default_factory=dict)  # what rows had, by their numbers

    def covered(self) -> set[int]:
        """Return the ids of the tensors that are in the places of weights now."""
        return {id(row.table.get(row.name)) for row in self.rows}

    def is_same(self, other: Any) -> bool:
        """Tell whether another look has found the same hooks."""
        return isinstance(other, SequentialOffload) and (
            [*map(id, self.hooks)] == [*map(id, other.hooks)]
        )

    def take(self, wake: Callable[[], object]) -> None:
        """Have Parameters hold the weights, and maps hold the Parameters. Weights of one memory
        become one Parameter. A part that is called by itself is loaded from the map."""
        known: dict[Any, Tensor] = {}
        for number, row in enumerate(self.rows):
            own, value = row.table[row.name], row.map[row.key]
            if own.is_meta:
                self._empty.setdefault(number, own)
                look = (value.data_ptr(), value.shape, value.stride(), value.dtype, type(own))
                own = known.setdefault(look, _held(value, own))
                row.table[row.name] = own
            row.map[row.key] = own
        for hook in self.around:
            for name in ("pre_forward", "post_forward"):
                setattr(hook, name, _Idle(hook, name, self.device))

    def has_slipped(self) -> bool:
        """Tell whether a Parameter no longer holds its weight, as somebody has called a part, or
        the map another than the Parameter."""
        return any(row.table.get(row.name) is not row.map[row.key] for row in self.rows)

    def let_go(self) -> None:
        """Do nothing: nobody holds a second copy."""

    def give_back(self) -> None:
        """Have tensors without memory in the places of weights, and hooks do what they did."""
        for hook in self.around:
            for name in ("pre_forward", "post_forward"):
                vars(hook).pop(name, None)
        for number, row in enumerate(self.rows):
            own = row.table.get(row.name)
            if own is None or own.is_meta or not row.is_in_force:
                continue
            row.map[row.key] = own.detach()
            row.table[row.name] = _empty_like(own, self._empty.get(number))
        self._empty.clear()


def sequential_offload(
    module: nn.Module, parts: Sequence[tuple[str, nn.Module]]
) -> tuple[SequentialOffload | None, str]:
    """Return how accelerate moves a module's weights, or why nobody can stand for that; neither
    where they stay in place. ``parts``: all of it, the module itself first."""
    hooks = ((part, hook) for _, part in parts for hook in moving_hooks(part))
    found = [(part, hook) for part, hook in hooks if hasattr(hook, "io_same_device")]
    moving = [(part, hook) for part, hook in found if hook.offload]
    if not found:
        return None, ""
    if not moving:  # they move arguments and results: those of the module itself stay around it
        return None, "" if all(part is module for part, _ in found) else ARGUMENTS
    if reason := _refusal(found, module):
        return None, reason
    rows = tuple(row for part, hook in moving for row in _rows(part, hook))
    if reason := _lost(rows):
        return None, reason
    sizes: dict[int, int] = {}
    for row in rows:
        sizes[id(row.part)] = sizes.get(id(row.part), 0) + row.table[row.name].nbytes
    return SequentialOffload(
        with_index(moving[0][1].execution_device),
        tuple(hook for _, hook in moving),
        tuple(hook for part, hook in moving if part is module),
        rows,
        sizes.pop(id(module), 0) + max(sizes.values(), default=0),
    ), ""


def _refusal(found: Sequence[tuple[nn.Module, Any]], module: nn.Module) -> str:
    moving = [hook for _, hook in found if hook.offload]
    if any(not hook.offload and part is not module for part, hook in found):
        return f"{REASON} has some modules stay on a device, and takes the weights of others there"
    if any(hook.place_submodules for hook in moving):
        return f"{REASON} takes modules with all that is in them to another device"
    if len({str(with_index(hook.execution_device)) for hook in moving}) > 1:
        return f"{REASON} takes weights to several devices"
    maps = [hook.weights_map for hook in moving]
    if not all(qualified(type(m)) == _MAP and type(m.dataset) is dict for m in maps):
        return f"{REASON} has weights on disk, from where they are read in each call"
    return ""


def _lost(rows: Sequence[Row]) -> str:
    """Say which weight a map does not have, or nothing."""
    for row in rows:
        value = row.map.get(row.key)
        if not isinstance(value, Tensor) or value.is_meta:
            return f"{REASON} has no weight for {row.key}"
    return ""


def _rows(part: nn.Module, hook: Any) -> Iterator[Row]:
    """Yield the weights that a hook moves."""
    unsaved = part._non_persistent_buffers_set
    tables: list[dict[str, Any]] = [part._parameters]
    if hook.offload_buffers:
        tables.append(part._buffers)
    weights = hook.weights_map
    for table in tables:
        for name, tensor in table.items():
            if tensor is not None and not (table is part._buffers and name in unsaved):
                yield Row(hook, part, table, name, weights.dataset, f"{weights.prefix}{name}")


def _held(value: Tensor, empty: Tensor) -> Tensor:
    """Return a weight as accelerate puts it in the place of an empty one."""
    if (type(value), value.dtype) == (type(empty), empty.dtype):
        return value  # as it was put there
    value = value.detach().to(empty.dtype)
    if isinstance(empty, nn.Parameter):
        return nn.Parameter(value, requires_grad=empty.requires_grad)
    return value


def _empty_like(own: Tensor, before: Any) -> Any:
    if before is not None and (before.shape, before.dtype) == (own.shape, own.dtype):
        return before.requires_grad_(own.requires_grad)
    empty = torch.empty_like(own, device="meta")
    if isinstance(own, nn.Parameter):
        return nn.Parameter(empty, requires_grad=own.requires_grad)
    return empty


class _Idle:
    """This stands for a method of ``AlignDevicesHook``, and moves arguments alone."""

    def __init__(self, hook: Any, name: str, device: torch.device) -> None:
        self.hook, self.name, self.device = hook, name, device

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.name == "post_forward":
            return args[0]
        return arguments_at(self.device, args, kwargs, self.hook.skip_keys or ())

    def __reduce__(self) -> Any:  # a copy is accelerate's own method, of a copy of the hook
        return getattr, (self.hook, self.name)
