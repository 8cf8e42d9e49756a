"""Write every stage of a compiled graph as files that ``diff`` can compare (``Options.dump``).

000_UNet2DConditionModel/
  graph.json            what the compiler was given: for strop repro, minify and bisect
  00_fx.txt             ATen calls, as torch traced them
  01_graph.txt          graph IR
  02_after_<pass>.txt   and so on, one for each pass
  plan.txt              fusion groups, calls, and why edges were refused
  kernels/*.py | *.cpp  generated code
  program.json, program.txt
  run.py                runs the program with random inputs
  inputs.safetensors    of a run in which Options.check found something, weights included
  error.txt             only where compilation failed
"""

from __future__ import annotations

import itertools
import re
import traceback
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from strop.backend import Compiled
from strop.codegen.assemble import Signature
from strop.debug import case as cases
from strop.debug.case import Case
from strop.debug.listing import graph_text, listing, plan_text
from strop.ir.graph import Graph
from strop.ir.serialize import to_json
from strop.options import Options

if TYPE_CHECKING:
    from torch.fx import GraphModule

_ENDINGS = {"ptx": "ptx", "triton": "py", "cpp": "cpp"}
_RUN = '''"""Runs the program of this folder on random inputs at the traced sizes."""

from pathlib import Path

from strop.debug.standalone import run_folder

SIZES = {sizes}  # change them: one program serves every size that its guards allow

if __name__ == "__main__":
    run_folder(Path(__file__).parent, SIZES, seed=0)
'''


def compile_and_dump(
    gm: GraphModule, graph: Graph, signature: Signature, device: str, options: Options, name: str
) -> Compiled:
    """Compile, with files. What was there before an error stays for ``strop repro``."""
    case = Case(graph, signature, device, options, name)
    folder = _new_folder(Path(options.dump).expanduser(), name)
    cases.save(case, folder)
    _write(folder / "00_fx.txt", _fx_text(gm))
    _write(folder / "01_graph.txt", graph_text(graph))
    try:
        compiled = case.compile()
    except BaseException:
        _write(folder / "error.txt", traceback.format_exc())
        raise
    write_stages(compiled, folder)
    _write(folder / "run.py", _RUN.format(sizes=dict(graph.hints)))
    return replace(compiled, folder=str(folder))


def write_stages(compiled: Compiled, folder: Path) -> None:
    for number, record in enumerate(compiled.passes, start=2):
        if record.graph is not None:
            _write(folder / f"{number:02d}_after_{record.name}.txt", graph_text(record.graph))
    _write(folder / "plan.txt", plan_text(compiled.plan))
    _write(folder / "program.txt", listing(compiled.program) + "\n")
    _write(folder / "program.json", to_json(compiled.program))
    (folder / "kernels").mkdir(exist_ok=True)
    for number, source in enumerate(compiled.program.sources):
        file = f"{number:03d}_{source.name}.{_ENDINGS[source.language]}"
        _write(folder / "kernels" / file, source.text)


def _fx_text(gm: GraphModule) -> str:
    lines = []
    for fx in gm.graph.nodes:
        value = fx.meta.get("val")
        shape = f"  # {value.dtype} {tuple(value.shape)}" if hasattr(value, "shape") else ""
        lines.append(f"{fx.format_node()}{shape}")
    return "\n".join(lines) + "\n"


def _new_folder(root: Path, name: str) -> Path:
    """Make a folder with the next number that is free, whoever else dumps there."""
    root.mkdir(parents=True, exist_ok=True)
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "_", name) or "graph"
    taken = [int(p.name[:3]) for p in root.iterdir() if re.match(r"\d{3}_", p.name)]
    for number in itertools.count(max(taken, default=-1) + 1):
        folder = root / f"{number:03d}_{plain}"
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise AssertionError("itertools.count has no end")


def _write(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8")
