"""The processes that train one model together, and what they tell each other.

Each process is a rank and holds the whole model (data parallelism). What a step computes travels
with the device's backend; what the hosts agree on travels with gloo, for which no GPU waits. Every
rank has to make the same calls in the same order; one that waits in vain raises LostRanksError.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from strop.errors import OptionError, TrainingError
from strop.train.averaged_gradients import AveragedGradients
from strop.train.flat_gradients import flat_buckets
from strop.train.messages import FAILED, LostRanksError, Messages
from strop.train.places import GroupPlace
from strop.train.settings import Settings
from strop.train.sharded_gradients import ShardedGradients
from strop.train.sharded_parameters import ShardedParameters
from strop.train.stuck import Calls, GpuSteps, Pulse, Witness
from strop.wording import counted

A = TypeVar("A")
T = TypeVar("T")
_STUCK = "stuck"  # folder of the output


@dataclass(frozen=True)
class Ranks:
    """Say which of ``count`` processes this is. A process alone is rank 0 of 1, and every call
    below is its own answer. ``attempt`` counts how often a launcher has started all of them
    again."""

    rank: int = 0
    count: int = 1
    local_rank: int = 0  # on its machine
    attempt: int = 0
    channel: Channel | None = None

    @property
    def is_first(self) -> bool:
        """Tell whether this process writes and speaks for all."""
        return self.rank == 0

    def at(self, step: int) -> None:
        """Tell the others which step this rank begins, for the error of one that waits in vain."""
        if self.channel is not None:
            self.channel.at(step)

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean over ranks of a tensor on the device."""
        return value if self.channel is None else self.channel.mean(value)

    def averaged(
        self, parameters: Sequence[Tensor], narrow: torch.dtype | None = None
    ) -> AveragedGradients:
        """Return what puts the mean over ranks in the place of each gradient. Gradients in fp32
        travel in the type ``narrow``, if there is one."""
        if self.channel is None:
            return AveragedGradients(parameters, 1, lambda value, what: [value])
        return self.channel.averaged(parameters, narrow)

    def averaged_sharded(self, shards: ShardedParameters) -> AveragedGradients:
        """Return what gives each rank the mean gradients of what it steps."""
        assert self.channel is not None
        return self.channel.averaged_sharded(shards)

    def summed(self, shards: ShardedParameters) -> ShardedGradients:
        """Have gradients summed into the shares of ranks while backward passes go on."""
        assert self.channel is not None
        return self.channel.summed(shards)

    def finish(self, gradients: ShardedGradients) -> None:
        """Give each rank the mean gradients of what it steps, after the last backward pass of a
        step."""
        if self.channel is not None:
            self.channel.finish(gradients)

    def gather(self, shards: ShardedParameters) -> None:
        """Take over the weights that other ranks have stepped."""
        if self.channel is not None:
            self.channel.gather(shards)

    def most(self, number: int) -> int:
        """Return the largest of the ranks' numbers."""
        return number if self.channel is None else self.channel.most(number)

    def all_of(self, value: T) -> list[T]:
        """Return the values of all ranks, in their order."""
        return [value] if self.channel is None else self.channel.all_of(value)

    def check_same(self, what: str, value: Callable[[], Any]) -> None:
        """Raise TrainingError on all ranks unless ``value`` gives each of them the same."""
        if self.channel is not None:
            self.channel.check_same(what, value())

    def alone(self, work: Callable[[], T]) -> T | None:
        """Let rank 0 work; the others wait, however long that takes, and return None. What it
        raises ends them with a LostRanksError."""
        return work() if self.channel is None else self.channel.alone(work)

    def first(self, work: Callable[[], T]) -> T:
        """Let rank 0 work, and return what it has found on all ranks."""
        return work() if self.channel is None else self.channel.first(work)

    def together(self, work: Callable[[], T]) -> T:
        """Let all ranks work, and wait until all are done, however long that takes. What one of
        them raises ends the others with a LostRanksError."""
        return work() if self.channel is None else self.channel.together(work)

    def dealt(self, items: Sequence[A], work: Callable[[Sequence[A]], list[T]]) -> list[T]:
        """Deal items out to the ranks. ``work`` makes a result of each item that it gets; all ranks
        return the results of all items, in their order, however long that takes."""
        return work(items) if self.channel is None else self.channel.dealt(items, work)

    def talk(self, stop: threading.Event) -> Talk:
        """Begin a talk for threads, in which texts are waited for until ``stop`` is set. All ranks
        have to begin it."""
        return Talk() if self.channel is None else self.channel.talk(stop)


ALONE = Ranks()


