"""Keep a copy of a module on another device equal to it: modules, settings, adapters and values.

What the copy shares with the module is nothing that either writes to. Modules and settings that
have changed are copied again, values are always written where they lie, so that what is bound to
the copy's memory stays bound to it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from strop.dispatch.parallel.rules import PACKAGES, PROCESSORS
from strop.dispatch.signature import is_foreign
from strop.errors import UnsupportedError
from strop.frontend.module_parts import named_parts, own_attributes
from strop.frontend.stable_text import is_plain

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)
_OWN = ("forward", "_compiled_call_impl")  # by which Strop serves a module


class Twin:
    """Hold the copy of ``source`` for a device. ``home`` is that of the source, whose tensors that
    lie elsewhere, such as a table on the host, have copies there too."""

    def __init__(self, source: nn.Module, home: torch.device, device: torch.device) -> None:
        self.source, self.home, self.device = source, home, device
        self.num_copies = 0  # of all values
        self.module: nn.Module = type(source).__new__(type(source))
        self._tensors: dict[int, tuple[Tensor, Tensor]] = {}  # theirs and ours, by the id of theirs
        self._tree: list[tuple[int, Any]] = []  # objects of the source, as they were copied

    @property
    def sources(self) -> list[Tensor]:
        """Return the tensors that are copied, of the source's own device."""
        return [theirs for theirs, _ in self._tensors.values() if theirs.device == self.home]

    @property
    def size_bytes(self) -> int:
        """Return the memory of the copy."""
        return sum(own.nbytes for _, own in self._tensors.values())

    def follow(self) -> None:
        """Copy modules, settings and values as they are. Raises UnsupportedError for a module that
        cannot be copied."""
        tree = [*_tree_of(self.source)]
        if not _are_same(tree, self._tree):
            self._copy_tree()
            self._tree = tree
        else:
            self._copy_settings()
        self.copy_values()

    def copy_values(self) -> None:
        """Write all values to the copy, behind what both devices have been given to do."""
        with torch.inference_mode(False), torch.no_grad():
            for theirs, own in self._tensors.values():
                own.copy_(theirs, non_blocking=True)
        self.num_copies += 1

    def _copy_tree(self) -> None:
        """Copy all modules. Tensors that are known keep their copies."""
        kept = self._tensors
        self._tensors = {}
        for tensor in _tensors_of(self.source):
            if type(tensor) not in _PLAIN or is_foreign(tensor):
                self._tensors = kept
                raise UnsupportedError(f"a weight is a {type(tensor).__name__}")
            if id(tensor) not in self._tensors:
                self._tensors[id(tensor)] = tensor, self._copy_for(tensor, kept.get(id(tensor)))
        memo: dict[int, Any] = {number: own for number, (_, own) in self._tensors.items()}
        memo[id(self.source)] = self.module
        held = {n: value for n, value in vars(self.source).items() if n not in _OWN}
        try:
            copied = copy.deepcopy(held, memo)
        except (TypeError, RuntimeError) as error:  # locks, open files
            raise UnsupportedError(f"it cannot be copied: {error}") from error
        own = vars(self.module)
        before = {name: own[name] for name in _OWN if name in own}
        own.clear()
        own.update(copied | before)

    def _copy_for(self, tensor: Tensor, known: tuple[Tensor, Tensor] | None) -> Tensor:
        device = self.device if tensor.device == self.home else tensor.device
        if known is not None:
            own = known[1]
            looks = [(t.shape, t.dtype, t.requires_grad) for t in (tensor, own)]
            if looks[0] == looks[1] and own.device == device:
                return own
        with torch.inference_mode(False), torch.no_grad():
            made = torch.empty_like(tensor, device=device, requires_grad=False)
        is_weight = isinstance(tensor, nn.Parameter)
        return nn.Parameter(made, requires_grad=tensor.requires_grad) if is_weight else made

    def _copy_settings(self) -> None:
        """Copy plain settings that differ."""
        both = zip(named_parts(self.source), named_parts(self.module), strict=True)
        for (_, theirs), (_, own) in both:
            _follow_settings(theirs, own)


