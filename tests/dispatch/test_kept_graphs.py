"""What a program keeps of its compile: collections of Python's garbage look at every object."""

from __future__ import annotations

import gc
from pathlib import Path

import torch
from torch import Tensor, nn

import strop
from strop.backend import Compiled
from strop.ir.graph import Node


def alive(kind: type) -> list[object]:
    gc.collect()
    return [each for each in gc.get_objects() if type(each) is kind]


class Views(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(8):
            x = (x.transpose(-1, -2).reshape(x.shape[0], 2, -1) * 2).reshape(x.shape).softmax(-1)
        return x


def test_only_the_last_graph_is_kept(tmp_path: Path) -> None:
    nodes, compiled = len(alive(Node)), {id(each) for each in alive(Compiled)}
    fast = strop.optimize(Views().eval(), options=strop.Options(cache_dir=str(tmp_path)))
    fast(torch.randn(3, 4, 6))
    new = [each for each in alive(Compiled) if id(each) not in compiled]
    kept = sum(len(each.graph.nodes) for each in new if isinstance(each, Compiled))
    assert new
    assert len(alive(Node)) - nodes == kept
