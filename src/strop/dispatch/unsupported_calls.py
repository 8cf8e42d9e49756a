"""Say why an inference program cannot serve a call."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from strop.dispatch import hooks
from strop.dispatch.module_state import ModuleState
from strop.dispatch.training_mode import is_in_training
from strop.frontend.four_bits import is_yet_to_be_packed
from strop.frontend.layerwise_casting import is_cast_as_one


def unfit_call(module: nn.Module) -> str:
    """Say why not, in the mode that torch is in; nothing where it can."""
    if torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters()):
        return "gradients are enabled: call under torch.no_grad() or inference_mode()"
    if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
        return "autocast is enabled: cast the module instead"
    return ""


def unfit_weights(state: ModuleState) -> str:
    """Say why no program can have the weights, as they are now; nothing where one can."""
    if any(map(is_lazy, state.lazy)):
        return "a lazy layer learns the sizes of its weights in a call of its own, once"
    return ""


def unfit_module(state: ModuleState) -> str:
    """Say why not, as the module is now; nothing where it can."""
    if is_in_training(state.modules, state.train_sensitive):
        return "the module, or a part of it, is in training mode: call .eval()"
    if reason := unfit_weights(state):
        return reason
    if any(state.hooks) and any(map(hooks.is_untraced, state.hooks)):
        return "a submodule has forward hooks, which compiled code would not run"
    if is_cast_as_one(state.module):
        return "layerwise casting of the whole module at once casts all weights at each call"
    if reason := state.attribute_asked_for:
        return reason
    if state.make_ups and any(map(is_yet_to_be_packed, state.modules)):
        return "bitsandbytes packs its weights for this CPU in a call of its own, once"
    return hooks.REASON if hooks.has_global_hooks() else ""
