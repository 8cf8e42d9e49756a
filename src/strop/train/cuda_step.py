"""Run steps on a GPU: two sweeps over device memory, and one program between them for the scalars.

The host enqueues and never waits. It uploads addresses when they change, as they do where
``zero_grad`` frees the gradients, and numbers of groups when a schedule changes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from strop.errors import UnsupportedError
from strop.ir.source import KernelSource
from strop.options import Options
from strop.runtime.build.loader import kernel_loader
from strop.train import sources
from strop.train.layout import Item, Layout
from strop.train.rules import UpdateRule
from strop.train.shards import gathered
from strop.train.sources import TensorForm, Tuning, Tunings
from strop.train.step import GROUP_NUMBERS, Memory, Request

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Numbers = npt.NDArray[np.int64]
_PARTIALS_ALIGNED = 16  # elements: kernels rely on arguments aligned to 16 bytes


class Launcher(Protocol):
    """Builds kernels and enqueues them."""

    def prepare(self, wanted: Sequence[KernelSource]) -> None: ...

    def __call__(
        self, source: KernelSource, tensors: Sequence[Tensor], sizes: tuple[int, ...]
    ) -> None: ...


class CudaLauncher:
    """Launch kernels of Strop's cache on the current stream."""

    def __init__(self, device: torch.device) -> None:
        options = Options.from_environment()
        index = torch.cuda.current_device() if device.index is None else device.index
        cache, workers = options.cache_dir, options.build_workers
        self._library = kernel_loader("cuda", index, cache, workers, options.arch)
        self._device = device
        self._built: set[KernelSource] = set()

    def prepare(self, wanted: Sequence[KernelSource]) -> None:
        with torch.cuda.device(self._device):
            self._library.build(wanted)
        self._built.update(wanted)

    def __call__(
        self, source: KernelSource, tensors: Sequence[Tensor], sizes: tuple[int, ...]
    ) -> None:
        if source not in self._built:
            self.prepare([source])
        with torch.cuda.device(self._device):
            stream = torch.cuda.current_stream(self._device).cuda_stream
            pointers = [tensor.data_ptr() for tensor in tensors]
            self._library.bind(source, pointers, sizes, stream)()


