"""Each kind of derived input is made anew when a source of it changes, in whatever way, and at no
other time."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.models.embeddings import get_timestep_embedding
from torch import Tensor, nn
from torch.nn import functional as F

import strop
from strop import passes
from strop.api import optimize_module
from strop.dispatch import effective_weights
from strop.dispatch.adapter import Adapter
from strop.dispatch.derived_inputs import (
    CODED,
    EFFECTIVE,
    HOISTED,
    KINDS,
    LOW_RANK,
    MERGED,
    PACKED,
    PADDED,
    TIMETABLE,
    DerivedInput,
)
from strop.dispatch.known_settings import KnownSettings
from strop.dispatch.signature import Skeleton
from strop.dispatch.weight_sums import WeightSum
from strop.ir.eight_bit import eight_bit_linear
from strop.passes import eight_bit_rules
from strop.runtime.derived.known_values import KnownValues
from strop.runtime.derived.sources import KnownMemory, KnownWrites, SourceWatch
from strop.runtime.loop.denoise_loop import DenoiseLoop
from tests.dispatch.packing import packing_everything
from tests.dispatch.test_low_rank import add, layers
from tests.e2e import tiny

STEPS, WIDTH, NUM_WORDS = 6, 16, 13
TARGETS = ["q", "k", "v", "time"]


@pytest.fixture(autouse=True)
def _pads_small_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pad weights on a CPU too, in fp32 and of few columns."""
    monkeypatch.delitem(passes.ONLY_ON, "aligned_linear")
    names = vars(sys.modules[passes.aligned_linear.__module__])
    for name, value in {"HALVES": (torch.float32,), "LEAST_COLUMNS": 1, "LEAST_DEPTH": 1}.items():
        monkeypatch.setitem(names, name, value)


@pytest.fixture(autouse=True)
def _packs_small_weights(request: pytest.FixtureRequest) -> Iterator[None]:
    of_cpu = getattr(request.node, "callspec", None)
    with packing_everything() if of_cpu and of_cpu.params.get("kind") == PACKED else nullcontext():
        yield


@pytest.fixture(autouse=True)
def _codes_small_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eight_bit_rules, "LEAST_WIDTH", 1)


class Door(Adapter):
    def steady(self, skeleton: Skeleton) -> tuple[int, ...]:
        return (2,)

    def timestep(self, skeleton: Skeleton) -> int | None:
        return 1


class Words(nn.Module):
    """Pixels that meet the words of a prompt at some time: every kind of derived input."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.time = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, t: Tensor, p: Tensor) -> Tensor:
        when = self.time(get_timestep_embedding(t, WIDTH))
        return self.q(x) * F.silu(when) + self.k(p) * self.v(p).tanh()


class Scored(Words):
    """Words with a score for each of a vocabulary, by the table that they are looked up in."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(NUM_WORDS, WIDTH), nn.Linear(WIDTH, NUM_WORDS)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor, t: Tensor, p: Tensor) -> Tensor:
        return self.head(super().forward(x, t, p) + self.table(t.long())).tanh()


class Inner(Words):
    """Two layers between others, so that they may be computed in 8 bits."""

    def forward(self, x: Tensor, t: Tensor, p: Tensor) -> Tensor:
        when = self.time(get_timestep_embedding(t, WIDTH))
        pixels = (self.q(x) * F.silu(when))[:, None] * torch.linspace(1, 2, 3, device=x.device)[
            :, None
        ]
        return (self.k(pixels) * self.v(pixels).tanh()) @ p[..., None]


