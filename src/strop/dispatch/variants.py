"""Each graph of a module is captured once, compiled once, and kept on disk.

A variant serves every shape that satisfies its guards. Another one is made for another set of
arguments, dtype or structure, and for sizes that no variant fits; the latter may be built in the
background while the caller runs in eager.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._prims_common import is_non_overlapping_and_dense_or_false

from strop.backend import Compiled, compile_captured
from strop.codegen.assemble import Signature
from strop.dispatch import stored_variants
from strop.dispatch.arguments import asks_begin, misfit_in_memory, wants_none
from strop.dispatch.cut_forward import may_be_cut
from strop.dispatch.effects import Effects
from strop.dispatch.gc_pause import collection_paused
from strop.dispatch.module_state import ModuleState
from strop.dispatch.signature import (
    Shapes,
    Skeleton,
    described,
    is_foreign,
    rebuild,
    served_sizes,
    solve_roots,
    without_numbers,
)
from strop.dispatch.varying_numbers import GivenCall
from strop.errors import CaptureError, ShapeError, UnsupportedError
from strop.frontend.capture import Captured, NumbersNeeded, Same, capture
from strop.frontend.importer import import_graph
from strop.frontend.low_rank_layers import is_factor, rows_counted
from strop.frontend.objects import Contents, with_objects
from strop.frontend.repeated_blocks import TraceWatch
from strop.ir.program import NumberGuard, Program
from strop.ir.source import KernelSource
from strop.ir.tensor_spec import TensorSpec
from strop.options import Options
from strop.patterns import registry
from strop.runtime.build.background import BackgroundBuild
from strop.runtime.build.early import EarlyBuild
from strop.runtime.build.loader import KernelLoader, kernel_loader
from strop.runtime.run import choices, cuda_graphs, library_warm_up
from strop.runtime.run.shape_plan import ShapePlans
from strop.wording import counted

log = logging.getLogger("strop")
Sizes = Sequence[Sequence[int]]  # of each tensor argument
MOST_FIXED = 16  # graphs that each hold for one value of some size, such as the rounds of a loop
TURNS_ON = (
    "its forward turns gradients on itself: call it under torch.no_grad(), with arguments that"
    " require none"
)
REFUSALS = (CaptureError, UnsupportedError, ShapeError)  # why a call runs in eager


@dataclass(frozen=True, slots=True)
class Variant:
    """This is a compiled graph, with how its arguments and results look."""

    program: Program
    specs: tuple[TensorSpec, ...]
    out_spec: pytree.TreeSpec
    state_names: tuple[str, ...]
    is_ragged: bool = False
    from_disk: bool = False
    seconds: Mapping[str, float] = field(default_factory=dict)
    compiled: Compiled | None = None  # None when it came from disk
    later: BackgroundBuild = field(
        default_factory=lambda: BackgroundBuild(())
    )  # kernels that only other sizes need
    fixed: tuple[str, ...] = ()  # sizes that it holds for at one value, and why
    layout_reads: tuple[str, ...] = ()  # see ``Captured``: it serves dense arguments alone
    number_guards: tuple[NumberGuard, ...] = ()  # of the numbers that are inputs
    # Which weights required a gradient, where the forward turns gradients on. It then serves calls
    # under ``no_grad``, with arguments that require none.
    wants: tuple[bool, ...] | None = None
    same: tuple[Same, ...] = ()  # see ``Captured``
    rows: tuple[TensorSpec, ...] = ()  # of each table of the module, see ``Captured``
    num_copied_blocks: int = 0  # that were not traced, as they are like an earlier one
    traced_blocks: tuple[str, ...] = ()  # those that were traced once more, and why
    plans: ShapePlans = field(default_factory=ShapePlans)  # of its program
    stored_keys: tuple[str, ...] = ()  # in the disk cache, the last is its own; () for none

    def fits(self, sizes: Sizes, state: ModuleState) -> bool:
        return self.env(sizes, state) is not None

    def is_for(self, numbers: Sequence[float]) -> bool:
        return all(guard.holds(numbers) for guard in self.number_guards)

    def suits(self, state: ModuleState) -> bool:
        """Say whether its gradients are still by the weights that require one, and tables have
        the numbers of rows that it takes for known."""
        known = zip((spec.sizes[0] for spec in self.rows), state.rows, strict=True)
        has_rows = all(not size.is_const or size.value == count for size, count in known)
        return has_rows and (self.wants is None or self.wants == state.wants)

    @property
    def asks_begin(self) -> bool:
        """Say whether it serves arguments at the beginning of their memory alone."""
        return asks_begin(self.layout_reads)

    def misfit(self, tensors: Sequence[Tensor], *, is_no_grad: bool) -> str:
        """Say why a call that it fits by sizes must not have it, or nothing."""
        if reason := misfit_in_memory(self.layout_reads, tensors, self.specs):
            return reason
        if self.wants is not None and not (is_no_grad and wants_none(tensors)):
            return TURNS_ON
        return ""

    def env(self, sizes: Sizes, state: ModuleState) -> dict[str, int] | None:
        """Return the values of the symbolic sizes, or None for arguments and tables that this graph
        does not serve."""
        all_sizes = [*sizes, *((count,) for count in state.rows)]
        return served_sizes((*self.specs, *self.rows), self.program.guards, all_sizes)


@dataclass
class Progress:
    """This tells those who watch from another thread what a store is at."""

    stage: str = ""
    total: int = 0
    count: Callable[[], int] = int  # how many of ``total`` are done

    def begin(self, stage: str, total: int = 0, count: Callable[[], int] = int) -> None:
        self.stage, self.total, self.count = stage, total, count

    def __str__(self) -> str:
        return f"{self.stage}, {self.count()} of {self.total}" if self.total else self.stage


class VariantStore:
    """This finds or makes the variant for a call."""

    def __init__(self, module: nn.Module, options: Options, name: str) -> None:
        self.module, self.options, self.name = module, options, name
        self.variants: dict[Any, list[Variant]] = {}
        self.num_captures = 0
        self.artefact = ""  # the file that should have a plan for each call
        self.progress = Progress()
        self._failed: dict[Any, str] = {}
        self._building: dict[Any, threading.Thread] = {}
        self.cuttable = set[str]()  # failures of a trace of ours that Dynamo's may do without
        self.of_code = set[str]()  # failures of a whole forward: its parts may do better
        self.forward_of = _own_forward  # what is traced of a copy of the module, for a call

    def library(self, device: torch.device) -> KernelLoader:
        """Return what loads the kernels of a device."""
        return library_for(device, self.options)

    @property
    def all(self) -> list[Variant]:
        return [v for variants in self.variants.values() for v in variants]

    def get(self, state: ModuleState, call: GivenCall, shapes: Shapes) -> Variant:
        """Return the variant for a call. Raises NumbersNeeded where numbers of the call have to be
        constants, or one of REFUSALS when it has to run in eager."""
        key, sizes = _key(state, call.skeleton, shapes), [t.shape for t in call.tensors]
        known = [v for v in self.variants.get(key, ()) if v.is_for(call.numbers) and v.suits(state)]
        for variant in known:
            if variant.fits(sizes, state):
                return variant
        failed = self._failed.get((key, shapes.is_ragged)) or self._usual_failure(key)
        if failed:
            self._failed[key, shapes.is_ragged] = failed
            raise UnsupportedError(failed)
        fixed = [variant.fixed for variant in known if variant.fixed]
        if len(fixed) >= MOST_FIXED:
            graphs = counted(len(fixed), "graph")
            raise UnsupportedError(
                f"it has {graphs} for one size each: its code fixes {fixed[-1][-1]}"
            )
        if shapes.is_ragged and known:
            return self._build_off_grid(key, state, call, shapes, sizes)
        # else the usual hints would give the same graph again
        if all(variant.is_ragged for variant in known):
            built, shapes = self._build_first(key, state, call, shapes, sizes)
            if built.fits(sizes, state):
                return built
        elif shapes.otherwise is not None:
            shapes = shapes.otherwise
        return self._build_exactly(key, state, call, shapes, sizes)

    def _build_off_grid(
        self, key: Any, state: ModuleState, call: GivenCall, shapes: Shapes, sizes: Sizes
    ) -> Variant:
        """Take a graph for sizes off the usual grid from an artefact. Raises UnsupportedError where
        there is none, while it is built in the background."""
        for form in (shapes, _exact(shapes, sizes)):
            if self._is_in_artefact(state, call, form, sizes):
                return self._build(key, state, call, form, sizes)
        self._build_in_background(key, state, call, shapes, sizes)
        raise UnsupportedError(
            "a graph for sizes off the usual grid is being built in the background"
        )

    def _build_fitting(
        self, key: Any, state: ModuleState, call: GivenCall, shapes: Shapes, sizes: Sizes
    ) -> Variant:
        """Build a graph for sizes off the usual grid, and one for these very sizes where its guards
        exclude them."""
        built = self._build(key, state, call, shapes, sizes)
        if built.fits(sizes, state):
            return built
        return self._build_exactly(key, state, call, shapes, sizes)

    def _is_in_artefact(
        self, state: ModuleState, call: GivenCall, shapes: Shapes, sizes: Sizes
    ) -> bool:
        if not self.artefact or self.options.wants_compiler:
            return False
        key = self._stored_key(state, call, shapes, self.library(device_of(state, shapes)))
        _, variant = stored_variants.find(key, call.numbers, state, self.options)
        return variant is not None and variant.fits(sizes, state)

    def _build_first(
        self, key: Any, state: ModuleState, call: GivenCall, shapes: Shapes, sizes: Sizes
    ) -> tuple[Variant, Shapes]:
        """Build the first graph of its kind, and return the sizes that it has been traced with
        too."""
        if shapes.otherwise is None:
            try:
                return self._build(key, state, call, shapes, sizes), shapes
            except CaptureError as error:
                if not _may_ask_for_one(error, shapes, sizes):
                    raise
            self._failed.pop((key, shapes.is_ragged), None)
            return self._build_exactly(key, state, call, shapes, sizes), shapes
        with contextlib.suppress(CaptureError, ShapeError):
            built = self._build(key, state, call, shapes, sizes)
            if built.fits(sizes, state):
                return built, shapes
        self._failed.pop((key, shapes.is_ragged), None)
        return self._build(key, state, call, shapes.otherwise, sizes), shapes.otherwise

    def _usual_failure(self, key: Any) -> str:
        """Say why such calls cannot be traced, if two that differ in numbers alone have failed for
        one reason, or nothing. A further number would take as long, to fail as well."""
        (structure, skeleton, kinds), found = key, Counter[str]()
        alike = without_numbers(skeleton)
        for ((other, its, its_kinds), _), reason in self._failed.items():
            is_like = other == structure and len(its_kinds) == len(kinds)
            if is_like and its != skeleton and without_numbers(its) == alike:
                found[reason] += 1
        return next((reason for reason, count in found.items() if count > 1), "")

    def forget_failure(self, state: ModuleState, call: GivenCall, shapes: Shapes) -> None:
        """Forget that the call failed: it was wrong in itself, which says nothing of other
        calls."""
        self._failed.pop((_key(state, call.skeleton, shapes), shapes.is_ragged), None)

    def _build_exactly(
        self, key: Any, state: ModuleState, call: GivenCall, shapes: Shapes, sizes: Sizes
    ) -> Variant:
        """Build a graph by the very sizes of this call, as one by the usual hints (a batch of at
        least 2) does not serve it."""
        exact = _exact(shapes, sizes)
        variant = self._build(key, state, call, exact, sizes)
        if variant.fits(sizes, state):
            return variant
        reason = f"its graph has guards that exclude the sizes it was traced for: {exact.hints}"
        self._failed[key, shapes.is_ragged] = reason
        raise ShapeError(reason)

    def _build_in_background(
        self, key: Any, state: ModuleState, call: GivenCall, shapes: Shapes, sizes: Sizes
    ) -> None:
        if key not in self._building:
            work = threading.Thread(
                target=self._build_and_leave,
                args=(key, state, call, shapes, sizes),
                name=f"strop-build-{self.name}",
                daemon=True,
            )
            self._building[key] = work
            work.start()

    def _build_and_leave(self, key: Any, *what: Any) -> None:
        try:
            with contextlib.suppress(*REFUSALS):  # kept for those who ask
                self._build_fitting(key, *what)
        finally:
            self._building.pop(key)

    def wait(self) -> None:
        """Wait until background builds are done, of graphs and of kernels for other sizes."""
        for work in list(self._building.values()):
            work.join()
        for variant in self.all:
            variant.later.wait()

    def _build(
        self, key: Any, state: ModuleState, call: GivenCall, shapes: Shapes, sizes: Sizes
    ) -> Variant:
        try:
            with registry.holding(key[0][1]):  # this very key, whatever other threads declare
                variant = self._make(state, call, shapes, sizes)
        except NumbersNeeded:
            raise
        except REFUSALS as error:
            self._failed[key, shapes.is_ragged] = str(error)
            if isinstance(error, CaptureError | UnsupportedError):
                self.of_code.add(str(error))
            if may_be_cut(error):
                self.cuttable.add(str(error))
            raise
        if variant.program.foreign_calls and self.options.strict:
            raise UnsupportedError(
                f"{self.name} would run operators in torch:"
                f" {'; '.join(variant.program.foreign_causes)} (strict=True forbids them)"
            )
        (_, patterns), *others = key
        key = (state.structure, patterns), *others  # without the caches that the trace has written
        self.variants.setdefault(key, []).append(variant)
        return variant

    def _make(self, state: ModuleState, call: GivenCall, shapes: Shapes, sizes: Sizes) -> Variant:
        started, device = time.perf_counter(), device_of(state, shapes)
        library = self.library(device)
        for name, tensor in zip(state.names, state.tensors, strict=True):
            if type(tensor) not in (Tensor, nn.Parameter) or is_foreign(tensor):
                raise CaptureError(f"{self.name}: {name} is {described(tensor)}")
            if not is_non_overlapping_and_dense_or_false(tensor):
                raise CaptureError(f"{self.name}: {name} has gaps in memory: make it contiguous")
        self.options.check_format(library.device)
        options = self.options.on(has_wgmma=library.device.has_wgmma)
        stored_key = self._stored_key(state, call, shapes, library)
        stored_keys: tuple[str, ...] = (stored_key,)
        variant = None
        if not self.options.wants_compiler:
            stored_keys, variant = stored_variants.find(
                stored_key, call.numbers, state, self.options
            )
        if variant is None:
            if self.artefact:
                log.warning("%s: %s has no plan for this call", self.name, self.artefact)
            library.warm_up()
        try:
            if variant is None:
                with collection_paused():
                    variant = self._compile(state, call, shapes, device, library, options)
                env = variant.env(sizes, state)
                library.begin(_needed(variant.program, env, library))
                if not self._keep(variant, stored_keys[-1]):
                    stored_keys = ()
            else:
                variant = _on(device, variant)
            variant = replace(variant, stored_keys=stored_keys)
            if variant.state_names != tuple(state.names):
                raise CaptureError(
                    f"{self.name}: the module's parameters are not those of its graph"
                )
            env = variant.env(sizes, state)
            return self._with_kernels(variant, library, device, env, started)
        finally:
            library.cool_down()

    def _stored_key(
        self, state: ModuleState, call: GivenCall, shapes: Shapes, library: KernelLoader
    ) -> str:
        options = self.options.on(has_wgmma=library.device.has_wgmma)
        return stored_variants.key_of(self.module, state, call.skeleton, shapes, options)

    def _keep(self, variant: Variant, key: str) -> bool:
        """Keep a variant on disk, and say whether that was possible. What its gradients are by is
        no part of the key."""
        return variant.wants is None and stored_variants.save(key, variant, self.options)

    def _with_kernels(
        self,
        variant: Variant,
        library: KernelLoader,
        device: torch.device,
        env: Mapping[str, int] | None,
        started: float,
    ) -> Variant:
        """Build the kernels that the first call needs, and list the others for later."""
        program = variant.program
        needed = _needed(program, env, library)
        num_ready = library.watch(needed)
        begun = time.perf_counter()
        self.progress.begin("building kernels", len(needed), num_ready)
        seconds = dict(variant.seconds)
        if device.type == "cuda" and env is not None and self._waits_for_compilers(variant):
            pool = cuda_graphs.pool_of(device)
            goes_there = self.options.cuda_graphs and pool.has_one_caller()
            library_warm_up.prime(
                program,
                env,
                device,
                library.device,
                lambda: num_ready() < len(needed),
                pool.lending_stream if goes_there else contextlib.nullcontext,
            )
            seconds["libraries"] = time.perf_counter() - begun
        primed = time.perf_counter()
        library.build(needed)
        ready = time.perf_counter()
        others = choices.sources_elsewhere(program, needed, library.device)
        log.info(
            "%s: %s, %s, %d more for other sizes; kernels ready in %.1f s, all in %.1f s",
            self.name,
            counted(len(program.call_steps), "call"),
            counted(len(needed), "kernel"),
            len(others),
            ready - begun,
            ready - started,
        )
        order = choices.likely_first(program, env or dict(program.hints), library.device)
        return replace(
            variant,
            seconds={**seconds, "kernels": ready - primed},
            later=library.later(others, order),
        )

    def _waits_for_compilers(self, variant: Variant) -> bool:
        """Say whether this thread, which will run the variant, has just begun its kernels."""
        is_caller = threading.current_thread() not in self._building.values()
        return is_caller and variant.compiled is not None

    def _compile(
        self,
        state: ModuleState,
        asked: GivenCall,
        shapes: Shapes,
        device: torch.device,
        library: KernelLoader,
        options: Options,
    ) -> Variant:
        start = time.perf_counter()
        foresight: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if library.device.arch:
            foresight = EarlyBuild(library.begin, library.device, options.kernels_off)
        captured = self._captured(state, asked, shapes, foresight)
        self.progress.begin("planning kernels")
        traced = time.perf_counter()
        imported = import_graph(
            captured.gm,
            captured.symbols,
            captured.hints,
            captured.origins,
            len(captured.state_names),
            small={n for n, name in enumerate(captured.state_names) if is_factor(name)},
            tied=state.tied,
            may_draw_on_host=True,
        )
        if imported.constants:
            raise CaptureError(f"{self.name} makes tensors from Python data in its forward")
        guards = (*captured.guards, *imported.guards)
        once = tuple(dict.fromkeys(guards))
        signature = Signature(imported.returned, once, host_draws=imported.host_draws)
        compiled = compile_captured(
            captured.gm, imported.graph, signature, device.type, options, self.name, library
        )
        seconds = {"capture": traced - start, **compiled.seconds}
        return Variant(
            compiled.program,
            captured.input_specs,
            captured.out_spec,
            captured.state_names,
            shapes.is_ragged,
            False,
            seconds,
            compiled,
            fixed=captured.fixed,
            layout_reads=captured.layout_reads,
            number_guards=captured.number_guards,
            wants=state.wants if captured.has_gradients else None,
            same=captured.same,
            rows=captured.rows,
            num_copied_blocks=captured.blocks.num_copied,
            traced_blocks=captured.blocks.texts(),
        )

    def _captured(
        self,
        state: ModuleState,
        asked: GivenCall,
        shapes: Shapes,
        foresight: contextlib.AbstractContextManager[Any],
    ) -> Captured:
        """Trace the module's forward in a clone, within ``foresight``."""
        self.num_captures += 1
        clone = state.clone()
        forward = self.forward_of(clone, asked)

        def call(*given: Any) -> Any:
            args, kwargs, *settings = rebuild(asked.skeleton, given)
            contents = Contents((args, kwargs))
            turned = state.turned.put(clone, settings[0] if settings else ())
            with foresight, turned, rows_counted(args, kwargs):
                effects.begin()
                result = forward(*args, **kwargs)  # its own hooks run outside
            effects.look([value for value in given if isinstance(value, Tensor)])
            return with_objects(result, (args, kwargs), contents)

        effects, parts, entered = Effects(clone), dict(clone.named_modules()), {id(clone)}
        self.progress.begin("tracing modules", len(parts), lambda: len(entered))
        numbers = {(id(parts[path]), name) for path, name in state.turned.names}
        watch = TraceWatch(effects.so_far, lambda part: entered.add(id(part)), numbers)
        try:
            captured = capture(
                clone,
                call,
                shapes.specs,
                shapes.hints,
                asked.numbers,
                state.tables,
                watch,
                state.place,
            )
        finally:
            effects.undo()
        if written := effects.check():
            state.ignore(written)
            log.warning(
                "%s writes %s when it is traced; compiled code does not",
                self.name,
                ", ".join(sorted(written)),
            )
        return captured


