"""Kernels on a CPU make the sums of products of codes that they read, as products of torchao and
others ask for them. All numbers here are whole or halves, so that every result is exact."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import strop
from strop.dispatch.derived_inputs import PACKED
from strop.fusion.planner import plan
from strop.ir.code_panel import MOST_BYTES, CodePanel
from strop.ir.dims import symbol
from strop.ir.graph import Builder, Graph
from strop.options import Options
from strop.passes.channels_last import order_of_largest
from strop.stages.code_panels import FEWEST_ROWS, SMALL, readers_of_sums
from tests.frontend.tracing import Function

INT8 = torch.int8


def of_signed(x: Tensor, weight: Tensor) -> Tensor:
    return torch._int_mm(x, weight.t())


def of_unsigned(x: Tensor, weight: Tensor) -> Tensor:
    """As torchao multiplies where a CPU has VNNI."""
    sums = torch._int_mm((x.to(torch.int32) + 128).to(torch.uint8), weight.t())
    return sums - weight.t().sum(dim=0, keepdim=True, dtype=torch.int32) * 128


def exact(x: Tensor, weight: Tensor) -> Tensor:
    """What both are, without oneDNN, which saturates on some CPUs."""
    return (x.long() @ weight.long().t()).int()


Product = Callable[[Tensor, Tensor], Tensor]


class Layer(nn.Module):
    """Quantises rows (by a fixed scale), multiplies codes, scales, and adds a bias."""

    def __init__(self, columns: int, depth: int) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randint(-128, 128, (columns, depth), dtype=INT8))
        self.register_buffer("bias", torch.randint(-9, 9, (columns,)).float())

    def forward(self, x: Tensor, product: Product) -> Tensor:
        codes = x.round().clamp(-128, 127).to(INT8).reshape(-1, x.shape[-1])
        y = product(codes, self.codes).float() * 0.5 + self.bias
        return y.reshape(*x.shape[:-1], -1)


class Stack(nn.Module):
    def __init__(self, product: Product, *widths: int) -> None:
        super().__init__()
        self.product = product
        self.layers = nn.ModuleList(map(Layer, widths[1:], widths))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer(x, self.product)
            x = (y - y.amax(-1, keepdim=True)) * 0.125
        return x


def made(product: Product, *widths: int, folder: Path, **options: Any) -> Any:
    stack = Stack(product, *widths).eval()
    return strop.optimize(stack, options=Options(cache_dir=str(folder), strict=True, **options))


def expected(stack: Any, x: Tensor) -> Tensor:
    by_hand = Stack(exact, *[layer.codes.shape[1] for layer in stack.layers], 1)
    by_hand.layers = stack.layers
    return by_hand(x)


def given(*shape: int) -> Tensor:
    return torch.randint(-128, 128, shape).float()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


PRODUCTS = pytest.mark.parametrize("product", [of_signed, of_unsigned])


@PRODUCTS
def test_one_graph_serves_every_number_of_rows(product, folder):
    stack = made(product, 36, 70, 64, 5, folder=folder)
    for rows in (2, 3, 5, 6, 23, 24, 25, 49, 1, 200):
        x = given(2, rows, 36)
        assert torch.equal(stack(x), expected(stack, x)), rows
    report = strop.explain(stack)
    assert report.num_graphs == 1
    assert not report.calls  # each product is a part of the kernel that reads it
    kernels = [k for k in report.components[0].latest.kernels if k.name.startswith("codes_")]
    assert sum(k.num_launches for k in kernels) == 3


@PRODUCTS
@pytest.mark.parametrize(("columns", "depth"), [(1, 1), (3, 5), (17, 63), (130, 127), (65, 4)])
def test_any_sizes_of_a_weight(columns, depth, product, folder):
    stack = made(product, depth, columns, folder=folder)
    for rows in (2, 7, 31):
        x = given(rows, depth)
        assert torch.equal(stack(x), expected(stack, x))
    assert not strop.explain(stack).calls


@PRODUCTS
def test_whatever_is_written_to_a_weight_counts(product, folder):
    stack, xs = made(product, 20, 33, folder=folder), (given(26, 20), given(6, 20))
    layer = stack.layers[0]

    def assert_fresh() -> None:
        assert all(torch.equal(stack(x), expected(stack, x)) for x in xs)

    assert_fresh()
    layer.codes.neg_()
    assert_fresh()
    layer.codes.data[5, 3] = 77  # which counts no version
    assert_fresh()
    layer.codes.numpy()[11, 2] = -3
    assert_fresh()
    layer.codes = torch.randint(-128, 128, (33, 20), dtype=INT8)
    assert_fresh()
    stack.load_state_dict(Stack(product, 20, 33).state_dict())
    assert_fresh()
    layer.codes.data = torch.randint(-128, 128, (33, 20), dtype=INT8)
    assert_fresh()
    with torch.inference_mode():
        layer.codes = torch.randint(-128, 128, (33, 20), dtype=INT8)
        assert_fresh()
        layer.codes[0] += 1
        assert_fresh()


def packed(module: nn.Module) -> Any:
    """What of a module's weights is packed, or None."""
    found = strop.explain(module).components[0].derived
    return next((one for one in found if one.kind == PACKED), None)


