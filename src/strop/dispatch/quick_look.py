"""A look at a module in native code first, and in Python where that says no."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from strop.dispatch.hooks import is_untraced
from strop.dispatch.native_look import NativeLook, look_if_ready

if TYPE_CHECKING:
    from strop.dispatch.module_state import ModuleState
    from strop.runtime.derived.sources import KnownMemory


MANY_NAMES = 16  # to look at, for which a call of native code is worth its beginning
SOME_LOOKS = 4  # of which nobody compiles anything for fewer


class QuickLook:
    """This answers as ``is_unchanged`` does, which ``ModuleState.comparison`` has made."""

    def __init__(
        self,
        state: ModuleState,
        is_unchanged: Callable[[], bool],
        num_owned: int,
        native: Callable[[Any], int],
        memory: KnownMemory | None = None,
    ) -> None:
        """The tables of ``state.owned`` have to have ``num_owned`` entries in all. ``memory``
        is that of tensors which may not have moved."""
        self._state, self._is_unchanged, self._native = state, is_unchanged, native
        self._memory = memory
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
            and (self._memory is None or not self._memory.differs())
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


class LookWhenReady:
    """This looks in Python until native code for it is there: no call waits for a compiler."""

    def __init__(self, state: ModuleState, look: Callable[[], bool], cache_dir: str) -> None:
        """``look`` is in Python, of a state that has not been scanned anew since."""
        self._state, self._look, self._cache_dir = state, look, cache_dir
        self._num_looks = 0  # below 0: it will not be another one

    def __call__(self) -> bool:
        is_unchanged = self._look()
        if is_unchanged and self._num_looks >= 0:
            self._num_looks += 1
            if self._num_looks > SOME_LOOKS:
                self._take_over()
        return is_unchanged

    def _take_over(self) -> None:
        """Look in native code from now on, if that is there. All is as it was scanned."""
        found = look_if_ready(self._cache_dir)
        if found is None:
            return
        native, _ = found
        quick = None if native is None else self._state.comparison(native=native)
        self._look, self._num_looks = quick or self._look, -1


def quickest(
    state: ModuleState, look: Callable[[], bool] | None, cache_dir: str
) -> Callable[[], bool] | None:
    """Return a look that is in native code as soon as it can be, where there is much to look at,
    for one in Python."""
    is_long = look is not None and len(state.watched) >= MANY_NAMES
    return LookWhenReady(state, look, cache_dir) if look and is_long else look
