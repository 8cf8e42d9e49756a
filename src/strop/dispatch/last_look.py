"""A module is looked at once in a denoise loop, unless somebody may have changed it since."""

from __future__ import annotations

from torch import nn

from strop.dispatch import hooks
from strop.dispatch.entry import Entry
from strop.dispatch.module_state import ModuleState
from strop.runtime.loop.denoise_loop import DenoiseLoop


class LastLook:
    """This knows in which denoise loop a call has last looked at everything in one module."""

    def __init__(self, module: nn.Module, state: ModuleState, loop: DenoiseLoop) -> None:
        self._module, self._state, self._loop = module, state, loop
        self.loop_number = 0  # of the loop in which that was; 0 for none

    @property
    def is_settled(self) -> bool:
        """Say whether a call has looked at everything inside the denoise loop that runs."""
        return self._loop.is_running and self.loop_number == self._loop.number

    @property
    def is_undisturbed(self) -> bool:
        """Say whether all is settled, and nobody can have changed anything since."""
        own = self._module
        return (
            not self._loop.has_user_code
            and self.is_settled
            and not (own._forward_hooks or own._forward_pre_hooks or hooks.has_global_hooks())
        )

    def note(self) -> None:
        """Note that a call looks at everything now."""
        self.loop_number = self._loop.number

    def forget(self) -> None:
        """Have the next call look at everything."""
        self.loop_number = 0

    def has_changed(self, *, is_memory_known: bool = False) -> bool:
        """Look at everything, and say whether the module is another than at the last scan.
        ``is_memory_known``: this call has seen already that no memory of a weight has moved."""
        self.note()
        state = self._state
        return state.has_new_structure() or state.has_new_tensors(is_memory_known=is_memory_known)

    def loop_of(self, entry: Entry) -> int | None:
        """Return the denoise loop that this is a call of, if what comes of it may be kept."""
        return self.loop_number if entry.steady and self.is_settled else None
