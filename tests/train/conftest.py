"""Every test of a step runs on the CPU path, in Triton's interpreter, and on a GPU if asked for."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from tests.train import interpreted

if TYPE_CHECKING:
    from tests.train.pair import Pair

# The trainer is part of the extra 'train'.
collect_ignore_glob = [] if importlib.util.find_spec("diffusers") else ["test_trainer_*.py"]
_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.fixture(params=["cpu", "interpreter", pytest.param("cuda", marks=_GPU)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The device of the parameters."""
    if request.param == "interpreter":
        pytest.importorskip("triton")
        interpreted.use(monkeypatch)
        return "cpu"
    return str(request.param)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two ranks that have met, for all tests of a file."""
    from tests.train.pair import Pair  # its trainer is part of the extra 'train'

    made = Pair(tmp_path_factory.mktemp("pair"))
    yield made
    made.stop()


@pytest.fixture
def fresh() -> Iterator[None]:
    """torch knows of no compiled code, and draws the same numbers for each test."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five drawings with captions in metadata.jsonl."""
    pytest.importorskip("diffusers")
    from tests.train import trainer

    return trainer.draw_pictures(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny models with random weights, in the format of diffusers."""
    from strop.bench.pipelines.flux import flux
    from strop.bench.pipelines.images import sd3
    from strop.bench.pipelines.stable import sdxl
    from strop.bench.pipelines.tiny import TinyPipeline

    kinds = {
        "sdxl": TinyPipeline("sdxl", "StableDiffusionXLPipeline", sdxl),
        "sd3": TinyPipeline("sd3", "StableDiffusion3Pipeline", sd3),
        "flux": TinyPipeline("flux", "FluxPipeline", flux),
    }
    made = {}
    for name, kind in kinds.items():
        made[name] = tmp_path_factory.mktemp(name) / "model"
        kind.made().save_pretrained(made[name])
    return made


@pytest.fixture(scope="session")
def deep(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two of these with transformers of more blocks."""
    import diffusers

    depths = {"sd3": {"num_layers": 3}, "flux": {"num_layers": 2, "num_single_layers": 3}}
    made = {}
    for name, depth in depths.items():
        made[name] = tmp_path_factory.mktemp(name) / "model"
        shutil.copytree(folders[name], made[name])
        place = made[name] / "transformer"
        config = json.loads((place / "config.json").read_text())
        shutil.rmtree(place)
        torch.manual_seed(3)
        getattr(diffusers, config["_class_name"]).from_config({**config, **depth}).save_pretrained(
            place
        )
    return made


@pytest.fixture(scope="session")
def controlled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Drawings in one folder, half as large greys of them in another, and metadata that names
    both."""
    from tests.train.controls import draw_controlled

    return draw_controlled(tmp_path_factory.mktemp("controlled"))


@pytest.fixture(scope="session")
def started(deep: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """ControlNets that diffusers has made and saved, after some training."""
    from tests.train.controls import NAMES, awake, by_diffusers

    made = {}
    for name in NAMES:
        net = by_diffusers(name, deep[name])
        awake(net)
        made[name] = tmp_path_factory.mktemp("started") / name
        net.save_pretrained(made[name])
    return made
