"""Remember what a pipeline is made of, and put it back.

Loading an adapter wraps layers, freezes weights, moves modules and writes settings in many places.
If it fails half-way, a snapshot that was taken before gives back the very objects: modules, weights
and tables stay the same ones, so that what was compiled for them goes on serving them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from strop.frontend.module_parts import named_parts

_CONTAINERS = frozenset((dict, list, set, OrderedDict, defaultdict, Counter))
_PLAIN = (Tensor, nn.Parameter, nn.Buffer)  # others, such as quantised ones, are never written to


class Snapshot:
    """Hold what a pipeline, its modules and their configurations are made of.

    Weights are not copied: only those of the adapter ``rewritten``, whose values a hot swap writes
    over. Nor are containers that hold nothing, as do nearly all of the 150,000 of SDXL's UNet with
    adapters.
    """

    def __init__(self, pipe: Any, rewritten: str | None = None) -> None:
        self._tables: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._contents: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[Tensor, Tensor, bool]] = []
        self._values: list[tuple[Tensor, Tensor]] = []
        parts = list(modules_of(pipe))
        for owner in (pipe, *(part for _, part in parts), *_configurations(pipe)):
            self._note(vars(owner))
        for path, part in parts:
            for name, tensor in (*part._parameters.items(), *part._buffers.items()):
                if type(tensor) in _PLAIN:
                    assert tensor is not None
                    self._tensors.append((tensor, tensor.data, tensor.requires_grad))
                    if rewritten is not None and rewritten in (*path.split("."), name):
                        self._values.append((tensor.data, tensor.detach().clone()))

    def _note(self, table: dict[str, Any]) -> None:
        self._tables.append((table, dict(table)))
        self._contents += [(value, value.copy()) for value in _filled(table)]
        if isinstance(scaling := table.get("scaling"), dict):
            scales = (s for s in scaling.values() if isinstance(s, Tensor))
            self._values += [(scale, scale.detach().clone()) for scale in scales]

    @torch.no_grad()
    def put_back(self) -> None:
        """Make everything what it was. Tables are changed in place, as others hold them too."""
        for table, before in self._tables:
            if not _is_same(table, before):
                table.clear()
                table.update(before)
        self._put_back_contents()
        for tensor, data, needs_gradient in self._tensors:
            if (tensor.data_ptr(), tensor.shape) != (data.data_ptr(), data.shape):
                tensor.data = data
            if tensor.requires_grad != needs_gradient:
                tensor.requires_grad_(needs_gradient)
        for tensor, value in self._values:
            tensor.copy_(value)

    def _put_back_contents(self) -> None:
        noted = {id(container) for container, _ in self._contents}
        for table, _ in self._tables:
            for container in _filled(table):
                if id(container) not in noted:  # it was empty
                    container.clear()
        for container, content in self._contents:
            if not _is_same(container, content):
                container.clear()
                (container.extend if isinstance(container, list) else container.update)(content)


def _filled(table: dict[str, Any]) -> list[Any]:
    """Return the containers among attributes that hold something."""
    return [value for value in table.values() if type(value) in _CONTAINERS and value]


@contextmanager
def unchanged_on_error(pipe: Any, rewritten: str | None = None) -> Iterator[None]:
    """Put back what a pipeline was made of if the body raises."""
    snapshot = Snapshot(pipe, rewritten)
    try:
        yield
    except BaseException:
        snapshot.put_back()
        raise


def components_of(pipe: Any) -> dict[str, nn.Module]:
    """Return the modules of a pipeline by their names."""
    return {name: part for name, part in vars(pipe).items() if isinstance(part, nn.Module)}


def modules_of(pipe: Any) -> Iterator[tuple[str, nn.Module]]:
    for component in components_of(pipe).values():
        yield from named_parts(component)


def _configurations(pipe: Any) -> Iterator[Any]:
    """Yield what components keep their settings in, where loading may set attributes."""
    for component in components_of(pipe).values():
        config = getattr(component, "config", None)
        if hasattr(config, "__dict__"):
            yield config


def _is_same(now: Any, before: Any) -> bool:
    """Tell whether two containers hold the very same objects in the same order."""
    if isinstance(now, set):
        return bool(now == before)
    keys = not isinstance(now, dict) or list(now) == list(before)
    values = [list(c.values()) if isinstance(c, dict) else c for c in (now, before)]
    return keys and list(map(id, values[0])) == list(map(id, values[1]))
