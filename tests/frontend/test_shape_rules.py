"""Rules that stand in for torch's while tracing say what torch's say."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.fx.experimental._config as fx_config
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from strop.frontend.capture import capture, fake_input, fake_roots
from strop.frontend.functional import memory_of
from strop.frontend.shape_rules import FAST_RULES, RULES, TracedSizes, _unary, shape_rules
from strop.frontend.step import capture_step
from strop.frontend.view_rules import viewed
from strop.ir.tensor_spec import TensorSpec

aten = torch.ops.aten
SHAPE = ("b", "8", "2*h", "w")
HINTS = {"b": 3, "h": 5, "w": 7}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "permuted": lambda x: x.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3),
    "sliced": lambda x: torch.cat([x, x], 1)[:, :8],
    "expanded": lambda x: x[:1].expand(x.shape),
}
OTHERS: dict[str, Callable[[Tensor], Any]] = {
    "number": lambda x: 0.5,
    "whole_number": lambda x: 3,
    "scalar": lambda x: x.new_ones(()),
    "wide_scalar": lambda x: x.new_ones((), dtype=torch.float64),
    "channels": lambda x: x.new_ones((8, 1, 1)),
    "statistics": lambda x: x.new_ones((x.shape[0], 8, 1, 1)),
    "row": lambda x: x.new_ones((x.shape[3],)),
    "across": lambda x: x.new_ones((x.shape[0], 1, 1, x.shape[3])),
    "wide": lambda x: x.double(),
    "whole": lambda x: x.int(),
}


def look(value: Any) -> Any:
    if isinstance(value, Tensor):
        sizes = [str(s) for s in (*value.shape, *value.stride())]
        return sizes, value.dtype, value.device
    return [look(v) for v in value] if isinstance(value, tuple | list) else value


@contextmanager
def traced_input(dtype: torch.dtype) -> Iterator[Tensor]:
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    roots = fake_roots(mode, HINTS)
    with mode:
        yield fake_input(TensorSpec(SHAPE, dtype, torch.device("cpu")), roots)


def both(make: Callable[[Tensor], Any], dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """What ``make`` gives by our rules, and by torch's."""

    def found(is_ours: bool) -> Any:
        env = ShapeEnv()
        mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
        roots = fake_roots(mode, HINTS)
        with mode:
            x = fake_input(TensorSpec(SHAPE, dtype, torch.device("cpu")), roots)
            if not is_ours:
                result = look(make(x))
            else:
                with shape_rules():
                    result = look(make(x))
        return result, len(env.guards)

    return found(True), found(False)


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sums_and_products_with_others(layout: str, other: str) -> None:
    def make(x: Tensor) -> list[Tensor]:
        pair = LAYOUTS[layout](x), OTHERS[other](x)
        pairs = [pair, pair[::-1]] if isinstance(pair[1], Tensor) else [pair]
        operators = (torch.add, torch.sub, torch.mul, torch.div)
        return [op(*operands) for op, operands in itertools.product(operators, pairs)]

    ours, theirs = both(make)
    assert ours == theirs


@pytest.mark.parametrize("second", LAYOUTS)
@pytest.mark.parametrize("first", LAYOUTS)
def test_sums_and_gradients_of_two_layouts(first: str, second: str) -> None:
    def make(x: Tensor) -> list[Tensor]:
        pair = LAYOUTS[first](x), LAYOUTS[second](x)
        return [
            torch.add(*pair, alpha=2),
            torch.mul(*pair),
            aten.silu_backward(*pair),
            aten.gelu_backward(*pair),
            aten.gelu_backward(*pair, approximate="tanh"),
        ]

    ours, theirs = both(make)
    assert ours == theirs


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16], ids=str)
def test_other_types(dtype: torch.dtype) -> None:
    ours, theirs = both(lambda x: [x + x, x * 2, x * 0.5, x / x], dtype)
    assert ours == theirs


