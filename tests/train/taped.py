"""A stand-in for CUDA graphs on a CPU: a tape of operators and kernels, with the tensors they used.

A capture leaves everything as it was and lets no kernel of ours run; a replay does all of it again
on the very same tensors and calls no Python of the step, as a graph does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from strop.ir.source import KernelSource
from strop.train import cuda_step, optimizer, recording
from strop.train.cuda_step import CudaStep
from strop.train.rules import UpdateRule
from strop.train.step import Memory
from tests.train import interpreted

# torch's schema does not say so
_WRITTEN_IN_SECRET = {
    ("aten::native_batch_norm", "running_mean"),
    ("aten::native_batch_norm", "running_var"),
}


class Tape(TorchDispatchMode):
    """Records what is done while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.actions: list[Callable[[], None]] = []
        self._before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "profiler":
            return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        schema = func._schema
        for place, argument in enumerate(schema.arguments):
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_written or (schema.name, argument.name) in _WRITTEN_IN_SECRET:
                value = args[place] if place < len(args) else kwargs[argument.name]
                self._before += [(t, t.clone()) for t in tree_leaves(value)]
        found = func(*args, **kwargs)
        if all(result.alias_info is None for result in schema.returns) or not schema.returns:
            self.actions.append(lambda: _again(func, args, kwargs, found))
        elif schema.is_mutable:
            self.actions.append(lambda: func(*args, **kwargs))
        return found

    def undo(self) -> None:
        for tensor, value in reversed(self._before):
            tensor.copy_(value)


def _again(func: Any, args: Any, kwargs: Any, found: Any) -> None:
    for old, new in zip(tree_leaves(found), tree_leaves(func(*args, **kwargs)), strict=True):
        if isinstance(old, Tensor):
            old.copy_(new)


class Recorder:
    """Tapes in the place of graphs. ``now``: the one that is on."""

    def __init__(self) -> None:
        self.now: Tape | None = None

    def make_ready(self) -> None:
        pass

    @contextmanager
    def working(self) -> Iterator[None]:
        yield

    def undisturbed(self) -> contextlib.AbstractContextManager[None]:
        return torch.random.fork_rng(devices=[])

    def record(self, body: Callable[[], Tensor], generators: Sequence[torch.Generator]) -> Played:
        states = [g.get_state() for g in generators]
        self.now = tape = Tape()
        try:
            with torch.random.fork_rng(devices=[]), tape:
                loss = body()
        finally:
            self.now = None
            with torch.no_grad():
                tape.undo()
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
        return Played(tape, loss)


class Played:
    def __init__(self, tape: Tape, loss: Tensor) -> None:
        self.tape, self.loss = tape, loss

    def replay(self) -> Tensor:
        with torch.no_grad():
            for action in self.tape.actions:
                action()
            return self.loss.clone()


class Launcher(interpreted.Launcher):
    """Runs kernels, or tapes them."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __call__(
        self, source: KernelSource, tensors: Sequence[Tensor], sizes: tuple[int, ...]
    ) -> None:
        tape, run = self._recorder.now, super().__call__
        if tape is None:
            run(source, tensors, sizes)
        else:
            tape.actions.append(lambda: run(source, tensors, sizes))


def use(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Let steps on a CPU be served as on a GPU."""
    recorder = Recorder()
    launcher = Launcher(recorder)

    def make(device: torch.device, rule: UpdateRule, memory: Memory, seed: int | None) -> CudaStep:
        return CudaStep(device, rule, memory, seed, launcher, interpreted.SMALL)

    monkeypatch.setattr(optimizer, "make_stepper", make)
    monkeypatch.setattr(recording, "can_record", lambda device: True)
    monkeypatch.setattr(recording, "make_recorder", lambda device: recorder)
    monkeypatch.setattr(cuda_step, "is_capturing", lambda device: recorder.now is not None)
    return recorder
