"""diffusers takes groups of a model's weights to a GPU as their modules are called, and back
(``enable_group_offload``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from strop.frontend.moving_hooks import GROUP, moving_hooks
from strop.frontend.stable_text import qualified
from strop.runtime.run.layouts import bytes_of

_KNOWN = ("onload_", "offload_", "_init_cpu_param_dict", "cpu_param_dict", "modules", "parameters")
OTHER_EDITION = "group offloading is on, of an edition of diffusers whose groups are not known"
ON_DISK = (
    "group offloading is on, with groups on disk, which are read in each call: without"
    " offload_to_disk_path weights stay on the host, from where they are streamed"
)


@dataclass(frozen=True, slots=True)
class GroupOffload:
    """Say where ``groups`` of diffusers take the weights of a module. ``around`` are the hooks of
    its own forward, from the inside. ``name`` is what the user has called, with its settings."""

    name: str
    device: torch.device
    groups: tuple[Any, ...]
    around: tuple[Any, ...]
    most_bytes: int
    _emptied: list[Any] = field(default_factory=list)  # groups whose copies are gone

    def covered(self) -> set[int]:
        """Return the ids of the tensors that the groups have now."""
        return {id(tensor) for group in self.groups for tensor in _tensors(group)}

    def is_same(self, other: Any) -> bool:
        """Tell whether another look has found the same hooks."""
        return isinstance(other, GroupOffload) and (
            [*map(id, (*self.groups, *self.around))] == [*map(id, (*other.groups, *other.around))]
        )

    def take(self, wake: Callable[[], object]) -> None:
        """Have the hooks do nothing but take arguments to the device; ``wake`` is called where a
        part is called by itself."""
        for hook in self.around:
            for name in ("pre_forward", "post_forward"):
                setattr(hook.fn_ref, name, _Idle(hook, name, self.device))
        own = [hook.group for hook in self.around if hasattr(hook, "group")]
        for group in self.groups:
            if not any(group is one for one in own):
                group.onload_ = _Waking(group, wake)

    def has_slipped(self) -> bool:
        """Parameters hold the weights all the time."""
        return False

    def let_go(self) -> None:
        """Drop the pinned copies, from which groups with a stream are loaded."""
        for group in self.groups:
            if group.cpu_param_dict:
                group.cpu_param_dict = {}
                self._emptied.append(group)

    def give_back(self) -> None:
        """Have the hooks do what they did. Groups with a stream pin copies of what the weights are
        now."""
        for hook in self.around:
            for name in ("pre_forward", "post_forward"):
                if isinstance(vars(hook.fn_ref)[name], _Idle):
                    setattr(hook.fn_ref, name, getattr(hook, name))
        for group in self.groups:
            vars(group).pop("onload_", None)
        for group in self._emptied:
            group.cpu_param_dict = group._init_cpu_param_dict()
            if all(tensor.device.type == "cpu" for tensor in _tensors(group)):
                group.offload_()  # which has weights lie in these copies, unless somebody took them
        self._emptied.clear()


def group_offload(
    module: nn.Module, parts: Sequence[tuple[str, nn.Module]]
) -> tuple[GroupOffload | None, str]:
    """Return how groups of a module's weights are moved, or why nobody can stand for that; neither
    where they stay in place. ``parts``: all of it, the module itself first."""
    hooks = [h for _, part in parts for h in moving_hooks(part) if qualified(type(h)) == GROUP]
    if not hooks:
        return None, ""
    groups = list({id(hook.group): hook.group for hook in hooks}.values())
    if not all(hasattr(group, name) for group in groups for name in _KNOWN):
        return None, OTHER_EDITION
    if any(group.offload_to_disk_path for group in groups):
        return None, ON_DISK
    devices = {with_index(group.onload_device) for group in groups}
    if len(devices) > 1 or any(torch.device(g.offload_device).type != "cpu" for g in groups):
        return None, "group offloading is on, to several devices, or from another than the host"
    if any(module is one for group in groups for one in group.modules):
        return None, "group offloading is on, and this is one of a larger model's groups"
    around = moving_hooks(module)
    return GroupOffload(
        _name(hooks[0].config),
        devices.pop(),
        tuple(groups),
        around,
        _most_bytes(groups, [hook.group for hook in around if hasattr(hook, "group")]),
    ), ""


def _name(config: Any) -> str:
    kind = getattr(config.offload_type, "value", config.offload_type)
    blocks = f" of {config.num_blocks_per_group}" if config.num_blocks_per_group else ""
    stream = ", with a stream" if config.stream is not None else ""
    return f"enable_group_offload, {kind}{blocks}{stream}"


def _most_bytes(groups: Sequence[Any], own: Sequence[Any]) -> int:
    """Return the memory that weights have on the device at most: those of the module's ``own``
    group as long as it runs, and of one group inside, or of two, of which one is loaded ahead."""
    held = bytes_of([t for group in own for t in _tensors(group)])
    inside = [g for g in groups if not any(g is one for one in own)]
    sizes = [bytes_of(_tensors(group)) for group in inside]
    if any(group.stream is not None for group in inside):
        return held + max((a + b for a, b in pairwise((*sizes, 0))), default=0)
    return held + max(sizes, default=0)


def _tensors(group: Any) -> list[Tensor]:
    parts = [t for m in group.modules for t in (*m.parameters(), *m.buffers())]
    return [*parts, *group.parameters, *group.buffers]


def with_index(device: Any) -> torch.device:
    """Return a device as tensors on it name theirs."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if device.type == "cpu" else device


class _Idle:
    """This stands for a method of a hook that moves weights, and moves arguments alone."""

    def __init__(self, hook: Any, name: str, device: torch.device) -> None:
        self.__self__, self.name, self.device = hook, name, device

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.name == "post_forward":
            return args[0]
        return arguments_at(self.device, args, kwargs, _left_out(self.__self__))

    def __reduce__(self) -> Any:  # a copy is diffusers' own method, of a copy of the hook
        return getattr, (self.__self__, self.name)


def _left_out(hook: Any) -> Sequence[str]:
    """Return the names of arguments that a hook does not move, as the model writes to them."""
    return getattr(getattr(hook, "config", None), "exclude_kwargs", None) or ()


def arguments_at(
    device: torch.device, args: Any, kwargs: Any, left_out: Sequence[str] = ()
) -> tuple[Any, Any]:
    """Return the arguments of a call on a device, but for those with these names."""
    from accelerate.utils import send_to_device

    moved = {name: value for name, value in kwargs.items() if name not in left_out}
    return send_to_device(args, device), kwargs | send_to_device(moved, device)


class _Waking:
    """This stands for ``ModuleGroup.onload_`` of a part that somebody calls by itself."""

    def __init__(self, group: Any, wake: Callable[[], object]) -> None:
        self.group, self.wake = group, wake

    def __call__(self) -> None:
        self.wake()
        self.group.onload_()  # its own again

    def __reduce__(self) -> Any:
        return getattr, (self.group, "onload_")
