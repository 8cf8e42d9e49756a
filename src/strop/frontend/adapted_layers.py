"""Find the layers that peft has wrapped and that compute what a plain layer with another weight
does.

Such a layer gives W0 x + sum of s_i B_i (A_i x). With the weight W0 + sum of s_i B_i A_i the layer
in it gives the same, so a program is traced with that layer in its place: which adapters there are,
and with which ranks and scales, is no part of the program (https://arxiv.org/abs/2106.09685, §4.1).
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterable
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from strop.frontend.adapter_kinds import FOLDED, kind_of, name_of
from strop.frontend.layerwise_casting import cast_of
from strop.frontend.module_parts import has_other_forward


def is_folded(layer: nn.Module) -> bool:
    """Tell whether a module is a wrapped layer that a plain one with another weight can stand for.

    Variants other than DoRA, adapters with a bias on a layer without one, quantised and offloaded
    weights are none; nor is a layer whose next call takes out what peft has merged into its weight.
    """
    return name_of(layer) in FOLDED and not unfolded_reason(layer)


def unfolded_reason(layer: Any) -> str:
    """Say why no plain layer can stand for a wrapped one, or nothing."""
    name, base = type(layer).__name__, layer.base_layer
    kind = FOLDED.get(name_of(layer))
    if kind is None:
        return f"no rule for adapters of the kind {type(layer).__module__}.{name}"
    if type(base) is not kind.base:
        return f"the layer is a {type(base).__name__}"
    if cast_of(base) is not None:
        return "layerwise casting keeps its weight in another type"
    if any(map(has_other_forward, (layer, base))):
        return "the layer has a forward of its own"
    if has_bias(layer) and base.bias is None:
        return "an adapter adds a bias to a layer that has none"
    if not kind.is_exact(layer):
        is_grouped = getattr(base, "groups", 1) > 1
        of_groups = "a convolution of groups, which its adapter does not have"
        return of_groups if is_grouped else "a variant, padding or dilation of the adapter's own"
    if layer.merged_adapters and layer.disable_adapters:
        return "what was merged is taken out by the next call"
    own: Any = base.weight
    tensors = [own, *kind.tensors(layer), *([base.bias] if has_bias(layer) else ())]
    is_plain = all(_is_plain(tensor, own.device) for tensor in tensors)
    return "" if is_plain else "its weight or a factor is quantised, or lies elsewhere"


def has_bias(layer: Any) -> bool:
    """Tell whether an adapter, active or not, adds to the bias of a folded layer."""
    return any(getattr(layer, "lora_bias", {}).values())


def scale_argument(module: nn.Module) -> str:
    """Return the keyword whose "scale" the forward of a model of diffusers multiplies the scales of
    all adapters by, for this call, or nothing."""
    forward: Any = type(module).forward
    code = _scaling_code()
    if code is None or getattr(forward, "__code__", None) is not code:
        return ""
    names = zip(forward.__code__.co_freevars, forward.__closure__, strict=True)
    return str(next(cell.cell_contents for name, cell in names if name == "kwargs_name"))


def without_scale(module: nn.Module, kwargs: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """Return what a call is given by name without the scale for all adapters, and that scale: 1.0
    where it has none, and NaN where it is no number."""
    name = scale_argument(module)
    more = kwargs.get(name) if name else None
    if not isinstance(more, dict) or "scale" not in more:
        return kwargs, 1.0
    others = {key: value for key, value in more.items() if key != "scale"}
    is_number = isinstance(more["scale"], int | float)
    return kwargs | {name: others or None}, float(more["scale"]) if is_number else math.nan


def _scaling_code() -> CodeType | None:
    """Return the code of all forwards under diffusers' ``apply_lora_scale``; None while nobody has
    imported diffusers, which may come later."""
    peft_utils = sys.modules.get("diffusers.utils.peft_utils")
    decorate = getattr(peft_utils, "apply_lora_scale", None)
    return None if decorate is None else _code_under(decorate)


@functools.cache
def _code_under(decorate: Any) -> CodeType:
    code: CodeType = decorate("")(lambda: None).__code__
    return code


def may_fold(module: nn.Module, parts: Iterable[nn.Module]) -> bool:
    """Tell whether no code of the module itself acts on adapters while it runs, except by its
    ``scale_argument``: there would be none on which it could act. ``parts``: all of it."""
    kinds: set[Any] = set(map(type, parts))
    forwards = {kind.forward for kind in kinds if not kind.__module__.startswith("peft.")}
    if scale_argument(module):
        own: Any = type(module).forward
        forwards = (forwards - {own}) | {own.__wrapped__}
    return not any(map(_acts_on_adapters, forwards))


# Names of peft's and diffusers' that such code reads.
ACTS = frozenset(
    (
        "scale_lora_layers",
        "scale_layer",
        "set_scale",
        "set_adapter",
        "set_adapters",
        "enable_adapters",
        "disable_adapters",
        "scaling",
        "base_layer",
        *(name for kind in FOLDED.values() for name in kind.tables),
    )
)


def _acts_on_adapters(function: Any) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and not ACTS.isdisjoint(code.co_names)


LEFT_OVER = ("lora_scale", "_safe_fusing")  # by diffusers' ``fuse_lora``
# What an IP-Adapter brings for a whole model is a module, and None when it is unloaded; in a model
# that never had one it is None or not there.
_OF_IP_ADAPTERS = "encoder_hid_proj"


def is_left_over(module: nn.Module, name: str) -> bool:
    """Tell whether an attribute only says how diffusers fused adapters last, or that there is no
    IP-Adapter."""
    if name == _OF_IP_ADAPTERS:
        return hasattr(type(module), "_load_ip_adapter_weights")
    return name in LEFT_OVER and hasattr(type(module), "fuse_lora")


def active_adapters(layer: Any) -> list[str]:
    """Return the adapters that count beside W0 at present, in the order in which peft adds them.
    Those that are merged are in W0, and others do not count meanwhile."""
    own = layer.__dict__
    if own["_disable_adapters"] or own["merged_adapters"]:
        return []
    kind = kind_of(layer)
    return [name for name in layer.active_adapters if kind.has(layer, name)]


def _is_plain(weight: Any, device: torch.device) -> bool:
    is_dense = type(weight) in (Tensor, nn.Parameter) and weight.layout is torch.strided
    return is_dense and weight.is_floating_point() and weight.device == device
