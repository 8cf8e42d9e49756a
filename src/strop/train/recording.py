"""Records a step as a CUDA graph, on one stream and in one pool of memory for all of its graphs.

Replays follow each other on that stream, so graphs share what they need while they run. What has
to outlive a graph is allocated outside of captures, or kept by whoever holds the recording.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from strop.dispatch.gc_pause import collection_paused
from strop.errors import UnsupportedError
from strop.runtime.run.library_workspaces import library_workspaces
from strop.runtime.run.own_streams import own_stream

_ASKED = "is_cuda_stream_capturing"  # what transformers asks
Body = Callable[[], Tensor]


class Recording(Protocol):
    """Hold a step that can be done again."""

    def replay(self) -> Tensor:
        """Do it; gives its loss, in memory that the next replay leaves alone."""
        ...


class Recorder(Protocol):
    """Record in a device's way."""

    def working(self) -> contextlib.AbstractContextManager[None]:
        """Run everything in here in order with what the caller does before and after."""
        ...

    def make_ready(self) -> None:
        """Make ready for a step that is run, and may then be recorded. To be called while
        ``working``."""
        ...

    def record(self, body: Body, generators: Sequence[torch.Generator]) -> Recording:
        """Record what the body does to the device, which it does not do now. Raises what it
        raises."""
        ...

    def undisturbed(self) -> contextlib.AbstractContextManager[None]:
        """Draw random numbers in here such that they are drawn again afterwards."""
        ...


@dataclass(frozen=True, slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    loss: Tensor

    def replay(self) -> Tensor:
        self.graph.replay()
        return self.loss.clone()


class CudaRecorder:
    """Records CUDA graphs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = own_stream(self, device)
        self._libraries = library_workspaces(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._one = torch.zeros(1, device=device)

    @contextmanager
    def working(self) -> Iterator[None]:
        if torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                "a step that records its own CUDA graphs was called inside of a capture; use "
                "compile_step(graph=False) there"
            )
        outer = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outer)
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                yield
        finally:
            outer.wait_stream(self._stream)

    def make_ready(self) -> None:
        self._libraries.hold_for_training()

    def record(self, body: Body, generators: Sequence[torch.Generator]) -> Recording:
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            if generator.device.type == "cuda":
                graph.register_generator_state(generator)
        failure: BaseException | None = None
        before = _host_draws()
        try:
            # other threads of the program may allocate pinned memory meanwhile
            with (
                collection_paused(),
                torch.cuda.graph(
                    graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
                ),
            ):
                try:
                    loss = body()
                except BaseException as error:
                    failure = error
                    raise
        except Exception as error:
            self._recover()
            raise failure or error from None
        moved = [name for name, state in _host_draws().items() if state != before[name]]
        if moved:
            raise UnsupportedError(
                f"the step draws random numbers on the host: {', '.join(moved)}. A replay would "
                "use these again; draw on the device, or hand them to the step"
            )
        return _Graph(graph, loss)

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        with torch.random.fork_rng(devices=[self._device]):
            yield

    def _recover(self) -> None:
        """Recover from a capture that broke: end its claim to the pool, and take torch's random
        generator out of it, which a capture that works does."""
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(self._index, self._pool)
        self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.set_stream(self._stream)  # torch leaves the context before it resets that
        with torch.cuda.graph(
            torch.cuda.CUDAGraph(),
            pool=self._pool,
            stream=self._stream,
            capture_error_mode="thread_local",
        ):
            self._one.zero_()

    @property
    def _index(self) -> int:
        index = self._device.index
        return torch.cuda.current_device() if index is None else index


@contextmanager
def as_if_recorded() -> Iterator[None]:
    """Have transformers compute in here what it computes inside of a capture, so that a step has
    the bits of its replays: while torch captures, it makes a mask of attention where else it says
    that attention is causal, which another kernel computes."""
    library: Any = sys.modules.get("transformers.utils.import_utils")
    usual = getattr(library, _ASKED, None)
    if usual is None:  # it is not loaded, or does not ask
        yield
        return
    setattr(library, _ASKED, lambda: True)
    try:
        yield
    finally:
        setattr(library, _ASKED, usual)


def _host_draws() -> dict[str, object]:
    """Return states of the generators that no graph knows."""
    return {
        "torch on the CPU": bytes(torch.get_rng_state().numpy()),
        "random": random.getstate(),
        "numpy": repr(np.random.get_state()),
    }


def can_record(device: torch.device) -> bool:
    """Tell whether steps can be recorded; else they are run as they are."""
    return device.type == "cuda"


def make_recorder(device: torch.device) -> Recorder | None:
    """Make a recorder; None where there can be none."""
    return CudaRecorder(device) if can_record(device) else None
