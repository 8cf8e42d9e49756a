"""Every part of every pipeline is planned for a GPU, on a machine without one.

What a CPU compiles a GPU may refuse, as values that are made on the CPU and moved; a part that is
refused runs in eager there.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from strop.api import optimize_module
from strop.artefacts.building import CARDS
from strop.artefacts.planning import PlanningDispatcher
from strop.bench.pipelines.all import PIPELINES
from strop.bench.pipelines.tiny import TinyPipeline, drawn
from strop.errors import StropError
from strop.options import Options
from strop.runtime.build.ahead import AheadLoader

SOON = ("flux", "qwen-image", "wan", "z-image")  # in each run of the tests
# diffusers 0.42 raises where it is asked to draw with these
BROKEN = ("chroma-inpaint", "omnigen")
VALUES = "the values of a tensor decide|a mask as an index"  # docs/limits.md; blocks are compiled
REFUSED = {
    ("hunyuan-image", "transformer"): VALUES,
    ("lumina2", "transformer"): VALUES,
    ("mochi", "transformer"): VALUES,
}
# Traces of some convolutions and caches of keys ask for a build of torch, or a driver, of a GPU.
WITHOUT = "not linked with support for cuda|the 'CUDA' backend|Found no NVIDIA driver"

pytestmark = pytest.mark.filterwarnings("ignore")  # diffusers' own, of what is old
Call = tuple[tuple[Any, ...], dict[str, Any]]


def parts_of(pipe: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield what a pipeline calls: of a VAE the decoder."""
    for name, part in pipe.components.items():
        if isinstance(part, nn.Module) and "safety" not in name:
            is_vae = isinstance(getattr(part, "decoder", None), nn.Module) and "vae" in name
            yield (f"{name}.decoder", part.decoder) if is_vae else (name, part)


def calls_of(case: TinyPipeline) -> dict[str, Call]:
    """Return the arguments of the first call of each part, in a call of the pipeline in eager."""
    pipe, calls = case.made(), dict[str, Call]()

    def note(name: str, part: nn.Module, args: Any, kwargs: Any) -> None:
        copied = pytree.tree_map_only(Tensor, torch.clone, (args, kwargs))
        calls.setdefault(name, copied)

    for name, part in parts_of(pipe):
        part.register_forward_pre_hook(partial(note, name), with_kwargs=True)
    drawn(case, pipe)
    return calls


def refusal_of(part: nn.Module, call: Call, folder: Path) -> str:
    """Say why a part cannot be planned for an H100, or nothing."""
    options = Options(cache_dir=str(folder))
    loader = AheadLoader("sm_90", CARDS["sm_90"], options)
    kind = partial(PlanningDispatcher, loader=loader, place=torch.device("cuda", 0))
    optimize_module(part, options, kind=kind)
    args, kwargs = call
    try:
        with torch.no_grad():
            part(*args, **kwargs)
    except StropError as error:
        return f"{error}{error.__cause__}"
    return ""


def case_of(case: TinyPipeline) -> Any:
    marks = [] if case.name in SOON else [pytest.mark.nightly]
    return pytest.param(case, id=case.name, marks=marks)


@pytest.mark.parametrize("case", [case_of(case) for case in PIPELINES])
def test_all_parts(case: TinyPipeline, tmp_path: Path) -> None:
    if case.name in BROKEN:
        pytest.skip("diffusers cannot draw with it")
    for package in case.needs:
        pytest.importorskip(package)
    calls = calls_of(case)
    assert calls
    for name, part in parts_of(case.made()):
        if name not in calls:
            continue
        found, wanted = refusal_of(part, calls[name], tmp_path), REFUSED.get((case.name, name))
        if any(text in found for text in WITHOUT.split("|")):
            continue
        if wanted is None:
            assert not found, name
        else:
            assert any(text in found for text in wanted.split("|")), name
