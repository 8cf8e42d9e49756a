"""LLM.int8: linears multiply codes, and columns of larger values apart; a library stands in."""

import copy
import functools

import pytest
import torch
from torch import nn

import strop
from strop.errors import CaptureError
from strop.frontend import int8_layers
from strop.frontend.clones import clone_structure
from strop.options import Options
from strop.testing import assert_as_accurate_as_eager
from tests.quantised import int8_stand_in
from tests.quantised.int8_stand_in import CodedLinear, Codes, Net, given, net

SHAPES = ((5, 64), (9, 64), (2, 64), (1, 64), (3, 4, 64), (1, 7, 64))
CALLS = {"code_sums": 2, "mixed_product": 2}


@pytest.fixture(autouse=True)
def the_layer_is_known(monkeypatch):
    names = frozenset((f"{int8_stand_in.__name__}.CodedLinear",))
    monkeypatch.setattr(int8_layers, "LAYERS", names)


def optimized(module, folder, **how):
    options = Options(**{"cache_dir": str(folder), "strict": True, **how})
    strop.optimize(module, options=options)
    return module


def agree(module, eager, *shape, dtype=torch.float16, **how):
    """Codes of the second linear may be the next ones, as its input differs in a last bit."""
    x = given(*shape or (5, 64), dtype=dtype, **how)
    with torch.no_grad():
        found, wanted = module(x), eager(x)
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    bound = 2e-2 if dtype is torch.bfloat16 else 1e-2
    assert (found - wanted).abs().max() <= bound * wanted.abs().max().clamp(min=1)
    return found


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("threshold", [0.0, 6.0])
def test_results(threshold, dtype, tmp_path):
    module = net(dtype, threshold=threshold)
    eager = copy.deepcopy(module)
    optimized(module, tmp_path)
    for shape in SHAPES:
        for larger in (0, 3, 40, 64):  # with 40 the second linear is given 5.98, next to 6 in bf16
            agree(module, eager, *shape, dtype=dtype, larger=larger)
    counters, report = module.forward.counters, strop.explain(module)
    assert counters.eager_calls == 0
    assert report.calls == (CALLS if threshold else {})
    assert report.num_graphs == 2  # of two and of three dims


def in_full(layer, x):
    """Compute a linear in fp64 from the very codes that it gives to x."""
    codes, scales = layer.weight.CB.double(), layer.weight.SCB.double()
    half = x.half()
    larger = half.abs() >= layer.state.threshold
    kept = half.masked_fill(larger, 0)
    most = kept.abs().amax(1, keepdim=True)
    own = (kept * (127 / most.float())).round().masked_fill(larger.any(0), 0).double()
    weight = codes * scales[:, None] / 127
    y = own * most.double() / 127 @ weight.t() + layer.bias.double()
    return y + x.double().masked_fill(~larger.any(0), 0) @ weight.t()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("larger", [0, 1, 9])
def test_it_is_as_near_as_eager(larger, dtype, tmp_path):
    layer = net(dtype).a
    x, eager = given(40, 64, dtype=dtype, larger=larger), copy.deepcopy(layer)
    wanted = in_full(layer, x)
    optimized(layer, tmp_path)
    with torch.no_grad():
        assert_as_accurate_as_eager(layer(x), eager(x), wanted)


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")], ids=str)
def test_rows_of_zeros_and_values_that_are_none(value, tmp_path):
    module = net().a
    eager, x = copy.deepcopy(module), torch.zeros(4, 64, dtype=torch.float16)
    x[1, 3] = value
    optimized(module, tmp_path)
    with torch.no_grad():
        found, wanted = module(x), eager(x)
    torch.testing.assert_close(found[[0, 2, 3]], wanted[[0, 2, 3]])
    assert torch.equal(found[1].isfinite(), wanted[1].isfinite())


def write_codes(module):
    (module.a.weight.CB if module.a.state.CB is None else module.a.state.CB)[:5].neg_()


def write_scales(module):
    (module.a.weight.SCB if module.a.state.SCB is None else module.a.state.SCB).mul_(1.5)


def replace_codes(module):
    held = module.a.weight if module.a.state.CB is None else module.a.state
    held.CB = held.CB.flip(0)


