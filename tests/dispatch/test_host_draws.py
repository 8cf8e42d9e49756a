"""Numbers that a forward on a GPU draws on the CPU for nothing are drawn at each call."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import strop
from strop.api import optimize_module
from strop.artefacts.building import CARDS
from strop.artefacts.planning import PlanningDispatcher
from strop.dispatch.native_look import native_look
from strop.frontend import importer
from strop.frontend.host_draws import unused_draw
from strop.ir import serialize
from strop.ir.program import HostDraw
from strop.options import Options
from strop.runtime.build.ahead import AheadLoader
from tests.diffusion import replayed

CALLS = 5


class LeavesLayersOut(nn.Module):
    """As Wav2Vec2 does: what it draws says in training whether a layer is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            drawn = torch.rand([])
            if not (self.training and drawn < 0.5):
                x = layer(x).relu()
        return x


def net() -> nn.Module:
    torch.manual_seed(0)
    return LeavesLayersOut().eval().requires_grad_(False)


def states(module: nn.Module, x: Tensor) -> list[Tensor]:
    """The generator's next number after each call."""
    torch.manual_seed(3)
    found = []
    for _ in range(CALLS):
        with torch.no_grad():
            module(x)
        found.append(torch.rand(1))
    return found


def test_a_plan_for_a_gpu_has_them(tmp_path: Path) -> None:
    options = Options(cache_dir=str(tmp_path), strict=True)
    loader = AheadLoader("sm_90", CARDS["sm_90"], options)
    module = net()
    kind = partial(PlanningDispatcher, loader=loader, place=torch.device("cuda", 0))
    optimize_module(module, options, kind=kind)
    with torch.no_grad():
        module(torch.randn(2, 8))
    (variant,) = module.forward.variants.all
    program = variant.program
    assert [draw.target for draw in program.host_draws] == ["aten.rand.default"] * 3
    assert program.is_pure
    assert serialize.from_json(serialize.to_json(program)) == program


@pytest.mark.parametrize("has_graphs", [False, True])
def test_the_generator_moves_on_as_in_eager(
    has_graphs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the program of a CPU, in which a plan for a GPU's rule is put."""
    x = torch.randn(2, 8)
    wanted = states(net(), x)
    monkeypatch.setattr(importer, "unused_draw", lambda fx, devices: unused_draw(fx, {"cuda"}))
    with replayed.replayed_first() as pool:
        options = Options(cache_dir=str(tmp_path), strict=True, cuda_graphs=has_graphs)
        native_look(str(tmp_path))  # short ways wait for it
        module = strop.optimize(net(), options=options)
        assert torch.equal(torch.cat(states(module, x)), torch.cat(wanted))
        torch.testing.assert_close(module(x), net()(x))
        assert bool(pool.num_replays) is has_graphs
        assert bool(module.forward.counters.short_replays) is has_graphs
    (variant,) = module.forward.variants.all
    assert len(variant.program.host_draws) == 3


def test_a_run_that_is_taken_back_draws_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importer, "unused_draw", lambda fx, devices: unused_draw(fx, {"cuda"}))
    x, eager = torch.randn(2, 8), net()
    with replayed.replayed_first() as pool:
        options = Options(cache_dir=str(tmp_path), strict=True)
        module = strop.optimize(net(), options=options)
        for each in (module, eager):
            states(each, x)
        taken_back = pool.num_replays
        numbers = []
        for each in (module, eager):
            torch.manual_seed(3)
            with torch.no_grad():
                each.layers[0] = nn.Linear(8, 8).requires_grad_(False).eval()
                each.layers[0].weight.fill_(0.5)
                each.layers[0].bias.zero_()
            torch.manual_seed(4)
            with torch.no_grad():
                numbers.append((each(x), torch.rand(1)))
        assert pool.num_replays > taken_back, "else the test says nothing"
    (own, own_next), (wanted, wanted_next) = numbers
    torch.testing.assert_close(own, wanted)
    assert torch.equal(own_next, wanted_next)


def test_what_somebody_reads_or_whose_size_is_open_is_none() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    drawn = [
        graph.call_function(torch.ops.aten.rand.default, ([2],)),
        graph.call_function(torch.ops.aten.rand.default, ([x],)),
        graph.call_function(torch.ops.aten.randn.default, ([],), {"dtype": torch.float64}),
        graph.call_function(torch.ops.aten.zeros.default, ([2],)),
    ]
    for node in drawn:
        node.meta["val"] = torch.zeros(2)
    read, unknown, normal, zeros = drawn
    graph.call_function(torch.ops.aten.neg.default, (read,))
    found = [unused_draw(node, {"cpu", "cuda"}) for node in (read, unknown, zeros)]
    assert found == [None, None, None]
    own = HostDraw("aten.randn.default", ((),), (("dtype", torch.float64),))
    assert unused_draw(normal, {"cpu", "cuda"}) == own
    assert unused_draw(normal, {"cpu"}) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_a_gpu(tmp_path: Path) -> None:
    x = torch.randn(2, 8, device="cuda")
    wanted = states(net().cuda(), x)
    module = strop.optimize(net().cuda(), options=Options(cache_dir=str(tmp_path), strict=True))
    assert torch.equal(torch.cat(states(module, x)), torch.cat(wanted))
    assert module.forward.counters.replays
    torch.testing.assert_close(module(x), net().cuda()(x))
