"""Models of the zoo: the table builds, and the quickest of them are good in every respect."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import strop
from strop.api import optimize_module
from strop.artefacts.building import CARDS
from strop.artefacts.planning import PlanningDispatcher
from strop.bench import census
from strop.bench.zoo import ZOO
from strop.errors import StropError
from strop.runtime.build.ahead import AheadLoader

BY_NAME = {model.name: model for model in ZOO}
# the rest: ``test_every_model``, of the nightly target, and ``strop bench models``
QUICK = (
    "sd15-unet",
    "sd-vae-encoder",
    "sd-vae-decoder",
    "controlnet",
    "pixart-transformer",
    "clip-vision",
    "gpt-neox",
    "mamba",
)


@pytest.mark.parametrize("name", QUICK)
def test_model(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp() / "kernels"
    options = strop.Options(cache_dir=str(folder))
    verdict = census.judge(BY_NAME[name], torch.device("cpu"), options)
    assert verdict.is_good, verdict.complaint
    assert verdict.num_shapes >= 4
    assert verdict.num_graphs == 1
    assert verdict.is_strict
    assert verdict.kernel_share >= 0.95


PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
FAILING = set(re.findall(r"^\| ([\w-]+) \| \w+ \| no \|", PAGE, re.M))


@pytest.mark.nightly
@pytest.mark.parametrize("name", BY_NAME)
def test_every_model(name: str, tmp_path: Path) -> None:
    """As docs/models.md says: at its 20 shapes, and one that fails still does."""
    options = strop.Options(cache_dir=str(tmp_path))
    verdict = census.judge(BY_NAME[name], torch.device("cpu"), options, 20)
    assert verdict.num_shapes == 20
    if name in FAILING:
        assert not verdict.is_good, f"{name} passes: write docs/models.md again"
        return
    assert verdict.is_good, verdict.complaint
    assert verdict.is_strict
    assert (verdict.num_graphs, verdict.num_recompiles) == (1, 0)
    assert not verdict.fallbacks
    assert verdict.kernel_share >= 0.95
    assert not verdict.parity


def test_the_page_has_every_model() -> None:
    assert re.findall(r"^\| ([\w-]+) \| \w+ \| (?:yes|no) \|", PAGE, re.M) == list(BY_NAME)


def test_the_zoo_is_large() -> None:
    assert len(BY_NAME) == len(ZOO)
    assert len(ZOO) >= 40
    assert all(len(model.sizes.some(20)) == 20 for model in ZOO)


def test_every_model_builds_and_runs() -> None:
    for model in ZOO:
        module, shape = model.made(), model.sizes.first[0]
        with torch.no_grad():
            found = module(**model.given(shape))
        leaves = torch.utils._pytree.tree_leaves(found)
        assert leaves, model.name


def test_what_a_model_raises_is_its_verdict() -> None:
    class Broken(torch.nn.Module):
        def forward(self, sample: torch.Tensor) -> torch.Tensor:
            raise ValueError("too wide\nfor this page")

    model = replace(BY_NAME["sd-vae-decoder"], build=Broken)
    verdict = census.judge(model, torch.device("cpu"), strop.Options())
    assert verdict.failure == "ValueError: too wide"
    assert not verdict.is_good


def test_the_graphs_of_a_model_that_needs_several_are_told(tmp_path: Path) -> None:
    class Branches(torch.nn.Module):
        def forward(self, sample: torch.Tensor) -> torch.Tensor:
            return sample.sin() if sample.shape[2] > 8 else sample.cos()

    options = strop.Options(cache_dir=str(tmp_path))
    model = replace(BY_NAME["sd-vae-decoder"], build=Branches)
    verdict = census.judge(model, torch.device("cpu"), options)
    assert verdict.num_graphs == 2
    assert verdict.complaint.startswith("2 graphs for 4 shapes: (b, 4, d0_2, d0_3) if d0_2 <= 8 or")


def test_a_model_that_strict_refuses_is_judged_without_it(tmp_path: Path) -> None:
    class NoRow(torch.nn.Module):
        def forward(self, sample: torch.Tensor) -> torch.Tensor:
            return (sample.abs() + 1).digamma() + 1

    options = strop.Options(cache_dir=str(tmp_path))
    model = replace(BY_NAME["sd-vae-decoder"], build=NoRow)
    verdict = census.judge(model, torch.device("cpu"), options)
    assert not verdict.is_strict
    assert verdict.opaque == {"aten.digamma.default": 1}
    assert verdict.is_captured
    assert not verdict.parity
    module = strop.optimize(NoRow().eval(), options=replace(options, strict=True))
    with pytest.raises(StropError, match="digamma"), torch.no_grad():
        module(torch.randn(2, 4))


def test_the_tables_of_a_result() -> None:
    good = census.Verdict("one", "text", 4, True, 1, kernel_share=1.0)
    bad = census.Verdict(
        "two",
        "text",
        4,
        opaque={"aten.sort.default": 2},
        num_graphs=1,
        origins={"aten.sort.default": "head"},
        kernel_share=0.5,
    )
    assert good.is_good
    assert bad.complaint == "opaque: aten.sort.default"
    (missing,) = census._missing([census.kept(good), census.kept(bad)])
    assert missing == {
        "overload": "aten.sort.default",
        "calls": 2,
        "models": ["two"],
        "place": "two: head",
    }


# torch's builds for CPUs cannot trace these as if on a GPU: they move constants there, write in
# place, or negate by an operator of Python
UNPLANNED = {"tiny-autoencoder", "bevformer", "rife", "deberta-v2", "mistral", "gemma2", "mamba"}
SOME_PLANNED = ("swin", "flux-transformer", "wav2vec2", "llama-decode")


def planned_graphs(name: str, folder: Path) -> int:
    """How many graphs four shapes of a model have, as it is compiled for a GPU."""
    model, options = BY_NAME[name], strop.Options(cache_dir=str(folder), strict=True)
    module, loader = model.made(), AheadLoader("sm_90", CARDS["sm_90"], options)
    kind = partial(PlanningDispatcher, loader=loader, place=torch.device("cuda", 0))
    optimize_module(module, options, kind=kind)
    with torch.no_grad():
        for shape in model.sizes.some(4):
            module(**model.given(shape))
    return len(module.forward.variants.all)


@pytest.mark.parametrize("name", SOME_PLANNED)
def test_a_plan_for_a_gpu_is_one_graph(name: str, tmp_path: Path) -> None:
    assert planned_graphs(name, tmp_path) == 1


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:PyTorch was compiled without cuDNN")
@pytest.mark.parametrize("name", [name for name in BY_NAME if name not in UNPLANNED])
def test_every_plan_for_a_gpu_is_one_graph(name: str, tmp_path: Path) -> None:
    assert planned_graphs(name, tmp_path) == 1