def replace_weight(module):
    module.a.weight = Codes.of(torch.linspace(-1, 1, 64 * 128).reshape(128, 64))


def swap_weight(module):
    given = Codes.of(torch.linspace(-1, 1, 64 * 128).reshape(128, 64))
    if module.a.state.CB is not None:  # from where eager takes it else
        module.a.state.CB, module.a.state.SCB = given.CB, given.SCB
    else:
        torch.utils.swap_tensors(module.a.weight, given)


def replace_state(module):
    old = module.a.state
    module.a.state = copy.copy(old)
    module.a.state.threshold = 0.5


CHANGES = {
    "codes": write_codes,
    "scales": write_scales,
    "other codes": replace_codes,
    "other weight": replace_weight,
    "swapped weight": swap_weight,
    "state": replace_state,
    "threshold": lambda module: setattr(module.a.state, "threshold", 0.5),
    "no threshold": lambda module: setattr(module.a.state, "threshold", 0.0),
    "bias": lambda module: module.a.bias.add_(1),
}


@pytest.mark.parametrize("runs_first", [False, True], ids=["new", "run in eager"])
@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_seen(name, runs_first, tmp_path):
    module = net()
    eager = copy.deepcopy(module)
    if runs_first:  # codes are in the state then
        for part in (module, eager):
            part(given(2, 64))
    optimized(module, tmp_path)
    before = agree(module, eager)
    for part in (module, eager):
        with torch.no_grad():
            CHANGES[name](part)
    after = agree(module, eager)
    assert (after - before).abs().max() > 0
    assert module.forward.counters.eager_calls == 0


def test_a_checkpoint_is_loaded(tmp_path):
    module, other = copy.deepcopy(net()), net()
    with torch.no_grad():
        write_codes(other)
    optimized(module, tmp_path)
    agree(module, net())
    module.load_state_dict(other.state_dict())  # into the weight, which a copy has apart
    agree(module, other)
    assert module.forward.counters.eager_calls == 0


def test_eager_may_come_first_between_and_last(tmp_path):
    module = net()
    eager = copy.deepcopy(module)
    agree(module, eager)
    optimized(module, tmp_path, strict=False)
    agree(module, eager)
    module.train()  # in eager
    agree(module, eager)
    module.eval()
    agree(module, eager)
    counters = module.forward.counters
    assert counters.eager_calls == 1
    strop.restore(module)
    x = given(6, 64)
    assert torch.equal(module(x), eager(x))
    assert strop.explain(optimized(module, tmp_path)).num_graphs == 0
    agree(module, eager)


def test_compiled_calls_leave_the_layer_as_it_is(tmp_path):
    module = optimized(net(), tmp_path)
    weight, bias = module.a.weight, module.a.bias
    codes, scales = weight.CB, weight.SCB
    for dtype in (torch.float16, torch.float32):
        module(given(5, 64, dtype=dtype))
    assert module.a.weight is weight
    assert module.a.bias is bias
    assert weight.CB is codes
    assert weight.SCB is scales
    assert bias.dtype is torch.float16
    assert module.a.state.CB is None
    strop.restore(module)
    agree(module, net())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_bias_is_rounded_to_the_type_of_x(dtype, tmp_path):
    layer = net(torch.float32).a
    layer.bias.data += 1 / 3
    eager = copy.deepcopy(layer)
    optimized(layer, tmp_path)
    x = torch.zeros(3, 64, dtype=dtype)
    assert torch.equal(layer(x), eager(x))
    assert (layer(x)[0] == layer.bias.to(dtype)).all()


def test_weights_that_are_no_codes_run_in_eager(tmp_path):
    module = net()
    module.a.state.has_fp16_weights = True
    eager = copy.deepcopy(module)
    optimized(module, tmp_path, strict=False)
    agree(module, eager)
    (reason,) = module.forward.counters.fallbacks
    assert "a.weight is a Codes" in reason
    module.a.state.has_fp16_weights = eager.a.state.has_fp16_weights = False
    agree(module, eager)
    assert module.forward.counters.eager_calls == 1


