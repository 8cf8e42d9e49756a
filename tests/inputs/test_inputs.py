"""Every kind of argument and result that a user may pass, against eager."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import strop
from strop.options import Options
from tests.views.running import Function, assert_equal


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


def compiled(function: Callable[..., Any], folder: str, **options: Any) -> nn.Module:
    module = function if isinstance(function, nn.Module) else Function(function).eval()
    options = {"cache_dir": f"{folder}/{id(function)}"} | options
    return strop.optimize(module, options=Options(**options))


def normed(x: Tensor) -> Tensor:
    """A pointwise kernel, a row reduction and a column reduction."""
    y = F.silu(x) * 2 + 1
    return torch.cat([y.softmax(-1), y.transpose(-1, -2).contiguous().transpose(-1, -2)], -1)


def reduced(x: Tensor) -> tuple[Tensor, ...]:
    return x.sum(-1), x.mean(0), x.flatten(1).sum(1), (x * x).sum((0, 1))


def matrices(x: Tensor) -> Tensor:
    return F.linear(x, torch.ones(3, 6)) @ torch.ones(3, 2)


SIZES: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "pointwise": (lambda x: F.silu(x) + 1, [(2, 5, 6), (0, 5, 6), (1, 5, 6), (2, 0, 6), (2, 1, 6)]),
    "starts_empty": (lambda x: F.silu(x) + 1, [(0, 5, 6), (3, 5, 6), (1, 5, 6)]),
    "starts_with_one": (lambda x: F.silu(x) + x[:1], [(1, 5, 6), (3, 5, 6), (0, 5, 6)]),
    "norms": (normed, [(2, 5, 6), (1, 1, 6), (0, 5, 6), (2, 0, 6)]),
    "sums": (reduced, [(2, 5, 6), (1, 1, 6), (0, 5, 6), (2, 0, 6)]),
    "matrices": (matrices, [(2, 5, 6), (1, 1, 6), (0, 5, 6), (2, 0, 6)]),
    "cats": (lambda x: torch.cat([x, x[:, :0], x * 2], 1), [(2, 5, 6), (1, 1, 6), (2, 0, 6)]),
    "views": (
        lambda x: x.flatten(1).unflatten(1, (-1, 2)).sum(-1),
        [(2, 5, 6), (1, 1, 6), (0, 5, 6)],
    ),
    "slices": (lambda x: x[:, 1:] + x[:, :-1], [(2, 5, 6), (2, 2, 6), (2, 1, 6), (0, 3, 6)]),
    "last": (lambda x: x[:, -2:] + 1, [(2, 5, 6), (2, 2, 6), (2, 1, 6), (2, 0, 6)]),
    "last_but_one": (lambda x: x[:, -3:-1] * 2, [(2, 5, 6), (2, 2, 6), (2, 1, 6), (2, 0, 6)]),
    "squeezes": (lambda x: x.squeeze() * 2, [(2, 5, 6), (1, 5, 6), (2, 1, 6), (1, 1, 6)]),
    "rank_0": (lambda x: x * 2 + 1, [()]),
    "rank_1": (lambda x: (x * 2, x.sum(0)), [(5,), (1,), (0,)]),
    "rank_6": (lambda x: F.silu(x).sum((1, 3)), [(2, 3, 1, 4, 2, 2), (1, 3, 1, 4, 2, 2)]),
    "broadcast_one": (lambda x: x + x.sum(1, keepdim=True), [(2, 5, 6), (2, 1, 6), (1, 5, 6)]),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes(name: str, folder: str) -> None:
    """Empty and single dims, when compiled and later."""
    function, shapes = SIZES[name]
    module = compiled(function, folder)
    for shape in shapes:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        assert_equal(module(x), function(x))
    assert module.forward.counters.eager_calls == 0, module.forward.counters.fallbacks


STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(1, 3).contiguous().transpose(1, 3),
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "expanded": lambda x: x[:, :, :1].expand_as(x),
    "overlapping": lambda x: x.flatten().as_strided(x.shape, (3, 2, 1, 1)),
    "offset": lambda x: torch.cat([x, x])[x.shape[0] :],
    "every_second": lambda x: torch.cat([x, x], -1)[..., ::2],
    "conjugated_off": lambda x: torch.complex(x, x).conj().imag,
}


@pytest.mark.parametrize("name", STRIDES)
def test_strides(name: str, folder: str) -> None:
    def function(x: Tensor) -> Any:
        return F.silu(x) * 2, x.sum(1), F.conv2d(x, torch.ones(2, 4, 3, 3), padding=1)

    module = compiled(function, folder + "/strides")
    x = STRIDES[name](torch.randn(2, 4, 5, 6))
    assert_equal(module(x), function(x), 1e-4)
    assert_equal(module(x), function(x), 1e-4)
    assert module.forward.counters.eager_calls == 0


TYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_types(dtype: torch.dtype, folder: str) -> None:
    def function(x: Tensor) -> Any:
        doubled = torch.cat([x, x.flip(0)])
        return (
            doubled,
            torch.where(doubled == x[:1], doubled, doubled * 1),
            x.float().sum(1) if not x.is_complex() else x.abs(),
        )

    module = compiled(function, folder)
    x = (torch.randn(3, 8) * 3).to(dtype)
    assert_equal(module(x), function(x), 1e-2 if dtype.itemsize < 4 else 1e-5)
    assert module.forward.counters.eager_calls == 0, module.forward.counters.fallbacks


NUMBERS: dict[str, Callable[[Tensor], Any]] = {
    "times": lambda x: x * 1j,
    "abs": lambda x: (x * (1 + 2j)).abs(),
    "filled": lambda x: torch.full_like(x, complex("nan-infj"), dtype=torch.cfloat).imag + x.real,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
@pytest.mark.parametrize("name", NUMBERS)
def test_complex_numbers(name: str, dtype: torch.dtype, folder: str) -> None:
    """Of the second module the plan is stored."""
    function, x = NUMBERS[name], torch.randn(3, 8, dtype=dtype)
    for _ in range(2):
        module = compiled(function, folder, cache_dir=f"{folder}/complex")
        torch.testing.assert_close(module(x), function(x), rtol=0, atol=0, equal_nan=True)
        assert module.forward.counters.eager_calls == 0, module.forward.counters.fallbacks


# results that share memory


def test_a_result_that_is_an_argument(folder: str) -> None:
    module = compiled(lambda x, y: (x, y + 1, y), folder)
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    a, _, b = module(x, y)
    assert_equal((a, b), (x, y))
    assert a.data_ptr() == x.data_ptr()
    assert b.data_ptr() == y.data_ptr()


ALIASES: dict[str, Callable[[Tensor], Any]] = {
    "twice": lambda x: (lambda y: (y, y))(x * 2),
    "view": lambda x: (lambda y: (y, y.view(-1), y.transpose(0, 1)))(x * 2),
    "slice": lambda x: (lambda y: (y, y[1:], y[:, -1]))(x * 2),
    "clone": lambda x: (lambda y: (y, y.clone()))(x * 2),
    "clone_of_view": lambda x: (lambda y: (y[:2], y[:2].clone()))(x * 2),
    "clone_of_argument": lambda x: (x, x.clone()),
    "view_of_clone": lambda x: (lambda y: (y.view(-1), y, y[1:]))(x.clone()),
    "clone_twice": lambda x: (lambda y: (y, x, y))(x.clone()),
    "view_of_argument": lambda x: (x.view(-1), x[1:], x.t()),
    "contiguous": lambda x: (lambda y: (y, y.contiguous(), y.to(torch.float32)))(x * 2),
    "flip": lambda x: (x, x.flip(0)),
    "repeat": lambda x: (x, x.repeat(1, 1)),
    "cat_of_one": lambda x: (x, torch.cat([x])),
    "expanded": lambda x: (x * 2)[:, None].expand(-1, 3, -1),
}


@pytest.mark.parametrize("name", ALIASES)
def test_aliases(name: str, folder: str) -> None:
    """Results share memory with arguments and each other exactly where eager's do."""
    function = ALIASES[name]
    module = compiled(function, folder)
    for rows in (4, 5):
        x = torch.randn(rows, 6)
        found, wanted = module(x), function(x)
        assert_equal(found, wanted)
        assert _sharing(x, found) == _sharing(x, wanted)


