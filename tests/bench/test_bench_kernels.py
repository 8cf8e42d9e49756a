"""Benchmarks of single kernels and of whole networks at many batches, on the CPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from strop.bench import batches, kernel
from strop.bench.kernel_cases import GROUP_NORM, ROW_FAMILIES, case_of, cases_at, kernel_cases, make
from strop.bench.turns import in_turns
from strop.cli import app
from strop.errors import StropError

CPU = torch.device("cpu")


def test_kernels_beside_eager() -> None:
    cases = [case_of(family, (33, 40)) for family in ROW_FAMILIES[:2]]
    cases.append(case_of(GROUP_NORM, (1, 64, 8, 8)))
    seen: list[str] = []
    result = kernel.run(
        cases, CPU, torch.float32, ("eager",), 3, each=lambda r: seen.append(r["case"])
    )
    assert seen == [case.name for case in cases]
    for row in result["rows"]:
        assert set(row["us"]) == {"strop", "eager"}
        assert 0 < row["us"]["strop"]["p20"] <= row["us"]["strop"]["p80"]
    assert {s["family"] for s in result["summary"]} == {case.family for case in cases}
    assert len(kernel.rows_of(result)) == 1 + len(cases)
    json.dumps(result)


def test_what_the_limit_leaves_out_is_listed() -> None:
    cases = [case_of(family, (4, 8)) for family in ROW_FAMILIES]
    result = kernel.run(cases, CPU, torch.float32, (), 3, limit_s=0)
    assert result["skipped"] == [case.name for case in cases]
    assert result["rows"] == []


def test_summary_counts_what_is_slower() -> None:
    rows = [
        {"family": "f", "case": f"c{i}", "us": {"strop": {"p50": 1.0}, "eager": {"p50": t}}}
        for i, t in enumerate((0.5, 2.0, 4.0))
    ]
    (found,) = kernel.summary(rows, ("eager",))
    assert (found["worst"], found["worst_case"], found["median"]) == (0.5, "c0", 2.0)
    assert (found["geomean"], found["slower"]) == (1.587, 1)


def test_random_sizes_are_those_of_the_seed() -> None:
    first, again, other = (kernel.random_cases(3, s, "cpu", torch.float32) for s in (1, 1, 2))
    assert [c.name for c in first] == [c.name for c in again] != [c.name for c in other]
    assert len(first) == 3 * (len(ROW_FAMILIES) + 1)


@pytest.mark.parametrize("family", [*ROW_FAMILIES, GROUP_NORM], ids=lambda f: f.name)
def test_cases_have_the_shape_they_say(family) -> None:
    shape = (2, 64, 4, 4) if family is GROUP_NORM else (3, 24)
    module, inputs = make(case_of(family, shape), CPU, torch.float32)
    result = module(*inputs)
    first = result[0] if isinstance(result, tuple) else result
    assert first.shape == shape
    tensors = [*inputs, *(result if isinstance(result, tuple) else (result,))]
    assert sum(t.numel() for t in tensors) == case_of(family, shape).num_moved


def test_every_case_of_the_grids_is_within_its_limit() -> None:
    for device_type, dtype in (("cpu", torch.float32), ("cuda", torch.float16)):
        cases = kernel_cases(device_type, dtype)
        assert len({case.name for case in cases}) == len(cases) > 100


@pytest.mark.parametrize("apart", [False, True])
def test_a_network_at_two_batches(apart: bool) -> None:
    (tiny,) = (n for n in batches.NETWORKS if n.name == "bert-tiny")
    result = batches.run(tiny, CPU, torch.float32, (1, 3), ("eager",), 3, apart)
    assert [row["batch"] for row in result["rows"]] == [1, 3]
    assert result["rows"][0]["error"]["is_good"]
    assert (result["counts"]["num_graphs"], result["counts"]["num_recompiles"]) == (1, 0)


def test_families_apart() -> None:
    cases = [case_of(family, (33, 40)) for family in ROW_FAMILIES[:2]]
    result = kernel.run(cases, CPU, torch.float32, ("eager",), 3, apart=True)
    assert [row["case"] for row in result["rows"]] == [case.name for case in cases]
    assert result["first_call_s"].keys() == {"strop", "eager"}


@pytest.mark.parametrize("apart", [False, True])
def test_what_there_is_no_time_for_is_listed(apart: bool) -> None:
    cases = [case_of(family, (33, 40)) for family in ROW_FAMILIES[:2]]
    saved: list[int] = []
    result = kernel.run(
        cases,
        CPU,
        torch.float32,
        ("eager",),
        3,
        limit_s=0.0,
        apart=apart,
        save=lambda result: saved.append(len(result["skipped"])),
    )
    assert result["skipped"] == [case.name for case in cases]
    assert result["rows"] == []
    assert saved == [1, 2]


def failing() -> Iterator[None]:
    yield None
    raise ValueError("no time for that")


def test_work_in_turns_tells_what_failed() -> None:
    with pytest.raises(StropError, match="no time for that"):
        list(in_turns([failing]))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["kernel", "--shape", "64x"], "'64x' is not like 4096x768"),
        (["kernel", "softmax", "--shape", "1x64x8x8"], "none of the families has such sizes"),
        (["kernel", "layernorm"], "no layernorm; there are layer_norm"),
        (["kernel", "--peer", "tvm"], "no tvm; there are eager"),
        (["batches", "alexnet"], "no alexnet; there are bert-base"),
        (["batches", "bert-tiny", "--batches", "1,x"], "is not like 1,8,33"),
    ],
)
def test_mistakes(arguments: list[str], said: str, tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["bench", *arguments, "--device", "cpu"])
    assert found.exit_code == 2
    assert said in " ".join(found.output.replace("│", " ").split())


def test_shapes_by_name() -> None:
    cases = cases_at([(4, 64), (1, 64, 8, 8)])
    assert [case.family for case in cases] == [*(f.name for f in ROW_FAMILIES), "group_norm_silu"]
    assert {case.shape for case in cases} == {(4, 64), (1, 64, 8, 8)}