class Upload:
    """Keep a list of numbers on the device, copied there when it differs from the last one.

    Under capture the copy is a part of the graph, from memory that then belongs to the graph: a
    replay puts back the list that it was captured with. What is on the device is unknown from then
    on, and copied in every step.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._numpy = np.int64 if dtype == torch.int64 else np.float64
        self._values: Sequence[float] | None = None
        self._tensor = torch.empty(0, dtype=dtype, device=device)
        self._pinned = device.type == "cuda"
        self._spare: Tensor | None = None
        self._captured: list[Tensor] = []
        self.count = 0

    @property
    def tensor(self) -> Tensor:
        return self._tensor

    def __call__(self, values: Sequence[float]) -> Tensor:
        capturing = is_capturing(self._device)
        if values == self._values and not capturing and not self._captured:
            return self._tensor
        if len(values) != len(self._tensor):
            if capturing:
                raise UnsupportedError("run one step with these gradients before the capture")
            self._tensor = torch.empty(len(values), dtype=self._dtype, device=self._device)
            self._spare = None
        host = torch.from_numpy(np.array(values, dtype=self._numpy))
        if self._pinned:
            host = self._in_pinned_memory(host, capturing)
        self._tensor.copy_(host, non_blocking=True)
        self.count += 1
        self._values = values
        return self._tensor

    def _in_pinned_memory(self, host: Tensor, capturing: bool) -> Tensor:
        """Allocate memory for a capture before it, pinned."""
        if not capturing:
            if self._spare is None:
                self._spare = torch.empty_like(host, pin_memory=True)
            return host.pin_memory()
        pinned = torch.empty_like(host, pin_memory=True) if self._spare is None else self._spare
        self._spare = None
        self._captured.append(pinned)
        return pinned.copy_(host)


@dataclass(frozen=True, slots=True, eq=False)
class LaunchBatch:
    """Hold tensors of one form: a launch for each sweep."""

    gradient_sweep: KernelSource
    update_sweep: KernelSource
    gradient_blocks: Tensor
    update_blocks: Tensor
    partials: Tensor
    flags: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LaunchPlan:
    """Hold a layout in device memory."""

    layout: Layout
    batches: tuple[LaunchBatch, ...]
    arrays: Tensor  # addresses of all but the gradients
    numels: Tensor
    groups: Tensor
    slots: Tensor
    partials: Tensor
    flags: Tensor
    rows: Tensor


class CudaStep:
    """Runs steps with generated kernels."""

    def __init__(
        self,
        device: torch.device,
        rule: UpdateRule,
        memory: Memory,
        seed: int | None,
        launcher: Launcher | None = None,
        tunings: Tunings | None = None,
    ) -> None:
        self.memory = memory
        self._device, self._rule, self._random = device, rule, seed is not None
        self._launch = launcher or CudaLauncher(device)
        self._tunings = tunings or Tunings()
        self._keys = torch.tensor([seed or 0, 0], dtype=torch.int64, device=device)
        self._one, self._zero = torch.ones((), device=device), torch.zeros((), device=device)
        self._settings = Upload(torch.float64, device)
        self._addresses = Upload(torch.int64, device)
        self._plan: LaunchPlan | None = None
        self._is_loaded = False

    def load(self, request: Request) -> None:
        """Put the numbers of the groups where steps that were captured by ``loaded`` read them."""
        self._upload_settings(request)

    @contextmanager
    def loaded(self) -> Iterator[tuple[object, ...]]:
        """Let steps upload no numbers of groups: whoever replays them calls ``load`` before. Gives
        what they point to, beside parameters, states and gradients."""
        self._is_loaded = True
        try:
            yield (self._plan, self._addresses.tensor, self._settings.tensor)
        finally:
            self._is_loaded = False

    @property
    def uploads(self) -> tuple[int, int]:
        """Copies to the device so far: addresses of gradients, numbers of groups."""
        return self._addresses.count, self._settings.count

    def prepare(self, tunings: Sequence[Tunings]) -> None:
        """Compile for all of these, for the arrays of the last step."""
        forms = {} if self._plan is None else self._forms_of(self._plan.layout.items)
        kernels = [sources.gradient_sweep(form, t.gradient) for form in forms for t in tunings]
        kernels += [sources.update_sweep(f, t.update_of(f)) for f in forms for t in tunings]
        self._launch.prepare(kernels)

    def tune(self, tunings: Tunings) -> None:
        """Use these from the next step on."""
        self._tunings, self._plan = tunings, None

    def run(self, layout: Layout, grads: Sequence[Tensor], request: Request) -> None:
        plan = self._plan
        if plan is None or plan.layout is not layout:
            plan = self._plan = self._make_plan(layout, self._settle_source(request))
        addresses = self._addresses(list(map(Tensor.data_ptr, grads)))
        settings = self._settings.tensor if self._is_loaded else self._upload_settings(request)
        scale = self._on_device(request.scale, self._one)
        found = self._on_device(request.found_inf, self._zero)
        if request.measured:
            for batch in plan.batches:
                inputs = (batch.gradient_blocks, addresses, plan.numels, scale)
                outputs = (batch.partials, batch.flags)
                programs = len(batch.gradient_blocks)
                self._launch(batch.gradient_sweep, (*inputs, *outputs), (programs,))
            if request.shards is not None:
                add_others(plan, request.shards)
        self._settle(plan, request, scale, found, settings)
        for batch in plan.batches:
            numbers = (plan.slots, self.memory.scalars, self._keys, plan.rows)
            tensors = (batch.update_blocks, addresses, plan.arrays, plan.numels)
            sizes = (len(batch.update_blocks), len(layout.items))
            self._launch(batch.update_sweep, (*tensors, *numbers), sizes)

    def _settle(
        self, plan: LaunchPlan, request: Request, scale: Tensor, found: Tensor, settings: Tensor
    ) -> None:
        memory = self.memory
        inputs = (plan.partials, plan.flags, scale, found, settings, plan.groups, plan.slots)
        state = (memory.steps, memory.counters, self._keys)
        outputs = (memory.scalars, plan.rows, memory.norm, memory.nonfinite)
        sizes = (len(plan.partials), len(plan.layout.items))
        self._launch(self._settle_source(request), (*inputs, *state, *outputs), sizes)

    def _settle_source(self, request: Request) -> KernelSource:
        return sources.settle(
            measured=request.measured,
            clip=request.clips,
            amp=request.skips,
            ema=request.schedule is not None,
            adam=self._rule.name == "adam",
        )

    def _upload_settings(self, request: Request) -> Tensor:
        s = request.schedule
        values = [request.max_norm, *([0.0] * 7)]
        if s is not None:
            warmup = float(s.use_ema_warmup)
            average = (s.decay, s.min_decay, s.update_after_step, warmup, s.inv_gamma, s.power)
            values[1:7] = map(float, average)
        for numbers in request.numbers:
            values += numbers
        settings = self._settings(values)
        for group, lr in request.lr_tensors:
            settings[GROUP_NUMBERS * (1 + group)].copy_(lr.view(()), non_blocking=True)
        return settings

    def _on_device(self, value: Tensor | None, default: Tensor) -> Tensor:
        if value is None:
            return default
        return value.to(device=self._device, dtype=torch.float32, non_blocking=True)

    def _make_plan(self, layout: Layout, settle: KernelSource) -> LaunchPlan:
        if is_capturing(self._device):
            raise UnsupportedError(
                "the set or the kind of gradients is new under graph capture: run one step with "
                "the same gradients before"
            )
        items = layout.items
        rows = (
            [i.param for i in items],
            [i.states[0] if i.states else None for i in items],
            [i.states[1] if len(i.states) > 1 else None for i in items],
            [i.average for i in items],
            [i.shadow for i in items],
            [i.scales[0] if i.scales else None for i in items],
            [i.scales[1] if i.scales else None for i in items],
        )
        addresses = [0 if a is None else a.data_ptr() for row in rows for a in row]
        numels = np.array([item.param.numel() for item in items] or [0], dtype=np.int64)
        batches, partials, flags = self._make_batches(self._forms_of(items), numels)
        kernels = [s for b in batches for s in (b.gradient_sweep, b.update_sweep)]
        self._launch.prepare([*kernels, settle])
        return LaunchPlan(
            layout,
            batches,
            self._table(np.array(addresses or [0], dtype=np.int64)),
            self._table(numels),
            self._table(np.array([item.group for item in items] or [0], dtype=np.int64)),
            self._table(np.array([item.slot for item in items] or [0], dtype=np.int64)),
            partials,
            flags,
            torch.zeros(8 * max(len(items), 1), dtype=torch.float64, device=self._device),
        )

    def _make_batches(
        self, forms: dict[TensorForm, list[int]], numels: Numbers
    ) -> tuple[tuple[LaunchBatch, ...], Tensor, Tensor]:
        gradient, update_of = self._tunings.gradient, self._tunings.update_of
        blocks = [
            (form, blocks_of(places, numels, gradient), blocks_of(places, numels, update_of(form)))
            for form, places in forms.items()
        ]
        ends = np.cumsum(
            [-(-len(g) // _PARTIALS_ALIGNED) * _PARTIALS_ALIGNED for _, g, _ in blocks]
        )
        size = int(ends[-1]) if len(ends) else 1
        partials = torch.zeros(size, dtype=torch.float64, device=self._device)
        flags = torch.zeros(size, dtype=torch.int32, device=self._device)
        batches, start = [], 0
        for (form, first, second), end in zip(blocks, ends.tolist(), strict=True):
            update = sources.update_sweep(form, update_of(form))
            kernels = sources.gradient_sweep(form, gradient), update
            tables = self._table(first), self._table(second)
            batches.append(LaunchBatch(*kernels, *tables, partials[start:end], flags[start:end]))
            start = end
        return tuple(batches), partials, flags

    def _forms_of(self, items: Sequence[Item]) -> dict[TensorForm, list[int]]:
        """Return places of the items of each form."""
        forms: dict[TensorForm, list[int]] = {}
        for place, item in enumerate(items):
            if item.param.numel():
                forms.setdefault(self._form_of(item), []).append(place)
        return forms

    def _form_of(self, item: Item) -> TensorForm:
        arrays = [item.param, *item.states, *item.scales, item.average, item.shadow]
        addresses = [a.data_ptr() for a in arrays if a is not None]
        return TensorForm(
            item.grad_dtype,
            item.param.dtype,
            len(item.states),
            item.average is not None,
            None if item.shadow is None else item.shadow.dtype,
            self._random and item.param.dtype == torch.bfloat16,
            not any(address % 16 for address in addresses),
            item.grad_aligned,
            bool(item.scales),
        )

    def _table(self, values: Numbers) -> Tensor:
        return torch.from_numpy(values).to(self._device)


def add_others(plan: LaunchPlan, shards: ProcessGroup) -> None:
    """Add the squares of the gradients that other processes have, and whether one is not finite."""
    own = torch.zeros(2, dtype=torch.float64, device=plan.partials.device)
    if plan.batches:
        own[0], own[1] = plan.partials.sum(), plan.flags.any()
    every = gathered(own, shards).sum(0)
    plan.partials.zero_()
    plan.flags.zero_()
    plan.partials[0], plan.flags[0] = every[0], every[1] > 0


def is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def blocks_of(places: Sequence[int], numels: Numbers, tuning: Tuning) -> Numbers:
    """Return for each program the number of its tensor in the high half, and the number of the
    block in the low."""
    chosen = np.asarray(places, dtype=np.int64)
    counts = -(-numels[chosen] // tuning.block)
    which = np.repeat(chosen, counts)
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    return (which << 32) | (np.arange(len(which)) - starts)
