"""Capture: few guards, origins, symbols, views, and calls that no rule knows."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._sympy.functions import (
    CeilToInt,
    FloatPow,
    FloorDiv,
    IntTrueDiv,
    Mod,
    ToFloat,
    TruncToInt,
)

import strop
from strop.diffusion.components import adapter_for
from strop.errors import CaptureError, UnsupportedError
from strop.frontend.symbols import Symbols
from strop.ir.dims import const, symbol
from strop.ir.ops import Kind
from tests.e2e import tiny
from tests.frontend.tracing import Traced, trace, trace_specs

ALLOWED_GUARDS = (
    r"b < \d+",  # diffusers' rule for upsampling
    r"[\d*bhw]+ <= 2147483648",  # 32-bit indices
)


@pytest.fixture(scope="module")
def unet() -> Traced:
    module = tiny.unet()
    args = tiny.unet_args(2, 8, 8, 7)
    shapes = adapter_for(module).shapes([args[2], args[0], args[1]])
    return trace_specs(
        module, lambda e, x, t: module(x, t, e, return_dict=False), list(shapes.specs), shapes.hints
    )


def test_a_unet_asks_for_nothing_but_these_guards(unet: Traced):
    for guard in map(str, unet.captured.guards):
        assert any(re.fullmatch(allowed, guard) for allowed in ALLOWED_GUARDS), guard


def test_operators_of_a_unet(unet: Traced):
    found = Counter(unet.ops())
    assert found["conv2d"] == 33
    assert found["attention"] == 8  # self and cross attention of four transformer blocks
    assert found["aten"] == 0
    assert set(unet.graph.hints) == {"b", "h", "w", "s0"}


def test_origins_are_module_paths(unet: Traced):
    paths = {name for name, _ in tiny.unet().named_modules()} | {"UNet2DConditionModel"}
    origins = {n.origin for n in unet.graph.nodes if n.kind is not Kind.OPAQUE}
    assert origins <= paths
    assert "mid_block.attentions.0.transformer_blocks.0.attn1.to_q" in origins


def test_every_size_of_a_unet_is_one_term(unet: Traced):
    assert all(len(size.terms) == 1 for node in unet.graph.nodes for size in node.shape)


# symbols

S = sympy.Symbol("s0", positive=True, integer=True)


@pytest.mark.parametrize(
    "guard",
    [sympy.Eq(S, 8 * FloorDiv(S - 1, 8) + 8, evaluate=False), sympy.Eq(Mod(S, 8), 0)],
    ids=["floor", "mod"],
)
def test_guards_are_solved(guard: Any):
    symbols = Symbols()
    symbols.solve([guard], {"s0": 64})
    assert symbols.size(S) == 8 * symbol("s0_8")
    assert symbols.size(FloorDiv(S, 4)) == 2 * symbol("s0_8")
    assert symbols.guards([guard]) == ()


def test_a_multiple_of_a_large_number_is_found_at_once():
    """A flat argument that is viewed as matrices: all numbers up to the square of a matrix were
    tried, which are 2 to the 38th here."""
    symbols, size = Symbols(), 512 * 1024
    symbols.solve([sympy.Eq(Mod(S, size), 0)], {"s0": 3 * size})
    assert symbols.size(S) == size * symbol(f"s0_{size}")


def test_guards_that_the_hint_does_not_meet_are_left():
    symbols = Symbols()
    symbols.solve([sympy.Eq(Mod(S, 8), 0)], {"s0": 63})
    assert symbols.size(S) == symbol("s0")


def test_guards_that_always_hold_drop_out():
    symbols = Symbols()
    assert symbols.guards([sympy.Ge(S + 1, S, evaluate=False)]) == ()
    (guard,) = symbols.guards([sympy.Lt(S, 64)])
    assert guard.holds({"s0": 63})
    assert not guard.holds({"s0": 64})


def test_a_difference_of_sizes_may_be_anything():
    symbols = Symbols({n: symbol(n) for n in ("s0", "s1")}, {"s0": 8, "s1": 3})
    for relation in (sympy.Gt(S - T, 0), sympy.Ne(S - T, 0), sympy.Ge(S * T, T + 2)):
        (guard,) = symbols.guards([relation])
        assert not guard.holds({"s0": 1, "s1": 1})
    assert settled(sympy.Max(1, S - 4), s0=9) == ("s0 - 4", {"s0 - 4 >= 1"})
    assert settled(sympy.Max(1, S * T), s0=9, s1=2) == ("s0*s1", set())


def test_a_quotient_by_a_difference_holds_where_that_is_positive():
    symbols = Symbols({n: symbol(n) for n in ("s0", "s1")}, {"s0": 8, "s1": 3})
    ratio = sympy.Gt(IntTrueDiv(T, S - 2), sympy.Rational(1, 4), evaluate=False)
    guards = symbols.guards([ratio])
    assert all(guard.holds({"s0": 8, "s1": 3}) for guard in guards)
    assert not all(guard.holds({"s0": 1, "s1": 3}) for guard in guards)  # 3 / -1 > 1/4


def test_of_the_least_under_a_difference_the_traced_one_is_checked():
    symbols = Symbols({n: symbol(n) for n in ("s0", "s1")}, {"s0": 5, "s1": 3})
    guards = symbols.guards([sympy.Ge((S - T) * sympy.Max(S, 2), -10, evaluate=False)])
    guards += tuple(symbols.assumed.values())
    assert all(guard.holds({"s0": 5, "s1": 3}) for guard in guards)
    # (1 - 7) * max(1, 2) < -10, although (1 - 7) * 1 is not; the other side for (4 - 8)
    for s0, s1 in ((1, 7), (4, 8)):
        assert not all(guard.holds({"s0": s0, "s1": s1}) for guard in guards)


# what modules ask of sizes, and must be told at each call
ASKING: dict[str, Callable[[Tensor], Any]] = {
    "as a tensor": lambda x: x.sum() * torch.tensor(x.shape[0]) + torch.as_tensor(x.shape[1]),
    "larger than 0": lambda x: x.sum() + (1 if x.shape[0] > 0 else -1),
    "other than 0": lambda x: x.sum() + (1 if x.shape[1] != 0 else -1),
    "elements": lambda x: x.sum() + (2 if x.numel() == 0 else x.shape[0]),
    "at least 1": lambda x: x.sum() / max(x.shape[0], 1),
    "at least 1 of a difference": lambda x: x.sum() / max(x.shape[1] - 4, 1),
    "a difference": lambda x: x.sum() + (1 if x.shape[0] - x.shape[1] > -4 else -1),
    "not as long": lambda x: x.sum() + (1 if x.shape[0] != x.shape[1] else -1),
    "of each": lambda x: x.sum(0) / x.shape[0] + x[:0].sum(0),
}


@pytest.mark.parametrize("name", ASKING)
def test_what_was_asked_of_sizes_holds_of_each_call(name: str, tmp_path: Any):
    function = ASKING[name]
    module = strop.optimize(Runs(function).eval(), options=tiny.options(cache_dir=str(tmp_path)))
    for size in ((3, 8), (0, 8), (3, 3), (1, 9), (3, 0), (0, 0), (2, 1)):
        x = torch.randn(size, generator=torch.manual_seed(0))
        # fp32 sums of 24
        torch.testing.assert_close(module(x), function(x), rtol=1e-5, atol=1e-5, equal_nan=True)
    assert module.forward.counters.eager_calls == 0, module.forward.counters.fallbacks


def test_a_size_as_a_tensor_is_any_size(tmp_path: Any):
    module = Runs(ASKING["as a tensor"]).eval()
    strop.optimize(module, options=tiny.options(cache_dir=str(tmp_path)))
    for size in ((3, 8), (1, 9), (4, 2)):
        module(torch.randn(size))
    assert len(module.forward.variants.all) == 1


class EqualInTurn(nn.Module):
    """Finds that sizes are equal in pairs, and then those of both pairs, as keys and values of the
    layers of a decoder are."""

    def forward(self, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        longer = [torch.cat([x, x.new_zeros(1, 4)]) for x in (a, b, c, d)]
        return (longer[0] + longer[1]) * (longer[2] + longer[3]) + longer[0] * longer[2]


def test_sizes_that_are_equal_in_turn_are_one(tmp_path: Any):
    module = strop.optimize(EqualInTurn().eval(), options=strop.Options(cache_dir=str(tmp_path)))
    for rows in (8, 5, 11):
        given = [torch.randn(rows, 4) for _ in range(4)]
        with torch.no_grad():
            torch.testing.assert_close(module(*given), EqualInTurn()(*given))
    (variant,) = module.forward.variants.all
    assert len({spec.shape[0] for spec in variant.specs}) == 1


def test_empty_tensors_are_a_graph_of_their_own_and_others_one(tmp_path: Any):
    for sizes in ([(3, 8), (1, 9), (0, 8), (4, 1)], [(0, 8), (1, 9), (3, 8), (0, 5)]):
        module = Runs(lambda x: F.silu(x).sum(0) + x.mean())
        strop.optimize(module.eval(), options=tiny.options(cache_dir=str(tmp_path)))
        for size in sizes:
            module(torch.randn(size))
        assert len(module.forward.variants.all) == 2


def test_sizes_outside_the_language_are_refused():
    with pytest.raises(UnsupportedError, match="size"):
        Symbols().size(sympy.sqrt(S))
    assert Symbols().size(sympy.Integer(7)) == const(7)
    assert Symbols().size(S**2 * 3 - 1) == symbol("s0") * symbol("s0") * 3 - 1


def test_sizes_that_a_trace_fixes_bind_the_arguments():
    def fixed(x: Tensor) -> Tensor:
        return x * int(x.shape[0]) + (1 if x.shape[1] == x.shape[2] else 2)

    (spec,) = trace(fixed, "b h w", b=3, h=5, w=5).captured.input_specs
    assert spec.shape[0] == "3"
    assert spec.shape[1] == spec.shape[2]


# what no polynomial says is assumed, and checked


def settled(size: Any, *guards: Any, **hints: int) -> tuple[str, set[str]]:
    symbols = Symbols({n: symbol(n) for n in hints}, hints)
    symbols.settle([size], guards)
    return str(symbols.size(size)), set(map(str, symbols.assumed))


T = sympy.Symbol("s1", positive=True, integer=True)


def test_the_smaller_side_is_assumed():
    assert settled(sympy.Min(64, S), s0=12) == ("s0", {"s0 <= 64"})
    assert settled(sympy.Min(64, S), s0=80) == ("64", {"64 <= s0"})


def test_a_picture_in_patches_is_even_in_both_sizes():
    b = sympy.Symbol("s2", positive=True, integer=True)
    patches = sympy.Eq(4 * b * S * T, 16 * b * FloorDiv(S, 2) * FloorDiv(T, 2))
    found = settled(FloorDiv(S, 2) * FloorDiv(T, 2), patches, s0=16, s1=24, s2=3)
    assert found == ("s0_2*s1_2", set())
    found = settled(
        S * FloorDiv(T, 3), sympy.Eq(S * T, 6 * FloorDiv(S, 2) * FloorDiv(T, 3)), s0=4, s1=9
    )
    assert found == ("2*s0_2*s1_3", set())


def test_what_a_fixed_size_says_of_others_is_kept():
    root = TruncToInt(FloatPow(ToFloat(S), sympy.Float(0.5)))
    u = sympy.Symbol("s2", positive=True, integer=True)
    tokens = sympy.Eq(FloorDiv(S, 3) * FloorDiv(T, 3), u)
    assert settled(root * u, tokens, s0=16, s1=10, s2=15)[0] == "20*((s1)//3)"


def test_a_root_of_a_size_fixes_it():
    root = TruncToInt(FloatPow(ToFloat(S), sympy.Float(0.5)))
    assert settled(root * T, s0=16, s1=3) == ("4*s1", set())


def test_an_equation_gives_one_size_by_another():
    assert settled(T, sympy.Eq(FloorDiv(S - 1, 8) + 1, T), s0=17, s1=3)[0] == "((s0 - 1)//8) + 1"


def test_an_equation_without_a_solution_fixes_its_sizes():
    assert settled(S + T, sympy.Eq(S * T, 1120), s0=32, s1=35) == ("67", set())


def test_an_equation_of_quotients_fixes_only_these():
    both = sympy.Eq(FloorDiv(S, 8) * FloorDiv(T, 8), 16)
    quotients = FloorDiv(S, 8) * S
    found = settled(quotients, both, s0=32, s1=35)
    assert found == ("4*s0", {"((s0)//8) == 4", "((s1)//8) == 4"})


def test_multiples_are_refined_guard_by_guard():
    guards = [sympy.Eq(Mod(S, 4), 0), sympy.Eq(Mod(FloorDiv(S, 4), 2), 0)]
    assert settled(FloorDiv(S, 8), *guards, s0=32) == ("s0_8", set())


def test_parts_of_equal_sums_are_matched_by_their_traced_sizes():
    a, b = (sympy.Symbol(n, positive=True, integer=True) for n in ("s2", "s3"))
    assert settled(S * T, sympy.Eq(S + T, a + b), s0=9, s1=64, s2=64, s3=9)[0] == "s2*s3"


def test_the_least_of_sizes_is_compared_one_by_one():
    symbols = Symbols({n: symbol(n) for n in ("s0", "s1")}, {"s0": 8, "s1": 12})
    guards = symbols.guards([sympy.Gt(sympy.Min(S, T), 4, evaluate=False)])
    assert set(map(str, guards)) == {"s0 > 4", "s1 > 4"}


def test_a_whole_part_of_a_quotient_of_sizes_is_a_floor():
    assert settled(TruncToInt(IntTrueDiv(S, 2)), s0=9) == ("((s0)//2)", set())
    assert settled(CeilToInt(S * sympy.Float(0.5)), s0=9) == ("((s0 + 1)//2)", set())


def test_of_alternatives_the_traced_one_is_checked():
    symbols = Symbols({"s0": symbol("s0")}, {"s0": 12})
    (guard,) = symbols.guards([sympy.Or(sympy.Gt(S, 64), sympy.Lt(S, 32))])
    assert guard.holds({"s0": 31})
    assert not guard.holds({"s0": 32})


# views and unknown calls, run through the whole compiler

VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "negative start": lambda x: F.silu(x)[:, -3:-1] * 2,
    "negative index": lambda x: F.silu(x)[:, -1] * 2,
    "split": lambda x: (lambda a, b: a.sum(1) + b.sum(1))(*F.silu(x).split([2, 4], 1)),
    "chunk": lambda x: (lambda a, b: a * b)(*F.silu(x).chunk(2, 1)),
    "unbind": lambda x: sum(F.silu(x).unbind(1)),
    "transposes": lambda x: F.silu(x).transpose(1, 2).mT.movedim(0, -1) + 1,
    "squeeze": lambda x: F.silu(x[:, :1]).squeeze(1).unsqueeze(-1) * 2,
    "expand": lambda x: x[:, :1].expand(-1, 6, -1, -1) * x,
    "flatten": lambda x: F.silu(x).flatten(1, 2).unflatten(1, (6, -1)) + 1,
    "pad": lambda x: F.silu(F.pad(x, (1, 0, 0, 2), value=0.5)),
    "pad channels": lambda x: F.pad(F.silu(x), (0, 0, 0, 0, 1, 2)),
    "upsample": lambda x: F.interpolate(F.silu(x), scale_factor=2.0, mode="nearest") + 1,
    "resize": lambda x: F.interpolate(F.silu(x), size=(x.shape[2] * 2, x.shape[3] + 1)) + 1,
    "clone": lambda x: F.silu(x).clone().contiguous() + 1,
    "cat of one": lambda x: torch.cat([F.silu(x)], 1) + 1,
    "in place": lambda x: F.silu(x).add_(1).mul_(2) + 1,
    "numbers": lambda x: x * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])[:, None, None],
    "no numbers": lambda x: torch.cat([torch.tensor([]), F.silu(x)], 1) * 2,
    "causal mask": lambda x: F.silu(x) + torch.full((x.shape[3],) * 2, -1.0).triu_(1).sum(0),
    "step": lambda x: F.silu(x)[:, ::2] * 2,
    "addmm": lambda x: torch.addmm(x[0, 0] @ x[0, 1].t(), x[0, 2], x[0, 3].t(), beta=0.5, alpha=2),
    "mse": lambda x: F.mse_loss(x, x * 2) + F.mse_loss(x[0], x[1], reduction="sum"),
    "distance": lambda x: F.pairwise_distance(x[:, 0], x[:, 1]),
    "flip": lambda x: torch.roll(F.silu(x), 1, 1).flip(1) * 2,
    "bicubic": lambda x: F.interpolate(F.silu(x), scale_factor=2.0, mode="bicubic") + 1,
    "reflect": lambda x: F.pad(F.silu(x), (1, 1, 1, 0), mode="reflect") * 2,
}
UNKNOWN: dict[str, Callable[[Tensor], Any]] = {
    "cumsum": lambda x: F.silu(x).cumsum(1) * 2,
    "sort": lambda x: F.silu(x).sort(1)[0] + F.silu(x).sort(1)[1],
    "topk": lambda x: F.silu(x).topk(2, 1).values * 2,
    "bits": lambda x: F.silu(x).view(torch.int32) + 0,
    "antialias": lambda x: F.interpolate(F.silu(x), (7, 9), mode="bicubic", antialias=True) + 1,
}


SPECIALISED = ("antialias",)  # torch's own shape rules fix these sizes


class Runs(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


@pytest.mark.parametrize("name", [*VIEWS, *UNKNOWN])
def test_compiled_functions_give_what_torch_gives(name: str, tmp_path_factory: Any):
    function = (VIEWS | UNKNOWN)[name]
    folder = str(tmp_path_factory.getbasetemp() / "kernels")
    module = strop.optimize(Runs(function).eval(), options=tiny.options(cache_dir=folder))
    dispatcher = module.forward
    for size in ((2, 6, 5, 4), (3, 6, 2, 7)):
        x = torch.randn(size, generator=torch.manual_seed(0))
        with torch.no_grad():
            # fp32 through at most three operators
            torch.testing.assert_close(module(x), function(x), rtol=1e-5, atol=1e-5)
    assert len(dispatcher.variants.all) == 1 or name in SPECIALISED
    assert dispatcher.counters.eager_calls == 0
    opaque = [s for s in dispatcher.variants.all[0].program.call_steps if s.op == "aten"]
    assert bool(opaque) == (name in UNKNOWN)


class Projection(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight)


def test_a_square_weight_is_not_taken_for_its_transpose():
    module = Projection().eval()
    x = torch.randn(3, 8)
    with torch.no_grad():
        expected = module(x)
        actual = strop.optimize(module, options=tiny.options(strict=True))(x)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)  # fp32 sums of eight


def test_values_that_decide_are_an_error():
    with pytest.raises(CaptureError, match="Function"):
        trace(lambda x: x if x.sum() > 0 else -x, "b 4", b=2)
