"""Weights of convolutions stay as they were given where eager's code views across channels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strop.backend import compile_graph
from strop.codegen.assemble import Signature
from strop.dispatch.placed_weights import _convolution_weights
from strop.frontend.capture import capture
from strop.frontend.importer import import_graph
from strop.ir.tensor_spec import TensorSpec
from strop.options import Options

GPU = torch.device("cuda", 0)


class Two(nn.Module):
    """Two convolutions, and code behind them."""

    def __init__(self, behind: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3)
        self.apart = nn.Conv2d(8, 8, 3, padding=1)
        self.behind = behind

    def forward(self, x: Tensor) -> Any:
        return self.behind(self.two(F.silu(self.one(x)))), torch.relu(self.apart(x))


def moved_weights(module: nn.Module) -> set[str]:
    """Plan a module for a GPU, and return the names of the weights that it would lay out anew."""
    spec = TensorSpec(("b", "8", "8*h", "8*w"), torch.float16, GPU)
    module = module.half()
    hints = {"b": 2, "h": 2, "w": 3}
    captured = capture(module, module, [spec], hints, device=GPU)
    imported = import_graph(
        captured.gm, captured.symbols, captured.hints, captured.origins, len(captured.state_names)
    )
    signature = Signature(imported.returned, captured.guards)
    compiled = compile_graph(imported.graph, signature, GPU.type, Options())
    return {captured.state_names[i] for i in _convolution_weights(compiled.program)}


BOTH, APART = {"one.weight", "two.weight", "apart.weight"}, {"apart.weight"}


@pytest.mark.parametrize(
    ("behind", "moved"),
    [
        (lambda y: y.view(len(y), -1), APART),
        (lambda y: y.view((y.shape[0], 4, -1)), APART),
        (lambda y: (y * 2).view(-1, 8 * 8), APART),
        (lambda y: y.view_as(y.reshape(len(y), -1)), APART),
        (lambda y: y.view(len(y), 8, -1), BOTH),  # pixels are joined, which lie together
        (lambda y: y.view(len(y), 2, 4, *y.shape[2:]), BOTH),
        (lambda y: y.reshape(len(y), -1), BOTH),  # copies where it has to
        (lambda y: y.flatten(1), BOTH),
        (lambda y: y.permute(0, 2, 3, 1).reshape(len(y), -1, 8), BOTH),
        (lambda y: y.view(torch.int16), BOTH),
        (lambda y: y.sum((2, 3)).view(-1), BOTH),
    ],
)
def test_which_stay(behind, moved):
    assert moved_weights(Two(behind)) == moved


def test_views_of_what_no_convolution_makes():
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(8, 8, 3)

        def forward(self, x):
            heads = self.conv(x).flatten(2).unflatten(1, (2, 4)).contiguous()
            return heads.view(-1, *heads.shape[2:])

    assert moved_weights(Heads()) == {"conv.weight"}


def test_views_in_repeated_blocks():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(8, 8, 3, padding=1)

        def forward(self, x):
            y = self.conv(x)
            return x + y.view(len(y), -1).view_as(y)

    assert moved_weights(nn.Sequential(*(Block() for _ in range(4)))) == set()