def test_a_weight_is_packed_once_for_all_calls_of_few_rows(tmp_path):
    stack, x = made(of_signed, 36, 70, 64, folder=tmp_path), given(49, 36)
    assert torch.equal(stack(x), expected(stack, x))
    assert packed(stack) is None  # many rows: in each call, in working memory
    for rows in (3, 48, 3, 24):
        assert torch.equal(stack(x[:rows]), expected(stack, x[:rows]))
        assert (packed(stack).count, packed(stack).num_made) == (2, 2)
    for times, change in enumerate((lambda codes: codes.data.neg_(), lambda codes: codes.add_(1))):
        change(stack.layers[0].codes)
        for rows in (24, 3):
            assert torch.equal(stack(x[:rows]), expected(stack, x[:rows]))
            assert packed(stack).num_made == 3 + times
    assert packed(stack).size_bytes >= sum(layer.codes.nbytes for layer in stack.layers)


def test_what_is_written_and_taken_back_counts(folder):
    """The memory holds what was packed last."""
    stack, x = made(of_signed, 20, 33, folder=folder), given(5, 20)
    codes = stack.layers[0].codes
    one, other = codes.clone(), -codes
    for held in (one, other, one, one, other):
        codes.numpy()[:] = held.numpy()
        assert torch.equal(stack(x), expected(stack, x))


def test_two_modules_of_one_weight_and_of_two_shapes(folder):
    """A weight that another module sees in another shape is packed by itself."""
    memory = torch.randint(-128, 128, (48 * 64,), dtype=INT8)
    stacks = [made(of_signed, *sizes, folder=folder) for sizes in ((64, 48), (48, 64))]
    stacks[0].layers[0].codes = memory.view(48, 64)
    stacks[1].layers[0].codes = memory.view(64, 48)
    for _ in range(2):
        for stack, depth in zip(stacks, (64, 48), strict=True):
            x = given(7, depth)
            assert torch.equal(stack(x), expected(stack, x))
        memory.neg_()


def test_threads_that_pack_the_same_weight_at_once(tmp_path):
    stack, x = made(of_signed, 256, 512, folder=tmp_path), given(6, 256)
    stack(x)
    for _ in range(5):
        stack.layers[0].codes.neg_()
        wanted = expected(stack, x)
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda _: stack(x), range(8)))
        assert all(torch.equal(each, wanted) for each in found)


def test_a_weight_that_lies_otherwise(folder):
    stack, x = made(of_signed, 20, 33, folder=folder), given(26, 20)
    stack(x)
    stack.layers[0].codes = torch.randint(-128, 128, (20, 33), dtype=INT8).t()
    assert torch.equal(stack(x), expected(stack, x))


