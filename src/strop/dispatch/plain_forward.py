"""Run what a module is without its dispatcher, and be that for whoever copies or pickles it."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

from torch import nn

from strop.dispatch.features import place_for, replacement_before


def _plain_forward(module: nn.Module) -> Any:
    """Return the forward of the module's class, bound to the module."""
    return types.MethodType(type(module).forward, module)


class ForwardStandIn:
    """This stands in for ``module.forward``, and can run what was there before."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module, self.name = module, name
        holder, place = place_for(module)
        self._eager: Callable[..., Any] | None = getattr(holder, place)
        self._before = vars(holder).get(place)  # in whose place this one will be
        is_own = getattr(self._eager, "__func__", None) is type(module).forward
        if is_own:  # whatever function that is at a call
            self._eager = None
        self._replaced = "" if is_own else replacement_before(module)

    def run_plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run as without us. Dynamo traces this, and does not know how to make a method."""
        if self._eager is None:
            return type(self.module).forward(self.module, *args, **kwargs)
        return self._eager(*args, **kwargs)

    @property
    def eager(self) -> Callable[..., Any]:
        """Return the forward that the module has without us."""
        return self._eager or _plain_forward(self.module)

    def forget_copies(self) -> None:
        """Take our attributes out of what libraries have put around us, where
        ``functools.update_wrapper`` has copied them: they keep memory, and cannot be copied."""
        around, forward = list[Any](), vars(self.module).get("forward")
        while isinstance(forward, functools.partial | types.FunctionType):
            around += [vars(forward)] if isinstance(forward, functools.partial) else []
            forward = vars(forward).get("__wrapped__")
        for table in around if forward is self else ():
            for name in table.keys() & vars(self).keys():
                del table[name]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:  # a copy is a plain module
        return copy.deepcopy(self.eager, memo)

    def __reduce__(self) -> Any:  # so is one that was pickled
        if self._replaced:
            raise TypeError(f"{self.name}: {self._replaced}, and cannot be pickled")
        return _plain_forward, (self.module,)

    @property
    def __code__(self) -> Any:  # torch.export asks for it
        return self.eager.__code__
