"""A look at a module in native code first, and in Python where that says no."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from strop.dispatch.hooks import is_untraced
from strop.dispatch.native_look import NativeLook

if TYPE_CHECKING:
    from strop.dispatch.module_state import ModuleState


class QuickLook:
    """This answers as ``is_unchanged`` does, which ``ModuleState.comparison`` has made."""

    def __init__(
        self,
        state: ModuleState,
        is_unchanged: Callable[[], bool],
        num_owned: int,
        native: Callable[[Any], int],
    ) -> None:
        """The tables of ``state.owned`` have to have ``num_owned`` entries in all."""
        self._state, self._is_unchanged, self._native = state, is_unchanged, native
        self._num_owned = num_owned
        self._num_refused = 0
        self._renew()

    def _renew(self) -> None:
        """Note what there is to compare."""
        state = self._state
        self._guards, own = state.global_guards, state.watched
        hooks: list[Mapping[int, Any]] = state.hooks
        read = self._guards.watched
        self._hooks = [registered for registered in hooks if registered]
        num_hooks = sum(map(len, self._hooks))
        watched = replace(
            read,
            places=[*own, *read.places],
            owned=[*state.owned, *read.owned, *hooks],
            num_owned=self._num_owned + read.num_owned + num_hooks,
        )
        self._look = NativeLook(self._native, watched)

    def _holds(self) -> bool:
        look, guards = self._look, self._state.global_guards
        return (
            guards is self._guards
            and look.holds()
            and not any(map(is_untraced, self._hooks))
            and guards.hold(look.others)
            and self._state.have_rows()
        )

    def __call__(self) -> bool:
        try:
            if self._holds():
                return True
        except KeyError:
            return False
        if not self._is_unchanged():
            return False
        self._num_refused += 1  # equal numbers were bound, which Python takes over
        if self._num_refused.bit_count() == 1:  # seldom: to note it all takes a millisecond
            self._renew()
        return True
