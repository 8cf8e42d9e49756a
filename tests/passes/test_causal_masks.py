"""Masks that are known to be causal, or to let all through, are not read by attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strop.debug.reference import evaluate, input_values
from strop.ir.graph import Graph
from strop.ir.tensor_spec import TensorSpec
from strop.options import Options
from strop.passes import run as run_passes
from tests.badinput.nets import optimized
from tests.frontend.tracing import trace, trace_specs

Mask = Callable[[Tensor], Tensor]


def places(x: Tensor) -> Tensor:
    return torch.arange(x.shape[2], device=x.device)


def causal(x: Tensor) -> Tensor:
    return places(x)[None] <= places(x)[:, None]


MASKS: dict[str, tuple[Mask, bool | None]] = {
    "causal": (causal, True),
    "causal for each picture": (lambda x: causal(x)[None, None], True),
    "all": (lambda x: causal(x) == causal(x), None),  # of conditions nothing is known yet
    "everything": (lambda x: places(x)[None] == places(x)[None], False),
    "strictly below": (lambda x: places(x)[None] < places(x)[:, None], None),
    "up to the last": (lambda x: places(x)[None] <= places(x)[-1:, None], False),
    "behind the last": (lambda x: places(x)[None] < places(x)[-1:, None], None),
    "a window": (lambda x: causal(x) & (places(x)[None] > places(x)[:, None] - 2), None),
    "the other way": (lambda x: places(x)[None] >= places(x)[:, None], None),
    "of values": (lambda x: causal(x) & (x[0, 0, :, 0] > -9), None),
    "numbers": (lambda x: torch.zeros(x.shape[2], x.shape[2]).masked_fill(~causal(x), -9), None),
}


def graph_of(mask: Mask, *, is_causal: bool = False) -> Graph:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if is_causal:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.scaled_dot_product_attention(q, k, v, mask(q))

    return run_passes(trace(attend, *["b 2 s 8"] * 3, b=2, s=5).graph, Options())[0]


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_is_known_or_read(name: str) -> None:
    mask, wanted = MASKS[name]
    graph = graph_of(mask)
    (attention,) = (node for node in graph.nodes if node.op == "attention")
    assert len(attention.inputs) == (4 if wanted is None else 3)
    assert attention.attrs["causal"] == (wanted is True)
    if wanted is not None:
        assert not {"iota", "le", "eq"} & {node.op for node in graph.nodes}


@pytest.mark.parametrize("name", MASKS)
def test_values_are_those_under_the_mask(name: str) -> None:
    mask, _ = MASKS[name]
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 5, 8) for _ in range(3))
    graph = graph_of(mask)
    given = input_values(graph, dict(enumerate((q, k, v))))
    (found,) = evaluate(graph.outputs, given, {"b": 2, "s": 5}, exact=False).values()
    wanted = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), mask(q))
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)


def test_what_is_causal_already_stays() -> None:
    (attention,) = (n for n in graph_of(causal, is_causal=True).nodes if n.op == "attention")
    assert attention.attrs["causal"]


class Remembers(nn.Module):
    """Attends to a cache by a mask that is made for another one, or for queries."""

    def __init__(self, *, is_of_queries: bool) -> None:
        super().__init__()
        self.layer, self.is_of_queries = nn.Linear(16, 16), is_of_queries

    def forward(self, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        q = self.layer(x).unflatten(-1, (2, 8)).transpose(1, 2)
        rows, length = q.shape[2], first.shape[2]
        keys = torch.arange(length + (0 if self.is_of_queries else rows))
        begin = 0 if self.is_of_queries else length
        mask = (keys[None] <= begin + torch.arange(rows)[:, None])[None, None]
        own = second if self.is_of_queries else torch.cat([second, q], 2)
        return F.scaled_dot_product_attention(q, own, own, mask)


@pytest.mark.parametrize("is_of_queries", [True, False])
def test_a_mask_that_is_not_read_has_the_sizes_of_scores(is_of_queries: bool) -> None:
    """Eager raises where it has others, and so does a program that does without the mask."""
    module: Any = optimized(Remembers(is_of_queries=is_of_queries))
    for rows, first, second in ((1, 6, 6), (1, 7, 7), (1, 7, 9), (1, 6, 5), (1, 8, 8)):
        rows = first if is_of_queries else rows
        given = [torch.randn(2, rows, 16), *(torch.randn(2, 2, n, 8) for n in (first, second))]
        if first == second:
            wanted = Remembers.forward(module, *given)
            torch.testing.assert_close(module(*given), wanted)
        else:
            with pytest.raises(RuntimeError, match="must match"):
                module(*given)
    steps = [step for variant in module.forward.variants.all for step in variant.program.call_steps]
    assert {len(step.inputs) for step in steps if step.op == "attention"} == {3}


def test_gpt2_hands_no_mask_to_attention() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=99)
    model = transformers.GPT2Model(config).eval()

    model.config.use_cache = False
    given = [TensorSpec(("b", "s"), torch.int64, torch.device("cpu"))]
    traced = trace_specs(model, model, given, {"b": 2, "s": 7})
    graph = run_passes(traced.graph, Options())[0]
    found = [node for node in graph.nodes if node.op == "attention"]
    assert [(len(n.inputs), n.attrs["causal"]) for n in found] == [(3, True)] * 2