@dataclass(frozen=True)
class Talk:
    """Exchange one text of each rank. A process alone has nobody to talk with."""

    name: str = ""
    messages: Messages | None = None
    stop: threading.Event | None = None

    @contextmanager
    def telling_failures(self) -> Iterator[None]:
        """Tell the others of an error in here, which then have a LostRanksError."""
        try:
            yield
        except BaseException as error:
            self.tell(f"{FAILED}{error or type(error).__name__}")
            raise

    def tell(self, text: str) -> None:
        """Leave the text of this rank."""
        if self.messages is not None:
            self.messages.post(self.name, text)

    def hear(self, rank: int) -> str:
        """Wait for the text of another rank, however long that takes."""
        assert self.messages is not None
        return self.messages.read(self.name, rank, self.stop)

    def hear_others(self) -> list[str]:
        """Wait for the texts of all other ranks."""
        return [] if self.messages is None else [self.hear(r) for r in self.messages.others]


@dataclass(eq=False)
class Channel:
    """Carry what the ranks of a group tell each other."""

    messages: Messages
    hosts: Any  # the group that speaks over gloo
    witness: Witness
    gpu: GpuSteps | None = None
    _has_grads: list[bool] | None = None  # of sharded parameters, in the last step
    _turns: Iterator[int] = field(default_factory=itertools.count)

    @property
    def rank(self) -> int:
        return self.messages.rank

    @property
    def count(self) -> int:
        return self.messages.count

    def at(self, step: int) -> None:
        self.messages.begin(step)
        if self.gpu is not None:
            ended = torch.cuda.Event()
            ended.record()
            self.gpu.begin(step, ended)

    def mean(self, value: Tensor) -> Tensor:
        total = value.detach().clone()
        with self._meeting("mean of losses"):
            torch.distributed.all_reduce(total)
        return total / self.count

    def averaged(
        self, parameters: Sequence[Tensor], narrow: torch.dtype | None = None
    ) -> AveragedGradients:
        lay_out = partial(flat_buckets, narrow=narrow)
        return AveragedGradients(parameters, self.count, self.all_of, self._meeting, lay_out)

    def averaged_sharded(self, shards: ShardedParameters) -> AveragedGradients:
        return AveragedGradients(
            shards.parameters, self.count, self.all_of, self._meeting, shards.buckets_of
        )

    def summed(self, shards: ShardedParameters) -> ShardedGradients:
        return ShardedGradients(
            shards,
            lambda: self._meeting("sum of gradients for their rank"),
            lambda at: int(self.all_of(at, "order of gradients")[0]),
        )

    def finish(self, gradients: ShardedGradients) -> None:
        has_grads = gradients.has_gradients
        if has_grads != self._has_grads:
            self.check_same("parameters with a gradient", has_grads)
            self._has_grads = has_grads
        gradients.finish()

    def gather(self, shards: ShardedParameters) -> None:
        with self._meeting("gathering of weights"):
            shards.gather_weights()

    def most(self, number: int) -> int:
        value = torch.tensor([number])
        with self._meeting("agreement of hosts"):
            torch.distributed.all_reduce(value, torch.distributed.ReduceOp.MAX, self.hosts)
        return int(value)

    def check_same(self, what: str, value: Any) -> None:
        found = self.all_of(value, f"comparison of {what}")
        odd = [rank for rank, other in enumerate(found) if other != found[0]]
        if odd:
            raise TrainingError(
                f"ranks do not have the same {what}: {_short(found[0])} on rank 0, "
                f"{_short(found[odd[0]])} on rank {odd[0]}; all must read the same files, with the "
                "same flags and versions"
            )

    def all_of(self, value: Any, what: str = "exchange of hosts") -> list[Any]:
        """Return the values of all ranks, in their order."""
        found: list[Any] = [None] * self.count
        with self._meeting(what):
            torch.distributed.all_gather_object(found, value, self.hosts)
        return found

    def alone(self, work: Callable[[], T]) -> T | None:
        talk = self.talk()
        with self._noted("turn of rank 0"):
            if self.rank:
                talk.hear(0)
                return None
            with talk.telling_failures():
                found = work()
            talk.tell("done")
        return found

    def first(self, work: Callable[[], T]) -> T:
        found: T = self.all_of(self.alone(work))[0]
        return found

    def together(self, work: Callable[[], T]) -> T:
        talk = self.talk()
        with self._noted("work of each rank"):
            with talk.telling_failures():
                found = work()
            talk.tell("done")
            talk.hear_others()
        return found

    def dealt(self, items: Sequence[A], work: Callable[[Sequence[A]], list[T]]) -> list[T]:
        parts = self.all_of(self.together(lambda: work(items[self.rank :: self.count])))
        return [parts[place % self.count][place // self.count] for place in range(len(items))]

    def talk(self, stop: threading.Event | None = None) -> Talk:
        return Talk(f"turn-{next(self._turns)}", self.messages, stop)

    def _noted(self, what: str) -> Any:
        return self.witness.calls.noted(what, self.messages.step)

    @contextmanager
    def _meeting(self, what: str) -> Iterator[None]:
        """Note a collective. Where it is not answered in time, have all ranks write what they
        do."""
        start = time.monotonic()
        with self._noted(what):
            try:
                with self.messages.answered():
                    yield
            except LostRanksError as error:
                if time.monotonic() - start < 0.9 * self.messages.timeout_s:
                    raise  # the others have ended
                raise LostRanksError(f"{error}; {self.witness.ask()}") from error


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


@contextmanager
def open_channel(place: GroupPlace, device: str, timeout_s: int, output: Path) -> Iterator[Ranks]:
    """Meet the group, and part from it. On "cuda" it speaks over NCCL, on "cpu" over gloo. A rank
    that waits in vain has all write what they do into ``output``. Raises LostRanksError where the
    others do not come."""
    is_on_gpu = device == "cuda"
    limit = timedelta(seconds=timeout_s)
    try:
        store = _meet(place, limit)
        torch.distributed.init_process_group(
            "nccl" if is_on_gpu else "gloo",
            store=store,
            rank=place.rank,
            world_size=place.count,
            timeout=2 * limit if is_on_gpu else limit,  # gloo is to speak first: it names ranks
        )
        hosts = torch.distributed.new_group(backend="gloo", timeout=limit) if is_on_gpu else None
    except RuntimeError as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise LostRanksError(
            f"rank {place.rank} did not find all {counted(place.count, 'process')} at "
            f"{place.address} within {timeout_s} s (--rank_timeout): {reason}"
        ) from error
    messages = Messages(place.rank, place.count, store, timeout_s)
    calls, gpu = Calls(), GpuSteps() if is_on_gpu else None
    folder = output / _STUCK
    channel = Channel(messages, hosts, Witness(messages, calls, folder), gpu)
    pulse = Pulse(Witness(messages.apart(), calls, folder), gpu)
    try:
        yield Ranks(place.rank, place.count, place.local_rank, place.attempt, channel)
        channel.together(lambda: None)
        channel.most(0)  # the store may be in a rank, which is not to end while others read there
    except BaseException as error:
        with contextlib.suppress(LostRanksError):  # nobody is there any more
            messages.post("end", f"{FAILED}{error or type(error).__name__}")
        raise
    finally:
        pulse.stop()


def _meet(place: GroupPlace, limit: timedelta) -> Any:
    """Return the store in which the group meets. That of torchrun may outlive an attempt, with all
    that was left there, so each attempt has names of its own."""
    found = rendezvous(place.address, place.rank, place.count, timeout=limit)
    store, _, _ = next(iter(found))
    store.set_timeout(limit)
    return PrefixStore(f"strop/attempt-{place.attempt}", store)


@contextmanager
def joined(settings: Settings, place: GroupPlace) -> Iterator[Ranks]:
    """Join the group that this process has a place in, and leave it together with the others.

    Raises OptionError where ``--num_processes`` says otherwise, or where a rank has no GPU.
    """
    if settings.num_processes not in (1, place.count):
        raise OptionError(
            f"--num_processes {settings.num_processes} in a group of "
            f"{counted(place.count, 'process')}: leave it out where a launcher has "
            "started the processes"
        )
    device = "cuda" if torch.cuda.is_available() and settings.device != "cpu" else "cpu"
    with group(place, device, settings.rank_timeout, settings.output) as ranks:
        yield ranks


@contextmanager
def group(place: GroupPlace, device: str, timeout_s: int, output: Path) -> Iterator[Ranks]:
    """Join the group on GPUs ("cuda") or "cpu", and leave it together with the others. A rank that
    is stuck leaves its stacks in ``output``."""
    if place.count == 1:
        yield Ranks(attempt=place.attempt)
        return
    if device == "cuda":  # a launcher may show each process one GPU alone, or all of them
        torch.cuda.set_device(place.local_rank % torch.cuda.device_count())
    with open_channel(place, device, timeout_s, output) as ranks:
        if device == "cuda" and ranks.channel is not None:
            properties = torch.cuda.get_device_properties(torch.cuda.current_device())
            check_apart(ranks.channel.all_of(str(properties.uuid)))
        yield ranks
    torch.distributed.destroy_process_group()


def check_apart(gpus: Sequence[str]) -> None:
    """Raise OptionError where two ranks have the same GPU, which NCCL cannot serve."""
    for rank, gpu in enumerate(gpus):
        if gpu in gpus[:rank]:
            raise OptionError(
                f"ranks {gpus.index(gpu)} and {rank} have the same GPU: start one process for each "
                "GPU of a machine, or train with --device cpu"
            )
