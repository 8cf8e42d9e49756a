"""The executor of launches: how tensors must lie, what is bound and when, and what runs early."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from strop.ir.dims import symbol
from strop.ir.source import KernelSource
from strop.kernels.kernel import (
    RESULT,
    Late,
    Launch,
    Launches,
    Lies,
    Operand,
    PartScratch,
    Scalar,
    Stride,
    Torch,
    View,
    scratch,
)
from strop.runtime.run import launched_calls
from strop.runtime.run.launched_calls import CallSite, Launched, scratch_bytes
from strop.runtime.run.memory import ALIGNMENT_BYTES
from tests.gpus import H100

HALF = torch.float16


class Kernels:
    """Stands where a GPU's kernels are built and bound: it notes what it is given."""

    device = H100

    def __init__(self) -> None:
        self.built: list[str] = []
        self.bound: list[Kernel] = []
        self.ran: list[tuple[str, tuple[int, ...]]] = []  # and its pointers

    def build(self, sources: Sequence[KernelSource]) -> None:
        self.built += [source.name for source in sources]

    def bind(
        self,
        source: KernelSource,
        pointers: Sequence[int],
        scalars: Sequence[int],
        stream: int,
        early: bool = False,
        views: Sequence[Any] = (),
    ) -> Kernel:
        assert all(pointer % 16 == 0 for pointer in pointers)
        self.bound.append(Kernel(self, source, [*pointers], tuple(scalars), stream, early, views))
        return self.bound[-1]


class Kernel:
    def __init__(
        self,
        kernels: Kernels,
        source: KernelSource,
        pointers: list[int],
        scalars: tuple[int, ...],
        stream: int,
        early: bool,
        views: Sequence[Any],
    ) -> None:
        self.kernels, self.source, self.pointers = kernels, source, pointers
        self.scalars, self.stream, self.early, self.views = scalars, stream, early, list(views)

    def set_pointer(self, place: int, pointer: int) -> None:
        self.pointers[place] = pointer

    def __call__(self) -> None:
        self.kernels.ran.append((self.source.name, tuple(self.pointers)))


def source(name: str, params: int, units: Sequence[int] = ()) -> KernelSource:
    return KernelSource(name, "triton", "", (HALF,) * params, tuple(units), (symbol("s0"),))


def launch(
    *operands: Operand, scalars: Sequence[Scalar] = (), units: Sequence[int] = (), name: str = "k"
) -> Launch:
    units = units or (1,) * len(scalars)
    return Launch(source(name, len(operands), units), operands, tuple(scalars))


def launched(
    launches: Launches, kernels: Any, memory: Tensor | None = None, **site: bool
) -> Launched:
    around = CallSite(kernels, 7, **{"is_early": False, "is_steady": True, **site})
    return Launched(launches, around, memory)


def half(*sizes: int) -> Tensor:
    return torch.zeros(*sizes, dtype=HALF)


def far(*strides: int) -> Tensor:
    """Two rows that lie so far apart, of which nobody needs memory."""
    return torch.empty_strided((2, 64), strides, dtype=HALF, device="meta")


DENSE = {
    "dense": (half(4, 64), True),
    "a dim of size 1": (half(4, 64)[:1].as_strided((1, 64), (3, 1)), True),
    "gaps": (half(4, 128)[:, :64], False),
    "turned": (half(64, 4).t(), False),
    "an odd address": (half(65)[1:], False),
    "an address of 16 bytes": (half(72)[8:], True),
    "empty": (half(0, 64), False),
    "2^31 elements": (torch.empty(2**31, dtype=HALF, device="meta"), False),
    "fewer": (torch.empty(2**31 - 64, dtype=HALF, device="meta"), True),
}
ROWS = DENSE | {
    "gaps": (half(4, 128)[:, :64], True),
    "odd gaps": (half(4, 68)[:, :64], False),
    "one row for all": (half(1, 64).expand(4, 64), True),
    "2^31 elements away": (far(2**31, 1), False),
    "nearly as far": (far(2**31 - 64, 1), True),
}
ANYHOW = ROWS | {
    "turned": (half(64, 4).t(), True),
    "odd gaps": (half(4, 68)[:, :64], True),
}
MAPPED = ROWS | {  # a tensor map has no stride of zero, and counts in coordinates
    "one row for all": (half(1, 64).expand(4, 64), False),
    "2^31 elements away": (far(2**31, 1), True),
}
PLACES = [
    (name, lies, view, tensor, is_right)
    for lies, view, table in (
        (Lies.DENSE, None, DENSE),
        (Lies.ROWS, None, ROWS),
        (Lies.ANYHOW, None, ANYHOW),
        (Lies.ROWS, View(), MAPPED),
    )
    for name, (tensor, is_right) in table.items()
]