class ByRule(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return eight_bit_linear(x, self.weight, self.bias, "int8")


class Drawing:
    """A module, all arguments of a denoise loop, and what has come of them."""

    def __init__(self, module: Any, loop: DenoiseLoop, device: str) -> None:
        self.module, self.loop = module, loop
        g = torch.Generator().manual_seed(3)
        self.x, self.prompt = torch.randn(2, 2, WIDTH, generator=g).to(device)
        self.times = torch.linspace(6, 1, STEPS, device=device)

    @torch.no_grad()
    def draw(self, change: Callable[[Any], None] | None = None) -> Tensor:
        """Run a loop, in the middle of which something changes."""
        results = []
        self.loop.begin(self.times)
        for step in range(STEPS):
            if step == STEPS // 2 and change is not None:
                change(self)
            t = self.times[step].expand(2)
            results.append(self.module(self.x, t, self.prompt))
        self.loop.end()
        return torch.stack(results)

    def row(self, kind: str) -> DerivedInput:
        (component,) = strop.explain(self.module).components
        found = component.derived_of(kind)
        assert found is not None
        return found


Change = Callable[[Drawing], None]
OPTIONS: dict[str, dict[str, Any]] = {
    MERGED: {},
    PADDED: {},
    PACKED: {},
    CODED: {"numerics": ("int8",)},
    EFFECTIVE: {"lora": "merged"},
    LOW_RANK: {"lora": "unmerged"},
    HOISTED: {},
    TIMETABLE: {},
}


def drawings(kind: str, folder: Path, device: str = "cpu") -> tuple[Drawing, Drawing]:
    torch.manual_seed(0)
    made = {PADDED: Scored, CODED: Inner}.get(kind, Words)()
    eager: Any = made.to(device).eval().requires_grad_(False)
    if kind in (EFFECTIVE, LOW_RANK):
        add(eager, target_modules=TARGETS)
        add(eager, "b", rank=3, seed=2, target_modules=TARGETS)
    fast, loop = copy.deepcopy(eager), DenoiseLoop()
    if kind == CODED:
        for name in ("k", "v"):
            getattr(eager, name).__class__ = ByRule
    options = tiny.options(cache_dir=str(folder), hoist=True, strict=True, **OPTIONS[kind])
    optimize_module(fast, options, adapter=Door(), loop=loop)
    return Drawing(eager, DenoiseLoop(), device), Drawing(fast, loop, device)


# Ways to change weights


def to_weights(change: Callable[[nn.Module], Any]) -> Change:
    return lambda drawing: change(drawing.module)


def to_each(change: Callable[[Tensor], Any]) -> Change:
    def apply(drawing: Drawing) -> None:
        with torch.no_grad():
            for own in drawing.module.parameters():
                change(own)

    return apply


def other_state(module: nn.Module) -> dict[str, Tensor]:
    return {name: value * 0.7 for name, value in module.state_dict().items()}


def replaced(module: nn.Module) -> None:
    """Put other Parameters in the places of all, factors of adapters among them."""
    for part in module.modules():
        for name, own in list(part.named_parameters(recurse=False)):
            setattr(part, name, nn.Parameter(own.detach() * 1.3, requires_grad=False))


def moved(own: Tensor) -> None:
    own.data = own.data * 1.1


COUNTED: dict[str, Change] = {
    "written": to_each(lambda own: own.mul_(-1.2)),
    "load_state_dict": to_weights(lambda module: module.load_state_dict(other_state(module))),
}
MOVED: dict[str, Change] = {
    "load_state_dict(assign=True)": to_weights(
        lambda module: module.load_state_dict(other_state(module), assign=True)
    ),
    "new Parameters": to_weights(replaced),
    "other .data": to_each(moved),
    "another type and back": to_weights(lambda module: module.double().float()),
}
UNCOUNTED: dict[str, Change] = {
    "written through .data": to_each(lambda own: own.data.mul_(1.4)),
    "written by NumPy": to_each(lambda own: np.multiply(own.numpy(), 0.8, out=own.numpy())),
}

# Ways to change adapters


def of_layers(change: Callable[[Any], Any]) -> Change:
    def apply(drawing: Drawing) -> None:
        for layer in layers(drawing.module):
            change(layer)

    return apply


def factors(change: Callable[[Tensor], Any]) -> Change:
    def apply(drawing: Drawing) -> None:
        with torch.no_grad():
            for name, own in drawing.module.named_parameters():
                if "lora_B" in name:
                    change(own)

    return apply


def one_factor_by_data(drawing: Drawing) -> None:
    layers(drawing.module)[-1].lora_A["a"].weight.data[-1, -1] += 1


def moved_factor(factor: Tensor) -> None:
    factor.data = factor.data * 1.2


def other_adapter(drawing: Drawing) -> None:
    for layer in layers(drawing.module):
        layer.set_adapter(["b"])
        layer.delete_adapter("a")
    add(drawing.module, "a", rank=4, seed=5, target_modules=TARGETS)


ADAPTERS: dict[str, Change] = {
    "both adapters": of_layers(lambda layer: layer.set_adapter(["a", "b"])),
    "the other one": of_layers(lambda layer: layer.set_adapter(["b"])),
    "the first one": of_layers(lambda layer: layer.set_adapter(["a"])),
    "a scale": of_layers(lambda layer: layer.set_scale("a", 0.3)),
    "disabled": of_layers(lambda layer: layer.enable_adapters(False)),
    "enabled": of_layers(lambda layer: layer.enable_adapters(True)),
    "factors written": factors(lambda own: own.mul_(-2)),
    "factors written through .data": factors(lambda own: own.data.mul_(0.5)),
    "one number of a factor through .data": one_factor_by_data,
    "factors with other .data": factors(moved_factor),
    "an adapter of another rank": other_adapter,
    "fused": of_layers(lambda layer: layer.merge()),
    "unfused": of_layers(lambda layer: layer.unmerge()),
}

# Ways to change arguments


def prompt_written(drawing: Drawing) -> None:
    drawing.prompt.mul_(0.5)


def prompt_replaced(drawing: Drawing) -> None:
    drawing.prompt = drawing.prompt * 3


def prompt_moved(drawing: Drawing) -> None:
    drawing.prompt.data = drawing.prompt * 0.7


def times_written(drawing: Drawing) -> None:
    drawing.times.mul_(0.9)


ARGUMENTS: dict[str, Change] = {
    "prompt written": prompt_written,
    "prompt replaced": prompt_replaced,
    "prompt with other .data": prompt_moved,
}
TIMES: dict[str, Change] = {"timesteps written": times_written}
WEIGHTS = COUNTED | MOVED | UNCOUNTED
SAME_BITS = ("another type and back",)  # which chance may put where they were

# What changes the sources of each kind between two loops, and in the middle of one, where nobody
# sees what torch does not count (docs/limits.md).
BETWEEN: dict[str, dict[str, Change]] = {
    MERGED: WEIGHTS,
    PADDED: WEIGHTS,
    PACKED: {name: WEIGHTS[name] for name in WEIGHTS if name not in SAME_BITS},
    CODED: WEIGHTS,
    EFFECTIVE: WEIGHTS | ADAPTERS,
    LOW_RANK: WEIGHTS | ADAPTERS,
    HOISTED: WEIGHTS | ARGUMENTS,
    TIMETABLE: WEIGHTS | TIMES,
}
WITHIN: dict[str, dict[str, Change]] = {
    MERGED: COUNTED | MOVED,
    PADDED: COUNTED | MOVED,
    PACKED: {name: WEIGHTS[name] for name in COUNTED | MOVED if name not in SAME_BITS},
    CODED: COUNTED | MOVED,
    EFFECTIVE: COUNTED | MOVED | ADAPTERS,
    LOW_RANK: COUNTED | MOVED | ADAPTERS,
    HOISTED: COUNTED | MOVED | ARGUMENTS,
    TIMETABLE: COUNTED | MOVED | TIMES,
}
OF_A_LOOP = (HOISTED, TIMETABLE)
IN_PLACE = (MERGED, PADDED)


def test_every_kind_is_swept() -> None:
    assert {kind.name for kind in KINDS} == BETWEEN.keys() == WITHIN.keys() == OPTIONS.keys()


def assert_alike(
    eager: Drawing, fast: Drawing, name: str = "", change: Change | None = None
) -> None:
    wanted, found = eager.draw(change), fast.draw(change)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5, msg=lambda m: f"{name}: {m}")