@pytest.mark.parametrize("mask", [(True, True, True), (True, False, False), (False, True, True)])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_gradients_of_norms(layout: str, mask: tuple[bool, ...]) -> None:
    def group(x: Tensor) -> Any:
        x = LAYOUTS[layout](x)
        b, c, h, w = x.shape
        mean = x.new_ones((b, 4))
        return aten.native_group_norm_backward(
            x, x, mean, mean, x.new_ones(c), b, c, h * w, 4, list(mask)
        )

    def layer(x: Tensor) -> Any:
        x = LAYOUTS[layout](x)[:, :, 0, :].transpose(1, 2).contiguous()
        mean, weight = x.new_ones((*x.shape[:2], 1)), x.new_ones(8)
        return aten.native_layer_norm_backward(x, x, [8], mean, mean, weight, weight, list(mask))

    for make in (group, layer):
        (ours, _), (theirs, _) = both(make)
        assert ours == theirs


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_group_norms(layout: str, dtype: torch.dtype, affine: bool) -> None:
    def make(x: Tensor) -> Any:
        weight = x.new_ones(8) if affine else None
        x = LAYOUTS[layout](x)
        n, c, h, w = x.shape
        return aten.native_group_norm(x, weight, weight, n, c, h * w, 4, 1e-5)

    (ours, guards), (theirs, own) = both(make, dtype)
    assert ours == theirs
    assert guards <= own


def test_group_norms_of_the_wrong_size_are_refused() -> None:
    with traced_input(torch.float32) as x, shape_rules():
        n, c, h, w = x.shape
        with pytest.raises(Exception, match="divisib"):
            aten.native_group_norm(x, None, None, n, c, h * w, 3, 1e-5)


@pytest.mark.parametrize("memory_format", [None, torch.preserve_format, torch.contiguous_format])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies(layout: str, memory_format: torch.memory_format | None) -> None:
    (ours, _), (theirs, _) = both(
        lambda x: aten.clone(LAYOUTS[layout](x), memory_format=memory_format)
    )
    assert ours == theirs


def test_products() -> None:
    def make(x: Tensor) -> Any:
        rows, matrix = x.flatten(2).transpose(1, 2).reshape(-1, 8), x.new_ones(6, 8)
        row, whole = x.new_ones(6), x.new_ones(rows.shape[0], 6)
        return [
            aten.mm(rows, matrix.t()),
            aten.mm(rows.t(), rows),
            *(aten.addmm(c, rows, matrix.t()) for c in (row, whole, row[:1])),
            aten.addmm(row, rows, matrix.t(), beta=2, alpha=0.5),
        ]

    (ours, guards), (theirs, own) = both(make)
    assert ours == theirs
    assert guards <= own


def test_products_of_the_wrong_size_are_refused() -> None:
    with traced_input(torch.float32) as x, shape_rules():
        rows = x.permute(0, 2, 3, 1).reshape(-1, 8)
        with pytest.raises(RuntimeError, match="reduction dim"):
            aten.mm(rows, x.new_ones(9, 8))


ACTIVATIONS = [rule for rule, how in FAST_RULES.items() if how is _unary]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_activations(layout: str, dtype: torch.dtype) -> None:
    known = (aten.gelu.default, aten.silu.default)  # of numbers alone that have a fraction
    used = [op for op in ACTIVATIONS if dtype.is_floating_point or op not in known]
    (ours, _), (theirs, _) = both(lambda x: [op(LAYOUTS[layout](x)) for op in used], dtype)
    assert ours == theirs
    assert len(used) >= 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layer_norms(layout: str, dtype: torch.dtype) -> None:
    """As eager's, which are contiguous; torch's trace takes over what arrives."""

    def of_rows(x: Tensor) -> Tensor:
        return LAYOUTS[layout](x).flatten(2).transpose(1, 2)

    def make(x: Tensor) -> Any:
        rows, weight = of_rows(x), x.new_ones(8)
        return [
            *aten.native_layer_norm(rows, [8], weight, weight, 1e-5),
            F.layer_norm(rows, [8]),
            F.layer_norm(x, x.shape[3:]),
        ]

    (_, guards), (_, theirs) = both(make, dtype)
    assert guards <= theirs
    with traced_input(dtype) as x, shape_rules():
        found = make(x)
        numbers = [
            [n if isinstance(n, int) else n.node.hint for n in (*v.shape, *v.stride())]
            for v in found
        ]
    eager = make(torch.randn(3, 8, 10, 7).to(dtype))
    assert numbers == [[*value.shape, *value.stride()] for value in eager]
    assert [value.dtype for value in found] == [value.dtype for value in eager]


