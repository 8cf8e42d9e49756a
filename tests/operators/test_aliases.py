"""Which operators of torch's table return memory of an operand and do not say so in their schema.

Programs reuse the memory of a value behind its last reader: they must know them all.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from strop.runtime.run.operator_calls import UNSAID
from tests.operators.of_torch import op_db

MOST_SAMPLES = 8
pytestmark = pytest.mark.filterwarnings("ignore")


def memory(value: Any) -> set[int]:
    """Return the addresses of all memory that a value lies in."""
    leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    plain = [t for t in leaves if t.layout is torch.strided and not t.is_quantized]
    return {t.untyped_storage().data_ptr() for t in plain if t.numel()} - {0}


class Looking(TorchDispatchMode):
    """Note each operator whose result lies in an operand, unless its schema says so."""

    def __init__(self) -> None:
        super().__init__()
        self.found = set[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = memory((args, kwargs))
        result = func(*args, **(kwargs or {}))
        says = any(returned.alias_info is not None for returned in func._schema.returns)
        if not says and given & memory(result):
            self.found.add(func)
        return result


def called(looking: Looking, call: Any) -> None:
    try:
        with looking:
            call()
    except RuntimeError:
        pass  # a sample that needs more than a CPU, or a tensor that has no memory


def test_pieces_of_an_unsafe_split_are_noticed() -> None:
    looking = Looking()
    called(looking, lambda: torch.randn(4, 6).unsafe_chunk(2, 1))
    assert looking.found == {torch.ops.aten.unsafe_split.Tensor}


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.complex64], ids=str)
def test_all_of_them_are_known(dtype: torch.dtype) -> None:
    looking = Looking()
    for op in op_db:
        if op.supports_dtype(dtype, "cpu") and not op.name.startswith("jiterator"):
            samples = op.sample_inputs("cpu", dtype, requires_grad=False)
            for _, sample in zip(range(MOST_SAMPLES), samples, strict=False):
                called(looking, lambda s=sample, op=op: op(s.input, *s.args, **s.kwargs))
    assert looking.found <= UNSAID, looking.found - UNSAID
