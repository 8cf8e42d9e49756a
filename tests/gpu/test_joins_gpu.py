"""Parts of a join on a real GPU: two kernels store into one buffer, in CUDA graphs too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from strop.testing import assert_as_accurate_as_eager
from tests.fusion.test_joins import ENVS, PATTERNS, arguments_of
from tests.views.cases import Case
from tests.views.running import optimized

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("name", ["attended", "rotated_before", "read_elsewhere", "cut_apart"])
def test_patterns(name: str, tmp_path: Path) -> None:
    pattern = PATTERNS[name]
    case = Case(pattern.function, pattern.arguments)
    module, dispatcher = optimized(case, ENVS[0], str(tmp_path))
    for env in ENVS:
        exact = [x.bfloat16().cuda().double() for x in arguments_of(pattern, env)]
        given = [x.bfloat16() for x in exact]
        with torch.no_grad():
            eager, reference = pattern.function(*given), pattern.function(*exact)
            for _ in range(3):  # the third is a replay of a graph
                found = module(*given)
                for results in zip(*map(_several, (found, eager, reference)), strict=True):
                    assert_as_accurate_as_eager(*results)
    assert not dispatcher.counters.fallbacks


def _several(results: Any) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)
