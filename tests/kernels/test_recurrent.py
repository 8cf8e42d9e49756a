"""Layers of recurrent networks: the kernel for a CPU, against fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from strop.ir.device import CPU
from strop.ir.recurrence import GATES, has_cell, recurrence, recurrence_of
from strop.kernels import library
from strop.kernels.kernel import Launch, Problem, Stride
from strop.kernels.recurrent import rows
from strop.runtime.build.cache import DiskCache
from strop.runtime.build.native import NativeKernels
from strop.testing import assert_as_accurate_as_eager

SIZES = [  # steps, batch, units: vectors that are full and not, tiles of all heights, long sums
    *(
        (1, 9, 1),
        (2, 3, 5),
        (3, 1, 8),
        (2, 4, 16),
        (4, 7, 17),
        (5, 2, 33),
        (3, 13, 40),
        (2, 5, 130),
    ),
    (33, 64, 24),  # enough work for several threads, by rows
    (65, 2, 96),  # the same by units
]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> NativeKernels:
    return NativeKernels(DiskCache(tmp_path_factory.mktemp("kernels")))


def operands(kind: str, size: tuple[int, int, int], *, has_bias: bool = True) -> list[Tensor]:
    torch.manual_seed(sum(size))
    steps, batch, units = size
    wide = GATES[kind] * units
    weight = torch.randn(wide, units) / units**0.5
    found = [torch.randn(steps, batch, wide), weight, torch.randn(batch, units)]
    found += [torch.randn(batch, units)] * has_cell(kind)
    return [*found, torch.randn(wide)] if has_bias else found


def apart(x: Tensor) -> Tensor:
    """Return the same numbers with gaps of NaN between them."""
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 1), torch.nan, dtype=x.dtype)
    wide[..., 1::2] = x
    return wide[..., 1::2]


def attrs_of(kind: str, *, has_bias: bool = True, is_reversed: bool = False) -> dict[str, Any]:
    return {"has_bias": has_bias, "kind": kind, "reversed": is_reversed}


def walked(kernels: NativeKernels, given: list[Tensor], attrs: dict[str, Any]) -> Tensor:
    problem = Problem(
        rows.OP, tuple(attrs.items()), tuple(tuple(x.shape) for x in given), torch.float32
    )
    launches = library.select(problem.call, problem, CPU).launches
    assert launches is not None
    (part,), (packed,) = launches.parts, launches.scratch
    assert isinstance(part, Launch)
    steps, batch, _ = given[0].shape
    out = torch.full((steps + has_cell(attrs["kind"]), batch, given[2].shape[-1]), torch.nan)
    memory = torch.full(packed.shape, torch.nan)
    places = {-1: out, -2: memory}
    tensors = [places.get(each.number, given[max(each.number, 0)]) for each in part.operands]
    scalars = [
        tensors[s.operand].stride(s.dim) if isinstance(s, Stride) else int(s)  # type: ignore[arg-type]
        for s in part.scalars
    ]
    kernels.build([part.source])[part.source].bind([t.data_ptr() for t in tensors], scalars)()
    return out


@pytest.mark.parametrize("is_reversed", [False, True], ids=["onwards", "reversed"])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("kind", GATES)
def test_against_fp64(
    kernels: NativeKernels, kind: str, size: tuple[int, int, int], is_reversed: bool
) -> None:
    for has_bias in (True, False):
        attrs = attrs_of(kind, has_bias=has_bias, is_reversed=is_reversed)
        given = operands(kind, size, has_bias=has_bias)
        exact = recurrence_of([x.double() for x in given], attrs)
        for laid in (given, list(map(apart, given))):
            found = walked(kernels, laid, attrs)
            assert_as_accurate_as_eager(found, recurrence_of(given, attrs), exact)


@pytest.mark.parametrize("kind", GATES)
def test_numbers_depend_on_neither_threads_nor_other_rows(
    kernels: NativeKernels, kind: str
) -> None:
    size, attrs = (65, 13, 96), attrs_of(kind)
    given, threads = operands(kind, size), torch.get_num_threads()
    found = walked(kernels, given, attrs)
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert torch.equal(walked(kernels, given, attrs), found)
    finally:
        torch.set_num_threads(threads)
    gates, weight, *states = given
    some = [x[3:5] if x.dim() == 2 else x for x in states]
    alone = walked(kernels, [gates[:, 3:5], weight, *some], attrs)
    assert torch.equal(alone, found[:, 3:5])


@pytest.mark.parametrize("kind", GATES)
def test_nan_and_inf_go_on_as_in_torch(kernels: NativeKernels, kind: str) -> None:
    given, attrs = operands(kind, (4, 3, 9)), attrs_of(kind)
    given[0][1, 0, 0], given[0][1, 1, :] = torch.nan, torch.inf
    wanted = recurrence_of(given, attrs)
    torch.testing.assert_close(walked(kernels, given, attrs), wanted, equal_nan=True)


@pytest.mark.parametrize("kind", GATES)
def test_the_definition_is_torchs(kind: str) -> None:
    torch.manual_seed(0)
    layer = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}.get(kind)
    own = layer(5, 7) if layer else torch.nn.RNN(5, 7, nonlinearity=kind.removeprefix("rnn_"))
    own, x = own.double(), torch.randn(6, 3, 5, dtype=torch.float64)
    weights = [weight.detach() for weight in own._flat_weights]
    gates = torch.nn.functional.linear(x, weights[0], weights[2])
    start = torch.zeros(3, 7, dtype=torch.float64)
    cell = start if has_cell(kind) else None
    found = recurrence(kind, gates, weights[1], start, cell, weights[3])
    with torch.no_grad():
        wanted, states = own(x)
    torch.testing.assert_close(found[:6], wanted)
    if cell is not None:
        torch.testing.assert_close(found[6], states[1][0])