def is_remade(kind: str, name: str) -> bool:
    """Tell whether it is made anew then: what is written to parts is in the whole."""
    return kind not in IN_PLACE or name in MOVED


@pytest.mark.parametrize("kind", BETWEEN)
def test_a_change_between_two_loops(kind: str, tmp_path: Path) -> None:
    eager, fast = drawings(kind, tmp_path)
    assert_alike(eager, fast)
    a_loop = kind in OF_A_LOOP  # makes its own
    for name, change in BETWEEN[kind].items():
        made = fast.row(kind).num_made
        for drawing in (eager, fast):
            change(drawing)
        assert_alike(eager, fast, name)
        remade = fast.row(kind).num_made
        assert (remade > made) == is_remade(kind, name), name
        assert_alike(eager, fast, f"again after {name}")
        assert fast.row(kind).num_made == remade + a_loop, name
    assert fast.module.forward.counters.eager_calls == 0


@pytest.mark.parametrize("kind", WITHIN)
def test_a_change_in_the_middle_of_a_loop(kind: str, tmp_path: Path) -> None:
    eager, fast = drawings(kind, tmp_path)
    assert_alike(eager, fast)
    a_loop = kind in OF_A_LOOP
    for name, change in WITHIN[kind].items():
        made = fast.row(kind).num_made
        assert_alike(eager, fast, name, change)
        remade = fast.row(kind).num_made
        assert (remade > made + a_loop) == is_remade(kind, name), name
    assert fast.module.forward.counters.eager_calls == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("kind", BETWEEN)
