"""The GPU's way of doing a step, on CPU tensors: kernels run in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from strop.codegen.triton_interpreter import interpret
from strop.ir.source import KernelSource
from strop.train import optimizer
from strop.train.cuda_step import CudaStep
from strop.train.rules import UpdateRule
from strop.train.sources import Tuning, Tunings
from strop.train.step import Memory

SMALL = Tunings(Tuning(256, 128, 1), Tuning(256, 128, 1))  # so that small tensors have many blocks


class Launcher:
    """Runs a kernel at once, program after program."""

    def __init__(self) -> None:
        self.launches: list[str] = []
        self._prepared: set[KernelSource] = set()

    def prepare(self, wanted: Sequence[KernelSource]) -> None:
        self._prepared.update(wanted)

    def __call__(
        self, source: KernelSource, tensors: Sequence[Tensor], sizes: tuple[int, ...]
    ) -> None:
        assert source in self._prepared or source.name == "settle", "would be compiled one by one"
        self.launches.append(source.name)
        interpret(source, tensors, {f"s{i}": size for i, size in enumerate(sizes)})


def use(monkeypatch: pytest.MonkeyPatch) -> Launcher:
    """Let optimizers of CPU tensors step as on a GPU."""
    launcher = Launcher()

    def make(device: torch.device, rule: UpdateRule, memory: Memory, seed: int | None) -> CudaStep:
        return CudaStep(device, rule, memory, seed, launcher, SMALL)

    monkeypatch.setattr(optimizer, "make_stepper", make)
    return launcher
