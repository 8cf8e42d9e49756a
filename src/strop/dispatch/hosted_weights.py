"""Weights of a module may lie on the host while it runs on a GPU: under a budget of the user's, or
where hooks of libraries take those of its parts there and back. This knows which it is, and changes
from one to the other as the user does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from weakref import WeakMethod

import torch
from torch import Tensor

from strop.dispatch.entry import Entry
from strop.dispatch.module_state import ModuleState
from strop.dispatch.parts_offload import PartsOffload
from strop.dispatch.varying_numbers import GivenCall
from strop.dispatch.weights_budget import WeightsBudget, budget_for
from strop.errors import UnsupportedError
from strop.options import Options


class HostedWeights:
    """This has the weights of one module lie where programs want them. ``budget`` is None where
    they stay where they are."""

    def __init__(
        self,
        name: str,
        state: ModuleState,
        options: Options,
        wake: Callable[[], None],
        *,
        streams: bool,
    ) -> None:
        """``wake`` is to release the weights when somebody calls a part. ``streams``: weights, and
        arguments, may be moved; else the place of a call need not be there."""
        self._name, self._state, self._options, self._moves = name, state, options, streams
        # This keeps no dispatcher alive: a module that is restored must be free at once.
        self._wake = WeakMethod(wake)
        self.taken: PartsOffload | None = None  # whose hooks do nothing now
        self.budget: WeightsBudget | None = budget_for(name, state, options) if streams else None

    @property
    def is_released(self) -> bool:
        """Tell whether hooks move weights that are ours to place."""
        return self.taken is None and self._offload() is not None

    def is_elsewhere(self, tensors: Sequence[Tensor]) -> bool:
        """Tell whether a call with these arguments wants weights to lie where they do not."""
        return self.is_released or (
            self.budget is not None and self.budget.place_of(tensors) != self._state.place
        )

    def follow(self, tensors: Sequence[Tensor] | None = None) -> bool:
        """Have who moves weights be whom the last look at the module has found. True: that is
        another than before, and the module is to be looked at anew. ``tensors`` are the arguments
        of the call."""
        found, known = self._offload(), self.taken
        if found is not None and found.is_same(known):
            if known is None or not known.has_slipped():
                return self._follow_call(tensors)
            known.take(self._woken)
            return True
        if known is None and found is None:
            return self._follow_call(tensors)
        if found is None and self.budget is not None and self._lie_with(tensors):
            self.budget.forget()  # the hooks are gone, and the call is for a GPU that has all
        self.release()
        if self.budget is not None:
            self.budget.give_back()
        if found is not None:
            self.taken = found
            found.take(self._woken)
        self._state.place = None if found is None else found.device
        self.budget = budget_for(self._name, self._state, self._options, found)
        return True

    def _woken(self) -> None:
        if (wake := self._wake()) is not None:
            wake()

    def _lie_with(self, given: Sequence[Tensor] | None) -> bool:
        """Tell whether all weights lie on the GPU on which the arguments of a call are."""
        devices = {tensor.device for tensor in (*self._state.tensors, *(given or ()))}
        return bool(given) and len(devices) == 1 and next(iter(devices)).type != "cpu"

    def _follow_call(self, tensors: Sequence[Tensor] | None) -> bool:
        if self.budget is None or tensors is None:
            return False
        place = self.budget.place_of(tensors)
        has_changed, self._state.place = place != self._state.place, place
        return has_changed

    def _offload(self) -> PartsOffload | None:
        """Return whose hooks move weights of parts, unless others are in the way of a program."""
        return None if self._state.replaced else self._state.offload

    def brought(self, call: GivenCall) -> GivenCall:
        """Return a call with its arguments where hooks of parts would take them. Under a budget of
        the user's those without dims are brought alone, which torch would do."""
        place, given = self._state.place, call.given
        if place is None or not self._moves or all(tensor.device == place for tensor in given):
            return call
        moved = [t.to(place) if self.taken or not t.dim() else t for t in given]
        return replace(call, tensors=[*moved, *call.tensors[len(given) :]], is_brought=True)

    def misfit(self, entry: Entry, call: GivenCall) -> str:
        """Say why weights on the host cannot be streamed for a call, or nothing."""
        place = self._state.place
        if call.is_brought and any(tensor.device != place for tensor in call.given):
            return "arguments lie on several devices"
        if call.is_brought and not entry.is_pure:
            return "it writes to arguments or draws numbers, and one is on another device"
        if self.taken is None or self.budget is None or entry.placed is not None:
            return ""
        reason = self.budget.misfit(entry.variant.program)
        if self._options.check:
            reason = "check=True reads weights that are no longer there when a step is judged"
        return f"{self.taken.name}: {reason}" if reason else ""

    def let_go(self) -> None:
        """Keep no second copy of weights that are about to be put in their places."""
        if self.taken is not None:
            self.taken.let_go()

    def may_rest(self) -> bool:
        """Tell whether there is memory of a GPU that hooks of parts would not have between
        calls."""
        return self.taken is not None and self.budget is not None and self.budget.held_bytes > 0

    def rest(self, forget: Callable[[], object]) -> None:
        """Give it back until the next call. ``forget`` has everybody let go of the weights."""
        if self.budget is not None and self.may_rest():
            with torch.inference_mode(False), torch.no_grad():
                self.budget.rest(forget)

    def release(self) -> None:
        """Have the hooks of parts move weights from here on, if we did."""
        taken, self.taken = self.taken, None
        if taken is None:
            return
        with torch.inference_mode(False), torch.no_grad():
            if self.budget is not None:
                self.budget.give_back()
            taken.give_back()

    def leave(self) -> None:
        """Take weights to where they were given."""
        self.release()
        if self.budget is not None:
            self.budget.give_back()

    def is_away(self) -> bool:
        """Tell whether torch cannot run the module, as the user's budget has its weights lie
        elsewhere."""
        return self.taken is None and self.budget is not None and self.budget.is_away()

    @property
    def may_move(self) -> bool:
        """Tell whether somebody moves weights around the calls: a budget, or hooks of parts."""
        return self.budget is not None or self.taken is not None

    def refuse(self, reason: str) -> None:
        """Raise UnsupportedError where that is so, for this reason."""
        if self.is_away():
            raise UnsupportedError(
                f"{self._name}: {reason}; torch cannot run it, since weights_budget_bytes keeps"
                " weights on the host: change that, or call strop.restore first"
            )

    def __str__(self) -> str:
        if self.budget is not None and not self.is_released:
            return str(self.budget)
        if self.taken is not None:
            return f"weights: {self.taken.name} does nothing meanwhile"
        offload = self._state.offload
        return f"weights: {offload.name} moves them" if offload is not None else ""
