"""Attention that may be computed by e4m3 codes: which one is marked, and what a mark changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from strop.backend import Compiled
from strop.debug.check import _has_judge
from strop.ir.eight_bit import MARK
from strop.ir.graph import Node
from strop.kernels import library
from strop.kernels.kernel import Call
from strop.options import Options
from strop.passes.eight_bit_attention import eight_bit_attention
from tests.gpus import H100
from tests.passes.planning import planned_by

GPU = torch.device("cuda", 0)
WIDTH, HEADS = 160, 4
SIZES = {"x": ("b", "n", str(WIDTH)), "words": ("b", "77", str(WIDTH))}
HINTS = {"b": 2, "n": 64}


class Attention(nn.Module):
    def __init__(self, *, is_causal: bool = False) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.is_causal = is_causal

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        q, k, v = (
            of(y).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for of, y in ((self.to_q, x), (self.to_k, words), (self.to_v, words))
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        return y.transpose(1, 2).flatten(2)


class Block(nn.Module):
    """To itself, and to words."""

    def __init__(self, *, is_causal: bool = False) -> None:
        super().__init__()
        self.attn1, self.attn2 = Attention(is_causal=is_causal), Attention()
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        x = x + self.attn1(x, x)
        return self.out(x + self.attn2(x, words))


def planned(module: nn.Module, dtype: torch.dtype = torch.float16, **options: object) -> Compiled:
    wanted = Options(**{"numerics": ("fp8",), **options}, record=True)  # type: ignore[arg-type]
    return planned_by(module, SIZES, wanted, dtype, HINTS)[0]


def attentions(compiled: Compiled) -> dict[str, Node]:
    return {node.origin: node for node in compiled.graph.nodes if node.op == "attention"}


def marked(compiled: Compiled) -> list[str]:
    return [name for name, node in attentions(compiled).items() if MARK in node.attrs]


def test_attention_to_itself_is_marked() -> None:
    compiled = planned(Block())
    assert [*attentions(compiled)] == ["attn1", "attn2"]
    assert marked(compiled) == ["attn1"]
    assert not _has_judge(attentions(compiled)["attn1"])
    assert _has_judge(attentions(compiled)["attn2"])
    (step,) = (step for step in compiled.program.call_steps if MARK in dict(step.attrs))
    assert step.op == "attention"


def test_what_stays_exact(caplog: pytest.LogCaptureFixture) -> None:
    assert not marked(planned(Block(), numerics=("int8",)))
    assert not marked(planned(Block(), numerics=()))
    assert not marked(planned(Block(), torch.float32))
    assert not marked(planned(Block(is_causal=True)))
    assert not marked(planned(Block(), disable=(eight_bit_attention.__name__,)))
    assert not marked(planned(Block(), exact_layers=("attn1",)))
    assert "exact_layers" not in caplog.text
    assert marked(planned(Block(), exact_layers=("attn2",))) == ["attn1"]


def test_exact_kernels_compute_what_is_marked() -> None:
    """Where codes are not faster, those that compute it without a mark."""
    compiled = planned(Block())
    node = attentions(compiled)["attn1"]
    call = Call.of(node)
    plain = Call(call.op, tuple(x for x in call.attrs if x[0] != MARK), call.shapes, call.dtype)
    sizes = {"b": 2, "n": 1024}
    found, wanted = (library.select(each, each.at(sizes), H100) for each in (call, plain))
    assert found.kernel == wanted.kernel == "wgmma_attention"
    assert found.launches == wanted.launches
