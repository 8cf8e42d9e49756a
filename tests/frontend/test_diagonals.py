"""Writes in place that torch has no form of without a write, or that go through strides."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import strop
from strop.errors import CaptureError
from strop.frontend.functional import _functional_overload
from tests.frontend.tracing import Function, trace

INF = math.inf


def _filled(x: Tensor, *how: float | bool, rows: int | None = None) -> Tensor:
    whole = x[:rows].clone()
    whole.fill_diagonal_(*how)
    return whole


def _filled_part(x: Tensor) -> Tensor:
    """As the perturbed attention of Stable Diffusion 3 keeps patches from each other."""
    whole = torch.zeros_like(x)
    whole[:-1, :-1] = -INF
    whole[:-1, :-1].fill_diagonal_(0)
    return whole.exp()


def _filled_through_views(x: Tensor) -> Tensor:
    whole = x.clone()
    part = whole.t()[1:]
    whole.add_(1)
    part.fill_diagonal_(3)
    return whole * 2 + part.sum()


CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "square or wide": lambda x: _filled(x, 7),
    "tall": lambda x: _filled(x[:, :2], 7),
    "wrapped": lambda x: _filled(x[:, :2], 7, True),
    "wrapped, but wide": lambda x: _filled(x, 7, True, rows=2),
    "three dims": lambda x: _filled(x[:4, :4].expand(4, 4, 4), 0.5),
    "truncated": lambda x: _filled((x * 9).int(), 1.7),
    "booleans": lambda x: _filled(x > 0, 2).float(),
    "a part": _filled_part,
    "through views": _filled_through_views,
    "power": lambda x: x.abs().pow_(x) + 1,
    "power of a wider type": lambda x: x.abs().pow_(x.double()) + 1,
    "rounded quotient": lambda x: x.clone().floor_divide_(x.abs() + 0.1),
}


@pytest.mark.parametrize("name", CASES)
def test_they_are_compiled(name: str, tmp_path: Path) -> None:
    function = CASES[name]
    module: Function = strop.optimize(
        Function(function).eval(), options=strop.Options(cache_dir=str(tmp_path), strict=True)
    )
    for rows in (5, 9):
        x = torch.randn(rows, 6)
        found, wanted = module(x), function(x)
        assert found.dtype == wanted.dtype
        torch.testing.assert_close(found, wanted, equal_nan=True)
    report = strop.explain(module)
    assert not report.calls
    assert report.num_graphs <= 2  # torch asks whether a matrix is tall


@pytest.mark.parametrize("shape", ["b", "b 6 6"])
def test_what_has_no_diagonal_raises_what_eager_raises(shape: str) -> None:
    with pytest.raises(CaptureError, match=r"dimensions"):
        trace(lambda x: x.clone().fill_diagonal_(1), shape, b=5)


# Parameter steps, Sobol sequences, dropout of training, and what changes the tensor itself.
WITHOUT = {
    *("_amp_foreach_non_finite_check_and_unscale_", "_amp_update_scale_"),
    *("_fused_adagrad_", "_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_muon_"),
    *("_sobol_engine_scramble_", "_sobol_engine_initialize_state_", "_sobol_engine_ff_"),
    *("_fill_mem_eff_dropout_mask_", "rrelu_with_noise_"),
    *("set_", "transpose_", "requires_grad_"),
    *("fill_diagonal_", "float_power_"),  # made of others
}


def test_every_operator_in_place_has_a_form_without_a_write() -> None:
    found = set()
    for text in torch._C._dispatch_get_all_op_names():
        space, _, rest = text.partition("::")
        name, _, overload = rest.partition(".")
        if space != "aten" or not name.endswith("_") or overload.endswith("out"):
            continue
        operator = getattr(getattr(torch.ops.aten, name), overload or "default")
        if operator._schema.is_mutable and _functional_overload(operator) is None:
            found.add(name)
    assert found <= WITHOUT
