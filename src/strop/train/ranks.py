"""The processes that train one model together, and what they tell each other.

Each process is a rank and holds the whole model (data parallelism). What a step computes travels
with the device's backend; what the hosts agree on travels with gloo, for which no GPU waits. Every
rank has to make the same calls in the same order; one that waits in vain raises LostRanksError.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor

from strop.errors import OptionError, StropError, TrainingError
from strop.train.flat_gradients import FlatGradients
from strop.train.places import GroupPlace
from strop.train.settings import Settings
from strop.train.sharded_parameters import ShardedParameters
from strop.wording import counted

T = TypeVar("T")
_POLL_S = 0.05


class LostRanksError(TrainingError):
    """This rank cannot go on, as others have failed or do not answer."""


@dataclass(frozen=True)
class Ranks:
    """Say which of ``count`` processes this is. A process alone is rank 0 of 1, and every call
    below is its own answer."""

    rank: int = 0
    count: int = 1
    local_rank: int = 0  # on its machine
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

    def average(self, parameters: Sequence[Tensor]) -> None:
        """Put the mean over ranks in the place of each gradient."""
        if self.channel is not None:
            self.channel.average(parameters)

    def average_sharded(self, shards: ShardedParameters) -> None:
        """Give each rank the mean gradients of what it steps."""
        if self.channel is not None:
            self.channel.average_sharded(shards)

    def gather(self, shards: ShardedParameters) -> None:
        """Take over the weights that other ranks have stepped."""
        if self.channel is not None:
            self.channel.gather(shards)

    def collected(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of all ranks by name, on rank 0 and in the host's memory; nothing on
        the other ranks."""
        return tensors if self.channel is None else self.channel.collected(tensors)

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
        """Let all ranks work, rank 0 before the others, which find what it has written."""
        found = self.alone(work)
        return found if self.is_first else work()  # type: ignore[return-value]


ALONE = Ranks()


