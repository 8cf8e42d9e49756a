"""Options.check finds the step that is wrong, and only that."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import strop
from strop.api import dispatchers_of
from strop.options import Options
from tests.debug import broken
from tests.e2e import tiny


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def findings(module: nn.Module, cache: Path, *args: Tensor, off: tuple[str, ...] = ()) -> list[str]:
    """``off``: kernels of ours in whose place a library is called."""
    options = Options(check=True, cache_dir=str(cache), kernels_off=off)
    strop.optimize(module, options=options)
    with torch.no_grad():
        module(*args)
    (dispatcher,) = dispatchers_of(module).values()
    assert dispatcher.counters.eager_calls == 0
    return dispatcher.counters.findings


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_sound_unet_has_no_findings(dtype: torch.dtype, cache: Path) -> None:
    args = tiny.unet_args(2, 6, 4, 5, dtype)
    assert findings(tiny.unet().to(dtype), cache, *args) == []


class Mutates(nn.Module):
    """Writes into a buffer, once with a kernel's store and once with a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4, 8))
        self.register_buffer("turned", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.total.copy_(self.total * 0.5 + x)
        self.turned.copy_(self.turned.roll(1) + 1)
        return (self.total + self.turned).relu()


class Opaque(nn.Module):
    """Several results of one call, and random numbers."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        values, indices = torch.topk(x.exp(), 3)
        return values * 2, indices, torch.bernoulli(x.sigmoid()) + 1


@pytest.mark.parametrize("module", [Mutates(), Opaque()], ids=lambda m: type(m).__name__)
def test_a_sound_module_has_no_findings(
    module: nn.Module, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compiled = torch.compile(
        module.eval(), backend="strop", options={"check": True, "cache_dir": str(cache)}
    )
    with torch.no_grad(), caplog.at_level(logging.INFO, "strop"):
        for _ in range(2):
            compiled(torch.randn(4, 8))
    assert "steps, 0 findings" in caplog.text


def test_a_wrong_row_is_found_where_it_is(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken.plant_row(monkeypatch, "sigmoid", "1 / (2 + sp::exp(-{0}))")
    module = broken.model()
    found = findings(module, cache, torch.randn(3, 16))
    assert len(found) == 1, "the steps behind it are right on what they got"
    assert "is inaccurate: mul float32[b, 32]" in found[0]
    assert "of Model (with parts of up, act, gate)" in found[0]
    assert found[0] in caplog.text
    report = strop.explain(module)
    assert found[0] in str(report)
    assert found[0] in report.summary()["findings"]


def test_a_wrong_library_call_is_found(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from strop.runtime.run import library_calls as calls

    def doubled(attrs: object) -> calls.OutCall:
        return lambda inputs, out: torch.mm(inputs[0] * 2, inputs[1].t(), out=out)

    monkeypatch.setitem(calls.PLANNED_OUT, "linear", doubled)
    found = findings(broken.model(), cache, torch.randn(3, 16), off=("cpu_linear",))
    assert len(found) == 2
    assert "linear of up, is inaccurate" in found[0]
    assert "linear of down, is inaccurate" in found[1]


class Overflows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Softplus(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.exp(x * 100))


def test_the_first_nan_or_inf_is_found(cache: Path) -> None:
    found = findings(Overflows().eval().requires_grad_(False), cache, torch.ones(2, 8))
    assert len(found) == 1, "what comes behind had no finite operands"
    assert "is not finite: exp float32[b, 8]: 16 of 16 elements, from finite operands" in found[0]
    assert "so they are in torch" in found[0]


def test_each_shape_is_checked_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken.plant_row(monkeypatch, "sigmoid", "1 / (3 + sp::exp(-{0}))")
    module = broken.model()
    found = findings(module, cache, torch.randn(3, 16))
    with torch.no_grad():
        module(torch.randn(3, 16))
        assert len(found) == 1
        module(torch.randn(5, 16))
    assert len(found) == 2


def test_torch_compile_is_checked(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken.plant_row(monkeypatch, "sigmoid", "1 / (4 + sp::exp(-{0}))")
    compiled = torch.compile(
        broken.model(), backend="strop", options={"check": True, "cache_dir": str(cache)}
    )
    with torch.no_grad():
        compiled(torch.randn(3, 16))
    assert "check of Model: step" in caplog.text
