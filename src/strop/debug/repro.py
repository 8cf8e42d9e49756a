"""Write a failing case as a folder to hand on: graph, inputs, and a script that shows the
failure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from strop.debug import case as cases
from strop.debug.case import Case
from strop.debug.failure import failure_of
from strop.debug.listing import graph_text
from strop.errors import OptionError

INPUTS = "inputs.safetensors"
_SCRIPT = '''"""Compiles and runs graph.json on inputs.safetensors; ends with 1 while it fails.

{about}
"""

import sys
from pathlib import Path

from strop.debug.repro import reproduce

if __name__ == "__main__":
    sys.exit(reproduce(Path(__file__).parent, *sys.argv[1:]))
'''


def write(case: Case, arguments: Mapping[int, Tensor], about: str, folder: Path) -> Path:
    """Write the script and its folder, which may be moved; return the script."""
    cases.save(case, folder)
    save_inputs(arguments, case.env, folder)
    (folder / "01_graph.txt").write_text(graph_text(case.graph), encoding="utf-8")
    script = folder / "repro.py"
    script.write_text(_SCRIPT.format(about=about.replace("\\", "\\\\")), encoding="utf-8")
    return script


def save_inputs(
    arguments: Mapping[int, Tensor | None], sizes: Mapping[str, int], folder: Path
) -> Path:
    """Save every argument by its index, and the sizes that they have."""
    file = folder / INPUTS
    save_file(
        {
            f"argument{n}": t.detach().cpu().contiguous().clone()
            for n, t in arguments.items()
            if t is not None
        },
        str(file),
        {"sizes": json.dumps(dict(sizes))},
    )
    return file


def read_inputs(case: Case, file: Path) -> tuple[Case, dict[int, Tensor]]:
    """Read the case at the sizes of the inputs. Raises OptionError when they are not its sizes."""
    if not file.is_file():
        raise OptionError(f"there is no {file}; STROP_DUMP and STROP_CHECK=1 together write one")
    try:
        with safe_open(str(file), "pt") as stored:
            sizes = json.loads((stored.metadata() or {})["sizes"])
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    except (SafetensorError, KeyError, ValueError) as error:
        raise OptionError(f"{file} holds no inputs that strop has saved: {error!r}") from error
    if set(sizes) != set(case.graph.hints):
        raise OptionError(f"{file} has sizes {sizes}, the graph wants {sorted(case.graph.hints)}")
    case = replace(case, sizes=sizes)
    return case, _by_index(case, tensors, file)


def _by_index(case: Case, tensors: Mapping[str, Tensor], file: Path) -> dict[int, Tensor]:
    found = {}
    for node in case.graph.inputs:
        index = node.attrs["index"]
        tensor = tensors.get(f"argument{index}")
        shape = tuple(size.eval(case.env) for size in node.shape)
        if tensor is None or tuple(tensor.shape) != shape:
            got = "nothing" if tensor is None else tuple(tensor.shape)
            raise OptionError(f"{file} holds {got} as argument{index}, the graph wants {shape}")
        found[index] = cases.laid_out(node, tensor, case.env).to(case.device)
    return found


def reproduce(folder: Path, device: str = "") -> int:
    """Return 0 if the case is right by now, 1 if it still fails."""
    case = cases.load(folder, device)
    cases.torch_device(case)
    failure = failure_of(*read_inputs(case, folder / INPUTS))
    print(f"fails: {failure}" if failure else "does not fail: results are as accurate as eager's")
    return 1 if failure else 0
