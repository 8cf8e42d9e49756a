"""Weights that hooks of torch compute before each call: norms, spectral norms, pruning."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import (
    prune,
    remove_spectral_norm,
    remove_weight_norm,
    spectral_norm,
    weight_norm,
)

import strop
from strop.frontend.clones import clone_structure

pytestmark = pytest.mark.filterwarnings("ignore")  # torch has other forms of these, too


def _pruned(layer: nn.Module) -> None:
    prune.l1_unstructured(layer, "weight", amount=0.3)
    prune.random_unstructured(layer, "bias", amount=0.3)


def _pruned_twice(layer: nn.Module) -> None:
    for _ in range(2):
        prune.ln_structured(layer, "weight", amount=1, n=2, dim=0)


KINDS: dict[str, Callable[[nn.Module], object]] = {
    "weight norm": weight_norm,
    "weight norm over all": lambda layer: weight_norm(layer, dim=None),
    "spectral norm": spectral_norm,
    "pruned": _pruned,
    "pruned twice": _pruned_twice,
}


class Net(nn.Module):
    def __init__(self, kind: Callable[[nn.Module], object]) -> None:
        super().__init__()
        self.inner = nn.Conv1d(4, 8, 3, padding=1)
        self.up, self.out = nn.ConvTranspose1d(8, 4, 4, 2), nn.Linear(8, 5)
        for layer in (self.inner, self.up, self.out):
            kind(layer)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.up(self.inner(x).sin()))
        return y


def net_of(kind: str) -> Net:
    torch.manual_seed(0)
    net = Net(KINDS[kind])
    if kind == "spectral norm":
        for _ in range(3):  # its vectors approach the singular ones
            net(torch.randn(2, 4, 3))
    return net.eval()


def optimized(net: Net, folder: Path, **more: Any) -> Net:
    made: Net = strop.optimize(
        net, options=strop.Options(cache_dir=str(folder), **{"strict": True, **more})
    )
    return made


def agree(net: nn.Module, twin: nn.Module) -> None:
    x = torch.randn(2, 4, 3)
    with torch.no_grad():
        found, expected = net(x), twin(x)
    # sums in fp32 cancel: an element may be further off than 1e-5 of itself
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("is_frozen", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_they_are_compiled(kind: str, is_frozen: bool, tmp_path: Path) -> None:
    net, twin = (net_of(kind).requires_grad_(not is_frozen) for _ in range(2))
    optimized(net, tmp_path, check=True)
    for _ in range(3):
        agree(net, twin)
    counters: Any = net.forward.counters  # type: ignore[attr-defined]
    assert (counters.eager_calls, counters.rebinds, counters.findings) == (0, 0, [])
    assert not counters.fallbacks
    report = strop.explain(net)
    assert report.num_graphs == 1
    assert {call for call in report.calls if call.startswith("aten.")} <= {
        "aten.convolution.default"
    }


@pytest.mark.parametrize("kind", KINDS)
def test_what_they_are_made_of_is_data(kind: str, tmp_path: Path) -> None:
    net, twin = net_of(kind), net_of(kind)
    optimized(net, tmp_path)
    agree(net, twin)
    for each in (net, twin):
        torch.manual_seed(1)
        for tensor in (*each.parameters(), *each.buffers()):
            tensor.data.copy_(torch.randn(tensor.shape).abs() * tensor.ne(0))
    agree(net, twin)
    state = {name: tensor * 2 for name, tensor in net.state_dict().items()}
    for each in (net, twin):
        each.load_state_dict(state)
    agree(net, twin)
    assert not net.forward.counters.eager_calls  # type: ignore[attr-defined]


def test_a_call_in_eager_between_compiled_ones(tmp_path: Path) -> None:
    """It leaves another weight on each layer, which nothing is bound to."""
    net, twin = net_of("weight norm"), net_of("weight norm")
    optimized(net, tmp_path, strict=False)
    for _ in range(3):
        agree(net, twin)
        net(torch.randn(2, 4, 3))  # gradients are enabled
    counters: Any = net.forward.counters  # type: ignore[attr-defined]
    assert (counters.eager_calls, counters.rebinds) == (3, 0)


def _without_norm(net: Any) -> None:
    for layer in (net.inner, net.up, net.out):
        remove_weight_norm(layer)


def _without_spectral(net: Any) -> None:
    for layer in (net.inner, net.up, net.out):
        remove_spectral_norm(layer)


def _without_pruning(net: Any) -> None:
    for layer in (net.inner, net.up, net.out):
        prune.remove(layer, "weight")


def _pruned_more(net: Any) -> None:
    torch.manual_seed(2)
    prune.random_unstructured(net.inner, "weight", amount=0.5)


def _over_another_dim(net: Any) -> None:
    (hook,) = net.out._forward_pre_hooks.values()
    hook.dim = -1  # one length for all rows
    net.out.weight_g.data = torch.tensor(2.0)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("weight norm", _without_norm),
        ("spectral norm", _without_spectral),
        ("pruned", _without_pruning),
        ("pruned", _pruned_more),
        ("weight norm", _over_another_dim),
    ],
)
def test_changes_of_hooks_are_seen(
    kind: str, change: Callable[[nn.Module], None], tmp_path: Path
) -> None:
    net, twin = net_of(kind), net_of(kind)
    optimized(net, tmp_path)
    agree(net, twin)
    for each in (net, twin):
        change(each)
    agree(net, twin)
    for each in (net, twin):
        each.bias = nn.Parameter(torch.zeros(1))
    agree(net, twin)
    assert not net.forward.counters.eager_calls  # type: ignore[attr-defined]


def test_a_norm_that_comes_later_is_seen(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, twin = (nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).eval() for _ in range(2))
    twin.load_state_dict(net.state_dict())
    optimized(net, tmp_path)  # type: ignore[arg-type]
    agree(net, twin)
    for each in (net, twin):
        weight_norm(each[0])
        each[0].weight_g.data.mul_(3)
    agree(net, twin)
    assert not net.forward.counters.eager_calls  # type: ignore[attr-defined]


def test_other_hooks_beside_them_run_in_eager_with_a_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net = net_of("weight norm")
    optimized(net, tmp_path, strict=False)
    seen: list[int] = []
    net.inner.register_forward_pre_hook(lambda part, args: seen.append(1))
    with caplog.at_level(logging.WARNING, "strop"), torch.no_grad():
        net(torch.randn(2, 4, 3))
    assert seen == [1]
    assert "a submodule has forward hooks" in caplog.text


def test_a_copy_has_no_hooks_and_leaves_nothing_behind() -> None:
    net = net_of("weight norm")
    clone: Any = clone_structure(net)
    agree(clone, net)
    assert not clone.inner._forward_pre_hooks
    assert "weight" not in vars(clone.inner)
    agree(clone_structure(clone), net)
    assert "weight" in vars(net.inner)


def test_training_beside_them_is_left_to_torch(tmp_path: Path) -> None:
    net, twin = net_of("weight norm").train(), net_of("weight norm").train()
    strop.optimize(net, options=strop.Options(cache_dir=str(tmp_path)), train=True)
    x = torch.randn(2, 4, 3)
    for each in (net, twin):
        each(x).square().sum().backward()
    torch.testing.assert_close(net.inner.weight_g.grad, twin.inner.weight_g.grad)
    (reason,) = net.forward.traced_by_torch  # type: ignore[attr-defined]
    assert reason.startswith("hooks of torch make weights of inner")


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(weight_norm(nn.Linear(4, 4)), nn.SiLU(), nn.Linear(4, 4))
            for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x.sin())
        return x


def test_repeated_blocks_are_traced_once(tmp_path: Path) -> None:
    net, twin = Stack().eval(), Stack().eval()
    twin.load_state_dict(net.state_dict())
    optimized(net, tmp_path)  # type: ignore[arg-type]
    x = torch.randn(3, 4)
    with torch.no_grad():
        torch.testing.assert_close(net(x), twin(x))
    assert strop.explain(net).graphs[0].num_copied_blocks == 2  # the first one's is an argument


def test_products_with_a_vector_have_rows(tmp_path: Path) -> None:
    class Products(nn.Module):
        def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, ...]:
            return torch.mv(x, v), torch.dot(v, v + 1), torch.vdot(v, v), x @ v

    net = optimized(Products().eval(), tmp_path)  # type: ignore[arg-type]
    for rows, columns in ((5, 7), (1, 3)):
        x, v = torch.randn(rows, columns), torch.randn(columns)
        torch.testing.assert_close(net(x, v), Products()(x, v))  # type: ignore[call-arg]
    assert not [call for call in strop.explain(net).calls if call.startswith("aten.")]