@pytest.mark.parametrize(
    ("name", "lies", "view", "tensor", "is_right"),
    PLACES,
    ids=[f"{lies.name}{'-mapped' * (view is not None)}-{name}" for name, lies, view, *_ in PLACES],
)
def test_how_operands_lie(
    name: str, lies: Lies, view: View | None, tensor: Tensor, is_right: bool
) -> None:
    """Of kernels' operands and of a library's in between."""
    out, kernels = half(4, 64), Kernels()
    parts = (launch(Operand(0, lies, view=view), Operand(RESULT)),)
    assert launched(Launches(parts), kernels).run([tensor], out) == is_right
    assert bool(kernels.ran) == is_right
    if view is None:
        called = launched(Launches((Torch("copy", (Operand(0, lies), Operand(0, lies))),)), kernels)
        assert called.run([tensor], out) == is_right


def test_the_library_is_called_where_they_lie_otherwise() -> None:
    x, odd, out = half(4, 64), half(64, 4).t(), half(4, 64)
    kernels, left = Kernels(), list[Any]()
    call = launched(Launches((launch(Operand(0), Operand(RESULT)),)), kernels)
    write = call.writing(lambda inputs, out: left.append((inputs, out)))
    write([x], out)
    assert kernels.ran == [("k", (x.data_ptr(), out.data_ptr()))]
    write([odd], out)
    assert left == [([odd], out)]
    assert len(kernels.ran) == 1


def test_all_or_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a later part's operands lie otherwise, an earlier one has not run."""
    called = list[str]()
    monkeypatch.setitem(launched_calls.TORCH, "linear", lambda *tensors: called.append("linear"))
    kernels = Kernels()
    parts = (
        Torch("linear", (Operand(0),)),
        launch(Operand(0), name="first"),
        launch(Operand(1), name="last"),
    )
    call = launched(Launches(parts), kernels)
    assert not call.run([half(8), half(8, 8).t()], half(8))
    assert not called
    assert not kernels.ran
    assert call.run([half(8), half(8, 8)], half(8))
    assert called == ["linear"]
    assert [name for name, _ in kernels.ran] == ["first", "last"]


def test_a_kernel_is_built_and_bound_once_for_each_way_to_lie() -> None:
    """Other addresses are put in place before each launch."""
    kernels, out = Kernels(), half(4, 64)
    call = launched(Launches((launch(Operand(0, Lies.ROWS), Operand(RESULT)),)), kernels)
    some = [half(4, 64), half(4, 64), half(4, 128)[:, :64], half(4, 64)]
    for x in some:
        assert call.run([x], out)
    assert [pointers for _, pointers in kernels.ran] == [
        (x.data_ptr(), out.data_ptr()) for x in some
    ]
    assert len(kernels.bound) == 2
    assert kernels.built == ["k", "k"]
    assert {kernel.stream for kernel in kernels.bound} == {7}


@pytest.mark.parametrize("is_steady", [True, False])
def test_scalars(is_steady: bool) -> None:
    """Of the launch, of how an operand lies, and of who writes the weights."""
    kernels, x = Kernels(), half(4, 128)[:, :64]
    scalars = (5, Stride(0, 0), Stride(0, 0, 8), Stride(1, 1), Late.WEIGHTS)
    part = launch(Operand(0, Lies.ROWS), Operand(RESULT), scalars=scalars)
    assert launched(Launches((part,)), kernels, is_steady=is_steady).run([x], half(4, 64))
    (kernel,) = kernels.bound
    assert kernel.scalars == (5, 128, 16, 1, int(not is_steady))


