"""A library of GPU kernels that Triton's interpreter runs: for the runtime's own calls."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from strop.ir.device import Device
from strop.ir.source import KernelSource
from tests.gpus import H100


class Interpreted:
    """Stands where a GPU's kernels are built and bound. It knows memory by addresses alone, as a
    GPU does: what a tensor map describes, or what lies in a tensor that is ``known``."""

    def __init__(self, device: Device = H100) -> None:
        self.device = device
        self.built: list[KernelSource] = []
        self.bound: list[Bound] = []
        self.ran: list[str] = []
        self.early: list[bool] = []
        self._memory: list[Tensor] = []

    def known(self, tensor: Tensor) -> Tensor:
        """The tensor, whose memory kernels may read or write from now on."""
        storage = tensor.untyped_storage()
        self._memory.append(torch.empty(0, dtype=torch.uint8).set_(storage))
        return tensor

    def at(self, pointer: int, dtype: torch.dtype) -> Tensor:
        """All of a known tensor's memory that lies from a pointer on."""
        for memory in self._memory:
            begin = pointer - memory.data_ptr()
            if 0 <= begin < memory.numel():
                end = memory.numel() - (memory.numel() - begin) % dtype.itemsize
                return memory[begin:end].view(dtype)
        raise AssertionError("a pointer to memory that nobody gave to the kernel")

    def build(self, sources: Sequence[KernelSource]) -> None:
        self.built += sources

    def bind(
        self,
        source: KernelSource,
        pointers: Sequence[int],
        scalars: Sequence[int],
        stream: int,
        early: bool = False,
        views: Sequence[Any] = (),
    ) -> Bound:
        assert source in self.built
        self.early.append(early)
        self.bound.append(Bound(self, source, scalars, views))
        return self.bound[-1]


class Bound:
    """A kernel with its arguments."""

    def __init__(
        self,
        library: Interpreted,
        source: KernelSource,
        scalars: Sequence[int],
        views: Sequence[Any],
    ) -> None:
        self._library, self.source, self.scalars = library, source, tuple(scalars)
        self.views = list(views)
        self.pointers = [0] * len(source.params)

    def set_pointer(self, place: int, pointer: int) -> None:
        self.pointers[place] = pointer

    def __call__(self) -> None:
        from triton.tools.tensor_descriptor import TensorDescriptor

        from strop.codegen.triton_interpreter import interpret

        views, found = iter(self.views), list[Any]()
        for place, pointer in enumerate(self.pointers):
            dtype = self.source.params[place]
            if box := self.source.box(place):
                seen = described(pointer, dtype, *next(views))
                found.append(TensorDescriptor.from_tensor(seen, list(box)))
            else:
                found.append(self._library.at(pointer, dtype))
        self._library.ran.append(self.source.name)
        scalars = {f"s{place}": value for place, value in enumerate(self.scalars)}
        interpret(self.source, found, scalars)


def described(
    pointer: int, dtype: torch.dtype, sizes: Sequence[int], strides: Sequence[int]
) -> Tensor:
    """The tensor that a tensor map describes, wherever it lies."""
    assert all(sizes)
    assert all(strides)
    last = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    memory = (ctypes.c_byte * (dtype.itemsize * (last + 1))).from_address(pointer)
    return torch.frombuffer(memory, dtype=dtype).as_strided(tuple(sizes), tuple(strides))