@pytest.mark.parametrize("what", ["weight", "threshold", "device", "forward"])
def test_a_layer_without_all_of_it_is_none(what, monkeypatch):
    layer = net().a
    assert int8_layers.is_int8(layer)
    if what == "weight":
        layer.weight = None
    elif what == "threshold":
        del layer.state.threshold
    elif what == "device":
        layer.weight.SCB = layer.weight.SCB.to("meta")
    else:
        monkeypatch.setattr(CodedLinear, "forward", functools.partial(CodedLinear.forward))
    assert not int8_layers.is_int8(layer)


@pytest.mark.parametrize("what", ["class", "layer"])
def test_another_forward_runs_in_eager(what, tmp_path, monkeypatch):
    module = optimized(net(), tmp_path, strict=False)
    eager = copy.deepcopy(net())
    agree(module, eager)
    own = CodedLinear.forward

    def forward(self, x):
        return own(self, x) + 1

    if what == "class":
        monkeypatch.setattr(CodedLinear, "forward", forward)
    else:
        for part in (module.a, eager.a):
            part.forward = functools.partial(forward, part)
    agree(module, eager)
    assert module.forward.counters.eager_calls == 1


def test_a_gradient_goes_through_the_librarys_own(tmp_path):
    module = optimized(net(torch.float32), tmp_path, strict=False)
    eager, x = copy.deepcopy(net(torch.float32)), given(5, 64, dtype=torch.float32)
    found, wanted = x.clone().requires_grad_(), x.clone().requires_grad_()
    module(found).square().sum().backward()
    eager(wanted).square().sum().backward()
    torch.testing.assert_close(found.grad, wanted.grad)
    assert module.forward.counters.eager_calls == 1


def test_a_bias_that_is_trained(tmp_path):
    module = net(torch.float32)
    module.a.bias.requires_grad_()
    eager, x = copy.deepcopy(module), given(5, 64, dtype=torch.float32)
    optimized(module, tmp_path, strict=False)
    for part in (module, eager):
        part(x).square().sum().backward()
    torch.testing.assert_close(module.a.bias.grad, eager.a.bias.grad)
    assert module.forward.counters.eager_calls == 1


@pytest.mark.parametrize("dims", [1, 4])
def test_what_the_library_does_not_take_is_left_to_it(dims, tmp_path):
    layer = optimized(net().a, tmp_path, strict=False)
    eager, x = copy.deepcopy(net().a), given(*(2,) * (dims - 1), 64)
    outcomes = []
    for part in (layer, eager):
        try:
            outcomes.append(part(x).shape)
        except (RuntimeError, IndexError) as error:
            outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]
    with pytest.raises(CaptureError, match=f"gets {dims} dims"):
        int8_layers.stand_in(layer)(x)
    agree(layer, eager)


class Stack(nn.Module):
    """Repeated blocks, one of which has another threshold."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Net() for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def test_repeated_blocks_with_thresholds_of_their_own(tmp_path):
    torch.manual_seed(0)
    module = Stack().eval().requires_grad_(False)
    module.blocks[2].a.state.threshold = 0.0
    module.blocks[3].a.state.threshold = 0.25
    eager = copy.deepcopy(module)
    optimized(module, tmp_path)
    for part in (*module.blocks, *eager.blocks):
        for layer in (part.a, part.b):
            layer.bias.data = layer.bias.data.half()
    agree(module, eager)
    assert strop.explain(module).calls == {"code_sums": 8, "mixed_product": 7}


def test_a_trace_holds_the_same_tensors():
    module = net()
    clone = clone_structure(module)
    assert clone.a.weight.data_ptr() == module.a.weight.CB.data_ptr()
    assert clone.a.SCB.data_ptr() == module.a.weight.SCB.data_ptr()
    assert isinstance(clone.a, CodedLinear)
    assert list(clone.state_dict()) == [
        "a.weight",
        "a.bias",
        "a.SCB",
        "b.weight",
        "b.bias",
        "b.SCB",
    ]


def test_a_stored_plan_serves_other_weights(tmp_path):
    optimized(net(), tmp_path)(given(5, 64))
    other = net()
    with torch.no_grad():
        write_codes(other)
    eager = copy.deepcopy(other)
    other(given(2, 64))  # its codes are in the state
    optimized(other, tmp_path)
    agree(other, eager)
    assert [graph.from_disk for graph in strop.explain(other).graphs] == [True]
