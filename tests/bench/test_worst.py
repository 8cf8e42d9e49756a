"""``strop bench worst``: what its table says, and that it runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from strop.bench import worst
from strop.bench.worst import WorstKernel, rows_of, worst_kernels
from strop.cli import app
from strop.debug import ceilings, step_times
from strop.debug.ceilings import Ceilings
from strop.debug.costs import is_too_slow
from strop.debug.profile import profiled
from strop.debug.roofline import PROFILER, ProfileRow, StepCost, Times, profile_row
from strop.fusion.parallelism import LAUNCH_BYTES

LIMITS = Ceilings(1e12, {"float32": 1e13})


def row(*steps: tuple[str, int, int, float]) -> ProfileRow:
    """A profile of (title, bytes, programs, us) each."""
    costs = [
        StepCost(n, title, "row kernel", "", moved, 0, "float32", False, programs, programs / 132)
        for n, (title, moved, programs, _) in enumerate(steps)
    ]
    times = Times(PROFILER, 5, 1000.0, {n: (step[-1], 1) for n, step in enumerate(steps)})
    return profile_row({}, costs, times, LIMITS, 0)


def test_launches_of_a_kernel_are_one_row_and_the_worst_comes_first() -> None:
    found = worst_kernels(
        [
            row(
                ("quick", 10**8, 132, 150.0),  # loses most, but is near its bound
                ("short", 1000, 1, 5.0),
                ("alone", 5 * 10**6, 1, 280.0),
                ("alone", 5 * 10**6, 1, 300.0),
            ),
            row(("late", 10**6, 132, 20.0)),
        ]
    )
    assert [(k.title, k.count, k.us, k.is_too_slow) for k in found] == [
        ("alone", 2, 290.0, True),
        ("late", 1, 20.0, True),
        ("quick", 1, 150.0, False),
        ("short", 1, 5.0, False),
    ]
    alone = found[0]
    assert (alone.bound_us, alone.estimated_us, alone.num_programs) == (5.0, 660.0, 1)
    assert alone.times == 58.0
    assert found[3].times == 2.5, "of the least that a kernel takes"


def test_one_slow_launch_marks_all_of_its_kernel() -> None:
    (found,) = worst_kernels([row(("k", 10**6, 132, 2.0), ("k", 10**6, 132, 7.0))])
    assert (found.us, found.low_us, found.high_us) == (4.5, 2.0, 7.0)
    assert found.is_too_slow


def test_rounds_are_one_call() -> None:
    rounds = [row(("k", 10**6, 132, us), ("k", 10**6, 132, us)) for us in (2.0, 4.0)]
    (found,) = worst_kernels(rounds, len(rounds))
    assert (found.count, found.us) == (2, 3.0)


def test_the_table_has_all_that_are_too_slow() -> None:
    kernels = worst_kernels(
        [row(*((f"k{n}", 10**6, 132, 50.0 - n) for n in range(4)), ("near", 10**7, 132, 11.0))]
    )
    result: dict[str, Any] = {"kernels": [worst.asdict(kernel) for kernel in kernels]}
    header, *lines = rows_of(result, 2)
    assert [line[0] for line in lines] == ["k0", "k1", "k2", "k3"]
    assert all(line[-1] == "more than 3 x" and len(line) == len(header) for line in lines)
    assert [line[0] for line in rows_of(result, 9)[1:]] == ["k0", "k1", "k2", "k3", "near"]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "COPY_BYTES", {"cuda": 1 << 28, "cpu": 1 << 24})
    monkeypatch.setattr(ceilings, "SIDE", {"cuda": 2048, "cpu": 256})
    monkeypatch.setattr(ceilings, "SECONDS", 0.02)
    monkeypatch.setattr(step_times, "CPU_S", 0.2)


def test_on_a_cpu(quick: None, tmp_path: Path) -> None:
    file = tmp_path / "worst.json"
    words = ["bench", "worst", "t5-encoder", "--device", "cpu", "--top", "3", "-o", str(file)]
    words += ["--rounds", "2"]
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 0, found.output
    result = json.loads(file.read_text())
    assert result["model"] == "t5-encoder"
    assert len(result["calls_us"]) == 2
    assert result["call_us"] in result["calls_us"]
    assert sum(kernel["count"] for kernel in result["kernels"]) > 10
    assert {kernel["kind"] for kernel in result["kernels"]} >= {"GEMM", "attention", "row kernel"}
    assert "by the host clock" in found.output


def test_an_unknown_model() -> None:
    found = CliRunner().invoke(app, ["bench", "worst", "t6"])
    assert found.exit_code == 2
    assert "no t6; there are sd15-unet" in " ".join(found.output.replace("│", " ").split())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_what_follows_a_whole_tensor_is_quick_on_a_gpu(quick: None) -> None:
    """T5's clamp took 280 us by one program, and the norm behind it 317, reading each row again for
    each of its elements; together they move 15 MB."""
    from transformers import T5Config, T5EncoderModel

    torch.manual_seed(0)
    config = T5Config(vocab_size=99, d_model=1024, d_ff=4096, num_layers=2, num_heads=16)
    module = T5EncoderModel(config).half().eval().cuda()
    report = profiled(module, torch.randint(99, (8, 256), device="cuda"))
    (profile,) = (c.profile for c in report.components)
    assert profile is not None
    kernels = [k for k in worst_kernels([profile]) if k.kind in ("row kernel", "column kernel")]
    assert len(kernels) >= 2
    for kernel in kernels:
        assert kernel.num_programs >= 33 or kernel.bytes_moved < LAUNCH_BYTES, briefly(kernels)
        # a lookup waits for the number that it looks up: estimates know, and bounds do not
        assert not is_too_slow(kernel.us, kernel.estimated_us), briefly(kernels)


def briefly(kernels: Sequence[WorstKernel]) -> str:
    """All numbers of the kernels, the worst first, in lines that no report cuts off."""
    return "".join(
        f"\n{k.title[:24]} {k.count}x {k.us} us, bound {k.bound_us}, estimated {k.estimated_us},"
        f"\n  {k.bytes_moved} bytes, {k.num_programs} programs, {k.times} x"
        for k in kernels
    )