def _sharing(x: Tensor, results: Any) -> list[list[bool]]:
    tensors = [x, *(results if isinstance(results, tuple) else (results,))]
    storages = [t.untyped_storage().data_ptr() for t in tensors]
    return [[a == b for b in storages] for a in storages]


def test_results_of_earlier_calls_stay(folder: str) -> None:
    module = compiled(lambda x: (x * 2, (x + 1).sum(1)), folder)
    first = module(torch.ones(2, 3))
    kept = [t.clone() for t in first]
    module(torch.zeros(2, 3))
    assert_equal(list(first), kept)


# arguments that are no tensors, and containers


@dataclass
class Affine:
    scale: float
    shift: Tensor


Pair = namedtuple("Pair", "left right")

ARGUMENTS: dict[
    str, tuple[Callable[..., Any], Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]]
]
ARGUMENTS = {
    "numbers": (lambda x, a, b, c: x * a + b if c else x, lambda: ((_x(), 2, 0.5, True), {})),
    "none": (lambda x, y=None: x * 2 if y is None else x + y, lambda: ((_x(), None), {})),
    "keywords": (lambda x, *, y, scale=1.0: x * scale + y, lambda: ((_x(),), {"y": _x()})),
    "text": (lambda x, mode: x.sum(1) if mode == "sum" else x, lambda: ((_x(), "sum"), {})),
    "dtype": (lambda x, dtype: x.to(dtype), lambda: ((_x(), torch.float64), {})),
    "nested": (
        lambda d: d["a"][0] + d["b"]["c"] * d["a"][1][0],
        lambda: (({"a": [_x(), (_x(),)], "b": {"c": _x()}},), {}),
    ),
    "int_keys": (lambda d: d[0] + d[1], lambda: (({0: _x(), 1: _x()},), {})),
    "namedtuple": (lambda p: Pair(p.left + p.right, p.left), lambda: ((Pair(_x(), _x()),), {})),
    "dict_result": (lambda x: {"z": x * 2, "a": [x + 1, (x - 1, None, 3)]}, lambda: ((_x(),), {})),
    "dataclass": (lambda x, o: x * o.scale + o.shift, lambda: ((_x(), Affine(2.0, _x())), {})),
    "same_twice": (lambda x, y: x + y * 2, lambda: ((lambda x: (x, x))(_x()), {})),
    "scalar_tensor": (lambda x, t: x * t, lambda: ((_x(), torch.tensor(2.5)), {})),
    "int_tensor": (lambda x, t: x * t, lambda: ((_x(), torch.tensor(3)), {})),
    "sizes": (lambda x: (x * 2, x.shape[0], x.shape[0] * 2), lambda: ((_x(),), {})),
    "shape": (lambda x, shape: x.reshape(shape) + 1, lambda: ((_x(), torch.Size((6, 3))), {})),
    "device": (lambda x, d: x.to(d) + 1, lambda: ((_x(), torch.device("cpu")), {})),
    "no_tensor_result": (lambda x: None, lambda: ((_x(),), {})),
}


