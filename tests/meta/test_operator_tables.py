"""What is known of an operator stands in its row: no other table of operators' names exists.

A table is a dict, set, tuple or list that names operators and little else: a constant of a module
with two of them, or any with four. A condition on two or three names is none.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import strop
from strop.ir.ops import OPS, planned_on
from strop.runtime.run import library_calls

ROOT = Path(strop.__file__).parent
NAMES = {name for name in OPS if not name.startswith("library ")}
ROWS = ("ir/ops.py", "ir/contractions.py", "ir/pointwise")
KERNELS = "kernels/"  # rows of the library of kernels say which operators they compute

# file -> why its tables are none of facts about operators
ALLOWED = {
    "runtime/run/library_calls.py": "what torch is asked for each: code of the runtime, below",
    "runtime/run/packed_calls.py": "what oneDNN is asked for each: code of the runtime, below",
    "debug/reference.py": "what each computes, in fp64: the judge's own code, which shares nothing",
    "codegen/cpp_text.py": "the reductions of a loop, in C++",
    "codegen/triton_reduce.py": "the reductions of a loop, in Triton",
    "codegen/triton_interpreter.py": "functions of libdevice, some of which are called alike",
    "ir/index_values.py": "what each makes of numbers that are known of indices",
    "passes/spelled_gelu.py": "the arithmetic of polynomials, and what GELU is spelled with",
    "ir/op.py": "functions of vmath.h, some of which are called alike",
}


def tables(file: Path) -> Iterator[tuple[int, list[str]]]:
    """Line and names of each."""
    tree = ast.parse(file.read_text())
    constants = {
        id(inner)
        for statement in tree.body
        if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None
        for inner in ast.walk(statement.value)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            elements = list(node.keys)
        elif isinstance(node, ast.Set | ast.Tuple | ast.List):
            elements = list(node.elts)
        else:
            continue
        texts = [e.value for e in elements if isinstance(e, ast.Constant)]
        named = [text for text in texts if text in NAMES]
        least = 2 if id(node) in constants else 4
        if len(named) >= least and len(named) >= 0.6 * len(elements):
            yield node.lineno, named


FOUND = {
    name: found
    for file in sorted(ROOT.rglob("*.py"))
    if not (name := file.relative_to(ROOT).as_posix()).startswith((*ROWS, KERNELS))
    and (found := list(tables(file)))
}


def test_no_other_table_names_operators() -> None:
    wrong = {name: found for name, found in FOUND.items() if name not in ALLOWED}
    assert not wrong, f"give the rows in ir/ops.py a field for this: {wrong}"


def test_what_is_allowed_is_needed() -> None:
    assert ALLOWED.keys() == FOUND.keys()


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ('MOVABLE = ("conv2d", "linear")', 1),
        ('PLANNED = frozenset({"linear", "matmul"})', 1),
        ('KINDS = {"conv2d": "convolution", "linear": "GEMM", "cumsum": ""}', 1),
        ('def f(op):\n    return op in ("input", "constant", "item")', 0),
        ('def f(op):\n    return {"sum": 1, "prod": 2, "amax": 3, "amin": 4}[op]', 1),
        ('WORDS = ("mean", "red", "blue")', 0),
    ],
)
def test_a_table_is_seen(text: str, count: int, tmp_path: Path) -> None:
    file = tmp_path / "table.py"
    file.write_text(text)
    assert len(list(tables(file))) == count


@pytest.mark.parametrize(
    ("device", "calls"),
    [("cpu", library_calls.PLANNED_OUT), ("cuda", library_calls.CUDA_PLANNED_OUT)],
)
def test_calls_that_write_where_they_are_told(device: str, calls: dict[str, object]) -> None:
    assert calls.keys() == planned_on(device)


@pytest.mark.parametrize("name", sorted(planned_on("cuda")))
def test_flops_are_counted(name: str) -> None:
    """Sums of taps are none that a profile would call a product."""
    anchor = OPS[name].anchor
    square = ((2, 4, 8, 8), (4, 4, 2, 2), (4,), (4,))
    attrs = {"padding": (0, 0), "stride": (1, 1), "dilation": (1, 1)}
    assert (anchor.flops(square, attrs) > 0) == (name != "folded_taps")