def test_scalars_that_must_be_multiples_of_16() -> None:
    kernels = Kernels()
    part = launch(Operand(0, Lies.ROWS), scalars=(Stride(0, 0), 3), units=(16, 1))
    call = launched(Launches((part,)), kernels)
    assert call.run([half(4, 80)[:, :64]], half(1))
    for _ in range(2):  # 72 is a multiple of 16 bytes alone
        assert not call.run([half(4, 72)[:, :64]], half(1))
    assert len(kernels.bound) == 1


def test_pieces_and_orders_of_operands() -> None:
    """A part by index, a part by length, and then another order of dims."""
    x, out, kernels = half(3, 4, 5, 8), half(3, 8, 4, 5), Kernels()
    last = (0, 2, 3, 1)
    parts = (
        launch(Operand(0, Lies.ANYHOW, piece=((0, 2),))),
        launch(Operand(0, Lies.ANYHOW, piece=((0, 1), (1, 2, 3)))),
        launch(Operand(RESULT, Lies.ANYHOW, order=last)),
        launch(Operand(0, Lies.ANYHOW, last, ((0, 1, 2),)), scalars=(Stride(0, 3), Stride(0, 1))),
    )
    assert launched(Launches(parts), kernels).run([x], out)
    pointers = [pointer for _, (pointer,) in kernels.ran]
    assert pointers == [
        x[2].data_ptr(),
        x[1, :, 2:].data_ptr(),
        out.data_ptr(),
        x[1:].data_ptr(),
    ]
    assert kernels.bound[3].scalars == (40, 8)


def test_views() -> None:
    """Those of the launch, or as operands lie; a dim of size 1 has a stride that is never used."""
    kernels = Kernels()
    x, single = half(4, 128)[:, :64], half(4, 64)[:1].as_strided((1, 64), (3, 1))
    part = launch(
        Operand(0, Lies.ROWS, view=View()),
        Operand(1),
        Operand(0, Lies.ROWS, view=View(box=(1, 1, 2, 64), ones=2)),
        Operand(RESULT, view=View((2, 128), (128, 1), (2, 8))),
        Operand(2, Lies.ROWS, view=View()),
    )
    assert launched(Launches((part,)), kernels).run([x, half(8), single], half(4, 64))
    (kernel,) = kernels.bound
    assert [tuple(map(tuple, view)) for view in kernel.views] == [
        ((4, 64), (128, 1)),
        ((1, 1, 4, 64), (64, 64, 128, 1), (1, 1, 2, 64)),
        ((2, 128), (128, 1), (2, 8)),
        ((1, 64), (64, 1)),
    ]


