"""The arguments of a call, and the settings of the module that users turn, are read into one
skeleton with tensors and numbers in it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from strop.dispatch.adapter import Adapter
from strop.dispatch.entry_maker import EntryMaker
from strop.dispatch.module_state import ModuleState
from strop.dispatch.signature import NUM_ARGUMENTS, Beside, count_numbers
from strop.dispatch.varying_numbers import GivenCall, Turned
from strop.frontend.low_rank_layers import batch_of


class CallReader:
    """This reads the calls of one module."""

    def __init__(
        self, state: ModuleState, turned: Turned, adapter: Adapter, maker: EntryMaker
    ) -> None:
        self._state, self._turned, self._adapter, self._maker = state, turned, adapter, maker

    def normalised(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments as the adapter has them. Raises OptionError where adapters by row do not
        fit the batch."""
        args, kwargs = self._adapter.normalise(args, kwargs)
        if (rows := self._state.effective.rows) is not None:
            rows.check(batch_of(args, kwargs))
        return args, kwargs

    def flattened(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], scale: float = 1.0
    ) -> GivenCall:
        """Return a call by its arguments alone, in which ``scale`` is that of all adapters. Raises
        UnsupportedError for an argument that no program takes."""
        tensors, beside = list[Tensor](), Beside(lora_scale=scale)
        told = self._state.told_apart
        skeleton = self._turned.flattened((args, kwargs), tensors, beside, told)
        return GivenCall(skeleton, tensors, skeleton, beside)

    def resolved(self, call: GivenCall) -> GivenCall | None:
        """Return a flattened call with the settings in it, and with those of its floats that are
        inputs; None where a setting is no longer what it was, and the module is to be looked at
        anew."""
        skeleton = call.bare
        if self._state.turned.names:
            part = self._state.turned.read(call.beside)
            if part is None:
                return None
            skeleton = (*skeleton, part)
        if call.beside.floats or call.beside.generators:
            return self._maker.resolved(skeleton, call.tensors, call.beside)
        return replace(call, skeleton=skeleton, bare=skeleton)

    def read_again(self, call: GivenCall) -> GivenCall | None:
        """Return the call with the settings as they are now, or None as ``resolved`` does."""
        arguments = call.bare[:NUM_ARGUMENTS]
        if arguments == call.bare and not self._state.turned.names:
            return call
        floats = call.beside.floats[: count_numbers(arguments)]
        beside = replace(call.beside, floats=floats, num_settings=0, num_wholes=0)
        return self.resolved(GivenCall(arguments, call.plain, arguments, beside))