def test_layer_norms_of_other_types_are_torchs() -> None:
    ours, theirs = both(
        lambda x: F.layer_norm(x, x.shape[3:], x.new_ones(x.shape[3:])), torch.float16
    )
    assert ours[0][1] == theirs[0][1] == torch.float16
    with pytest.raises(Exception, match="normalized_shape"):
        both(lambda x: F.layer_norm(x, [9]))


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "pixels in one dim": lambda x: x.view(x.shape[0], 8, -1),
    "all in one dim": lambda x: x.view(-1),
    "rows": lambda x: x.view(x.shape[0] * 8, x.shape[2] * x.shape[3]),
    "heads": lambda x: x.view(x.shape[0], 4, 2, x.shape[2], x.shape[3]),
    "a size that is divided": lambda x: x.view(x.shape[0], 8, -1, 2, x.shape[3]),
    "a number that is left": lambda x: x.view(x.shape[0], -1, x.shape[2], x.shape[3]),
    "the same": lambda x: x.view(x.shape),
    "more dims": lambda x: x.view(1, *x.shape, 1),
    "of a part": lambda x: x[1:].view(-1, x.shape[3]),
    "of a view": lambda x: x.view(-1, 8).view(x.shape[0], x.shape[2], -1, 8),
    "of what lies otherwise": lambda x: x.permute(0, 2, 3, 1).view(x.shape[0], -1, x.shape[3], 8),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views(name: str) -> None:
    """The rule has torch's sizes and steps, in the memory that it looks at, and no guard more."""

    def make(x: Tensor) -> Any:
        found = VIEWS[name](x)
        values = [
            size.node.hint if isinstance(size, torch.SymInt) else size for size in found.shape
        ]
        return found, values, str(found.storage_offset()), memory_of(found) == memory_of(x)

    with fx_config.patch(use_duck_shape=False, backed_size_oblivious=True):
        ours, theirs = both(make)
    assert ours == theirs
    assert ours[0][3] is True


def test_sizes_of_a_view_are_of_its_own_trace() -> None:
    """Symbols of two traces have the same names, and a view that is made again is the same."""
    with shape_rules():
        for _ in range(2):
            env = ShapeEnv()
            mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
            roots = fake_roots(mode, HINTS)
            with mode:
                x = fake_input(TensorSpec(SHAPE, torch.float32, torch.device("cpu")), roots)
                views = [x.view(x.shape[0], 8, -1) for _ in range(2)]
            assert look(views[0]) == look(views[1])
            assert memory_of(views[0]) == memory_of(views[1]) == memory_of(x)
            for view in views:
                symbolic = [size for size in view.shape if isinstance(size, torch.SymInt)]
                assert len(symbolic) == 2
                assert all(size.node.shape_env is env for size in symbolic)
            assert not env.guards