@pytest.mark.parametrize("is_early", [True, False])
def test_only_what_follows_a_kernel_of_ours_is_early(
    is_early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first launch where the one before the call is, also behind a sum's copy, which mostly
    does not run; no launch behind another part."""
    monkeypatch.setitem(launched_calls.TORCH, "linear", lambda *tensors: None)
    first, second = launch(Operand(0), name="first"), launch(Operand(0), name="second")
    copy, linear = Torch("copy", (Operand(0), Operand(0))), Torch("linear", (Operand(0),))
    for parts, wanted in (
        ((first, second), [is_early, False]),
        ((copy, first), [is_early]),
        ((linear, first, second), [False, False]),
        ((first, linear, second), [is_early, False]),
    ):
        kernels = Kernels()
        assert launched(Launches(parts), kernels, is_early=is_early).run([half(8)], half(8))
        assert [kernel.early for kernel in kernels.bound] == wanted


def test_a_sum_is_copied_unless_it_is_there() -> None:
    copy = Torch("copy", (Operand(0), Operand(RESULT)))
    call = launched(Launches((copy,)), Kernels())
    x, out = torch.randn(4, 64).half(), half(4, 64)
    assert call.run([x], out)
    assert torch.equal(out, x)
    before = out._version
    assert call.run([out], out)
    assert out._version == before


def test_scratch() -> None:
    """Pieces lie apart, each at an aligned address; a part may see the first of one as another
    shape."""
    pieces = (
        PartScratch((3, 5), HALF),
        PartScratch((4, 6), torch.float32),
        PartScratch((1,), HALF),
    )
    kernels = Kernels()
    parts = (
        launch(*(Operand(scratch(n)) for n in range(3)), name="whole"),
        launch(Operand(scratch(1), shape=(2, 3)), scalars=(Stride(0, 0),), name="less"),
    )
    launches = Launches(parts, pieces)
    size = scratch_bytes(launches)
    assert size == 3 * ALIGNMENT_BYTES
    assert [piece.size_bytes for piece in pieces] == [30, 96, 2]
    memory = torch.zeros(size + ALIGNMENT_BYTES, dtype=torch.uint8)
    assert launched(launches, kernels, memory).run([], half(1))
    begin = memory.data_ptr()
    starts = tuple(begin + n * ALIGNMENT_BYTES for n in range(3))
    assert kernels.ran == [("whole", starts), ("less", starts[1:2])]
    assert kernels.bound[1].scalars == (3,)
    assert scratch_bytes(Launches(parts[:0])) == 0


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (0, 1, 2, 3), (3, 0, 1, 2)])
def test_a_result_that_the_call_allocates(order: tuple[int, ...]) -> None:
    """Of its sizes, dense in an order of dims, outermost first; a new one each time."""
    kernels, sizes = Kernels(), (2, 3, 4, 8)
    part = launch(Operand(0), Operand(RESULT, Lies.ANYHOW))
    call = launched(Launches((part,), result=sizes, order=order), kernels)
    allocate = call.allocating(lambda inputs: inputs[0])
    x = half(8)
    first, second = allocate([x]), allocate([x])
    assert first.shape == sizes
    assert first.permute(order).is_contiguous()
    assert first.dtype == x.dtype
    assert first.data_ptr() != second.data_ptr()
    assert [pointers[1] for _, pointers in kernels.ran] == [first.data_ptr(), second.data_ptr()]
    odd = half(9)[1:]
    assert allocate([odd]) is odd  # as the library does it


def test_what_ends_with_a_kernel_of_ours() -> None:
    kernel, library = launch(Operand(0)), Torch("linear", (Operand(0),))
    assert Launches((library, kernel)).ends_ours
    assert not Launches((kernel, library)).ends_ours


def test_sources_are_named_once() -> None:
    one, other = launch(Operand(0), name="one"), launch(Operand(0), name="other")
    library = Torch("linear", (Operand(0),))
    found = Launches((one, library, other, one)).sources
    assert found == (one.source, other.source)


def test_products_of_half_precision_into_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch does between launches; its products of two types are for GPUs alone."""

    def bmm(a: Tensor, b: Tensor, *, out_dtype: torch.dtype, out: Tensor) -> Tensor:
        assert out_dtype == torch.float32
        return out.copy_(a.float() @ b.float())

    monkeypatch.setattr(torch, "bmm", bmm)
    q, k = torch.randn(2, 5, 8).half(), torch.randn(2, 7, 8).half()
    scores = torch.full((2, 5, 7), math.nan)
    launched_calls.TORCH["scores"](q, k, scores)
    torch.testing.assert_close(scores, q.float() @ k.float().mT)
    values = torch.full((2, 5, 8), math.nan)
    launched_calls.TORCH["weighted"](scores.half(), k, values)
    torch.testing.assert_close(values, scores.half().float() @ k.float())
    divided = half(2, 5, 8)
    launched_calls.TORCH["divided"](values, torch.full((2, 5, 1), 4.0), divided)
    assert torch.equal(divided, (values / 4).half())
    x, weight, out = torch.randn(5, 8).half(), torch.randn(6, 8).half(), half(5, 6)
    launched_calls.TORCH["linear"](x, weight, out)
    assert torch.equal(out, torch.mm(x, weight.t()))
