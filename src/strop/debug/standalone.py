"""Run a dumped program without its model: this is the body of a dump's run.py."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strop.debug import case as cases
from strop.debug.case import Case
from strop.errors import OptionError
from strop.ir.program import Program
from strop.ir.serialize import from_json
from strop.wording import counted


def run_folder(folder: Path, sizes: Mapping[str, int], seed: int = 0) -> list[Any]:
    """Run program.json on inputs drawn from ``seed``, print its results and return them."""
    case = cases.load(folder)
    if set(sizes) != set(case.graph.hints):
        raise OptionError(f"SIZES are {sorted(case.graph.hints)}, not {sorted(sizes)}")
    program = from_json((folder / "program.json").read_text(encoding="utf-8"))
    _check_guards(program, sizes)
    case = replace(case, sizes=dict(sizes))
    bound, inputs = cases.bind(case, program, cases.random_inputs(case, seed))
    bound.run(inputs)
    start = time.perf_counter()
    results = bound.run(inputs)
    _settle(case)
    seconds = time.perf_counter() - start
    steps = counted(len(program.steps), "step")
    print(f"{case.name}: {steps} in {seconds * 1e3:.2f} ms at {dict(sizes)}")
    for number, result in enumerate(results):
        print(f"result {number}: {_summary(result)}")
    return results


def _check_guards(program: Program, sizes: Mapping[str, int]) -> None:
    broken = [str(guard) for guard in program.guards if not guard.holds(sizes)]
    if broken:
        raise OptionError(f"this program wants {', '.join(broken)}; SIZES say {dict(sizes)}")


def _settle(case: Case) -> None:
    if case.device == "cuda":
        torch.cuda.synchronize()


def _summary(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    wide = value.double()
    mean, largest = (wide.mean().item(), wide.abs().max().item()) if value.numel() else (0.0, 0.0)
    finite = bool(torch.isfinite(wide).all())
    return (
        f"{value.dtype} {tuple(value.shape)} mean {mean:.6g} max {largest:.6g}"
        f"{'' if finite else ', NOT FINITE'}"
    )
