"""The operator table is the one place that an operator is written down in."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import strop
from strop.ir.ops import POINTWISE, Op

ROOT = Path(__file__).parents[2]

# The row of CONTRIBUTING.md, as it stands in the table.
ROW = """
    row(
        "softplus",
        (aten.softplus.default,),
        "tl.where({0} * {beta} > {threshold}, {0}, libdevice.log1p(tl.exp({0} * {beta})) / {beta})",
        "({0} * {beta} > {threshold} ? {0} : sp::log1p(sp::exp({0} * {beta})) / {beta})",
        attrs={"beta": 1, "threshold": 20},
    ),
"""

# Runs with the changed copy. Prints what it imported, to prove it.
SCRIPT = """
import sys
from pathlib import Path

import torch

import strop
import strop.errors


class Gate(torch.nn.Module):
    def forward(self, x, y):
        return torch.nn.functional.softplus(x, beta=2.0) * y


def program_of_gate():
    gate = Gate().eval()
    x, y = torch.linspace(-15, 30, 1003), torch.randn(4, 1003)
    with torch.no_grad():
        wanted = gate(x, y)
        strop.optimize(gate, options=strop.Options(strict=True))
        torch.testing.assert_close(gate(x, y), wanted)
    (program,) = [v.program for v in gate.forward.variants.all]
    return program


"""
WITHOUT = """
try:
    program_of_gate()
except strop.errors.UnsupportedError as error:
    assert "aten.softplus.default" in str(error)
else:
    raise AssertionError("softplus has a row elsewhere")
print(strop.__file__)
"""
WITH = """
from strop.codegen import cpp, triton
from strop.codegen.triton_interpreter import interpret
from strop.ir.ops import OPS
from strop.runtime.build.cache import DiskCache
from strop.runtime.build.native import NativeKernels
from tests.codegen import kernels
from tests.codegen.cpp_launch import launch

x = torch.linspace(-15, 30, 1003)
row = OPS["softplus"]
sample = kernels.pointwise("softplus", [torch.float32], torch.float32, row.attrs)

emitted, out = cpp.emit(sample.kernel), torch.empty_like(x)
native = NativeKernels(DiskCache(Path(sys.argv[1])))
launch(native.build([emitted.source])[emitted.source], emitted, [x, out], {"n": 1003})
torch.testing.assert_close(out, torch.nn.functional.softplus(x))

emitted, out = triton.emit(sample.kernel), torch.empty_like(x)
sizes = {f"s{i}": size.eval({"n": 1003}) for i, size in enumerate(emitted.scalars)}
interpret(emitted.source, [x, out], sizes)
torch.testing.assert_close(out, torch.nn.functional.softplus(x))

program = program_of_gate()
assert not program.call_steps, "softplus was left to torch"
assert len(program.sources) == 1, "softplus and the product are one kernel"
print(strop.__file__)
"""


@pytest.mark.parametrize("op", POINTWISE, ids=lambda op: op.name)
def test_a_row_is_complete(op: Op) -> None:
    assert op.overloads
    assert op.triton
    assert op.cpp
    assert op.reference is not None
    assert "{0}" in op.triton
    assert "{0}" in op.cpp
    assert all(f"{{{name}}}" in op.cpp and f"{{{name}}}" in op.triton for name in op.attrs)


@pytest.mark.parametrize("has_row", [False, True], ids=["without", "with"])
def test_an_operator_is_one_row_in_one_file(has_row: bool, tmp_path: Path) -> None:
    copy = tmp_path / "strop"
    skipped = shutil.ignore_patterns("__pycache__", "weights")
    shutil.copytree(Path(strop.__file__).parent, copy, ignore=skipped)
    table = copy / "ir" / "pointwise_activations.py"
    text = table.read_text()
    assert text.count(ROW) == 1
    table.write_text(text if has_row else text.replace(ROW, "\n"))
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
        "STROP_CACHE_DIR": str(tmp_path / "cache"),
    }
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + (WITH if has_row else WITHOUT))
    command = [sys.executable, str(script), str(tmp_path / "kernels")]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == str(copy / "__init__.py")


def test_the_guide_shows_that_row() -> None:
    guide = (ROOT / "CONTRIBUTING.md").read_text()
    assert "\n".join(line.strip() for line in ROW.strip().splitlines()) in "\n".join(
        line.strip() for line in guide.splitlines()
    )