@dataclass(eq=False)
class Channel:
    """Carry what the ranks of a group tell each other."""

    rank: int
    count: int
    store: Any  # torch.distributed.Store: small texts by name
    hosts: Any  # the group that speaks over gloo
    timeout_s: int
    _flat: FlatGradients | None = None
    _has_grads: list[bool] | None = None  # of sharded parameters, in the last step
    _turns: Iterator[int] = field(default_factory=itertools.count)
    _step: int = 0

    def at(self, step: int) -> None:
        self._step = step
        with self._waiting():
            self.store.set(f"strop/at/{self.rank}", str(step))

    def mean(self, value: Tensor) -> Tensor:
        total = value.detach().clone()
        with self._waiting():
            torch.distributed.all_reduce(total)
        return total / self.count

    def average(self, parameters: Sequence[Tensor]) -> None:
        active = [p for p in parameters if p.grad is not None]
        if self._flat is None or not self._flat.fits(active):
            has_grads = [p.grad is not None for p in parameters]
            self.check_same("parameters with a gradient", has_grads)
            self._flat = FlatGradients(active)
        with self._waiting():
            self._flat.average(self.count)

    def average_sharded(self, shards: ShardedParameters) -> None:
        has_grads = shards.has_gradients
        if has_grads != self._has_grads:
            self.check_same("parameters with a gradient", has_grads)
            self._has_grads = has_grads
        with self._waiting():
            shards.average_gradients()

    def gather(self, shards: ShardedParameters) -> None:
        with self._waiting():
            shards.gather_weights()

    def collected(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        looks = self.all_of([(name, t.shape, t.dtype) for name, t in tensors.items()])
        if self.rank:
            with self._waiting():
                for tensor in tensors.values():
                    torch.distributed.send(_as_bytes(tensor.detach().cpu()), 0, self.hosts)
            return {}
        found = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
        for rank in range(1, self.count):
            for name, shape, dtype in looks[rank]:
                found[name] = torch.empty(shape, dtype=dtype)
                with self._waiting():
                    torch.distributed.recv(_as_bytes(found[name]), rank, self.hosts)
        return found

    def most(self, number: int) -> int:
        value = torch.tensor([number])
        with self._waiting():
            torch.distributed.all_reduce(value, torch.distributed.ReduceOp.MAX, self.hosts)
        return int(value)

    def check_same(self, what: str, value: Any) -> None:
        found = self.all_of(value)
        odd = [rank for rank, other in enumerate(found) if other != found[0]]
        if odd:
            raise TrainingError(
                f"ranks do not have the same {what}: {_short(found[0])} on rank 0, "
                f"{_short(found[odd[0]])} on rank {odd[0]}; all must read the same files, with the "
                "same flags and versions"
            )

    def all_of(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in their order."""
        found: list[Any] = [None] * self.count
        with self._waiting():
            torch.distributed.all_gather_object(found, value, self.hosts)
        return found

    def alone(self, work: Callable[[], T]) -> T | None:
        name = f"strop/turn/{next(self._turns)}"
        if self.rank:
            self._await(name)
            return None
        try:
            found = work()
        except BaseException as error:
            with self._waiting():
                self.store.set(name, f"failed: {error or type(error).__name__}")
            raise
        with self._waiting():
            self.store.set(name, "done")
        return found

    def _await(self, name: str) -> None:
        """Wait without a limit: to draw pictures or fill a cache may take hours. The store ends
        with the process that serves it, and then this raises."""
        while True:
            with self._waiting():
                if self.store.check([name]):
                    outcome = self.store.get(name).decode()
                    break
            time.sleep(_POLL_S)
        if outcome != "done":
            raise LostRanksError(f"rank 0 {outcome}")

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Say who waited, in which step, and for whom, where others do not answer."""
        try:
            yield
        except (StropError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:  # DistError and its kinds among them
            reason = str(error).strip().split("\n", 1)[0]
            raise LostRanksError(
                f"rank {self.rank} of {self.count} got no answer from the others in step "
                f"{self._step} (--rank_timeout {self.timeout_s}): {self._others()}; {reason}"
            ) from error

    def _others(self) -> str:
        """Return where the other ranks were last seen."""
        try:
            seen = [
                f"rank {rank} began step {self.store.get(name).decode()}"
                if self.store.check([name := f"strop/at/{rank}"])
                else f"rank {rank} began no step"
                for rank in range(self.count)
                if rank != self.rank
            ]
        except RuntimeError:  # the store has ended with its process
            return "their store is gone"
        return ", ".join(seen)


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor as bytes, which travel whatever its type is."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def open_channel(place: GroupPlace, device: str, timeout_s: int) -> Ranks:
    """Meet the group. On "cuda" it speaks over NCCL, on "cpu" over gloo. Raises LostRanksError
    where the others do not come."""
    is_on_gpu = device == "cuda"
    limit = timedelta(seconds=timeout_s)
    try:
        torch.distributed.init_process_group(
            "nccl" if is_on_gpu else "gloo",
            init_method=place.address,
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
    store = torch.distributed.distributed_c10d._get_default_store()
    channel = Channel(place.rank, place.count, store, hosts, timeout_s)
    return Ranks(place.rank, place.count, place.local_rank, channel)


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
    with group(place, device, settings.rank_timeout) as ranks:
        yield ranks


@contextmanager
def group(place: GroupPlace, device: str, timeout_s: int) -> Iterator[Ranks]:
    """Join the group on GPUs ("cuda") or "cpu", and leave it together with the others."""
    if place.count == 1:
        yield ALONE
        return
    if device == "cuda":  # a launcher may show each process one GPU alone, or all of them
        torch.cuda.set_device(place.local_rank % torch.cuda.device_count())
    ranks = open_channel(place, device, timeout_s)
    if device == "cuda" and ranks.channel is not None:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        check_apart(ranks.channel.all_of(str(properties.uuid)))
    yield ranks
    ranks.most(0)  # the store may be in one of the processes, which is not to end before the others
    torch.distributed.destroy_process_group()


def check_apart(gpus: Sequence[str]) -> None:
    """Raise OptionError where two ranks have the same GPU, which NCCL cannot serve."""
    for rank, gpu in enumerate(gpus):
        if gpu in gpus[:rank]:
            raise OptionError(
                f"ranks {gpus.index(gpu)} and {rank} have the same GPU: start one process for each "
                "GPU of a machine, or train with --device cpu"
            )