HALVES: dict[str, Callable[[Tensor], Tensor]] = {
    "pixels in one dim": lambda x: x.view(x.shape[0], 8, -1),
    "rows": lambda x: x.view(x.shape[0] * 8, x.shape[2] * x.shape[3]),
    "pixels behind channels": lambda x: x.permute(0, 2, 3, 1).view(
        x.shape[0], x.shape[2] * x.shape[3], 8
    ),
    "heads": lambda x: x.flatten(2).transpose(1, 2).contiguous().view(x.shape[0], -1, 4, 2),
}


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("is_ours", [True, False], ids=["our trace", "another's"])
def test_views_of_what_is_computed_of_sizes(name: str, is_ours: bool) -> None:
    """The halves that a convolution leaves, rounded up, are above 0, and so are products of
    them."""

    def made(with_rules: bool) -> Any:
        env = TracedSizes() if is_ours else ShapeEnv()
        mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
        roots = fake_roots(mode, HINTS)
        with mode:
            x = fake_input(TensorSpec(SHAPE, torch.float32, torch.device("cpu")), roots)
            half = x.new_empty((x.shape[0], 8, *((size - 1) // 2 + 1 for size in x.shape[2:])))
            with shape_rules() if with_rules else nullcontext():
                found = HALVES[name](half)
        assert memory_of(found) == memory_of(half) or name == "heads"
        return look(found), [v if isinstance(v, int) else v.node.hint for v in found.shape]

    with fx_config.patch(use_duck_shape=False, backed_size_oblivious=is_ours):
        calls: list[Any] = []

        def noted(*given: Any) -> Any:
            calls.append(viewed(*given))
            return calls[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(RULES, aten.view.default, noted)
            ours = made(True)
        assert ours[1] == made(False)[1]
        assert ours[0] == made(False)[0]
    assert calls
    assert all(call is not None for call in calls)


def test_views_of_the_wrong_size_are_refused() -> None:
    with traced_input(torch.float32) as x, shape_rules():
        for shape in ((x.shape[0], 9, x.shape[2], x.shape[3]), (8, x.shape[2]), (-1, -1)):
            with pytest.raises(RuntimeError):
                x.view(shape)


def test_dropout_in_evaluation_is_its_input() -> None:
    class Dropped(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x.sin(), 0.5, self.training).cos()

    spec, module = TensorSpec(SHAPE, torch.float32, torch.device("cpu")), Dropped().eval()
    targets = [node.target for node in capture(module, module, (spec,), HINTS).gm.graph.nodes]
    assert [
        t for t in targets if t in (aten.sin.default, aten.clone.default, aten.cos.default)
    ] == [aten.sin.default, aten.cos.default]


def test_torch_has_its_own_rules_back() -> None:
    from torch._subclasses import fake_impls

    tables = fake_impls.op_implementations_dict, fake_impls.get_fast_op_impls()
    before = [dict(table) for table in tables]
    with shape_rules():
        assert tables[1][aten.silu_backward.default] is not None
        assert [dict(table) for table in tables] != before
    assert [dict(table) for table in tables] == before
    assert FAST_RULES


class Picture(nn.Module):
    """As much of a UNet as asks torch for the order of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.norm(self.conv(x)))


def test_a_batch_of_one_is_no_other_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strides of a size 1 say nothing of the order of memory, so torch asks whether it is one."""
    module = Picture().to(memory_format=torch.channels_last)
    spec = TensorSpec(SHAPE, torch.float32, torch.device("cpu"), order=(0, 2, 3, 1))
    sizes = [{"b": b, "h": h, "w": 7} for b in (1, 2, 5) for h in (1, 3)]
    wants = [True] * len(list(module.parameters()))

    def served() -> list[bool]:
        with torch.autocast("cpu", torch.bfloat16):
            step = capture_step(module, module, (spec,), HINTS, [*wants, False])
        return [all(guard.holds(size) for guard in step.sizes.guards) for size in sizes]

    assert all(served())
    monkeypatch.setattr("strop.frontend.step.TracedSizes", ShapeEnv)  # as anybody's trace
    assert not any(served()[:2])


def test_questions_of_the_module_itself_are_guards() -> None:
    class Asking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if x.shape[0] > 1 else x

    spec = TensorSpec(SHAPE, torch.float32, torch.device("cpu"))
    guards = capture(Asking(), Asking(), (spec,), HINTS).guards
    assert not all(guard.holds(HINTS | {"b": 1}) for guard in guards)
