"""Every test of a step runs on the CPU path, in Triton's interpreter, and on a GPU if asked for."""

from __future__ import annotations

import pytest
import torch

from tests.train import interpreted

_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.fixture(params=["cpu", "interpreter", pytest.param("cuda", marks=_GPU)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The device of the parameters."""
    if request.param == "interpreter":
        pytest.importorskip("triton")
        interpreted.use(monkeypatch)
        return "cpu"
    return str(request.param)
