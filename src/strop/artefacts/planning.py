"""Compile a module for a device that this machine does not have.

A planning dispatcher stands in front of a module whose weights lie on the host. It traces calls as
if on the device, compiles them, and gives zeros of the right sizes back, so that the pipeline
around it goes on to the next module. Nothing of the module is ever run.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import nn

from strop.dispatch.arguments import returned
from strop.dispatch.bound_shapes import BoundShapes
from strop.dispatch.dispatcher import Dispatcher
from strop.dispatch.entry import Entry
from strop.dispatch.flights import Flight
from strop.dispatch.module_state import ModuleState
from strop.dispatch.prepared_calls import PlainCall
from strop.dispatch.signature import Shapes
from strop.dispatch.variants import Sizes, Variant, VariantStore
from strop.dispatch.varying_numbers import GivenCall
from strop.errors import StropError, UnsupportedError
from strop.ir.program import Program, Returned
from strop.options import Options
from strop.runtime.build.ahead import AheadLoader
from strop.runtime.build.loader import KernelLoader


class PlanningStore(VariantStore):
    """This makes variants for another device."""

    def __init__(self, module: nn.Module, options: Options, name: str, loader: AheadLoader) -> None:
        super().__init__(module, options, name)
        self._loader = loader

    def library(self, device: torch.device) -> KernelLoader:
        """Return what compiles for the device."""
        return self._loader

    def _waits_for_compilers(self, variant: Variant) -> bool:
        return False  # and makes no call of a library meanwhile

    def _build_off_grid(
        self, key: Any, state: ModuleState, call: GivenCall, shapes: Shapes, sizes: Sizes
    ) -> Variant:
        """Build what would be built in the background."""
        return self._build_fitting(key, state, call, shapes, sizes)


class PlanningDispatcher(Dispatcher):
    """This stands in for ``module.forward``, compiles, and runs nothing."""

    streams = False  # no weight is ever moved

    def __init__(
        self,
        module: nn.Module,
        options: Options,
        *,
        loader: AheadLoader,
        place: torch.device | None,
        name: str = "",
        **how: Any,
    ) -> None:
        """``place`` is where the weights are to lie, or None for the host."""
        name = name or type(module).__name__
        store = PlanningStore(module, options, name, loader)
        super().__init__(module, options, name=name, variants=store, **how)
        self.state.place = place
        # nothing was run, least of all from a CUDA graph
        self.shapes = BoundShapes(self.state, lambda devices, but: None)

    def _answer(
        self,
        key: Hashable,
        entry: Entry,
        call: GivenCall,
        plain: PlainCall,
        flight: Flight,
        *,
        is_no_grad: bool,
    ) -> tuple[StropError | None, Any]:
        """Return what the call would give, but for its values."""
        variant = entry.variant
        results = [
            _pretended(variant.program, item, entry.env) for item in variant.program.returned
        ]
        weights = self.state.tensors
        return None, returned(
            variant.out_spec, entry.aliases, variant.same, results, call.tensors, weights
        )

    def _run_eager(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise UnsupportedError(
            f"{self.name} cannot be compiled ahead, as it would run in eager: {reason}"
        )

    def _run_refused(
        self, refusal: StropError, call: GivenCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        raise refusal


def _pretended(program: Program, item: Returned, env: dict[str, int]) -> Any:
    """Return an item of a result: zeros for a tensor."""
    if item.tensor is None:
        return item.value if item.size is None else item.size.eval(env)
    sizes, strides = ([s.eval(env) for s in o] for o in (item.tensor.shape, item.tensor.strides))
    dtype = program.buffers[item.tensor.buffer].dtype
    return torch.empty_strided(sizes, strides, dtype=dtype).zero_()
