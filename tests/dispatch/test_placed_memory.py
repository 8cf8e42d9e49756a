"""Weights that lie as programs want them take no memory beside the weights, and little while they
are put there."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from functools import cache, partial
from operator import is_
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import strop
from strop import passes
from strop.api import dispatchers_of
from strop.bench import timer
from strop.bench.infer_rows import MODELS
from strop.bench.models import made_on
from strop.bench.transformer_models import FLUX, _flux_inputs
from strop.debug.report import ComponentRow
from strop.dispatch import placed_weights
from strop.dispatch.derived_inputs import MERGED
from strop.ir.program import InputSpec
from strop.options import Options
from strop.runtime.run.layouts import bytes_of
from tests.e2e import tiny
from tests.fusion.full_width import planned
from tests.peak_memory import largest_at_peak, recorded

CPU = torch.device("cpu")
SMALL_SHARE = 0.02  # of the weights
WIDTH, BLOCKS = 64, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.q(x) * self.k(x).tanh() + self.v(x)


def blocks() -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(BLOCKS))).eval().requires_grad_(False)


def peak_of(work: Callable[[], Any]) -> tuple[int, int]:
    """Return the most memory that torch had allocated for this on a CPU, and what is left of it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        kept = work()
    events: Any = found.profiler.kineto_results.events()
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    del kept
    return most, now


def first_call(folder: Path) -> nn.Module:
    module = strop.optimize(blocks(), options=tiny.options(cache_dir=str(folder)))
    with torch.no_grad():
        module(torch.ones(1, WIDTH))
    return module


def test_weights_are_put_in_place_layer_by_layer(tmp_path: Path) -> None:
    """There are never more than all weights and one piece. A second place that keeps what the
    Parameters have left would be seen: it is twice the weights."""
    first_call(tmp_path)  # kernels are there
    weights_bytes = bytes_of(blocks().parameters())
    plain = peak_of(blocks)
    assert plain == (weights_bytes, weights_bytes)
    most, left = peak_of(lambda: first_call(tmp_path))
    a_block, values = weights_bytes // BLOCKS, 64 * WIDTH * 4
    assert most <= weights_bytes + a_block + values
    assert left <= weights_bytes + values


class Leaving:
    """A weight on a GPU, as far as it is looked at."""

    nbytes, is_cuda, device = 100, True, torch.device("cuda", 0)

    def __init__(self, readers: list[Any]) -> None:
        self._readers = readers

    def detach(self) -> Leaving:
        return self

    def record_stream(self, stream: Any) -> None:
        self._readers.append(stream)


def test_the_device_gets_back_what_weights_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would keep it in blocks in which no piece has room."""
    emptied, readers = list[int](), list[Any]()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "this one")
    monkeypatch.setattr(placed_weights, "MOST_LEFT_BYTES", 250)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(number))
    is_capturing = list[bool]()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(is_capturing))
    left, number = placed_weights.LeftMemory(), 0
    for number in range(16):
        left.note(Leaving(readers))  # type: ignore[arg-type]
        if number == 7:
            is_capturing.append(True)
    assert emptied == [3, 6], "nobody can while a graph is captured"
    assert readers == ["this one"] * 8


class Modulations(nn.Module):
    """Layers of one input, as those of all blocks of Flux.1."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x).sin() for layer in self.layers])


def scaled(module: nn.Module) -> None:
    for weight in module.parameters():
        weight.mul_(1.5)


def loaded(module: nn.Module) -> None:
    state = {name: value * 0.5 for name, value in module.state_dict().items()}
    module.load_state_dict(state, assign=True)


def moved(module: nn.Module) -> None:
    module.double().float()


@torch.no_grad()
def test_weights_of_one_input_may_lie_in_several_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = vars(sys.modules[passes.dot_merge.__module__])
    monkeypatch.setitem(names, "MOST_BYTES", 3 * WIDTH * WIDTH * 4)
    eager = Modulations().eval().requires_grad_(False)
    fast = copy.deepcopy(eager)
    strop.optimize(fast, options=tiny.options(cache_dir=str(tmp_path), strict=True))
    x, parameters = torch.randn(5, WIDTH), [*fast.parameters()]
    for change in (None, scaled, loaded, moved):
        for module in (eager, fast) if change else ():
            change(module)
        torch.testing.assert_close(fast(x), eager(x))
        merged = strop.explain(fast).components[0].derived_of(MERGED)
        assert merged is not None
        assert (merged.count, merged.beside_bytes) == (2 * 3, 0)  # weights and biases: 3, 3 and 2
        if change is not loaded:
            assert all(map(is_, fast.parameters(), parameters))
        parameters = [*fast.parameters()]
        assert all(w.untyped_storage().nbytes() == w.nbytes for w in parameters)


