"""The judge itself: it knows every operator, and agrees with modules in fp64."""

from __future__ import annotations

import pytest
import torch

from strop.debug.reference import evaluate, has_reference, input_values
from strop.diffusion.components import adapter_for
from strop.ir.graph import Node
from strop.ir.ops import POINTWISE, REDUCTIONS, STRUCTURAL, Op
from tests.e2e import tiny
from tests.frontend.tracing import trace_specs


@pytest.mark.parametrize("row", POINTWISE + REDUCTIONS + STRUCTURAL, ids=lambda row: row.name)
def test_every_operator_has_a_reference(row: Op) -> None:
    assert has_reference(row.name), (
        f"{row.name}: give its row a reference, or add a rule to _RULES in debug/reference.py;"
        " STROP_CHECK, bisect and minify cannot judge it otherwise"
    )


def test_a_unet_in_fp64() -> None:
    module = tiny.unet()
    args = tiny.unet_args(2, 8, 4, 5)
    shapes = adapter_for(module).shapes(args)
    traced = trace_specs(
        module, lambda x, t, text: module(x, t, text, return_dict=False), shapes.specs, shapes.hints
    )
    state = [module.state_dict()[name] for name in traced.captured.state_names]
    given: dict[Node, torch.Tensor] = input_values(traced.graph, dict(enumerate([*state, *args])))
    (output,) = traced.outputs
    with torch.no_grad():
        eager = module(*args).sample
        exact = module.double()(*(x.double() for x in args)).sample
    found = {e: evaluate([output], given, shapes.hints, exact=e)[output] for e in (False, True)}
    torch.testing.assert_close(found[False], eager, rtol=1e-5, atol=1e-5)
    # positions of the timestep are computed in fp32 by the module whatever its dtype
    torch.testing.assert_close(found[True], exact, rtol=1e-5, atol=1e-5)
    assert found[True].dtype == torch.float64
