"""Make one callable of forward, loss, backward and update: ``strop.train.compile_step``.

On a GPU a call replays a CUDA graph of all of it. Python then runs for the first two calls of each
bucket (how the arguments look, and where in an accumulation the call is) and for the capture that
follows the second; replays copy the arguments in, hand over learning rates, and launch one graph.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from strop.dispatch.signature import Skeleton, flatten, rebuild
from strop.errors import CaptureError, OptionError, StropError, UnsupportedError
from strop.runtime.run import graph_keep_alive, group_shutdowns
from strop.train import diagnosis, recording
from strop.train.averaged_gradients import AveragedGradients, averaged_over
from strop.train.closure_walk import Reached, WatchedModules, reached
from strop.train.recording import Recorder, Recording
from strop.train.static_gradients import StaticGradients
from strop.train.updating import Updating
from strop.wording import counted

Averages = Callable[[Sequence[Tensor]], AveragedGradients]

WARM_UPS = 2  # calls of a bucket before its capture
MOST_GRAPHS = 32  # the least recently used one goes
MOST_BUCKETS = 1024  # with a number that is another one at each call there is no end of them


@dataclass
class StepReport:
    """Count how the calls of a step were served."""

    graph: bool  # whether there are graphs at all
    plain_runs: int = 0
    replays: int = 0
    captures: int = 0
    stale: int = 0  # graphs that pointed to memory which is no longer in use
    buckets: int = 0

    def __str__(self) -> str:
        what = counted(self.plain_runs, "plain run")
        if not self.graph:
            return f"{what}, no graphs"
        stale = f" ({self.stale} became stale)" if self.stale else ""
        captures, buckets = counted(self.captures, "capture"), counted(self.buckets, "bucket")
        return f"{what}, {counted(self.replays, 'replay')}, {captures}{stale}, {buckets}"


@dataclass(frozen=True, slots=True)
class _Call:
    """Hold the arguments of a call: tensors, and all else as a key."""

    skeleton: Skeleton
    tensors: tuple[Tensor, ...]

    @property
    def looks(self) -> Hashable:
        firsts: dict[int, int] = {}
        return self.skeleton, tuple(
            (t.shape, t.stride(), t.dtype, t.device, firsts.setdefault(id(t), place))
            for place, t in enumerate(self.tensors)
        )

    def copied(self) -> _Call:
        """Copy into memory of its own; what was one tensor stays one."""
        copies = {id(t): _span(t).clone().as_strided(t.shape, t.stride(), 0) for t in self.tensors}
        return _Call(self.skeleton, tuple(copies[id(t)] for t in self.tensors))

    def fill(self, other: _Call) -> None:
        """Take over the values of a call that looks the same."""
        if self.tensors:
            torch._foreach_copy_(list(map(_span, self.tensors)), list(map(_span, other.tensors)))


def _span(t: Tensor) -> Tensor:
    """View all memory from the first element to the last: also of tensors with gaps or overlaps."""
    steps = zip(t.shape, t.stride(), strict=True)
    extent = 1 + sum((size - 1) * stride for size, stride in steps) if t.numel() else 0
    return t.detach().as_strided((extent,), (1,))


@dataclass(eq=False)
class _Bucket:
    """Hold calls that look alike. ``held``: what the graph points to, beside ``standing``."""

    uses: int = 0
    recording: Recording | None = None
    given: _Call | None = None
    standing: Any = None
    after: bytes = b""  # which leaves have a gradient when it is done
    leases: list[graph_keep_alive.KeptMemory] = field(default_factory=list)
    held: tuple[object, ...] = ()

    def drop(self) -> None:
        self.uses, self.recording, self.given, self.standing = 0, None, None, None
        self.leases, self.held = [], ()


class WholeStep:
    """Run a training step that ``compile_step`` has made. Each call is one micro-batch, and returns
    its loss, detached."""

    leads_nowhere = True  # to modules of a loss, which may hold the step as well

    def __init__(
        self,
        loss_fn: Callable[..., Tensor],
        updating: Updating,
        accumulate: int,
        graph: bool,
        averages: Averages | None = None,
        on_failure: Callable[[CaptureError], None] | None = None,
    ) -> None:
        """``averages`` makes what averages the gradients of leaves over ranks. ``on_failure`` gets
        why a step cannot be captured, which is then run without graphs; else that is raised."""
        self._loss_fn, self._updating, self.accumulate = loss_fn, updating, accumulate
        self._graph, self._averages, self._on_failure = graph, averages, on_failure
        self._averaged: AveragedGradients | None = None
        self._recorder: Recorder | None = None
        self._device: torch.device | None = None
        self._has_recorded = False
        self._part = 0  # micro-batches since the last update
        self._static_gradients, self._watched = StaticGradients(), WatchedModules([])
        self._buckets: OrderedDict[Hashable, _Bucket] = OrderedDict()
        self._counts = StepReport(graph)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        leaves = self._updating.leaves
        if not leaves:
            raise OptionError("no parameter of the optimizer requires a gradient")
        call = self._call_of(args, kwargs)
        is_last = self._part + 1 == self.accumulate
        self._choose_recorder(leaves[0].device)
        self._choose_averages(leaves)
        if self._recorder is None:
            loss = self._plain(partial(self._loss_fn, *args, **kwargs), leaves, is_last)
        else:
            _check_devices(call.tensors, leaves[0].device)
            with self._recorder.working():
                loss = self._serve(self._recorder, call, leaves, is_last)
        return loss

    def forget(self) -> None:
        """Drop the gradients of micro-batches since the last update."""
        self._part = 0
        for leaf in self._updating.leaves:
            leaf.grad = None

    def let_go_of_graphs(self) -> None:
        """Let go of the graphs. Later calls capture anew, if their process group is there."""
        for bucket in self._buckets.values():
            bucket.drop()

    def report(self) -> StepReport:
        """Return the counts so far."""
        if self._device is not None:
            self._counts.graph = self._recorder is not None
        self._counts.buckets = len(self._buckets)
        return self._counts

    def __repr__(self) -> str:
        optimizer = type(self._updating.optimizer).__name__
        return f"<compiled step with {optimizer}, accumulate={self.accumulate}: {self.report()}>"

    # ---- one micro-batch -----------------------------------------------------------------------

    def _micro(self, call: Callable[[], Any], leaves: Sequence[Tensor], is_last: bool) -> Tensor:
        """Run what a graph records."""
        torch.clear_autocast_cache()  # weights that were cast before the last update
        averaged = self._averaged
        is_whole = averaged is not None and self.accumulate == 1
        with (
            averaged.backward() if averaged is not None and is_whole else nullcontext(),
            recording.as_if_recorded() if self._has_recorded else nullcontext(),
        ):
            loss = self._backward(call, leaves)
        torch.clear_autocast_cache()
        if is_last:
            if averaged is not None:
                averaged.finish()
            self._updating.update()
        return loss

    def _backward(self, call: Callable[[], Any], leaves: Sequence[Tensor]) -> Tensor:
        with torch.enable_grad():
            loss = call()
            _check_loss(loss)
            share = loss if self.accumulate == 1 else loss / self.accumulate
            share = self._updating.scaled(share)
        share.backward(inputs=list(leaves))
        return loss.detach()  # type: ignore[no-any-return]

    def _plain(self, call: Callable[[], Any], leaves: Sequence[Tensor], is_last: bool) -> Tensor:
        loss = self._micro(call, leaves, is_last)
        self._counts.plain_runs += 1
        self._part = 0 if is_last else self._part + 1
        return loss

    # ---- with graphs ---------------------------------------------------------------------------

    def _serve(
        self, recorder: Recorder, call: _Call, leaves: Sequence[Tensor], is_last: bool
    ) -> Tensor:
        """Serve a call plainly, or from a graph."""
        before, around = self._static_gradients.settle(leaves), reached(self._loss_fn)
        if not self._watched.still_lists(around.modules):
            self._watched = _capturable(WatchedModules(around.modules))
        key = (call.looks, is_last, before, self._watched.modes(), _global_guards())
        bucket = self._buckets.setdefault(key, _Bucket())
        self._buckets.move_to_end(key)
        if bucket.recording is not None and bucket.given is not None:
            if bucket.standing == self._standing(leaves, before, bucket.after):
                loss = self._replay(bucket, bucket.recording, bucket.given, call, is_last)
                if before != bucket.after:
                    self._static_gradients.put(leaves, bucket.after)
                return loss
            bucket.drop()
            self._counts.stale += 1
        bucket.uses += 1
        recorder.make_ready()
        loss = self._run_kept(call, leaves, is_last)
        if bucket.uses >= WARM_UPS:
            bucket.after = self._static_gradients.settle(leaves)
            try:
                self._record(recorder, bucket, call.copied(), leaves, before, is_last, around)
            except CaptureError as error:
                if self._on_failure is None:
                    raise
                self._go_without(error)
                return loss
            bucket.standing = self._standing(leaves, before, bucket.after)
        self._trim()
        return loss

    def _go_without(self, error: CaptureError) -> None:
        assert self._on_failure is not None
        self._on_failure(error)
        self._graph, self._recorder = False, None
        self._buckets.clear()

    def _run_kept(self, call: _Call, leaves: Sequence[Tensor], is_last: bool) -> Tensor:
        with (
            graph_keep_alive.taken(),
            nullcontext() if is_last else self._static_gradients.kept(leaves),
        ):
            return self._plain(self._bound(call), leaves, is_last)

    def _bound(self, call: _Call) -> Callable[[], Any]:
        args, kwargs = rebuild(call.skeleton, call.tensors)
        return partial(self._loss_fn, *args, **kwargs)

    def _record(
        self,
        recorder: Recorder,
        bucket: _Bucket,
        given: _Call,
        leaves: Sequence[Tensor],
        before: bytes,
        is_last: bool,
        around: Reached,
    ) -> None:
        """Capture what a call like the one that has just run does."""
        kept = nullcontext() if is_last else self._static_gradients.kept(leaves)
        body = partial(self._micro, self._bound(given), leaves, is_last)
        self._static_gradients.put(leaves, before)
        try:
            with graph_keep_alive.taken() as taken, self._updating.loaded() as held, kept:
                bucket.recording = recorder.record(body, around.generators)
        except Exception as error:
            raise self._failure(recorder, error, given, leaves) from error
        finally:
            self._static_gradients.put(leaves, bucket.after)
        stepper = getattr(self._updating.optimizer, "stepper", None)
        bucket.given, bucket.leases = given, taken
        bucket.held = (*held, stepper, *leaves, *self._updating.states, self._watched)
        self._counts.captures += 1
        group_shutdowns.note_capture(self)

    def _replay(
        self, bucket: _Bucket, recorded: Recording, given: _Call, call: _Call, is_last: bool
    ) -> Tensor:
        for lease in bucket.leases:
            lease.check()
        given.fill(call)
        if is_last:
            self._updating.load()
        loss = recorded.replay()
        self._part = 0 if is_last else self._part + 1
        if is_last:
            self._updating.note_writes()
        self._counts.replays += 1
        return loss

    def _standing(
        self, leaves: Sequence[Tensor], before: bytes, after: bytes
    ) -> tuple[object, ...]:
        """Return what must be as it was at the capture."""
        homes = self._static_gradients.places(leaves, bytes(map(max, before, after)))
        own = [leaf.data_ptr() for leaf in leaves]
        places = self._watched.places()
        averaged = self._averaged.generation if self._averaged is not None else 0
        return list(map(id, leaves)), own, places, homes, self._updating.standing(), averaged

    def _trim(self) -> None:
        recorded = [b for b in self._buckets.values() if b.recording is not None]
        for bucket in recorded[:-MOST_GRAPHS]:
            bucket.drop()
        if len(self._buckets) > MOST_BUCKETS:
            self._buckets.popitem(last=False)

    def _failure(
        self, recorder: Recorder, error: Exception, given: _Call, leaves: Sequence[Tensor]
    ) -> StropError:
        """Name what a graph cannot hold."""
        waiting = (
            []
            if isinstance(error, torch.OutOfMemoryError)
            else self._culprits(recorder, given, leaves)
        )
        lines = [
            f"no CUDA graph of this step: {diagnosis.first_line(error)}",
            f"  at {diagnosis.place_of(error)}",
            *(f"  it waits for the device: {text}" for text in waiting),
            "Keep on the device what the step computes, and its sizes independent of values; or use"
            " compile_step(graph=False). The step itself has run.",
        ]
        return CaptureError("\n".join(lines))

    def _culprits(self, recorder: Recorder, given: _Call, leaves: Sequence[Tensor]) -> list[str]:
        """Run forward and backward pass once more, without their effect on gradients, and name the
        culprits."""
        grads = [leaf.grad for leaf in leaves]
        call = self._bound(given)
        try:
            with recorder.undisturbed():
                for leaf in leaves:
                    leaf.grad = None
                return diagnosis.culprits(lambda: self._backward(call, leaves))
        finally:
            for leaf, grad in zip(leaves, grads, strict=True):
                leaf.grad = grad

    def _choose_averages(self, leaves: Sequence[Tensor]) -> None:
        known = self._averaged
        if self._averages is None or (known is not None and _are_same(known.parameters, leaves)):
            return
        self._averaged = self._averages(leaves)
        self._buckets.clear()

    # ---- arguments -----------------------------------------------------------------------------

    def _choose_recorder(self, device: torch.device) -> None:
        if device == self._device:
            return
        self._device = device
        self._recorder = recording.make_recorder(device) if self._graph else None
        self._has_recorded = self._recorder is not None  # and may have none any more
        self._buckets.clear()
        if self._recorder is not None:
            self._updating.check_capturable()

    def _call_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        tensors: list[Tensor] = []
        try:
            skeleton = flatten((args, kwargs), tensors)
        except UnsupportedError as error:
            raise OptionError(
                f"compile_step: {error}; a step takes tensors, numbers, texts and containers of "
                "these. Let loss_fn close over everything else"
            ) from None
        for place, tensor in enumerate(tensors):
            if tensor.requires_grad:
                raise OptionError(
                    f"tensor {place} of the arguments requires a gradient, which its copy in a "
                    "graph would get: detach it, or let loss_fn close over it"
                )
        return _Call(skeleton, tuple(tensors))


def compile_step(
    loss_fn: Callable[..., Tensor],
    optimizer: Optimizer,
    *,
    accumulate: int = 1,
    scaler: torch.amp.GradScaler | None = None,
    graph: bool = True,
    process_group: ProcessGroup | None = None,
) -> WholeStep:
    """Compile a training step: ``step(*args)`` runs ``loss_fn(*args)``, its backward pass and the
    update.

    ``accumulate``: an update every so many calls, of gradients of loss / accumulate; all of them
    are None after it. ``graph``: replay CUDA graphs on a GPU; else, and on a CPU, the same step
    runs as it is. ``process_group``: put the mean over its ranks in the place of each gradient, as
    DistributedDataParallel does; buckets of gradients are sent while the backward pass goes on,
    and a graph holds that, too. All ranks must begin with the same weights, and call the step
    equally often. Raises OptionError for arguments that cannot be served, CaptureError where
    ``loss_fn`` waits for the device, TrainingError where ranks do not fit together.
    """
    if not callable(loss_fn):
        raise OptionError(f"loss_fn is a {type(loss_fn).__name__}: it must be a function")
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise OptionError(f"accumulate is {accumulate!r}: it must be a whole number from 1 on")
    if process_group is not None and not isinstance(process_group, ProcessGroup):
        raise OptionError(
            f"process_group is a {type(process_group).__name__}: it must be one of "
            "torch.distributed, such as torch.distributed.group.WORLD behind init_process_group"
        )
    averages = None if process_group is None else partial(averaged_over, process_group)
    return WholeStep(loss_fn, Updating(optimizer, scaler), accumulate, graph, averages)


def _are_same(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(tensors) == len(others) and all(map(is_, tensors, others))


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise OptionError(f"loss_fn gave a value {what}: a step needs one loss, such as .mean()")
    if not loss.requires_grad:
        raise OptionError(
            "the loss of loss_fn has no gradient: it was detached, or computed without a parameter "
            "that requires one"
        )


def _capturable(watched: WatchedModules) -> WatchedModules:
    if watched.has_kind(nn.parallel.DistributedDataParallel):
        raise UnsupportedError(
            "a CUDA graph cannot hold what DistributedDataParallel does on the host: give the step "
            "the module in it (ddp.module) and process_group=torch.distributed.group.WORLD; or use "
            "compile_step(graph=False)"
        )
    return watched


def _check_devices(tensors: Sequence[Tensor], device: torch.device) -> None:
    for place, tensor in enumerate(tensors):
        if tensor.device != device:
            raise OptionError(
                f"tensor {place} of the arguments is on {tensor.device} and not on {device}, where "
                "the parameters are: move it before the step, or use compile_step(graph=False)"
            )


def _global_guards() -> Hashable:
    """Return modes of torch that change what is launched."""
    kinds = ("cpu", "cuda")
    return (
        *((torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds),
        torch.is_autocast_cache_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.conv.fp32_precision,  # type: ignore[attr-defined]
        torch.backends.cuda.matmul.fp32_precision,
    )
