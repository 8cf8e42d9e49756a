"""Training steps that are replayed from two CUDA graphs: on a GPU, and on a CPU in their order."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import strop
from strop.dispatch.dynamo import AOT_LOG, AotLog
from tests.train.compiled import MODELS, Mlp, assert_gradients_as_accurate, mlp_args, options
from tests.train.graphed import replayed_steps

pytestmark = pytest.mark.usefixtures("fresh")
GPU = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    ],
)


@pytest.fixture(params=["cpu", GPU])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    if request.param == "cuda":
        yield "cuda"
    else:
        with replayed_steps():
            yield "cpu"


def mlp(device: str, **changes: Any) -> tuple[nn.Module, nn.Module, AotLog]:
    """Return a small network, the same one compiled, and what is known of its graphs."""
    plain = Mlp().to(device)
    ours = strop.optimize(copy.deepcopy(plain), train=True, options=options(**changes))
    return plain, ours, ours.forward.log


def args(device: str, n: int = 0) -> tuple[Tensor, ...]:
    return tuple(tensor.to(device) for tensor in mlp_args(n))


def gradients_of(module: nn.Module, loss: Tensor, **how: Any) -> list[Tensor]:
    module.zero_grad()
    loss.backward(**how)
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


def assert_alike(ours: list[Tensor], plain: list[Tensor]) -> None:
    for mine, theirs in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)


def warmed(device: str, **changes: Any) -> tuple[nn.Module, nn.Module, AotLog]:
    """Return them behind two steps: the second one is replayed."""
    plain, ours, log = mlp(device, **changes)
    for _ in range(2):
        gradients_of(ours, ours(*args(device)).square().mean())
    return plain, ours, log


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_as_accurate_as_those_of_eager(name: str, device: str) -> None:
    """The weights change between the calls, in place, as under an optimizer."""
    make, made = MODELS[name]
    plain = make().to(device)
    ours = strop.optimize(copy.deepcopy(plain), train=True, options=options())
    inputs = [tuple(t.to(device) for t in made(n)) for n in (0, 0, 1, 0, 1, 1, 0)]
    assert_gradients_as_accurate(ours, plain, inputs, per_tensor=name != "unet")
    log = ours.forward.log
    assert (log.step_captures, log.step_replays, log.against_step_graphs) == (2, 5, {})
    assert ours.forward.traced_by_torch == {}
    (text,) = (t for t in strop.explain(ours).components[0].texts if "replayed" in t)
    assert text.startswith("5 training steps replayed CUDA graphs of forward and backward (2 pairs")


def test_an_optimizer_sees_each_gradient_of_its_own(device: str) -> None:
    plain, ours, log = mlp(device)
    for module in (plain, ours):
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        torch.manual_seed(1)
        for n in range(6):
            optimizer.zero_grad()
            module(*args(device, n % 2)).square().mean().backward()
            optimizer.step()
    assert_alike(list(ours.parameters()), list(plain.parameters()))
    assert log.step_replays == 4


def test_gradients_of_several_calls_add_up(device: str) -> None:
    """Autograd keeps the first gradient that it gets, and adds the next one to it."""
    plain, ours, log = warmed(device)
    inputs = [args(device) for _ in range(4)]
    for module in (plain, ours):
        module.zero_grad(set_to_none=False)
        for given in inputs:
            module(*given).square().mean().backward()
    assert_alike(*([p.grad for p in m.parameters()] for m in (ours, plain)))  # type: ignore
    assert log.step_replays == 5


def test_a_call_amid_another_one_runs_step_by_step(device: str) -> None:
    plain, ours, log = warmed(device)
    inputs = [args(device) for _ in range(3)]
    found = [gradients_of(m, sum(m(*x).square().mean() for x in inputs)) for m in (ours, plain)]
    assert_alike(*found)
    assert log.step_replays == 2


def test_a_result_is_the_callers_own(device: str) -> None:
    _, ours, log = warmed(device)
    first = ours(*args(device)).detach()
    kept, changed = first.clone(), first
    ours(*args(device)).square().mean().backward()
    torch.testing.assert_close(changed, kept, rtol=0, atol=0)
    assert log.step_replays == 3


def test_a_loss_that_nobody_wants_ends_its_call(device: str) -> None:
    plain, ours, log = warmed(device)
    given = args(device)
    del_me = ours(*args(device))
    assert log.step_replays == 2
    del del_me
    found = [gradients_of(m, m(*given).square().mean()) for m in (ours, plain)]
    assert_alike(*found)
    assert log.step_replays == 3


def test_a_graph_that_is_retained_serves_twice_and_then_no_more(device: str) -> None:
    plain, ours, log = warmed(device)
    given = args(device)
    results = [m(*given).square().mean() for m in (ours, plain)]
    both = zip((ours, plain), results, strict=True)
    assert_alike(*(gradients_of(m, loss, retain_graph=True) for m, loss in both))
    ours(*args(device)).square().mean().backward()  # runs step by step: the first is not over
    assert log.step_replays == 2
    assert_alike(*(gradients_of(m, r) for m, r in zip((ours, plain), results, strict=True)))
    with pytest.raises(RuntimeError, match="second time"):
        results[0].backward()


def test_weights_that_lie_elsewhere_are_read_there(device: str) -> None:
    plain, ours, log = warmed(device)
    for module in (plain, ours):
        torch.manual_seed(2)
        for parameter in module.parameters():
            parameter.data = torch.randn_like(parameter)
    for _ in range(3):
        given = args(device)
        assert_alike(*(gradients_of(m, m(*given).square().mean()) for m in (ours, plain)))
    assert (log.step_captures, log.step_replays) == (2, 3)


def test_weights_that_move_between_forward_and_backward(device: str) -> None:
    """So do those that are sharded, or offloaded."""
    plain, ours, log = warmed(device)
    gradients_of(ours, ours(*args(device)).square().mean())
    given = args(device)
    results = [m(*given).square().mean() for m in (ours, plain)]
    before, others = [p.data_ptr() for p in ours.parameters()], []
    for parameter in ours.parameters():
        storage, kept = parameter.untyped_storage(), parameter.detach().clone()
        size = storage.nbytes()
        storage.resize_(0)
        others += [torch.empty_like(kept) for _ in range(4)]  # one of them where it was
        storage.resize_(size)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(parameter):
            parameter.copy_(kept)
    assert before != [p.data_ptr() for p in ours.parameters()]
    for other in others:
        other.zero_()
    assert log.step_replays == 3
    assert_alike(*(gradients_of(m, r) for m, r in zip((ours, plain), results, strict=True)))


def test_gradients_of_gradients_raise_an_error(device: str) -> None:
    _, ours, log = warmed(device)
    for _ in range(2):
        x = args(device)[0].requires_grad_()
        (gradient,) = torch.autograd.grad(ours(x).square().mean(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="gradients of gradients"):
            gradient.sum().backward()
    found = gradients_of(ours, ours(*args(device)).square().mean())
    assert not any(each.requires_grad for each in found)
    assert log.step_replays > 1


def test_settings_of_libraries_hold_for_each_pass(device: str) -> None:
    plain, ours, log = warmed(device)
    given = args(device)
    results = [m(*given).square().mean() for m in (ours, plain)]
    replays = log.step_replays
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = not before
    try:
        assert_alike(*(gradients_of(m, r) for m, r in zip((ours, plain), results, strict=True)))
        ours(*given).square().mean().backward()
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    if device == "cuda":
        assert log.step_replays == replays, "other settings have a graph of their own"


def test_hooks_on_saved_tensors_get_each(device: str) -> None:
    plain, ours, log = warmed(device)
    given, packed = args(device), []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: packed.append(t) or t.clone(), lambda t: t
    ):
        found = [gradients_of(m, m(*given).square().mean()) for m in (ours, plain)]
    assert_alike(*found)
    assert packed
    assert log.step_replays == 1


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(32, 8), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.one(x).tanh()
        return y, self.other(x).sin() * y


def test_one_of_two_results_has_a_gradient(device: str) -> None:
    plain = Pair().to(device)
    ours = strop.optimize(copy.deepcopy(plain), train=True, options=options())
    for wanted in ([0], [1], [0], [0, 1], [1], [0, 1]):
        given = args(device)
        losses = (sum(m(*given)[n].square().mean() for n in wanted) for m in (ours, plain))
        found = [gradients_of(m, loss) for m, loss in zip((ours, plain), losses, strict=True)]
        # eager leaves out who has none, where a graph gives zeros
        assert_alike(*([g for g in each if g.any()] for each in found))
    assert ours.forward.log.step_replays == 5


def test_masks_of_dropout_are_drawn_anew(device: str) -> None:
    module = Mlp(dropout=0.5).to(device)
    ours = strop.optimize(module, train=True, options=options())
    given, seen = args(device), set()
    for _ in range(6):
        result = ours(*given)
        seen.add(float(result.detach().sum()))
        result.square().mean().backward()
    assert len(seen) == 6
    assert ours.forward.log.step_replays == 5


def test_a_seed_draws_the_same_masks(device: str) -> None:
    module = Mlp(dropout=0.5).to(device)
    ours = strop.optimize(module, train=True, options=options())
    given, found = args(device), []
    for _ in range(4):
        torch.manual_seed(7)
        for _ in range(2):
            result = ours(*given)
            result.square().mean().backward()
        found.append(result.detach())
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


def test_graphs_that_the_budget_has_no_room_for(device: str) -> None:
    plain, ours, log = warmed(device, graph_budget_bytes=0)
    given = args(device)
    assert_alike(*(gradients_of(m, m(*given).square().mean()) for m in (ours, plain)))
    assert (log.step_captures, log.step_replays) == (0, 0)
    (reason,) = log.against_step_graphs
    assert "graph_budget_bytes" in reason
    assert any(reason in text for text in strop.explain(ours).components[0].texts)


@pytest.mark.parametrize("changes", [{"cuda_graphs": False}, {"check": True}])
def test_who_wants_none_has_none(changes: dict[str, Any], device: str) -> None:
    _, _, log = warmed(device, **changes)
    assert (log.step_captures, log.step_replays, log.against_step_graphs) == (0, 0, {})


def test_the_backend_of_torch_compile_replays_too(device: str) -> None:
    plain = Mlp().to(device)
    ours = torch.compile(copy.deepcopy(plain), backend="strop", dynamic=True)
    before = AOT_LOG.step_replays
    for n in (0, 1, 0, 1, 0, 1):
        given = args(device, n)
        assert_alike(*(gradients_of(m, m(*given).square().mean()) for m in (ours, plain)))
    assert AOT_LOG.step_replays - before == 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_two_streams_have_graphs_of_their_own() -> None:
    plain, ours, log = mlp("cuda")
    streams = [torch.cuda.Stream() for _ in range(2)]
    for _ in range(4):
        for stream in streams:
            given = args("cuda")
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                found = [gradients_of(m, m(*given).square().mean()) for m in (ours, plain)]
            torch.cuda.current_stream().wait_stream(stream)
            assert_alike(*found)
    assert (log.step_captures, log.step_replays) == (2, 6)
