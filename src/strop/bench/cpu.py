"""Measure inference on one core of a CPU beside eager, Inductor, OpenVINO and ONNX Runtime.

All contenders of a model live in this process, which is pinned to a core, and are called in turns
with the same arguments. Their times are those of the processor, since other work may run beside
them.
"""

from __future__ import annotations

import copy
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from strop.bench import cpu_peers, environment, report
from strop.bench.cpu_rows import (
    EAGER,
    MODELS,
    OURS,
    PEERS,
    Contender,
    CpuModel,
    CpuRow,
    Must,
    contenders_of,
    is_peer,
    text_of,
)
from strop.bench.cpu_turns import MOST_CALLS, Times, on_one_core, over_inputs, ratio, seconds
from strop.bench.timer import timing_of
from strop.errors import StropError

PACKAGES = ("openvino", "nncf", "onnxruntime", "onnx", "onnxscript", "torchao")
SAMPLE_S, MOST_RAGGED = 0.03, 12  # a sample of eager; calls of one, each of other sizes
# errors, of the norm of a result, that the precision of a contender does not explain
WRONG, WRONG_FP32 = 0.1, 1e-3
LONGEST_WHY = 320  # letters of what a peer says when it fails
CPU = torch.device("cpu")
Found = dict[str, Any]


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """Say whom to measure, by how many samples, and on which core (None: the last one)."""

    peers: tuple[str, ...] = PEERS
    samples: int = 15
    core: int | None = None


@torch.no_grad()
def run(
    rows: Sequence[CpuRow],
    plan: CpuPlan,
    *,
    out: Path | None = None,
    step: Callable[[str], None] = lambda note: None,
    models: Mapping[str, CpuModel] = MODELS,
) -> list[Found]:
    """Measure ``rows`` and return a result for each, which is written into ``out`` when it is
    there."""
    results = []
    with on_one_core(plan.core) as core:
        described = _described(core)
        for name in dict.fromkeys(row.model for row in rows):
            torch.compiler.reset()
            some = [row for row in rows if row.model == name]
            for result in _of_model(models[name], some, plan, step):
                result["environment"] = described
                if out is not None:
                    result["file"] = str(_written(result, out))
                results.append(result)
    return results


def _written(result: Found, folder: Path) -> Path:
    date = result["environment"]["date"][:10]
    return report.write_json(result, folder / f"cpu-{result['row']}_cpu_{date}.json")


def _described(core: int) -> Found:
    """Return the environment, with what a core reaches in products by the library: what processor
    it was says less."""
    return {
        **environment.describe(CPU),
        **{name: environment.version_of(name) for name in PACKAGES},
        "core": core,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores_at_work": round(os.getloadavg()[0], 1),
        "product_gops": _products(),
    }


def _products() -> dict[str, int]:
    """Return billions of operations a second of a product by oneDNN, weights packed, and of
    codes; of bf16 where the CPU has it."""
    m, n, k = 512, 1024, 1024
    found = {}
    has_bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()  # or packing raises
    types = {"fp32": torch.float32} | ({"bf16": torch.bfloat16} if has_bf16 else {})
    for name, dtype in types.items():
        x, weight = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, m)
        found[name] = _rate(partial(_packed_product, x, packed))
    codes, others = (torch.randint(0, 127, (r, k)).to(torch.int8) for r in (m, n))
    found["int8"] = _rate(lambda: torch._int_mm(codes, others.t()))
    return {name: round(2e-9 * m * n * k / each) for name, each in found.items()}


def _packed_product(x: Tensor, weight: Tensor) -> object:
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


def _rate(call: Callable[[], object]) -> float:
    call()
    return min(seconds(call, 2) for _ in range(9))


# ---- a model -----------------------------------------------------------------------------------


def _of_model(
    model: CpuModel, rows: Sequence[CpuRow], plan: CpuPlan, step: Callable[[str], None]
) -> Iterator[Found]:
    step(model.name)
    module = model.make()
    generator = torch.Generator().manual_seed(0)
    example = model.inputs(module, rows[0].shape, generator)
    ways: dict[str, Any] = {}
    notes: dict[str, Found] = {}
    for contender in contenders_of(model, plan.peers):
        step(f"{model.name}: {contender.name}")
        notes[contender.name], way = _prepared(contender, module, example)
        if way is not None:
            ways[contender.name] = way
    for row in rows:
        step(row.name)
        yield _of_row(row, model, module, ways, notes, plan)


def _prepared(contender: Contender, module: nn.Module, example: Any) -> tuple[Found, Any]:
    """Return what is said about a contender, and the way to call it, if there is one."""
    said: Found = {"how": contender.how}
    if why := cpu_peers.missing(contender.needs):
        return {**said, "missing": why}, None
    begin = time.process_time()

    def made() -> Any:
        way = contender.make(module, example)
        way(*example)
        return way

    way, failed = _tried(contender.name, made)
    if failed:
        return {**said, "failed": failed}, None
    return {**said, "first_call_s": round(time.process_time() - begin, 2)}, way