def test_a_few_rows_are_left_to_a_call(folder):
    """Packing a weight takes longer than multiplying them, unless it is small."""
    stack = made(of_signed, 36, SMALL // 512 + 1, 512, folder=folder)
    few = {"code_sums": 1}
    for rows, calls in ((FEWEST_ROWS - 1, few), (FEWEST_ROWS, {}), (2, few)):
        x = given(rows, 36)
        assert torch.equal(stack(x), expected(stack, x))
        assert strop.explain(stack).calls == calls
    assert strop.explain(stack).num_graphs == 1


def test_threads_change_nothing(folder):
    stack, x = made(of_signed, 256, 300, 200, folder=folder), given(300, 256)
    wanted, before = expected(stack, x), torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(stack(x), wanted)
    finally:
        torch.set_num_threads(before)


def test_a_stored_plan_does_the_same(tmp_path):
    first, x = made(of_unsigned, 40, 48, 8, folder=tmp_path), given(19, 40)
    first(x)
    second = made(of_unsigned, 40, 48, 8, folder=tmp_path)
    assert torch.equal(second(x), expected(second, x))
    report = strop.explain(second)
    assert report.components[0].latest.from_disk
    assert not report.calls


def both(x: Tensor, weight: Tensor) -> Any:
    sums = of_signed(x, weight)
    return sums, sums.float().sum(-1)


def two_readers(x: Tensor, weight: Tensor) -> Any:
    sums = of_signed(x, weight).float()
    return sums.amax(0), (sums - sums.amax(-1, keepdim=True)) * 2


@pytest.mark.parametrize("function", [both, two_readers])
def test_what_others_read_too_is_a_call_of_our_kernel(function, tmp_path):
    module = Function(function).eval()
    strop.optimize(module, options=Options(cache_dir=str(tmp_path), strict=True))
    weight = torch.randint(-128, 128, (24, 40), dtype=INT8)
    for rows in (3, 30):
        x = torch.randint(-128, 128, (rows, 40), dtype=INT8)
        for found, wanted in zip(module(x, weight), function(x, weight), strict=True):
            assert torch.equal(found, wanted)
    report = strop.explain(module)
    assert report.calls == {"code_sums": 1}
    assert "code_sums" in str(report)


def product_graph(*, writes: bool) -> Graph:
    """A product whose sums a reduction reads, and that may overwrite its weight."""
    b = Builder()
    x = b.make("input", (), (symbol("m"), 40), INT8, index=0, state=False, merged=())
    weight = b.make("input", (), (24, 40), INT8, index=1, state=True, merged=())
    sums = b.make("code_sums", (x, weight), (symbol("m"), 24), torch.int32)
    top = b.reduce("amax", sums, (1,), torch.int32)
    result = b.pointwise("sub", sums, top, dtype=torch.int32, alpha=1)
    if writes:
        b.make("write", (weight, b.pointwise("neg", weight, dtype=INT8)), weight.shape, INT8)
    return Graph(tuple(b.nodes), (x, weight), (result,), {"m": 3})


def test_a_product_stays_where_it_is_if_its_weight_is_written():
    for writes in (False, True):
        graph = product_graph(writes=writes)
        found = readers_of_sums(graph, plan(graph, device="cpu"))
        assert len(found) == 1 - writes


def test_rows_that_would_not_fit_on_a_stack_are_a_call(folder):
    columns = MOST_BYTES // 4 // 24
    assert CodePanel(columns, 8, 1).stack_bytes > MOST_BYTES
    stack, x = made(of_signed, 8, columns, folder=folder), given(3, 8)
    assert torch.equal(stack(x), expected(stack, x))
    assert strop.explain(stack).calls == {"code_sums": 1}


def test_it_can_be_switched_off(tmp_path):
    stack, x = made(of_unsigned, 8, 16, folder=tmp_path, kernels_off=("code_sums",)), given(3, 8)
    stack(x)
    assert strop.explain(stack).calls == {"aten._int_mm.default": 1}


def test_a_check_judges_the_sums_with_their_kernel(tmp_path):
    stack = made(of_unsigned, 24, 40, 16, folder=tmp_path, check=True)
    for rows in (5, 26):
        x = given(rows, 24)
        assert torch.equal(stack(x), expected(stack, x))
    assert not stack.forward.counters.findings


def coded(x: Tensor, weight: Tensor) -> Any:
    """Quantise rows as torchao does."""
    most = torch.maximum(-x.amin(-1, keepdim=True), x.amax(-1, keepdim=True))
    scale = (most / 127.5).clamp(min=2**-23).float()
    codes = (x * (1 / scale)).round().clamp(-128, 127).to(INT8)
    return codes, scale, of_signed(codes, weight).float() * scale


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_codes_are_those_of_eager(dtype, tmp_path):
    """A scale is a half, and whoever makes codes by it takes it as it is stored."""
    module = Function(coded).eval()
    strop.optimize(module, options=Options(cache_dir=str(tmp_path), strict=True))
    weight = torch.randint(-128, 128, (24, 200), dtype=INT8)
    for rows in (3, 500):
        x = (torch.randn(rows, 200) * torch.rand(rows, 1)).to(dtype)
        for found, wanted in zip(module(x, weight), coded(x, weight), strict=True):
            assert torch.equal(found, wanted)


def test_through_torch_compile():
    stack = Stack(of_unsigned, 24, 40, 16).eval()
    compiled = torch.compile(stack, backend="strop")
    with torch.no_grad():
        for rows in (5, 9, 26):
            x = given(rows, 24)
            assert torch.equal(compiled(x), expected(stack, x))


class Asymmetric(nn.Module):
    """Codes of rows with a zero point each, as torchao has them."""

    def __init__(self, columns: int, depth: int) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randint(-128, 128, (columns, depth), dtype=INT8))

    def forward(self, x: Tensor) -> Tensor:
        zero = x.amin(-1, keepdim=True).round().clamp(-128, 127).to(INT8)
        scale = x.amax(-1, keepdim=True).clamp(min=1.0).float()
        codes = x.round().clamp(-128, 127).to(INT8)
        sums = (torch._int_mm(codes, self.codes.t()).float() * scale).bfloat16()
        of_weight = self.codes.sum(1).float() * 0.5
        return torch.tanh(sums - (zero.float() * scale * of_weight).bfloat16())