def test_cuda_graphs_miss_no_change(kind: str, tmp_path: Path) -> None:
    eager, fast = drawings(kind, tmp_path, "cuda")
    for name, change in BETWEEN[kind].items():
        if name != "written by NumPy":
            for drawing in (eager, fast):
                change(drawing)
            for again in range(3):  # a graph is captured at the second use
                assert_alike(eager, fast, f"{name}, loop {again}")
    for name, change in WITHIN[kind].items():
        assert_alike(eager, fast, f"{name} in a loop", change)
    counters = fast.module.forward.counters
    assert counters.replays > len(BETWEEN[kind])
    assert counters.eager_calls == 0


# A way to watch, and a change that no other way would notice.
ONE_EYED: dict[type[SourceWatch], tuple[str, Change]] = {
    KnownMemory: (MERGED, MOVED["other .data"]),
    KnownWrites: (HOISTED, ARGUMENTS["prompt written"]),
    KnownValues: (LOW_RANK, ADAPTERS["factors written through .data"]),
    KnownSettings: (EFFECTIVE, ADAPTERS["both adapters"]),
}


@pytest.mark.parametrize("watch", ONE_EYED)
def test_these_tests_would_notice_a_missing_watch(
    watch: type[SourceWatch], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, change = ONE_EYED[watch]
    eager, fast = drawings(kind, tmp_path)
    assert_alike(eager, fast)
    monkeypatch.setattr(watch, "differs", lambda self: False)
    with pytest.raises(AssertionError, match="not close"):
        assert_alike(eager, fast, change=change)


def test_bytes_are_those_of_all_that_is_held(tmp_path: Path) -> None:
    """What sources are compared with takes memory too."""
    eager, fast = drawings(EFFECTIVE, tmp_path)
    assert_alike(eager, fast)
    first_rows, factors = len(TARGETS) * WIDTH, len(TARGETS) * (2 + 3) * 2 * WIDTH
    compared = 2 * (first_rows + factors)  # the latest, and room for those of now
    assert fast.row(EFFECTIVE).size_bytes == 4 * (len(TARGETS) * WIDTH**2 + compared)
    assert fast.row(MERGED).size_bytes == 4 * 2 * (WIDTH**2 + WIDTH)  # k and v, with bias
    report = strop.explain(fast.module)
    rows = report.to_dict()["components"][0]["derived"]
    assert {row["kind"] for row in rows} == {EFFECTIVE, MERGED, HOISTED, TIMETABLE}
    for row in rows:
        assert all(
            row[name] in text for name in ("kind", "remade") for text in (str(report), report.html)
        )


def test_what_nobody_reads_any_longer_is_let_go(tmp_path: Path) -> None:
    eager, fast = drawings(EFFECTIVE, tmp_path)
    assert_alike(eager, fast)
    for module in (eager.module, fast.module):
        for name in TARGETS:
            setattr(module, name, getattr(module, name).base_layer)
    assert_alike(eager, fast)
    weights = fast.module.forward.state.effective.merged
    assert (weights.size_bytes, weights.watch_bytes) == (0, 0)


def test_weights_of_inference_mode_are_summed_at_each_look(tmp_path: Path) -> None:
    """They count no writes."""
    eager, fast = drawings(EFFECTIVE, tmp_path)
    with torch.inference_mode():
        for drawing in (eager, fast):
            replaced(drawing.module)
        for _ in range(2):
            for drawing in (eager, fast):
                drawing.module.q.base_layer.weight.mul_(2)
            assert_alike(eager, fast)


def test_a_write_that_failed_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it left is not taken for what was there before, though all sources are again."""

    def fail(sums: Sequence[WeightSum]) -> None:
        sums[0].weight.zero_()
        raise torch.OutOfMemoryError("for this test")

    eager, fast = drawings(EFFECTIVE, tmp_path)
    for drawing in (eager, fast):
        ADAPTERS["the other one"](drawing)
    assert_alike(eager, fast)
    ADAPTERS["both adapters"](fast)
    with monkeypatch.context() as patched:
        patched.setattr(effective_weights, "write_sums", fail)
        with pytest.raises(torch.OutOfMemoryError):
            fast.draw()
    ADAPTERS["the other one"](fast)
    assert_alike(eager, fast)
