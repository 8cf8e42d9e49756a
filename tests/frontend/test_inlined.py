"""What torch would compile by itself, in the middle of a forward, is traced through."""

from __future__ import annotations

import threading
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import strop
from strop.frontend.inlined import inlined, scans
from strop.frontend.python_sizes import symbolic_builtins
from strop.options import Options

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit")


def _halves(x: Tensor, n: int) -> Tensor:
    return x.expand([x.size(0), n]) * 0.5


def _spread(x: Tensor, like: Tensor) -> Tensor:
    return _halves(x, like.size(-1)) + like


def product(left: Any, right: Any) -> Any:
    return left[0] * right[0], right[0] * left[1] + right[1]


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.spread = torch.jit.script(_spread)

    def forward(self, x: Tensor, like: Tensor) -> Tensor:
        result: Tensor = self.spread(x, like)
        return result.relu()


class Recorded(nn.Module):
    """A function that was recorded with a positive sum keeps that branch for good."""

    def __init__(self) -> None:
        super().__init__()
        example = torch.ones(2, 3)
        self.own = torch.jit.trace(lambda x: x * 2 if x.sum() > 0 else x * 3, example)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.own(x)
        return result + 1


def optimised(module: nn.Module, folder: Path) -> nn.Module:
    made = strop.optimize(module.eval(), options=Options(cache_dir=str(folder), strict=True))
    assert isinstance(made, nn.Module)
    return made


def test_a_scripted_function_is_traced_for_all_sizes(tmp_path: Path) -> None:
    module, eager = optimised(Scripted(), tmp_path), Scripted().eval()
    for rows, columns in ((2, 3), (5, 7), (1, 4)):
        given = torch.randn(rows, 1), torch.randn(rows, columns)
        with torch.no_grad():
            torch.testing.assert_close(module(*given), eager(*given))
    assert len(module.forward.variants.all) == 1


@pytest.mark.filterwarnings("ignore:Converting a tensor")
def test_a_recorded_function_stays_what_was_recorded(tmp_path: Path) -> None:
    module = optimised(Recorded(), tmp_path)
    x = -torch.ones(4, 3)
    with torch.no_grad():
        assert torch.equal(module(x), x * 2 + 1)


def _where(x: Tensor) -> int:
    return 1 if torch.jit.is_scripting() else 2


def test_torchs_interpreter_is_not_asked_in_a_trace_and_is_elsewhere() -> None:
    function, found = torch.jit.script(_where), list[int]()
    usual = torch._C.ScriptFunction.__call__
    with inlined():
        elsewhere = threading.Thread(target=lambda: found.append(function(torch.ones(2))))
        elsewhere.start()
        elsewhere.join()
        found.append(function(torch.ones(2)))
    found.append(function(torch.ones(2)))
    assert found == [1, 2, 1]
    assert torch._C.ScriptFunction.__call__ is usual


class Scanning(nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode

    def forward(self, decay: Tensor, x: Tensor) -> Tensor:
        _, states = scans.associative_scan(product, (decay, x), dim=1, combine_mode=self.mode)
        return states * 2


def test_scans_of_both_kinds_are_taken_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU torch refuses to scan element by element before it looks at who compiles it."""
    decay, x = torch.rand(2, 9, 4), torch.randn(2, 9, 4)
    wanted, state = [], torch.zeros(2, 4)
    for step in range(9):
        state = decay[:, step] * state + x[:, step]
        wanted.append(state * 2)

    def scan(fn: Any, xs: Any, dim: int, *, combine_mode: str) -> Any:
        leaves = [each.movedim(dim, 0) for each in xs]
        found = scans._maybe_compile_and_run_fn(
            None, lambda *four: list(fn(four[:2], four[2:])), leaves
        )
        return tuple(each.movedim(0, dim) for each in found)

    for mode, own in (("generic", scans.associative_scan), ("pointwise", scan)):
        monkeypatch.setattr(scans, "associative_scan", own)
        module = optimised(Scanning(mode), tmp_path)
        with torch.no_grad():
            torch.testing.assert_close(module(decay, x), torch.stack(wanted, 1))


def test_code_that_was_made_without_a_module_is_no_users_file() -> None:
    """Such functions have None for the name of their module."""
    table: dict[str, Any] = {}
    exec("def double(x):\n    return x * 2", table)
    double: Any = FunctionType(table["double"].__code__, {})
    assert double.__module__ is None
    globals()["_made"] = double
    try:
        with symbolic_builtins(Scanning("generic")):
            pass
    finally:
        del globals()["_made"]
