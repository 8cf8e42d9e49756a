"""A call that is seen for the first time gets the entry that serves all calls like it."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from strop.dispatch.adapter import Adapter
from strop.dispatch.aliases import returned_arguments
from strop.dispatch.entry import Entry
from strop.dispatch.fallbacks import Fallbacks
from strop.dispatch.free_places import FreePlaces
from strop.dispatch.module_state import ModuleState
from strop.dispatch.signature import Beside, Shapes, Skeleton, placed
from strop.dispatch.step_cache.structures import piece_of
from strop.dispatch.variants import REFUSALS, Variant, VariantStore, device_of
from strop.dispatch.varying_numbers import GivenCall, Turned, all_shapes
from strop.errors import UnsupportedError
from strop.frontend.capture import NumbersNeeded
from strop.runtime.run.library_settings import library_settings
from strop.runtime.run.limits import looks_too_far

_NUMBERS = itertools.count()
_ON_HOST = torch.empty(0)


class EntryMaker:
    """This makes the entries of one module. Where it ``may_hoist``, what comes of arguments that
    stay the same through a loop may be kept."""

    def __init__(
        self,
        state: ModuleState,
        turned: Turned,
        variants: VariantStore,
        adapter: Adapter,
        fallbacks: Fallbacks,
        *,
        may_hoist: bool,
    ) -> None:
        self._state, self._turned, self._variants = state, turned, variants
        self._adapter, self._fallbacks, self.may_hoist = adapter, fallbacks, may_hoist
        self.free = FreePlaces()

    def resolved(self, bare: Skeleton, tensors: list[Tensor], beside: Beside) -> GivenCall:
        """Return a call that has floats or generators, and decide which of its floats are
        inputs."""
        device = (tensors or self._state.tensors or [_ON_HOST])[0].device
        return self._turned.call(bare, beside, tensors, self._state.structure, device)

    def key(self, call: GivenCall) -> Hashable:
        """Return a key that is equal for calls that one entry serves."""
        key = (call.skeleton, self.free.looks(call), library_settings())
        return (*key, self._turned.outcomes(call)) if call.numbers else key

    def make(self, call: GivenCall) -> tuple[Entry, GivenCall]:
        """Find or build the variant, and return an entry with the call, in which other floats may
        have become inputs. It may raise one of REFUSALS."""
        if self._state.replaced:
            raise UnsupportedError(self._state.replaced)
        if call.beside.floats and self._turned.note(call):
            call = self.resolved(call.bare, call.plain, call.beside)
        variant, call = self._variant(call)
        env = variant.env([t.shape for t in call.tensors], self._state)
        assert env is not None  # it would be another one
        if looks_too_far(variant.program, env):
            raise UnsupportedError("an index looks into a dim of 2^31 elements or more")
        for cause in variant.program.foreign_causes:
            self._fallbacks.note(f"{cause}: torch runs it")
        steady = self._steady(call)
        sizes = variant.plans.outline(variant.program).free
        free = self.free.note(call, sizes, is_kept=bool(steady))
        entry = Entry(
            next(_NUMBERS),
            variant,
            device_of(self._state, self._shapes(call)),
            env,
            aliases=returned_arguments(variant.program, env),
            steady=steady,
            timestep=self._adapter.timestep(call.skeleton) if steady else None,
            piece=piece_of(call.skeleton),
            is_pure=variant.program.is_pure,
            has_exchanges=variant.program.has_exchanges,
            has_graph=not call.beside.generators,
            free=free,
            settings=library_settings(),
        )
        return entry, call

    def forget_failure(self, call: GivenCall) -> None:
        """Forget that the call failed: it was wrong in itself. It may raise one of REFUSALS."""
        self._variants.forget_failure(self._state, call, self._shapes(call))

    def _steady(self, call: GivenCall) -> tuple[int, ...]:
        """Return the places of the call's tensors that stay the same through a loop. Numbers are
        among them, or nothing that they scale would be kept."""
        steady = self._adapter.steady(call.skeleton) if self.may_hoist else ()
        return (*steady, *range(len(call.given), len(call.tensors))) if steady else ()

    def _shapes(self, call: GivenCall) -> Shapes:
        shapes = self._adapter.shapes(call.given, call.skeleton)
        if (device := self._state.place) is None:
            return all_shapes(shapes, call, device_of(self._state, shapes))
        return placed(all_shapes(placed(shapes, device), call, device), device)

    def _variant(self, call: GivenCall) -> tuple[Variant, GivenCall]:
        """Find the variant for a call. Floats that it can have only as constants become constants
        first."""
        while True:
            try:
                variant = self._variants.get(self._state, call, self._shapes(call))
            except NumbersNeeded as error:
                needed: Sequence[int] = sorted(error.numbers)
            except REFUSALS:
                if not call.numbers and not call.beside.num_sizes:
                    raise
                needed = range(len(call.numbers))
            else:
                self._turned.learn(call, variant.number_guards)
                return variant, call
            call = self.resolved(*self._turned.fix(call, self._state.structure, needed))