def _tried(name: str, call: Callable[[], Any]) -> tuple[Any, str]:
    """Return what a call gives, or why it failed, if it is a peer's, whatever that raises. What
    eager and Strop raise is raised."""
    if not is_peer(name):
        return call(), ""
    try:
        with cpu_peers.quiet():
            return call(), ""
    except Exception as error:
        return None, _why(error)


def _why(error: Exception) -> str:
    """Return an error as a line, as much of it as a table can hold."""
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {text[:LONGEST_WHY]}"


def _of_row(
    row: CpuRow,
    model: CpuModel,
    module: nn.Module,
    ways: Mapping[str, Any],
    notes: Mapping[str, Found],
    plan: CpuPlan,
) -> Found:
    generator = torch.Generator().manual_seed(1 + math.prod(row.shape))
    given = model.inputs(module, row.shape, generator)
    working, errors, said = _working(ways, notes, given, _exact(module, given))
    calls = _rounds(row, model, module, working[EAGER], given, plan.samples, generator)
    times = over_inputs(working, calls)
    contenders = {name: {**found, **_timed(name, times, errors)} for name, found in said.items()}
    counters = [_graphs(way) for name, way in working.items() if name.startswith(OURS)]
    return {
        "kind": "cpu",
        "row": row.name,
        "title": model.title,
        "shape": [*row.shape],
        "is_ragged": model.is_ragged,
        "contenders": contenders,
        "graphs": max((count for count in counters if count), default=None),
        "musts": [judged(must, contenders, times) for must in row.musts],
    }


def _working(
    ways: Mapping[str, Any], notes: Mapping[str, Found], given: Any, exact: Tensor
) -> tuple[dict[str, Any], dict[str, float], dict[str, Found]]:
    """Return those that give a right result for these arguments, the errors of the results, and
    what is said about all."""
    working, errors, said = {}, {}, {name: dict(found) for name, found in notes.items()}
    for name, way in ways.items():
        error, failed = _tried(name, partial(_error, name, way, given, exact))
        if failed:
            said[name] = {"how": said[name]["how"], "failed": failed}
        else:
            working[name], errors[name] = way, error
    return working, errors, said


def _exact(module: nn.Module, given: Any) -> Tensor:
    wide = tuple(x.double() if x.dtype.is_floating_point else x for x in given)
    return _first(copy.deepcopy(module).double()(*wide))


def _error(name: str, way: Callable[..., Any], given: Any, exact: Tensor) -> float:
    """Return the distance of a first result from that in fp64, relative by the norm. Raises
    StropError where it is no result of these arguments."""
    found = _first(way(*given))
    if found.shape != exact.shape:
        raise StropError(f"the result has shape {(*found.shape,)}, not {(*exact.shape,)}")
    error = float((found - exact).norm() / exact.norm())
    if not error < (WRONG_FP32 if name.endswith("fp32") else WRONG):
        raise StropError(f"the result is wrong: its error is {error:.2g} of its norm")
    return float(f"{error:.4g}")


def _graphs(way: Any) -> int | None:
    """Return into how many graphs a module of Strop was traced."""
    variants = getattr(getattr(way, "forward", None), "variants", None)
    return len(variants.all) if variants is not None else None


def _rounds(
    row: CpuRow,
    model: CpuModel,
    module: nn.Module,
    eager: Any,
    given: Any,
    samples: int,
    generator: torch.Generator,
) -> Iterator[Sequence[Any]]:
    """Yield the calls of each round: those of ragged features have sizes and ids of their own."""
    one = max(seconds(lambda: eager(*given), 1), 1e-7)
    count = max(1, min(MOST_CALLS, int(SAMPLE_S / one)))
    for _ in range(samples + 1):
        if model.is_ragged:
            few = min(count, MOST_RAGGED)
            yield [model.inputs(module, row.shape, generator) for _ in range(few)]
        else:
            yield [given] * count


def _timed(name: str, times: Times, errors: Mapping[str, float]) -> Found:
    if name not in times:
        return {}
    return {
        **timing_of(times[name]).to_dict(),
        "over_eager": ratio(times[EAGER], times[name]),
        "error": errors[name],
    }


def _first(result: Any) -> Tensor:
    found = result[0] if isinstance(result, tuple | list) else result
    return torch.as_tensor(found).double()


# ---- what must hold ----------------------------------------------------------------------------


def judged(must: Must, contenders: Mapping[str, Found], times: Times) -> Found:
    """Return what was found, and whether the must holds; None where there was nothing to compare
    with, and why."""
    said: Found = {"must": must.text, "found": None, "holds": None}
    for name in (must.contender, must.other):
        if name not in times:
            why = text_of(contenders[name]) if name in contenders else "not measured"
            return {**said, "why": f"{name}: {why}"}
    if must.least is not None:
        found = ratio(times[must.other], times[must.contender])
        return {**said, "found": found, "holds": found >= must.least}
    own, other = (contenders[name]["error"] for name in (must.contender, must.other))
    return {**said, "found": round(own / other, 3), "holds": own <= other}