# models


@cache
def optimised(name: str) -> tuple[nn.Module, ComponentRow]:
    workload = MODELS[name].tiny(0)(CPU, torch.float32)
    strop.optimize(workload.target, options=tiny.options())
    given = workload.inputs(MODELS[name].tiny_size or (64, 64), 1)
    with torch.no_grad():
        workload.call(workload.target, given)
    (row,) = strop.explain(workload.target).components
    assert not row.num_eager_calls
    return workload.target, row


NAMES = ("flux", "wan", "sd3-medium", "qwen-image", "t5-large", "vit-l")


@pytest.mark.parametrize("name", NAMES)
def test_derived_inputs_lie_where_weights_do(name: str) -> None:
    module, row = optimised(name)
    merged = row.derived_of(MERGED)
    assert merged is not None
    assert merged.shared_bytes == merged.size_bytes > 0
    assert row.beside_bytes <= SMALL_SHARE * row.weights_bytes
    (dispatcher,) = dispatchers_of(module).values()
    read = [t for e in dispatcher.shapes.entries for t in e.placed or () if t is not None]
    assert len(read) > len(dispatcher.state.tensors)
    assert bytes_of([*dispatcher.state.tensors, *read]) == row.weights_bytes
    attributes = [value for part in module.modules() for value in vars(part).values()]
    tables = [value for value in attributes if isinstance(value, Tensor)]  # of Qwen-Image
    own = [*module.parameters(), *module.buffers(), *tables]
    assert bytes_of([*own, *read]) <= (1 + SMALL_SHARE) * bytes_of(own)


def _bytes(spec: InputSpec) -> int:
    sizes = [size.value for size in spec.shape]
    return torch.Size(sizes).numel() * spec.dtype.itemsize


@pytest.mark.parametrize("name", ["flux", "wan", "sd3", "sd35", "qwen", "vit", "t5"])
def test_pieces_have_the_size_of_their_parts(name: str) -> None:
    """This is so at full width, in the programs for a GPU."""
    inputs = [spec for spec in planned(name).program.inputs if spec.is_state]
    weights = [spec for spec in inputs if not spec.merged]
    pieces = [spec for spec in inputs if spec.merged]
    parts = [_bytes(inputs[n]) for spec in pieces for n in spec.merged]
    assert sum(map(_bytes, pieces)) - sum(parts) <= SMALL_SHARE * sum(map(_bytes, weights))
    assert len({n for spec in pieces for n in spec.merged}) == len(parts), "each lies in one piece"
    assert all(_bytes(spec) <= 320 << 20 for spec in pieces)


def test_the_largest_pieces_of_a_peak_are_told() -> None:
    def event(action: str, address: int, size: int) -> dict[str, Any]:
        return {"action": action, "addr": address, "size": size * 1_000_000, "frames": []}

    given = [("alloc", 1, 5), ("alloc", 2, 7), ("free_requested", 1, 5), ("alloc", 3, 1)]
    given += [("free_completed", 1, 5), ("alloc", 1, 4), ("free_requested", 2, 7)]
    found = largest_at_peak([event(*each) for each in given])
    marked = "5.0 MB (freed, and waits for a stream)"
    assert [line.strip() for line in found] == ["13.0 MB in all", "7.0 MB", marked, "1.0 MB"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_transformer_takes_no_more_memory_than_eager(tmp_path: Path) -> None:
    """Two blocks of Flux.1 at full width, from the first call to the replay of a CUDA graph."""
    from diffusers import FluxTransformer2DModel

    gpu, dtype = torch.device("cuda", torch.cuda.current_device()), torch.bfloat16
    with made_on(gpu, dtype):
        model = FluxTransformer2DModel(**FLUX, num_layers=1, num_single_layers=1).eval()
    given = _flux_inputs(model.requires_grad_(False), (1024, 1024), 1, gpu, dtype)

    def three_calls() -> None:
        for _ in range(3):
            with torch.no_grad():
                model(**given, return_dict=False)

    three_calls()  # libraries have their memory
    _, eager = timer.with_peak(three_calls, gpu)
    strop.optimize(model, options=Options(cache_dir=str(tmp_path)))
    largest, ours = timer.with_peak(partial(recorded, three_calls, gpu), gpu)
    counters = model.forward.counters
    assert (counters.eager_calls, counters.replays) == (0, 2)
    assert ours is not None
    assert eager is not None
    assert ours <= eager, "\n".join([f"{ours / 1e6:.1f} MB for {eager / 1e6:.1f}", *largest])
    (row,) = strop.explain(model).components
    assert row.beside_bytes <= SMALL_SHARE * row.weights_bytes