def _x() -> Tensor:
    return torch.randn(3, 6)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(name: str, folder: str) -> None:
    function, make = ARGUMENTS[name]
    module = compiled(function, folder)
    args, kwargs = make()
    assert_equal(module(*args, **kwargs), function(*args, **kwargs))
    assert module.forward.counters.eager_calls == 0, module.forward.counters.fallbacks


def test_numbers_of_another_value_are_another_graph(folder: str) -> None:
    module = compiled(lambda x, a: x * a, folder)
    x = _x()
    for a in (2, 2.0, True, -0.0, 0.0):
        assert_equal(module(x, a), x * a)


def test_arguments_of_unknown_types_run_in_eager_and_say_so(folder: str) -> None:
    module = compiled(lambda x, f: f(x), folder)
    x = _x()
    assert_equal(module(x, torch.sin), x.sin())
    (reason,) = module.forward.counters.fallbacks
    assert "builtin_function_or_method" in reason


def test_model_output(folder: str) -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")

    def function(x: Tensor) -> Any:
        return outputs.BaseModelOutput(last_hidden_state=x * 2, hidden_states=(x, x + 1))

    module = compiled(function, folder)
    x = _x()
    found, wanted = module(x), function(x)
    assert type(found) is type(wanted)
    assert_equal(found.last_hidden_state, wanted.last_hidden_state)
    assert_equal(found.hidden_states, wanted.hidden_states)
    assert module.forward.counters.eager_calls == 0, module.forward.counters.fallbacks
    again = compiled(lambda o: o.last_hidden_state + o["hidden_states"][1], folder)
    assert_equal(again(found), found[0] + found[1][1])
    assert again.forward.counters.eager_calls == 0, again.forward.counters.fallbacks


# parameters in other memory orders


class Weighted(nn.Module):
    """A kernel and a convolution that read 4-d parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 6, 3, padding=1)
        self.scale = nn.Parameter(torch.randn(1, 4, 5, 6))

    def forward(self, x: Tensor) -> Any:
        return self.conv(x * self.scale), self.conv.weight * 2, self.scale.sum(1)


@pytest.mark.parametrize("when", ["before", "after"])
def test_parameters_in_channels_last(when: str, folder: str) -> None:
    torch.manual_seed(0)
    model = Weighted().eval().requires_grad_(False)
    x = torch.randn(2, 4, 5, 6)
    wanted = model(x)
    if when == "before":
        model.to(memory_format=torch.channels_last)
    strop.optimize(model, options=Options(cache_dir=f"{folder}/{when}"))
    assert_equal(model(x), wanted, 1e-4)
    model.to(memory_format=torch.channels_last if when == "after" else torch.contiguous_format)
    assert_equal(model(x), wanted, 1e-4)
    assert model.forward.counters.eager_calls == 0, model.forward.counters.fallbacks


def test_a_selection_of_unknown_length_says_why(folder: str) -> None:
    module = compiled(lambda x: x[x > 0] * 2, folder)
    x = torch.randn(4, 6)
    assert_equal(module(x), x[x > 0] * 2)
    (reason,) = module.forward.counters.fallbacks
    assert "depends on the values" in reason


def test_putting_under_a_mask(folder: str) -> None:
    def function(x: Tensor, m: Tensor) -> Tensor:
        y = x * 2
        y[m] = -1.0
        return y

    module = compiled(function, folder, strict=True)
    x = torch.randn(4, 6)
    assert_equal(module(x, x > 0), function(x, x > 0))
