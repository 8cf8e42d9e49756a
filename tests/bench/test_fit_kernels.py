"""The sweeps that rules of kernels are fitted to make their kernels without a GPU."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks import fit_kernels
from benchmarks.fitting import contest, linear_libraries
from strop.bench import select
from strop.ir.source import KernelSource
from strop.kernels.gemm.tile import ACTIVATED, GATED, PLAIN
from strop.kernels.tuned import tuned
from tests.gpus import H100

OF_KERNELS = list(fit_kernels.SWEEPS.values())


@pytest.fixture(autouse=True)
def precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sweeps choose one for their process; other tests find theirs again."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", torch.backends.cudnn.allow_tf32)


def name_of(module: ModuleType) -> str:
    return module.__name__.rpartition(".")[2]


@pytest.mark.parametrize("module", OF_KERNELS, ids=name_of)
def test_a_sweep_has_shapes_and_kernels(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: dict[str, Any] = {}

    def hold(name: str, args: argparse.Namespace, sources: Any, shapes: Any, measure: Any) -> None:
        held.update(name=name, sources=list(sources), shapes=list(shapes), measure=measure)

    monkeypatch.setattr(contest, "hold", hold)
    args = fit_kernels.parser().parse_args([name_of(module), "--out", "somewhere"])
    module.run(args)
    assert held["name"] == name_of(module)
    assert len(set(held["shapes"])) == len(held["shapes"]) >= 9
    assert all(isinstance(source, KernelSource) for source in held["sources"])
    assert len(set(held["sources"])) >= (0 if module is linear_libraries else 9)  # has none of ours
    assert callable(held["measure"])


@pytest.mark.parametrize("kind", ["conv_wgmma", "linear_wgmma"])
def test_what_is_held_out_is_measured_apart(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[Any] = []
    monkeypatch.setattr(contest, "hold", lambda name, args, sources, found, m: shapes.append(found))
    for more in ([], ["--held-out"]):
        args = fit_kernels.parser().parse_args([kind, "--out", "somewhere", *more])
        fit_kernels.SWEEPS[kind].run(args)
    fitted, held_out = map(set, shapes)
    assert held_out == select.HELD_OUT[kind]
    assert not fitted & held_out


def test_a_kernel_that_is_unknown_is_named() -> None:
    with pytest.raises(SystemExit):
        fit_kernels.parser().parse_args(["conv_boxes", "--out", str(Path())])


def test_every_rule_has_a_sweep() -> None:
    assert select.RULES.keys() <= fit_kernels.SWEEPS.keys()


def linears(monkeypatch: pytest.MonkeyPatch, *words: str) -> dict[str, Any]:
    """Return the kernels and the shapes that a sweep of linears would measure."""
    held: dict[str, Any] = {}
    monkeypatch.setattr(
        contest, "hold", lambda n, a, sources, shapes, m: held.update(all=[*sources], of=shapes)
    )
    args = fit_kernels.parser().parse_args(["linear_wgmma", "--out", "somewhere", *words])
    fit_kernels.SWEEPS["linear_wgmma"].run(args)
    return held


def test_wide_products_are_measured_in_bf16_with_gates_by_silu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = linears(monkeypatch, "--wide")
    assert {shape[-1] for shape in held["of"]} == {PLAIN, GATED}
    assert all("bf16" in source.text for source in held["all"])
    assert any("rcp.approx" in source.text for source in held["all"])


def test_activations_at_the_end_are_measured_beside_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their tiles are guesses until then; each of them is measured."""
    held = linears(monkeypatch, "--end", ACTIVATED)
    assert {shape[-1] for shape in held["of"]} == {ACTIVATED}
    assert all("rcp.approx" in source.text for source in held["all"])
    sweep = fit_kernels.SWEEPS["linear_wgmma"]
    assert tuned(H100).gemm.tiles[ACTIVATED].keys() <= {*sweep.ACTIVATED_TILES}
