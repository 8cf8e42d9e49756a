"""Calls of one kernel on a CPU, which are bound where their operands lie."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from strop.ir.source import KernelSource
from strop.kernels.kernel import RESULT, Late, Launch, Launches, Lies, Operand, Stride, Torch, View
from strop.runtime.run.native_calls import OperandPlace, scalars_at

SOURCE = KernelSource("f", "cpp", "", (torch.float32,) * 2, scalars=(1, 16))
LOOSE = (Operand(0, Lies.LINES), Operand(RESULT, Lies.UNALIGNED))
LAUNCH = Launch(SOURCE, LOOSE, (3, Stride(0, 0)))
AT = OperandPlace((2, 16), (32, 1), 4)  # at an odd address


def test_only_one_kernel_over_whole_operands() -> None:
    assert Launches((LAUNCH,)).only is LAUNCH
    assert Launches((LAUNCH, LAUNCH)).only is None
    assert Launches((Torch("copy", LOOSE),)).only is None
    assert Launches((replace(LAUNCH, scalars=(3, Late.WEIGHTS)),)).only is None
    for piece in (
        Operand(0, piece=((0, 1),)),
        Operand(0, order=(1, 0)),
        Operand(0, shape=(4,)),
        Operand(0, view=View()),
    ):
        assert Launches((replace(LAUNCH, operands=(piece,)),)).only is None


def test_scalars() -> None:
    assert scalars_at(LAUNCH, (AT, AT)) == [3, 32]
    assert scalars_at(LAUNCH, (AT._replace(strides=(40, 1)), AT)) is None  # no multiple of 16


@pytest.mark.parametrize(
    ("shape", "strides", "is_line"),
    [
        ((2, 16), (64, 1), True),
        ((2, 16), (16, 2), False),
        ((2, 16), (17, 1), False),
        ((1, 16), (16, 1), True),
        ((2, 1), (32, 9), True),
        ((0, 16), (16, 1), False),
        ((1 << 28, 16), (16, 1), False),
    ],
)
def test_lines(shape: tuple[int, ...], strides: tuple[int, ...], is_line: bool) -> None:
    found = scalars_at(LAUNCH, (OperandPlace(shape, strides, 0), AT))
    assert (found is not None) is is_line


def test_others_are_dense_at_known_addresses() -> None:
    dense = Launch(SOURCE, (Operand(0), Operand(RESULT, Lies.UNALIGNED)), (3, 16))
    whole = OperandPlace((2, 16), (16, 1), 64)
    assert scalars_at(dense, (whole, AT)) == [3, 16]
    for other in (whole._replace(pointer=0), whole._replace(pointer=72), AT):
        assert scalars_at(dense, (other, AT)) is None
    rows = Launch(SOURCE, (Operand(0, Lies.ROWS), Operand(RESULT, Lies.UNALIGNED)), (3, 16))
    assert scalars_at(rows, (whole, AT)) is None
