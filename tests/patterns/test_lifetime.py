"""For how long patterns are in force, for whom, and what tells of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import strop
from strop.dispatch import dynamo as aot
from strop.errors import PatternError
from strop.patterns import registry
from tests.frontend.tracing import Function
from tests.patterns.searches import (
    Block,
    Kernel,
    attention,
    declare,
    matched,
    norm_silu,
    optimized,
    reasons,
    swiglu,
)

# several patterns, and for how long


def test_the_first_one_takes_what_it_finds(cache: str) -> None:
    declare(swiglu, name="whole")
    strop.pattern(F.silu, lambda x: F.silu(x), example=[torch.empty(2)], name="part")
    module = optimized(Function(lambda x, y: swiglu(x, y) + F.silu(y)), cache)
    module(torch.randn(2, 8), torch.randn(2, 8))
    assert sorted(matched(module)) == ["part", "whole"]


def test_removal_and_return(cache: str) -> None:
    pattern, kernel = declare(swiglu)
    module = optimized(Function(swiglu), cache)
    given = torch.randn(2, 8), torch.randn(2, 8)
    made = [module(*given) for _ in range(3)]
    pattern.remove()
    pattern.remove()
    assert len(kernel.calls) == 3
    made += [module(*given) for _ in range(3)]
    assert len(kernel.calls) == 3
    assert [v.from_disk for v in module.forward.variants.all] == [False, False]
    with pattern:
        made.append(module(*given))
    assert len(kernel.calls) == 4
    made.append(module(*given))
    assert len(kernel.calls) == 4
    assert module.forward.variants.num_captures == 2
    assert strop.explain(module).num_recompiles == 0
    for result in made:
        torch.testing.assert_close(result, swiglu(*given))


class Gated(nn.Module):
    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        return swiglu(gate, up)


def test_stored_plans(tmp_path: Path) -> None:
    """Loaded where the pattern is in force, and only there."""
    given = torch.randn(2, 8), torch.randn(2, 8)

    def used() -> tuple[bool, list[str]]:
        module = optimized(Gated(), str(tmp_path))
        torch.testing.assert_close(module(*given), swiglu(*given))
        return module.forward.variants.all[0].from_disk, matched(module)

    assert used() == (False, [])
    with declare(swiglu, name="a")[0]:
        assert used() == (False, ["a"])
    assert used() == (True, [])
    again, kernel = declare(swiglu, name="a")
    assert used() == (True, ["a"])
    assert len(kernel.calls) == 1, "the replacement of this process"
    again.remove()
    for other in ({"name": "b"}, {"name": "a", "when": lambda gate, up: True}):
        with declare(swiglu, **other)[0]:
            assert used() == (False, [other["name"]])
    with declare(swiglu, name="a", when=lambda gate, up: "never")[0]:
        assert used() == (False, [])


def test_other_threads_see_one_state(cache: str) -> None:
    """Declared and removed while others call: results are right, programs those of their keys."""
    module = optimized(Function(lambda x, y: swiglu(x, y) * 2), cache)
    given, wrong = (torch.randn(2, 8), torch.randn(2, 8)), list[Any]()
    expected, stop = swiglu(*given) * 2, threading.Event()

    def call() -> None:
        while not stop.is_set():
            if not torch.allclose(module(*given), expected, atol=1e-5):
                wrong.append("result")

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(10):
        declare(swiglu)[0].remove()
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    for (structure, *_), variants in module.forward.variants.variants.items():
        for variant in variants:
            names = [dict(s.attrs)["name"] for s in variant.program.call_steps]
            assert names == [pattern.name for pattern in structure[1]]


def test_numerics_by_name(cache: str) -> None:
    declare(swiglu, lambda gate, up: gate.clamp(0) * up, numerics="relu_for_silu")
    given = torch.randn(2, 8), torch.randn(2, 8)
    plain = optimized(Function(swiglu), cache, check=True)
    torch.testing.assert_close(plain(*given), swiglu(*given))
    assert reasons(plain) == [
        "numerics='relu_for_silu' is not allowed: Options(numerics=(...,)) lists it"
    ]
    quick = optimized(Function(swiglu), cache, check=True, numerics=("relu_for_silu",))
    torch.testing.assert_close(quick(*given), given[0].clamp(0) * given[1])
    assert quick.forward.counters.findings == []


def test_numerics_of_no_pattern_are_told_once(cache: str, caplog: pytest.LogCaptureFixture) -> None:
    declare(swiglu, numerics="relu_for_silu")
    for _ in range(2):
        module = optimized(
            Function(swiglu), cache, record=True, numerics=("relu_for_silu", "no_such")
        )
        module(torch.randn(2, 8), torch.randn(2, 8))
    told = [text for text in caplog.messages if "numerics" in text]
    assert told == ["Options.numerics allows 'no_such', which no pattern in force names"]


def test_an_inexact_one_is_found(cache: str) -> None:
    declare(swiglu, lambda gate, up: swiglu(gate, up) * 1.001)
    module = optimized(Function(swiglu), cache, check=True)
    module(torch.randn(64, 80), torch.randn(64, 80))
    (finding,) = module.forward.counters.findings
    assert "pattern Kernel of Function, is inaccurate" in finding


def test_disabled(cache: str) -> None:
    _, kernel = declare(swiglu)
    module = optimized(Function(swiglu), cache, disable=("patterns",))
    module(torch.randn(2, 8), torch.randn(2, 8))
    assert not kernel.calls


# torch.compile


@pytest.fixture
def dynamo(monkeypatch: pytest.MonkeyPatch) -> Iterator[aot.AotLog]:
    torch._dynamo.reset()
    monkeypatch.setattr(aot, "AOT_LOG", aot.AotLog())
    yield aot.AOT_LOG
    torch._dynamo.reset()


def test_torch_compile(dynamo: aot.AotLog, cache: str) -> None:
    layers = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU())

    def gelu_linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.gelu(F.linear(x, w, b))

    kernel = Kernel(gelu_linear)
    example = torch.empty(2, 4), torch.empty(8, 4), torch.empty(8)
    pattern = strop.pattern(gelu_linear, kernel, example=example)
    fast = torch.compile(layers, backend="strop", options={"cache_dir": cache, "strict": True})
    with torch.no_grad():
        for rows in (2, 3, 5, 9):
            x = torch.randn(rows, 4)
            torch.testing.assert_close(fast(x), layers(x))
        assert len(dynamo.served) == 1
        assert len(kernel.calls) == 8
        pattern.remove()
        torch.testing.assert_close(fast(x), layers(x))
        assert len(kernel.calls) == 8
    with pattern:  # for the backward the value before the activation is a result
        fast(x).sum().backward()
    misses = dynamo.records[-2].compiled.patterns.misses
    assert [m.reason for m in misses] == ["its linear is a result of the graph as well"] * 2
    assert not dynamo.fallbacks


# explain


def test_explain(cache: str) -> None:
    declare(norm_silu, name="norm_silu")
    declare(attention, name="unused")
    module = optimized(Block(), cache, record=True)
    module(torch.randn(2, 4, 8, 8))
    report = strop.explain(module)
    used, unused = report.graphs[0].patterns
    assert (used.name, used.origins) == ("norm_silu", ("first", "second"))
    assert used.misses == (("third", "differs at gelu in Block: silu expected, gelu found"),)
    assert (unused.name, unused.origins, unused.misses) == ("unused", (), ())
    assert report.calls["pattern norm_silu"] == 2
    assert report.num_opaque_calls == 0
    text = str(report)
    assert "2x pattern norm_silu  <- first and 1 more" in text
    assert "not in third: differs at gelu in Block: silu expected, gelu found" in text
    assert "0x pattern unused" in text
    assert "norm_silu: 2 matches, 1 near miss<" in report.html
    assert "silu expected, gelu found" in report.html
    assert "after patterns" in report.html
    fresh = optimized(Block(), cache)
    fresh(torch.randn(2, 4, 8, 8))
    (row,) = strop.explain(fresh).graphs[0].patterns
    assert fresh.forward.variants.all[0].from_disk
    assert (row.name, len(row.origins), row.misses) == ("norm_silu", 2, ())


def test_a_program_of_another_process(tmp_path: Path, cache: str) -> None:
    """A dump runs by itself only where its patterns are declared."""
    with pytest.raises(PatternError, match="'mine', which this process has not declared"):
        registry.find("0" * 32, "mine")
    with declare(swiglu, name="mine")[0]:
        module = optimized(Function(swiglu), cache, dump=str(tmp_path))
        module(torch.randn(2, 8), torch.randn(2, 8))
    (folder,) = tmp_path.iterdir()
    assert "call   pattern mine(" in (folder / "program.txt").read_text()
    assert "pattern(in0, in1" in (folder / "02_after_patterns.txt").read_text()
