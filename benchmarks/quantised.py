"""Time a step of a model with quantised weights: eager, Inductor and Strop, in every scheme.

python benchmarks/quantised.py --out FILE [--model flux|sdxl] [--schemes bf16,torchao-int8,...]
    [--contenders eager,inductor,strop] [--together N] [--samples N] [--tiny]

A row is a scheme of ``quantised_schemes.py``. Each of its contenders has a process with empty
caches; those of ``--together`` rows are prepared at the same time, as compilers take one core each,
and timed one after another. FILE is written after each row, and rows that it has are not measured
again. A scheme whose library is missing is a row with the reason, "skipped"; "failed" is the last
line of a contender's errors.

"first_s" is the first call, and with it all that is compiled; "timing" holds percentiles of calls
behind each other; "peak_bytes" is the most memory that a call has, weights included, and
"weights_bytes" what the quantised model has. "error" is relative to the result in fp32 of the
weights that were quantised, with eager's error beside it: ``strop.bench.accuracy.judge``.
"flux" is a slice of Flux.1, 2 double and 4 single blocks at full width, at 1024 x 1024 pixels.
On a machine without an index: pip install --no-deps --no-index --target FOLDER *.whl, and then
PYTHONPATH=FOLDER.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.quantised_schemes import (
    SCHEMES,
    Quantisation,
    linears,
    quantise,
    tune_inductor,
    widen,
)
from strop.bench import accuracy, environment, models, report, timer, transformer_models
from strop.bench.models import Workload

CONTENDERS = ("eager", "inductor", "strop")  # and "inductor-tuned"
READY = "ready to be timed"
FLUX_SLICE = transformer_models.FLUX | {"num_layers": 2, "num_single_layers": 4}
TINY_FLUX = transformer_models.FLUX | {
    "num_layers": 1,
    "num_single_layers": 1,
    "num_attention_heads": 2,
    "joint_attention_dim": 256,
    "pooled_projection_dim": 256,
}
TINY_SDXL = models.TINY_SDXL_UNET | {  # rows of quantised weights are multiples of 256
    "block_out_channels": (32, 256),
    "cross_attention_dim": 256,
    "attention_head_dim": [2, 8],
}
MODELS = {  # by name: how it is built, tiny too, and the size of a picture, tiny too
    "flux": (
        transformer_models.flux_workload(FLUX_SLICE),
        transformer_models.flux_workload(TINY_FLUX),
        (1024, 1024),
        (64, 64),
    ),
    "sdxl": (
        models.unet_workload(models.SDXL_UNET),
        models.unet_workload(TINY_SDXL),
        (1024, 1024),
        (128, 128),
    ),
}


def main() -> None:
    args = arguments()
    if args.one:
        measure_here(*args.one, args)
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result: dict[str, Any] = {
        "kind": "quantised",
        "model": args.model,
        "is_tiny": args.tiny,
        "environment": environment.describe(device),
    }
    rows = rows_before(args.out, result)
    names = [name for name in args.schemes.split(",") if name not in rows]
    for name in names:
        if reason := SCHEMES[name].missing(device):
            rows[name] = {"skipped": reason}
    wanted = [name for name in names if name not in rows]
    for first in range(0, len(wanted), args.together):
        for name, row in measured(wanted[first : first + args.together], args):
            rows[name] = row
            report.write_json({**result, "rows": rows}, args.out)
            print(line_of(name, row), flush=True)
    report.write_json({**result, "rows": rows}, args.out)
    for name, row in rows.items():
        if "skipped" in row:
            print(f"{name:21} skipped: {row['skipped']}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file for every number")
    parser.add_argument("--model", choices=MODELS, default="flux")
    parser.add_argument("--schemes", default=",".join(SCHEMES))
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--together", type=int, default=2, help="rows prepared at the same time")
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--tiny", action="store_true", help="a tiny model: to try this out")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    return parser.parse_args()


def rows_before(path: Path, result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rows of an earlier run of the same model."""
    if not path.is_file():
        return {}
    before: dict[str, Any] = json.loads(path.read_text())
    if any(before.get(key) != result[key] for key in ("kind", "model", "is_tiny")):
        raise SystemExit(f"{path} has results of something else")
    rows: dict[str, Any] = before["rows"]
    return {name: row for name, row in rows.items() if "skipped" not in row}


@dataclass(frozen=True, slots=True)
class Started:
    """Hold the process of a contender, and the file of its result."""

    scheme: str
    contender: str
    process: subprocess.Popen[str]
    folder: Path

    def finished(self) -> dict[str, Any]:
        """Wait until it is ready, let it measure, and return what it found."""
        assert self.process.stdout is not None
        is_ready = any(line.strip() == READY for line in self.process.stdout)
        answer, _ = self.process.communicate("now\n" if is_ready else None)
        if self.process.returncode:
            return {"failed": (self.folder / "errors").read_text().strip().splitlines()[-1:]}
        found: dict[str, Any] = json.loads(answer.splitlines()[-1])
        return found


