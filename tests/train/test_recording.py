"""How captures end, with a stand-in for as much of torch.cuda as a recorder asks for."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from strop.errors import UnsupportedError
from strop.train import recording


class Stream:
    def wait_stream(self, other: Stream) -> None: ...


class Graph:
    def __init__(self) -> None:
        self.generators: list[torch.Generator] = []

    def register_generator_state(self, generator: torch.Generator) -> None:
        self.generators.append(generator)

    def replay(self) -> None: ...


class Cuda:
    """``is_broken``: the next capture ends as one that was invalidated."""

    CUDAGraph = Graph

    def __init__(self) -> None:
        self.is_capturing, self.is_broken = False, False
        self.captures: list[Graph] = []
        self.pools: list[object] = []

    def current_stream(self, device: Any) -> Stream:
        return Stream()

    def stream(self, stream: Stream) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    device = stream

    def set_stream(self, stream: Stream) -> None: ...

    def current_device(self) -> int:
        return 0

    def is_current_stream_capturing(self) -> bool:
        return self.is_capturing

    def graph_pool_handle(self) -> object:
        return object()

    @contextlib.contextmanager
    def graph(
        self, graph: Graph, pool: object, stream: Stream, capture_error_mode: str
    ) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        self.is_capturing = True
        self.captures.append(graph)
        self.pools.append(pool)
        try:
            yield
        finally:
            self.is_capturing = False
            if self.is_broken:
                self.is_broken = False
                raise RuntimeError("operation failed due to a previous error during capture")


class Torch:
    """torch with another ``cuda``."""

    def __init__(self) -> None:
        self.cuda, self.ended = Cuda(), []
        self._C = self

    def _cuda_endAllocateToPool(self, device: int, pool: object) -> None:
        self.ended.append(pool)
        raise RuntimeError("it has ended")

    def zeros(self, *args: Any, device: Any) -> Tensor:
        return torch.zeros(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Torch:
    fake = Torch()
    monkeypatch.setattr(recording, "torch", fake)
    monkeypatch.setattr(recording, "library_workspaces", lambda device: SimpleNamespace())
    monkeypatch.setattr(recording, "own_stream", lambda owner, device: Stream())
    return fake


def body() -> Tensor:
    return torch.ones(())


def wait() -> Tensor:
    raise ValueError("it would wait")


def test_captures_share_a_pool(fake: Torch) -> None:
    recorder = recording.CudaRecorder(torch.device("cuda", 0))
    with recorder.working():
        first, second = recorder.record(body, [torch.Generator()]), recorder.record(body, ())
    assert fake.cuda.pools[0] is fake.cuda.pools[1]
    assert not fake.cuda.captures[0].generators, "one of the CPU's"
    assert first.replay() is not second.replay()


@pytest.mark.parametrize("is_broken", [False, True], ids=["left", "broken"])
def test_a_capture_that_fails(is_broken: bool, fake: Torch) -> None:
    """The error of the step comes out, not that of the capture's end; the next one is as usual."""
    recorder = recording.CudaRecorder(torch.device("cuda", 0))
    fake.cuda.is_broken = is_broken
    with recorder.working(), pytest.raises(ValueError, match="it would wait") as caught:
        recorder.record(wait, ())
    assert caught.traceback[-1].name == "wait"
    assert fake.ended == [fake.cuda.pools[0]]
    assert len(fake.cuda.captures) == 2, "one of nothing, which frees the random generator"
    with recorder.working():
        recorder.record(body, ())
    assert fake.cuda.pools[1] is fake.cuda.pools[2] is not fake.cuda.pools[0]


def test_draws_of_the_host(fake: Torch) -> None:
    recorder = recording.CudaRecorder(torch.device("cuda", 0))
    with pytest.raises(UnsupportedError, match=r"on the host: torch on the CPU, random\. A replay"):
        recorder.record(lambda: torch.rand(()) * random.random(), ())


def test_inside_of_another_capture(fake: Torch) -> None:
    recorder = recording.CudaRecorder(torch.device("cuda", 0))
    fake.cuda.is_capturing = True
    with pytest.raises(UnsupportedError, match="inside of a capture"), recorder.working():
        pass
