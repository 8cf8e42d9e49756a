"""Weights of classes of tensors that hold codes: compiled, never stale, never kept in full."""

import logging

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import strop
from strop.dispatch.module_state import ModuleState
from strop.frontend import composed_tensors
from strop.frontend.clones import clone_structure
from strop.frontend.composed_tensors import CodesInMemory
from strop.frontend.module_tensors import named_state
from strop.options import Options
from strop.testing import assert_as_accurate_as_eager
from tests.quantised.stand_ins import (
    LINEARS,
    BlockLinear,
    Blocks,
    ByFunctions,
    ByOperators,
    Dynamic,
    Nested,
    Net,
    State,
    Stated,
    exact,
    quantised,
)

KINDS = (ByOperators, ByFunctions, Dynamic, Nested, Blocks, Stated)


@pytest.fixture(autouse=True)
def blocks_are_known(monkeypatch):
    known = {
        f"{Blocks.__module__}.{Blocks.__qualname__}": CodesInMemory("as_tensor"),
        f"{Stated.__module__}.{Stated.__qualname__}": CodesInMemory("", ("state",)),
    }
    monkeypatch.setattr(composed_tensors, "_WITH_MEMORY", known)


def net_of(kind):
    torch.manual_seed(0)
    return quantised(kind, Net(linear=LINEARS.get(kind, nn.Linear)))


def optimized(kind, folder, **more):
    """A module of such weights, and a copy of it that runs in eager with the same weights."""
    module = net_of(kind)
    eager = Net(linear=LINEARS.get(kind, nn.Linear)).eval()
    for name, part in eager.named_modules():
        vars(part)["_parameters"] = module.get_submodule(name)._parameters
    strop.optimize(module, options=Options(cache_dir=str(folder), strict=True, **more))
    return module, eager


