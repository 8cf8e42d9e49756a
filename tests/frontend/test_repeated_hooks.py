"""Hooks of blocks run as often as in eager, and those of transformers keep no block apart."""

from __future__ import annotations

import tempfile
from copy import deepcopy
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel

import strop
from strop.bench import models
from strop.frontend import repeated_blocks
from tests.frontend.tracing import trace

FOLDER = tempfile.TemporaryDirectory()  # of caches: each test traces
WORDS = torch.arange(14).reshape(2, 7)


@pytest.fixture(autouse=True)
def _no_gradients():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def _compiled(module: nn.Module) -> Any:
    folder = tempfile.mkdtemp(dir=FOLDER.name)
    return strop.optimize(deepcopy(module.eval()), options=strop.Options(cache_dir=folder))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 8)  # which says how wide the argument is
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return x


def _shifted(module: nn.Module, args: Any, result: Tensor) -> Tensor:
    return result + args[0].mean()


def _scaled(module: nn.Module, args: Any) -> Any:
    return (args[0] * 2,)


@pytest.mark.parametrize("where", ["around", "inside"])
def test_hooks_of_blocks_are_traced(where: str):
    module = Stack().eval()
    for number, block in enumerate(module.blocks):
        part: Any = block if where == "around" else block[1]
        if number:
            part.register_forward_hook(_shifted)
            part.register_forward_pre_hook(_scaled)
    shared = trace(module, "b n 8", b=2, n=5)
    with mock.patch.object(repeated_blocks, "repeated", return_value=()):
        whole = trace(module, "b n 8", b=2, n=5)
    nodes = [list(traced.captured.gm.graph.nodes) for traced in (shared, whole)]
    assert [node.target for node in nodes[0]] == [node.target for node in nodes[1]]
    assert shared.captured.blocks.num_copied == (3 if where == "around" else 0)


def _text_encoder() -> Any:
    config = models.TINY_CLIP | {"num_hidden_layers": 4}
    return CLIPTextModel(CLIPTextConfig(**config)).eval()


@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize("asked", ["nothing", "hidden_states", "attentions"])
def test_layers_of_text_encoders(asked: str, *, has_run: bool):
    eager = _text_encoder()
    eager.config._attn_implementation = "eager"  # the only one that gives attentions
    more = {} if asked == "nothing" else {f"output_{asked}": True}
    if has_run:
        eager(WORDS)  # which puts hooks on its layers
    compiled = _compiled(eager)
    found, wanted = compiled(WORDS, **more), eager(WORDS, **more)
    torch.testing.assert_close(found.last_hidden_state, wanted.last_hidden_state)
    if asked != "nothing":
        values, expected = found[asked], wanted[asked]
        assert len(values) == len(expected) >= 4
        torch.testing.assert_close(values, expected)
    report = strop.explain(compiled)
    assert not report.fallbacks
    assert report.graphs[0].num_copied_blocks == (0 if asked == "attentions" else 3)