def _own_forward(clone: nn.Module, asked: GivenCall) -> Callable[..., Any]:
    # looked up within the trace, which puts other forwards into classes
    return lambda *args, **kwargs: clone.forward(*args, **kwargs)


def _on(device: torch.device, variant: Variant) -> Variant:
    """Return a stored variant for a device, of which kind it was made on any."""
    specs, rows = (
        stored_variants.on_device(some, lambda _: device) for some in (variant.specs, variant.rows)
    )
    return replace(variant, specs=specs, rows=rows)


def _needed(
    program: Program, env: Mapping[str, int] | None, library: KernelLoader
) -> tuple[KernelSource, ...]:
    """Return the kernels of the first call, or none where nobody knows its sizes. On a CPU nobody
    builds others behind it, so that those of further sizes are among them."""
    if env is None:
        return ()
    find = choices.sources_at_magnitudes if library.device.isa else choices.sources_at
    return find(program, env, library.device)


def _may_ask_for_one(error: CaptureError, shapes: Shapes, sizes: Sizes) -> bool:
    """Say whether the code has raised an error of its own where a size of 1 was traced as a 2."""
    is_its_own = type(error.__cause__) in (ValueError, AssertionError, RuntimeError, IndexError)
    return is_its_own and solve_roots(shapes.specs, sizes) != shapes.hints


