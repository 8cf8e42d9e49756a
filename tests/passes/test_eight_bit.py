"""Which linears of which models get 8 bits, and what stands in their place, planned for a GPU."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from strop.backend import Compiled
from strop.ir.eight_bit import FORMATS
from strop.options import Options
from strop.passes.eight_bit_rules import LEAST_WIDTH, RULES
from tests.passes.planning import planned_by
from tests.quantised.small_models import Net


def planned(
    module: nn.Module, specs: dict[str, tuple[str, ...]], numerics: str, dtype: torch.dtype
) -> Compiled:
    return planned_by(module, specs, Options(numerics=(numerics,)), dtype)[0]


TOKENS = {"x": ("b", "s", "16"), "time": ("b", "16")}


@pytest.mark.parametrize("numerics", FORMATS)
def test_a_transformer_on_a_gpu(numerics):
    program = planned(Net(128), TOKENS, numerics, torch.float16).program
    calls = Counter(
        dict(step.attrs)["target"] if step.op == "aten" else step.op for step in program.call_steps
    )
    of_codes = {"int8": "code_sums", "fp8": "scaled_product"}[numerics]
    # q, k and v are one product; what stays exact are the first, the last and the time's
    assert calls[of_codes] == 8
    assert calls["linear"] == 3
    # rows are quantised where they are made: a kernel for that alone is behind attention only
    # and sums of int8 codes are scaled for attention by one, which e4m3 does not need
    assert len(program.kernel_steps) <= 1 + 2 * {"int8": 5, "fp8": 4}[numerics]
    assert program.is_pure
    made = [spec for spec in program.inputs if spec.made]
    assert Counter(spec.made for spec in made) == {f"{numerics} codes": 8, f"{numerics} scales": 8}
    assert {len(spec.merged) for spec in made} == {1, 3}
    own = FORMATS[numerics]
    assert all(s.dtype is (own.dtype if s.made.endswith("codes") else torch.float32) for s in made)


def test_nothing_changes_without_being_asked():
    graphs = [
        planned(Net(128), TOKENS, numerics, torch.float16).graph for numerics in ("none", "other")
    ]
    assert not any(n.op == "code_sums" for graph in graphs for n in graph.nodes)
    assert not planned(Net(128), TOKENS, "none", torch.float16).program.exact


class Chain(nn.Module):
    """Layers one behind the other, of which one in the middle is asked about."""

    def __init__(self, width: int = 64, depth: int = 64, name: str = "own") -> None:
        super().__init__()
        self.first, self.last = nn.Linear(depth, depth), nn.Linear(width, width)
        self.add_module(name, nn.Linear(depth, width))
        self._name = name

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(x))
        return self.last(torch.relu(self._modules[self._name](y)))


class Computed(Chain):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(x))
        return self.last(torch.relu(nn.functional.linear(y, self.own.weight * 2)))


THREE = {"x": ("b", "s", "64")}
CASES = {
    "in 8 bits": (Chain(), THREE, torch.float16, ""),
    "computed": (Computed(), THREE, torch.float16, "its weight is computed in each call"),
    "fp32": (Chain(), THREE, torch.float32, "its type is none that is multiplied in 8 bits"),
    "no tokens": (Chain(), {"x": ("b", "64")}, torch.float16, "its operand has no tokens"),
    "of the time": (Chain(name="time_emb_proj"), THREE, torch.float16, "it makes modulations"),
    "a norm's": (Chain(name="adaln_single"), THREE, torch.float16, "it makes modulations"),
    "small": (Chain(width=LEAST_WIDTH - 16), THREE, torch.float16, "it is too small to gain"),
    "uneven": (Chain(width=72), THREE, torch.float16, "libraries multiply codes of 8 (int8)"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_which_layers_stay_exact(case):
    module, specs, dtype, reason = case
    exact = dict(planned(module, specs, "fp8", dtype).program.exact)
    (asked,) = (name for name, _ in module.named_children() if name not in ("first", "last"))
    origin = type(module).__name__ if isinstance(module, Computed) else asked
    assert exact.get(origin, "").startswith(reason)
    assert bool(exact.get(origin)) == bool(reason)
    if not reason:
        assert exact["first"].startswith("it is a first layer")
        assert exact["last"].startswith("it is a last layer")


def test_each_rule_has_a_reason_of_its_own():
    reasons = [rule.reason for rule in RULES]
    assert len({*reasons}) == len(reasons)


def test_layers_that_read_one_value_are_one_product_only_if_both_are_in_8_bits():
    options = Options(numerics=("int8",), exact_layers=("blocks.0.k",))
    made, own = planned_by(Net(128, num_blocks=1), TOKENS, options, torch.float16)
    program = made.program
    merged = [spec.merged for spec in program.inputs if spec.made == "int8 codes"]
    names = [{own[n] for n in numbers} for numbers in merged]
    assert {"blocks.0.q.weight", "blocks.0.v.weight"} in names
    assert not any("blocks.0.k.weight" in some for some in names)