@pytest.mark.parametrize("rows", [1, 2, 40])
def test_zero_points_leave_no_call(rows: int, tmp_path: Path) -> None:
    """A single row has as many results as the weight has sums, and a call that is left to a library
    keeps a program from running as one call."""
    module = Asymmetric(64, 64).eval()
    x = given(rows, 64).bfloat16()
    wanted = module(x)
    strop.optimize(module, options=Options(cache_dir=str(tmp_path), strict=True))
    for _ in range(2):
        torch.testing.assert_close(module(x), wanted, rtol=2**-7, atol=2**-7)
    report = strop.explain(module)
    assert not report.calls
    kernels = [kernel.name for kernel in report.components[0].latest.kernels]
    assert "row_sum" in kernels  # which does nothing else
    assert any(name.startswith("codes_") for name in kernels)


def test_a_column_times_a_row_lies_by_rows():
    """As the zero points of torchao's rows times the sums of a weight, which panels read."""
    b = Builder()
    each, row = (
        b.make("input", (), shape, torch.float32, index=n, state=False, merged=())
        for n, shape in enumerate(((symbol("m"), 5, 1), (1, 24)))
    )
    column = b.reshape(each, (symbol("m") * 5, 1))
    for operands in ((column, row), (column,)):
        assert order_of_largest(operands, {"m": 30}, 2) is None
    turned = b.permute(b.make("copy", (row,), (7, 24), torch.float32), (1, 0))
    assert order_of_largest((turned,), {"m": 30}, 2) == (1, 0)