def _exact(shapes: Shapes, sizes: Sizes) -> Shapes:
    return replace(shapes, hints=solve_roots(shapes.specs, sizes), is_exact=True)


def _key(state: ModuleState, skeleton: Skeleton, shapes: Shapes) -> Any:
    kinds = tuple(
        (s.dtype, s.device, s.order, *(size == "0" for size in s.shape)) for s in shapes.specs
    )
    return (state.structure, registry.active()), skeleton, kinds


def device_of(state: ModuleState, shapes: Shapes) -> torch.device:
    """Return the device where all arguments and weights lie. Raises UnsupportedError if that is not
    one device."""
    devices = {s.device for s in shapes.specs} | {*state.devices}
    if len(devices) > 1:
        named = ", ".join(sorted(map(str, devices)))
        raise UnsupportedError(f"arguments and weights lie on several devices: {named}")
    if not devices:
        raise UnsupportedError("the call has no tensor, and the module no weight")
    return devices.pop()


def library_for(device: torch.device, options: Options) -> KernelLoader:
    """Return what loads the kernels of a device. Raises UnsupportedError where Strop has no code
    generator for it."""
    folder, workers = options.cache_dir, options.build_workers
    index, arch = device.index or 0, options.arch
    return kernel_loader(device.type, index, folder, workers, arch, options.target)
