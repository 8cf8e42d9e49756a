"""Count the instructions of the kernels that Strop generates for an H100, without a GPU.

Two blocks of a transformer at full width are planned for sm_90, ptxas compiles each kernel, and
Triton's nvdisasm shows its machine code. Times programs and warps that is how long 132
multiprocessors issue instructions, beside how long the kernel's memory moves at 3 TB/s. A branch
counts as if all of it ran. Kernels of fewer than 4 MB are left out.

    python benchmarks/instructions.py flux qwen
    python benchmarks/instructions.py wan --text 14
"""

from __future__ import annotations

import argparse
import math
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

import triton

from strop.artefacts.building import CARDS
from strop.ir.program import KernelStep
from strop.ir.source import KernelSource
from strop.options import Options
from strop.runtime.build.ahead import AheadLoader
from strop.runtime.build.cubin import compile_cubin
from strop.runtime.run.shape_plan import ShapePlan, plan_shape
from strop.wording import counted
from tests.fusion.full_width import MODELS, planned

SCHEDULERS, CLOCK = 132 * 4, 1755  # of an H100, which starts an instruction of a warp each; MHz
BANDWIDTH = 3.0e6  # bytes a microsecond
LEAST_BYTES = 4e6
SHOWN = ("LDG", "STG", "LDS", "STS", "MUFU", "F2F", "BRA")
LINE = re.compile(r"\s*/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+\s+)?(\w+)")


def code_of(source: KernelSource) -> tuple[Counter[str], int]:
    """Return how often each instruction is in a kernel's machine code, and its warps."""
    cubin = compile_cubin(source, 90)
    program = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    if not program.exists():
        raise SystemExit(f"{program} is missing: this Triton brings no nvdisasm")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin.code)
        file.flush()
        command = [str(program), "-c", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = (LINE.match(line) for line in text.splitlines())
    return Counter(match[1] for match in found if match), cubin.num_warps


def rows_of(plan: ShapePlan, texts: list[int]) -> None:
    """Print a line for each kernel of a plan, and the Triton text of some."""
    seen = set[tuple[int, tuple[int, ...]]]()
    for position, launch in sorted(plan.launches.items()):
        step = plan.order.steps[position]
        assert isinstance(step, KernelStep)
        moved = sum(map(plan.sizes.bytes_of, set(step.buffers)))
        if (step.kernel, launch.scalars) in seen or moved < LEAST_BYTES:
            continue
        seen.add((step.kernel, launch.scalars))
        names = {f"s{i}": value for i, value in enumerate(launch.scalars)} | {"splits": 1}
        programs = math.prod(size.eval(names) for size in launch.source.grid)
        count, warps = code_of(launch.source)
        issue = count.total() * warps * programs / SCHEDULERS / CLOCK
        shown = " ".join(f"{name} {count[name]}" for name in SHOWN)
        print(
            f"{step.kernel:3} {launch.source.name:40} "
            f"{counted(count.total(), 'instruction', '5')}, "
            f"{counted(warps, 'warp')}, {counted(programs, 'program')}: {issue:6.1f} us, "
            f"{moved / BANDWIDTH:6.1f} us of bytes | {shown}",
            flush=True,
        )
        if step.kernel in texts:
            print(launch.source.text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", choices=sorted(MODELS))
    parser.add_argument(
        "--text", type=int, action="append", default=[], help="show this kernel's Triton text"
    )
    given = parser.parse_args()
    for name in given.models:
        print(name, flush=True)
        compiled = planned(name)
        loader = AheadLoader("sm_90", CARDS["sm_90"], Options())
        sizes = dict(compiled.graph.hints)
        rows_of(plan_shape(compiled.program, sizes, loader, None, None, shares=True), given.text)


if __name__ == "__main__":
    main()
