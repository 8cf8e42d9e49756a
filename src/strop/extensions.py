"""Handle, for nodes and extensions of user interfaces, calls of a model whose options are a dict
(``transformer_options``) that samplers, nodes and other extensions write into."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self
from weakref import ref

import torch
from torch import nn

from strop.frontend import composed_tensors

NAME = "transformer_options"
PLACES = ("block", "block_index", "transformer_index", "current_index")  # that code writes there
ASKS_PLACE = f"it asks {NAME} where in the model it is called"
PLAIN_DATA = (bool, int, float, str, torch.Tensor, torch.dtype, torch.device, type(None))


def read_codes(kind: type[torch.Tensor], others: tuple[str, ...] = ()) -> None:
    """Have compiled code read weights of a class of tensors that an extension has for codes.

    A trace meets plain tensors with the class's attributes: the module that holds such weights
    must take the codes apart itself. All attributes but ``others`` say what the codes mean, and
    become part of a program's key.
    """
    composed_tensors.read_codes(kind, composed_tensors.CodesInMemory("", (), others))


def dense(value: Any) -> Any:
    """Return the same with tensors that lie in their usual order. A ControlNet's and a VAE's lie
    now in this order and now in that, by the size of the picture, and each would be a graph."""
    if isinstance(value, torch.Tensor):
        return value.contiguous()
    if type(value) is dict:
        return {key: dense(part) for key, part in value.items()}
    return type(value)(map(dense, value)) if type(value) in (list, tuple) else value


def reason_in(value: Any, place: str, origin_of: Callable[[Any], str]) -> str:
    """Say what in nested containers is no plain data, and whose it is by ``origin_of``, or
    nothing."""
    if isinstance(value, PLAIN_DATA):
        return ""
    if type(value) is dict:
        parts = [(part, f"{place}[{key!r}]" if place else str(key)) for key, part in value.items()]
    elif type(value) in (list, tuple):
        parts = [(part, place) for part in value]
    else:
        return f"{place} holds {origin_of(value)}"
    return next(filter(None, (reason_in(part, name, origin_of) for part, name in parts)), "")


class KnowsCopies(nn.Module):
    """Know whether this is the module that was made, or a copy of it, which Strop traces.

    It compares objects, not their numbers: a number would be an attribute that the forward reads,
    another one in each process, so that no plan on disk would ever be found again.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made = ref(self)  # a copy's is the same
        self.shows_places = False  # in options, to the code that is traced

    def is_copy(self) -> bool:
        """Tell whether this is a copy."""
        return self._made() is not self

    def heed(self, reasons: Iterable[str]) -> None:
        """Show code from now on where in the model it is called, if it has asked for that:
        ``reasons`` say why calls ran in eager."""
        if not self.shows_places and any(ASKS_PLACE in reason for reason in reasons):
            self.shows_places = True


class UnaskedPlace:
    """Stand for where in a model code is called. A UNet writes that into its options for patches
    of other nodes, and with it no two of its blocks are given the same. Code may hand it on; asking
    for it raises LookupError."""

    def __getitem__(self, number: int) -> UnaskedPlace:
        return self

    def __add__(self, steps: object) -> UnaskedPlace:
        return self

    def __hash__(self) -> int:
        return 0  # a dictionary of patches may be asked, which is empty


def _ask(*args: Any) -> Any:
    raise LookupError(ASKS_PLACE)


_ASKING = ("eq", "ne", "lt", "le", "gt", "ge", "bool", "len", "iter", "contains", "sub", "mod")
for _name in (*_ASKING, "int", "index", "float", "str", "repr", "format"):
    setattr(UnaskedPlace, f"__{_name}__", _ask)
PLACE = UnaskedPlace()


class TracedOptions(dict[str, Any]):
    """Hold the options of a call while it is traced. Reading one of ``left_out`` raises
    LookupError: the value of the traced call would be taken for that of all later ones."""

    left_out: tuple[str, ...] = ()
    shows_places = True

    @classmethod
    def of(cls, options: Mapping[str, Any], *, shows_places: bool) -> Self:
        """Return these options. Where not ``shows_places``, code that writes down where it is
        called writes ``PLACE``."""
        found = cls(options)
        if not shows_places:
            found.shows_places = False
        return found

    def __setitem__(self, key: str, value: Any) -> None:
        is_hidden = key in PLACES and not self.shows_places
        super().__setitem__(key, PLACE if is_hidden else value)

    def _check(self, key: object) -> None:
        if key in self.left_out and not super().__contains__(key):
            raise LookupError(f"it reads {NAME}[{key!r}], another one in each step")

    def __contains__(self, key: object) -> bool:
        self._check(key)
        return super().__contains__(key)

    def __missing__(self, key: str) -> Any:
        self._check(key)
        raise KeyError(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._check(key)
        return super().get(key, default)

    def pop(self, key: str, *default: Any) -> Any:
        self._check(key)
        return super().pop(key, *default)

    def setdefault(self, key: str, default: Any = None) -> Any:
        self._check(key)
        return super().setdefault(key, default)

    def copy(self) -> TracedOptions:
        return self.of(self, shows_places=self.shows_places)


# Functions of UNets take ``transformer_options={}``, and write into it. Called without options, as
# by a ControlNet, they write into the default itself, which lives on: the sizes of the last picture
# then stand in the defaults of functions that the diffusion model shares. Strop compares all that
# the code of a model may read, and would compile it again for each of them.


def defaults_of(model: nn.Module) -> list[dict[Any, Any]]:
    """Return the dicts that are defaults for options in the code of a model's parts."""
    kinds = {type(part) for part in model.modules()}
    owners = [*kinds, *(sys.modules[name] for name in {kind.__module__ for kind in kinds})]
    found = [default for owner in owners for default in _defaults_in(vars(owner))]
    return list({id(default): default for default in found}.values())


def _defaults_in(table: Any) -> Iterator[dict[Any, Any]]:
    for value in [*table.values()]:
        if inspect.isfunction(value) and NAME in value.__code__.co_varnames:
            parameter = inspect.signature(value).parameters.get(NAME)
            if parameter is not None and type(parameter.default) is dict:
                yield parameter.default


def empty(defaults: list[dict[Any, Any]]) -> None:
    """Make them again what their authors wrote."""
    for default in defaults:
        default.clear()