def measured(names: Sequence[str], args: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """Yield each of these rows, prepared together."""
    with tempfile.TemporaryDirectory() as folder:
        started = [
            start(name, contender, Path(folder), args)
            for name in names
            for contender in args.contenders.split(",")
        ]
        try:
            for name in names:
                own = [each for each in started if each.scheme == name]
                yield name, judged(own, {each.contender: each.finished() for each in own})
        finally:
            for each in started:
                each.process.kill()
                each.process.wait()


def start(scheme: str, contender: str, folder: Path, args: argparse.Namespace) -> Started:
    own = folder / f"{scheme}-{contender}"
    own.mkdir()
    names = ("STROP_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
    words = ["--one", scheme, contender, str(own), "--out", str(args.out), "--model", args.model]
    words += ["--samples", str(args.samples), *["--tiny"] * args.tiny]
    with (own / "errors").open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, __file__, *words],
            env=os.environ | {name: str(own / name.lower()) for name in names},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    return Started(scheme, contender, process, own)


def judged(started: Sequence[Started], found: dict[str, Any]) -> dict[str, Any]:
    """Add to each contender's numbers the error of its result."""
    kept = {each.contender: each.folder / "result.pt" for each in started}
    results = {name: torch.load(path) for name, path in kept.items() if path.is_file()}
    if "exact" in results.get("eager", {}):
        eager, exact = results["eager"]["found"], results["eager"]["exact"]
        for name, tensors in results.items():
            if "failed" not in found[name]:
                found[name]["error"] = accuracy.judge(tensors["found"], eager, exact)
    return {"contenders": found}


def line_of(name: str, row: Mapping[str, Any]) -> str:
    parts = []
    for contender, found in row["contenders"].items():
        if "failed" in found:
            parts.append(f"{contender} failed: {found['failed']}")
            continue
        peak = (found["peak_bytes"] or 0) / 2**20
        rms = found.get("error", {}).get("rms", float("nan"))
        numbers = f"{found['timing']['p50_ms']:.2f} ms, {peak:.0f} MiB, first {found['first_s']} s"
        parts.append(f"{contender} {numbers}, error {rms:.2e}")
    return f"{name:21} " + "; ".join(parts)


def measure_here(scheme_name: str, contender: str, folder: str, args: argparse.Namespace) -> None:
    """Prepare a contender, say so, wait to be asked, and print what was measured."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    scheme = SCHEMES[scheme_name]
    full, tiny, size, tiny_size = MODELS[args.model]
    workload = (tiny if args.tiny else full)(device, torch.bfloat16)
    names = list(linears(workload.target))
    quantise(workload.target, scheme, names)
    timer.give_back(device)
    weights = timer.allocated(device)
    given = workload.inputs(tiny_size if args.tiny else size, 1)
    call = prepared(workload, scheme, contender, given)
    begin = time.perf_counter()
    found = call().clone()
    timer.synchronise(device)
    numbers: dict[str, Any] = {
        "first_s": round(time.perf_counter() - begin, 3),
        "weights_bytes": weights,
        "num_linears": len(names),
    }
    wait_for_builds(workload, contender)
    print(READY, flush=True)
    sys.stdin.readline()
    timings = timer.time_calls({"": call}, device, samples=args.samples, inner=2)
    numbers["timing"] = timings[""].to_dict()
    timer.forget_peak(device)
    call()
    timer.synchronise(device)
    numbers["peak_bytes"] = timer.peak(device) or None
    kept = {"found": found.cpu()}
    if contender == "eager":
        kept["exact"] = exact_of(workload, scheme, names, given).cpu()
    torch.save(kept, Path(folder) / "result.pt")
    print(json.dumps(numbers | counts_of(workload, contender)))


def prepared(
    workload: Workload, scheme: Quantisation, contender: str, given: Mapping[str, Any]
) -> timer.Call:
    import strop

    model = workload.target
    if contender == "strop":
        strop.optimize(model)
    elif contender == "inductor":
        model.forward = torch.compile(model.forward, dynamic=False)
    elif contender == "inductor-tuned":
        tune_inductor(scheme)
        mode = "max-autotune-no-cudagraphs"
        model.forward = torch.compile(model.forward, dynamic=False, mode=mode)
    elif contender != "eager":
        raise SystemExit(f"there is no contender {contender!r}")

    def call() -> Any:
        with torch.no_grad():
            return workload.call(model, given)

    return call


def wait_for_builds(workload: Workload, contender: str) -> None:
    if contender == "strop":
        from strop.api import dispatchers_of

        for dispatcher in dispatchers_of(workload.target).values():
            dispatcher.variants.wait()


def counts_of(workload: Workload, contender: str) -> dict[str, Any]:
    if contender != "strop":
        return {}
    import strop

    found = strop.explain(workload.target)
    return {
        "fallbacks": [dict(component.fallbacks) for component in found.components],
        "calls": dict(found.calls),
        "counts": found.summary(),
    }


def exact_of(workload: Workload, scheme: Any, names: list[str], given: Mapping[str, Any]) -> Any:
    """Return the result in fp32 of the weights that were quantised. The model is another one
    then."""
    widen(workload.target, scheme, names)
    wide = {
        key: value.float() if torch.is_tensor(value) and value.is_floating_point() else value
        for key, value in given.items()
    }
    with torch.no_grad(), accuracy.full_precision():
        return workload.call(workload.target, wide)


if __name__ == "__main__":
    main()