def agree(module, eager, rows=5):
    x = torch.randn(rows, 64)
    with torch.no_grad():
        torch.testing.assert_close(module(x), eager(x), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_compiled_and_as_accurate_as_eager(kind, tmp_path):
    module, eager = optimized(kind, tmp_path, check=True)
    with torch.no_grad():
        for shape in ((5, 64), (9, 64), (1, 64)):
            x = torch.randn(shape)
            if kind is Dynamic:  # whose codes of x jump where a number is rounded
                torch.testing.assert_close(module(x), eager(x), rtol=1e-4, atol=1e-3)
            else:
                assert_as_accurate_as_eager(module(x), eager(x), exact(eager, x))
    counters, report = module.forward.counters, strop.explain(module)
    assert counters.fallbacks == {}
    assert counters.eager_calls == 0
    assert report.num_graphs == 1
    assert not counters.findings
    # sums of products of codes are a part of the kernels that read them
    assert report.calls == ({} if kind is Dynamic else {"linear": 2})


@pytest.mark.parametrize("kind", KINDS)
def test_its_codes_are_what_the_program_reads(kind):
    state = named_state(net_of(kind))
    assert all(type(t) in (torch.Tensor, nn.Parameter) for t in state.values())
    names = {ByOperators: {"a.weight.codes", "a.weight.scale"}, Blocks: {"a.weight"}}
    names[Nested] = {"a.weight.codes.packed", "a.weight.scale"}
    names[Stated] = {"a.weight", "a.weight.state.scale", "a.weight.state.inner.scale"}
    wanted = names.get(kind, names[ByOperators])
    assert {name for name in state if name.startswith("a.weight")} == wanted


def _replaced(module):
    module.a.weight = nn.Parameter(ByFunctions.of(torch.randn(128, 64)), requires_grad=False)


def _scaled(module):
    module.a.weight.scale.mul_(2)


def _rewritten(module):
    module.a.weight.codes.neg_()


def _moved(module):
    module.a.weight.codes.data = module.a.weight.codes.flip(0).contiguous()


def _other_scale(module):
    module.a.weight.scale = module.a.weight.scale * 3


def _other_context(module):
    module.a.weight.bits = 4


def _swapped(module):
    other = nn.Parameter(ByFunctions.of(torch.randn(128, 64)), requires_grad=False)
    torch.utils.swap_tensors(module.a.weight, other)


@pytest.mark.parametrize(
    "change",
    [_replaced, _scaled, _rewritten, _moved, _other_scale, _other_context, _swapped],
)
def test_what_is_changed_is_seen(change, tmp_path):
    module, eager = optimized(ByFunctions, tmp_path)
    agree(module, eager)
    before = module(torch.ones(2, 64))
    change(module)
    agree(module, eager)
    assert not torch.allclose(before, module(torch.ones(2, 64)))
    assert module.forward.counters.eager_calls == 0
    assert strop.explain(module).num_graphs == 1 + (change is _other_context)


def _other_bytes(module):
    module.a.weight.data = torch.cat(
        [Blocks.of(torch.randn(128, 64)).data.as_subclass(torch.Tensor)]
    )


def _other_kind(module):
    module.a.weight.kind = "half"


def _written_bytes(module):
    module.a.weight.as_tensor()[:, 3] ^= 128  # the signs of scales


@pytest.mark.parametrize("change", [_other_bytes, _other_kind, _written_bytes])
def test_what_is_changed_of_bytes_is_seen(change, tmp_path):
    module, eager = optimized(Blocks, tmp_path)
    agree(module, eager)
    before = module(torch.ones(2, 64))
    change(module)
    agree(module, eager)
    assert not torch.allclose(before, module(torch.ones(2, 64)))
    assert module.forward.counters.eager_calls == 0


def _other_state(module):
    module.a.weight.state = State(torch.rand(128, 1), State(torch.tensor(0.1)))


def _other_inner(module):
    module.a.weight.state.inner.scale = torch.tensor(3.0)


def _other_bits(module):
    module.a.weight.state.bits = 4


def _written_state(module):
    module.a.weight.state.scale.neg_()


def _written_codes(module):
    module.a.weight.data.neg_()


@pytest.mark.parametrize(
    "change", [_other_state, _other_inner, _other_bits, _written_state, _written_codes]
)
def test_what_is_changed_of_a_state_is_seen(change, tmp_path):
    module, eager = optimized(Stated, tmp_path)
    agree(module, eager)
    before = module(torch.ones(2, 64))
    change(module)
    agree(module, eager)
    assert not torch.allclose(before, module(torch.ones(2, 64)))
    assert module.forward.counters.eager_calls == 0


def test_weights_that_are_tied_stay_so(tmp_path):
    module, eager = optimized(ByFunctions, tmp_path)
    module.b.weight = module.a.weight = nn.Parameter(
        ByFunctions.of(torch.randn(64, 64)), requires_grad=False
    )
    for net in (module, eager):
        net.a.bias = None
    agree(module, eager)
    module.a.weight.scale.mul_(3)
    agree(module, eager)


def test_another_process_finds_the_graph_of_its_make_up_alone(tmp_path):
    first, _ = optimized(ByFunctions, tmp_path)
    first(torch.ones(2, 64))
    again, eager = optimized(ByFunctions, tmp_path)
    again.a.weight.scale.mul_(2)
    agree(again, eager)
    assert [v.from_disk for v in again.forward.variants.all] == [True]
    other, eager = optimized(ByFunctions, tmp_path)
    other.a.weight.bits = 2
    agree(other, eager)
    assert [v.from_disk for v in other.forward.variants.all] == [False]


def test_torchs_own_classes_run_in_eager_with_a_reason(tmp_path, caplog):
    module = Net().eval().requires_grad_(False)
    half = module.a.weight.detach() / 2
    module.a.weight = nn.Parameter(TwoTensor(half, half.clone()), requires_grad=False)
    strop.optimize(module, options=Options(cache_dir=str(tmp_path)))
    with caplog.at_level(logging.WARNING, "strop"):
        module(torch.ones(2, 64))
    assert "a.weight is a TwoTensor, a class of tensors of its own" in caplog.text


def test_tensors_among_what_codes_mean_are_no_part_of_a_key(tmp_path):
    module = net_of(ByFunctions)
    module.a.weight.bits = torch.tensor(8)
    strop.optimize(module, options=Options(cache_dir=str(tmp_path)))
    eager = clone_structure(module)
    agree(module, eager)
    module.a.weight.bits.fill_(2)
    agree(module, eager)
    (reason,) = module.forward.counters.fallbacks
    assert "a.weight is a ByFunctions, a class of tensors of its own" in reason


def test_what_is_not_known_of_bytes_runs_in_eager_with_a_reason(tmp_path):
    class Reading(Net):
        def forward(self, x):
            return x + self.a.weight[0, 0]

    reading = Reading(linear=BlockLinear).eval().requires_grad_(False)
    reading.a.weight = Blocks.of(torch.randn(128, 64))
    strop.optimize(reading, options=Options(cache_dir=str(tmp_path)))
    reading(torch.ones(2, 64))
    (reason,) = reading.forward.counters.fallbacks
    assert "of a Blocks before it is dequantised" in reason


class Stack(nn.Module):
    def __init__(self, kind, count):
        super().__init__()
        self.blocks = nn.ModuleList(net_of(kind) for _ in range(count))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("kind", [ByFunctions, Nested, Blocks, Stated])
def test_repeated_blocks_are_traced_once(kind, tmp_path):
    stack = Stack(kind, 4)
    eager = clone_structure(stack)
    if kind not in LINEARS:
        stack.blocks[2].a.weight.bits = 4  # is another block
    strop.optimize(stack, options=Options(cache_dir=str(tmp_path), strict=True))
    agree(stack, eager)
    copied = strop.explain(stack).graphs[0].num_copied_blocks
    assert copied == (2 if kind in LINEARS else 1)  # the first one's input is an argument


@pytest.mark.parametrize("kind", [ByFunctions, Blocks])
def test_torch_traces_what_trains_beside_such_weights(kind, tmp_path):
    module, eager = net_of(kind), net_of(kind)
    strop.optimize(module, options=Options(cache_dir=str(tmp_path)), train=True)
    x = torch.randn(5, 64)
    for net in (module, eager):
        net.norm.requires_grad_(True)
        net(x).square().sum().backward()
    torch.testing.assert_close(module.norm.weight.grad, eager.norm.weight.grad)
    (reason,) = module.forward.traced_by_torch
    assert reason.startswith("a.weight is quantised")


@pytest.mark.parametrize("kind", [ByFunctions, Nested])
def test_a_module_may_be_quantised_after_it_was_optimized(kind, tmp_path):
    torch.manual_seed(0)
    module, twin = Net().eval().requires_grad_(False), net_of(kind)
    strop.optimize(module, options=Options(cache_dir=str(tmp_path), strict=True))
    x = torch.randn(5, 64)
    in_full = module(x)
    quantised(kind, module)
    found = module(x)
    torch.testing.assert_close(found, twin(x), rtol=1e-5, atol=2e-5)
    assert not torch.equal(found, in_full)
    assert module.forward.counters.eager_calls == 0
    weights = dict(module.named_parameters())
    strop.restore(module)
    assert {name: id(p) for name, p in module.named_parameters()} == {
        name: id(p) for name, p in weights.items()
    }
    torch.testing.assert_close(module(x), twin(x))


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_look_finds_the_same_tensors(kind):
    state = ModuleState(net_of(kind))
    before, bound = state.tensors, state.bound_to()
    state.scan()
    assert all(a is b for a, b in zip(before, state.tensors, strict=True))
    assert state.bound_to() == bound
