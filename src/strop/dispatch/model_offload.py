"""accelerate moves a whole model to the GPU before its call, and back before that of another
(``cpu_offload_with_hook``, which diffusers' ``enable_model_cpu_offload`` is made of). Here its
hooks leave that to ``OffloadedWeights``."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from strop.dispatch.features import OFFLOADED, is_offloaded, whole_offload
from strop.dispatch.offloaded_weights import OffloadedWeights, WeightReader
from strop.errors import OptionError
from strop.frontend.moving_hooks import moving_hooks
from strop.runtime.run.workspace import rest_on

DEVICES = ("cuda",)  # types of devices that weights are taken to; tests add another
_KNOWN: WeakKeyDictionary[nn.Module, OffloadedWeights] = WeakKeyDictionary()


def refuse_budget(module: nn.Module, budget_bytes: int) -> None:
    """Raise OptionError where a hook takes all weights of a module to the GPU, of which a budget is
    to leave some on the host."""
    hook = whole_offload(module) if budget_bytes else None
    if hook is not None and torch.device(hook.execution_device).type in DEVICES:
        raise OptionError(
            f"weights_budget_bytes={budget_bytes} has weights stay on the host, and"
            " enable_model_cpu_offload takes all of the model to the GPU at each call: leave one of"
            " the two out. enable_group_offload goes with a budget, and other models of a pipeline"
            " can be moved to the GPU"
        )


def refusal(module: nn.Module, reader: WeightReader, budget_bytes: int) -> str:
    """Say why calls of a module run in eager while it is offloaded, or nothing. Raises OptionError
    where weights have a budget as well."""
    refuse_budget(module, budget_bytes)
    if is_offloaded(module) and not moving_hooks(module):
        reader.forget_weights()  # which would keep the memory that is to be free
        return OFFLOADED
    follow(module, reader)
    return ""


def follow(module: nn.Module, reader: WeightReader | None = None) -> OffloadedWeights | None:
    """Have the hook that offloads a module, if there is one now, do so by pinned copies. ``reader``
    has programs that are bound to the weights. Return what moves them, or None."""
    hook, known = whole_offload(module), _KNOWN.get(module)
    if hook is None:
        if known is not None:
            forget(module)
        return None
    device = torch.device(hook.execution_device)
    if device.type not in DEVICES:
        return None
    if known is None or known.device != device:
        known = _KNOWN[module] = OffloadedWeights(module, device)
    if reader is not None:
        known.readers.add(reader)
    if not isinstance(vars(hook).get("init_hook"), _Offloading):
        hook.init_hook = _Offloading(known, hook)
        hook.pre_forward = _Loading(known, hook)
    return known


def known_offload(module: nn.Module | None) -> OffloadedWeights | None:
    """Return what moves the weights of a module, or None."""
    return None if module is None else _KNOWN.get(module)


def offload_text(module: nn.Module) -> str:
    """Say how the weights of a module get to the GPU, or nothing where they stay there."""
    known = known_offload(module)
    return "" if known is None else str(known)


def leave(module: nn.Module, reader: WeightReader) -> None:
    """Have the hook of a module do what it did without us, once no reader is left."""
    known = _KNOWN.get(module)
    if known is not None:
        known.readers.discard(reader)
        if not known.readers:
            forget(module)


def forget(module: nn.Module) -> None:
    """Leave a module's weights where they are, and have accelerate move them from here on."""
    _KNOWN.pop(module, None)
    hook = whole_offload(module)
    if hook is not None and isinstance(vars(hook).get("init_hook"), _Offloading):
        del hook.init_hook, hook.pre_forward


class _Offloading:
    """This stands for ``CpuOffload.init_hook``, which takes a module to the host."""

    name = "init_hook"

    def __init__(self, weights: OffloadedWeights, hook: Any) -> None:
        self.weights, self.hook = weights, hook

    def __call__(self, module: nn.Module) -> nn.Module:
        if module is self.weights.module and self.weights.offload():
            return module
        found: nn.Module = type(self.hook).init_hook(self.hook, module)
        return found

    def __reduce__(self) -> Any:  # a copy is accelerate's own method, of a copy of the hook
        return getattr, (self.hook, self.name)


class _Loading(_Offloading):
    """This stands for ``CpuOffload.pre_forward``, which takes a module to the GPU, and the one
    before it to the host."""

    name = "pre_forward"

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        from accelerate.utils import send_to_device

        earlier, is_ours = self.hook.prev_module_hook, module is self.weights.module
        if hasattr(earlier, "offload") and may_be_loaded(earlier.model):
            before = known_offload(earlier.model)
            if is_ours and before is not None:
                self.weights.begin(before)
            earlier.offload()
            if is_ours and self.weights.is_larger_than(before):
                free_working_memory(self.weights.device)
        if not is_ours or not self.weights.load():
            return type(self.hook).pre_forward(self.hook, module, *args, **kwargs)
        device = self.weights.device
        return send_to_device(args, device), send_to_device(kwargs, device)


def may_be_loaded(module: nn.Module) -> bool:
    """Tell whether a module is to be offloaded before another is loaded. A pipeline asks at every
    step of a loop, so this looks at one weight."""
    known, first = known_offload(module), next(module.parameters(), None)
    return not known.is_on_host() if known else first is not None and first.device.type != "cpu"


def free_working_memory(device: torch.device) -> None:
    """Give a device back the memory that programs work in, until they run again."""
    rest_on(device)
