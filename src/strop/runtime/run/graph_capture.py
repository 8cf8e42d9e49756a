"""Capture CUDA graphs of one GPU, on a stream of their own and in one pool of memory."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import TypeVar
from weakref import WeakSet

import torch

from strop.ir.exchange import rehearsed
from strop.runtime.run.library_workspaces import library_workspaces
from strop.runtime.run.own_streams import own_stream

T = TypeVar("T")
_KERNEL_NODE = 0  # CUgraphNodeType


class NoGraphError(Exception):
    """A call cannot be replayed from a CUDA graph; the message says why."""


class GraphCapture:
    """This captures graphs that are replayed one at a time: they share what they need while they
    run."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.renew_pool()
        self.stream = own_stream(self, device)
        self.libraries = library_workspaces(device)
        with torch.inference_mode(False):
            self._one = torch.zeros(1, device=device)  # for captures that need no memory

    def renew_pool(self) -> None:
        """Let graphs from here on have memory of their own."""
        self._pool = torch.cuda.graph_pool_handle()
        self._of_pool = WeakSet[torch.cuda.CUDAGraph]()  # those that live

    def rehearse(self, run: Callable[[], object]) -> None:
        """Let libraries choose algorithms outside of the capture, as if nothing had been drawn. The
        stream of captures is current."""
        generator = torch.cuda.default_generators[self._device.index]
        state = generator.get_state()
        with rehearsed():
            run()
        generator.set_state(state)

    def recorded(self, run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T, int]:
        """Return a graph that is ready to be replayed, what ``run`` gave, and how many kernels the
        graph has. torch gives nothing back amid a capture of what it keeps for later: where memory
        runs out, it does so now, and all is captured again."""
        try:
            graph, results = self._record(run)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            graph, results = self._record(run)
        num_kernels = _count_kernels(graph)
        graph.instantiate()
        return graph, results, num_kernels

    def replayable(self, run: Callable[[], object]) -> Callable[[], None]:
        return self.recorded(run)[0].replay

    def _record(self, run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        try:
            with self._capturing(graph):
                results = run()
        except RuntimeError as error:
            with contextlib.suppress(RuntimeError):  # torch has done so unless the capture broke
                torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
            self.renew_pool()
            if not isinstance(error, torch.OutOfMemoryError):
                self._capture_nothing()
            if _is_out_of_memory(error):  # or torch reports what came of that: a broken capture
                raise torch.OutOfMemoryError("for a CUDA graph") from error
            raise NoGraphError(f"the capture failed: {str(error).partition(chr(10))[0]}") from error
        return graph, results

    @contextlib.contextmanager
    def _capturing(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Capture what is launched meanwhile. torch.cuda.graph does so as well, but first waits for
        the GPU and gives back all memory that torch keeps for later, pinned memory too, which the
        steps behind it then have to allocate anew. As nobody gives it back, torch still knows a
        pool whose graphs are all gone, and takes no more into it: others are in another one."""
        if not self._of_pool:
            self.renew_pool()
        self._of_pool.add(graph)
        with torch.cuda.stream(self.stream):
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                yield
            finally:
                graph.capture_end()

    def _capture_nothing(self) -> None:
        """Capture as good as nothing. A capture that breaks leaves torch's random generator in it;
        one that works ends that."""
        with self._capturing(torch.cuda.CUDAGraph()):
            self._one.zero_()


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Say whether the error, or what it came from, is that memory ran out."""
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__ or error.__context__
    return error is not None


def _count_kernels(graph: torch.cuda.CUDAGraph) -> int:
    """Count the kernel nodes of a captured graph, asked of the driver."""
    cuda = ctypes.CDLL("libcuda.so.1")
    handle, count = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t()
    cuda.cuGraphGetNodes(handle, None, ctypes.byref(count))
    nodes = (ctypes.c_void_p * count.value)()
    cuda.cuGraphGetNodes(handle, nodes, ctypes.byref(count))
    kind, total = ctypes.c_int(), 0
    for node in nodes:
        cuda.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind))
        total += kind.value == _KERNEL_NODE
    return total
