"""Find the tensors that a module holds, which are data of its programs, and where."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch.nn.parameter import is_lazy

from strop.frontend.composed_tensors import (
    Place,
    PlainLook,
    identity,
    inner_places,
    is_composed,
    put_together,
)
from strop.frontend.computed_weights import names_computed
from strop.frontend.int8_layers import held_places, is_int8
from strop.frontend.module_parts import own_attributes

Tables = Mapping[int, dict[str, Any]]  # what is read for or beside a layer's own, by its id


def named_state(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name, each once, module by module; and tensors that are
    plain attributes, which are no less data. Of composed ones those that are in them."""
    return {name: table[key] for name, table, key in state_places(module.named_modules())}


def state_places(
    parts: Iterable[tuple[str, nn.Module]], tables: Tables = MappingProxyType({})
) -> Iterator[Place]:
    """Yield where each plain tensor of some modules with their paths is held, each once."""
    return plain_places(tensor_places(parts, tables), {})


def plain_places(held: Iterable[Place], looks: dict[int, PlainLook]) -> Iterator[Place]:
    """Yield where the plain tensors of these are held, each once; see ``inner_places``."""
    seen: set[int] = set()
    for place in held:
        if not is_composed(place[1][place[2]]):
            inner: Iterable[Place] = (place,)
        else:
            inner = inner_places(place, looks)
        for one in inner:
            if (number := identity(one)) not in seen:
                seen.add(number)
                yield one


def with_sizes(places: Iterable[Place]) -> tuple[list[Place], list[Tensor]]:
    """Divide places into those of tensors that have sizes, and the tensors that are yet to learn
    them."""
    sized: list[Place] = []
    lazy: list[Tensor] = []
    for place in places:
        tensor = place[1][place[2]]
        if is_lazy(tensor):
            lazy.append(tensor)
        else:
            sized.append(place)
    return sized, lazy


def tensor_places(
    parts: Iterable[tuple[str, nn.Module]], tables: Tables = MappingProxyType({})
) -> Iterator[Place]:
    """Yield where each tensor of some modules with their paths is held: its name, a table and a
    key. ``tables`` hold what is read in the place of some of a module's own Parameters, or beside
    them."""
    seen: set[int] = set()
    parts = list(parts)
    weights = (
        t for _, owner in parts for t in (*owner._parameters.values(), *owner._buffers.values())
    )
    devices = {weight.device for weight in weights if weight is not None}
    for path, owner in parts:
        others = tables.get(id(owner), {})
        start = f"{path}." if path else ""
        own, buffers = owner._parameters, owner._buffers
        if is_int8(owner):
            places = held_places(owner)
        else:
            places = [(key, others if key in others else own, key) for key in own | others]
            places += [(key, buffers, key) for key in buffers]
        for name, table, key in places:
            tensor = table[key]
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield start + name, table, key
        computed = names_computed(owner)
        for key, value in own_attributes(owner):
            if key in computed:
                continue
            if type(value) is Tensor and id(value) not in seen and _is_data(value, devices):
                seen.add(id(value))
                yield start + key, owner.__dict__, key


def _is_data(value: Tensor, devices: Set[torch.device]) -> bool:
    """Tell whether a tensor that is a plain attribute is one that programs can read."""
    if value.requires_grad or value.layout is not torch.strided:
        return False
    is_whole = not value.is_quantized and not value.is_nested
    return (
        is_whole
        and (not devices or value.device in devices)
        and bool(is_non_overlapping_and_dense_or_false(value))
    )


def putting_together(
    module: nn.Module,
) -> Callable[[Mapping[str, Tensor]], dict[str, Tensor]]:
    """Return a function that makes of traced plain tensors what stands for those that the module
    holds, by their names."""
    places = list(tensor_places(module.named_modules()))
    tensors = [(name, table[key]) for name, table, key in places]
    numbers = {place[0]: identity(place) for place in state_places(module.named_modules())}

    def put(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        traced = {numbers[name]: tensor for name, tensor in state.items()}
        return {name: put_together(tensor, traced) for name, tensor in tensors}

    return put