def _follow_settings(theirs: nn.Module, own: nn.Module) -> None:
    found = dict(own_attributes(theirs)) | {"training": theirs.training}
    for name in [name for name, _ in own_attributes(own) if name not in found]:
        if name != "forward":
            del own.__dict__[name]
    for name, value in found.items():
        if name != "forward" and is_plain(value) and not _is_equal(own.__dict__.get(name), value):
            own.__dict__[name] = copy.deepcopy(value)


def _is_equal(one: Any, other: Any) -> bool:
    """Compare plain values; 1, 1.0 and True are three."""
    return type(one) is type(other) and repr(one) == repr(other)


def _are_same(one: list[tuple[int, Any]], other: list[tuple[int, Any]]) -> bool:
    """Compare objects by identity, and texts."""
    if len(one) != len(other):
        return False
    return all(
        a[0] == b[0] and (a[1] is b[1] or (type(a[1]) is type(b[1]) is str and a[1] == b[1]))
        for a, b in zip(one, other, strict=True)
    )


def _tree_of(source: nn.Module) -> Iterator[tuple[int, Any]]:
    """Yield which objects stand where, by the number of their module: modules, tensors, and
    settings that are no plain values, with what these hold as text."""
    for number, (_, part) in enumerate(named_parts(source)):
        yield number, part
        for table in (part._parameters, part._buffers, part._modules):
            yield from ((number, held) for held in table.values())
        for name, value in own_attributes(part):
            if name != "forward" and not is_plain(value):
                yield number, name
                for held in _objects(value):
                    yield number, held
                    yield from ((number, text) for text in _texts(held))


def _objects(value: Any) -> Iterator[Any]:
    """Yield what is inside of containers, or the value itself."""
    if isinstance(value, dict):
        for part in value.values():
            yield from _objects(part)
    elif isinstance(value, list | tuple | set):
        for part in value:
            yield from _objects(part)
    elif not is_plain(value):
        yield value


def _texts(value: Any) -> Iterator[str]:
    """Yield the plain attributes of an object as text."""
    if _is_own_object(value):
        yield repr({name: part for name, part in vars(value).items() if is_plain(part)})


def _tensors_of(source: nn.Module) -> Iterator[Tensor]:
    """Yield all tensors that a module holds: those in containers, such as scales of adapters, and
    in objects of its own, such as functions of attention, too."""
    for _, part in named_parts(source):
        for table in (part._parameters, part._buffers):
            yield from (tensor for tensor in table.values() if tensor is not None)
        for name, value in own_attributes(part):
            if name == "forward":
                continue
            for held in _objects(value):
                inside = vars(held).values() if _is_own_object(held) else [held]
                yield from (one for each in inside for one in _objects(each) if _is_tensor(one))


def _is_own_object(value: Any) -> bool:
    """Tell whether a value is a plain object with attributes, and neither a module of nn nor one of
    Python."""
    is_other = isinstance(value, Tensor | nn.Module | ModuleType | type)
    return not is_other and hasattr(value, "__dict__")


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _package(code: Any) -> str:
    return str(code.__module__).partition(".")[0]


def mixes_rows(source: nn.Module) -> str:
    """Say what in a module may look at several rows of a call at once, or nothing."""
    for path, part in named_parts(source):
        where = path or type(part).__name__
        # a registry stays when a model has been told which part of guidance a call is for
        registry = part.__dict__.get("_diffusers_hook")
        if "_hf_hook" in part.__dict__ or getattr(registry, "hooks", None):
            return f"a hook of a library stands around {where}"
        kind = type(part)
        if not {_package(kind), _package(kind.forward)} <= PACKAGES:
            return f"{where} is a {kind.__name__} of your own, which may look at several rows"
        processor = part.__dict__.get("processor", part._modules.get("processor"))
        if processor is not None and type(processor).__name__ not in PROCESSORS:
            return f"{where} has a {type(processor).__name__}, which may look at several rows"
    return ""
