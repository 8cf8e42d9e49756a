"""``strop.optimize`` serves programs of torch.export, and other modules of torch.fx."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import strop
from strop import Options


class Net(nn.Module):
    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm, self.act = nn.Linear(8, 8), nn.BatchNorm1d(8), act

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.act(self.norm(self.linear(x)))
        return {"all": y * x.shape[0], "mean": y.mean(0)}


def exported(act: Callable[[Tensor], Tensor] = torch.relu) -> tuple[Any, nn.Module]:
    net = Net(act).eval()
    sizes = ({0: Dim("rows", min=2, max=64)},)
    program = torch.export.export(net, (torch.randn(4, 8),), dynamic_shapes=sizes)
    return program.module(), net


@torch.no_grad()
def test_an_exported_program_is_one_graph(tmp_path: Path) -> None:
    module, net = exported()
    strop.optimize(module, options=Options(cache_dir=str(tmp_path), strict=True))
    for rows in (4, 7, 2, 64):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(module(x), net(x))
    report = strop.explain(module)
    assert report.num_graphs == 1
    assert not report.fallbacks


@torch.no_grad()
def test_its_own_checks_hold(tmp_path: Path) -> None:
    """Sizes that it was not exported for raise its own error."""
    module, _ = exported()
    strop.optimize(module, options=Options(cache_dir=str(tmp_path)))
    module(torch.randn(4, 8))
    with pytest.raises((AssertionError, RuntimeError), match="64"):
        module(torch.randn(65, 8))


@torch.no_grad()
def test_stored_plans_of_two_programs_are_two(tmp_path: Path) -> None:
    """They have weights of one shape and one class, and differ in an operator of their code."""
    for act in (torch.relu, torch.tanh, torch.relu):
        module, net = exported(act)
        strop.optimize(module, options=Options(cache_dir=str(tmp_path), strict=True))
        x = torch.randn(5, 8)
        torch.testing.assert_close(module(x), net(x))
    assert [graph.from_disk for graph in strop.explain(module).graphs] == [True]


@torch.no_grad()
def test_a_graph_that_is_edited_is_another(tmp_path: Path) -> None:
    module = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(8, 8), nn.ReLU())).eval()
    strop.optimize(module, options=Options(cache_dir=str(tmp_path), strict=True))
    x = torch.randn(3, 8)
    assert module(x).min() >= 0
    (output,) = module.graph.find_nodes(op="output")
    output.args = (output.args[0].args[0],)
    module.recompile()
    torch.testing.assert_close(module(x), module.get_submodule("0")(x))


def test_gradients_of_an_exported_program(tmp_path: Path) -> None:
    module, net = exported(torch.tanh)
    strop.optimize(module, train=True, options=Options(cache_dir=str(tmp_path), strict=True))
    for rows in (3, 6):
        x = torch.randn(rows, 8)
        for model in (module, net):
            model.zero_grad()
            model(x)["all"].square().sum().backward()
        found = {name: p.grad for name, p in module.named_parameters()}
        torch.testing.assert_close(found, {name: p.grad for name, p in net.named_parameters()})


class Heads(nn.Module):
    def forward(self, q: Tensor, mask: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)


@torch.no_grad()
def test_its_attention_is_a_call_that_may_have_a_kernel(tmp_path: Path) -> None:
    """torch's operator has a second result, which nobody reads."""
    given = torch.randn(2, 4, 8, 64), torch.zeros(2, 1, 8, 8)
    given[1][0, 0, :, 5:] = -10
    module: Any = torch.export.export(Heads().eval(), given).module()
    strop.optimize(module, options=Options(cache_dir=str(tmp_path), strict=True))
    torch.testing.assert_close(module(*given), Heads()(*given))
    assert strop.explain(module).calls == {"attention": 1}
