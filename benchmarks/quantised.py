"""Time a step of a model with quantised weights: eager, Inductor and Strop, in every scheme.

python benchmarks/quantised.py --out FILE [--model flux|sdxl] [--schemes bf16,torchao-int8,...]
    [--contenders eager,inductor,strop] [--together N] [--limit S] [--samples N] [--tiny]

A row is a scheme of ``quantised_schemes.py``. Each of its contenders has a process with empty
caches; those of ``--together`` rows are prepared at the same time, as compilers take one core each,
and timed one after another when all are ready. Each stage is told on stderr with the seconds since
the process began, and "prepare_s" holds what each stage took. A contender that is not ready, or has
not measured, after ``--limit`` seconds is "failed", with its stage and the "stack" of its code.
FILE is written after each contender, and those that it has are not measured again unless they
failed; eager runs again beside others, whose errors are judged by it. A scheme whose library is
missing is a row with the reason, "skipped"; "failed" is otherwise the last line of a contender's
errors.

"inductor" is ``torch.compile`` with its defaults. torchao asks for settings under which Inductor
tries many forms of each kernel, which takes minutes: "inductor-tuned" has them, and max-autotune.

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
import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks import prepared_apart
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
STAGES = ("imported", "built", "quantised", "first call", "built kernels")
Key = tuple[str, str]  # a scheme and a contender
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
    names = args.schemes.split(",")
    for name in names:
        if reason := SCHEMES[name].missing(device):
            rows[name] = {"skipped": reason}
            print(f"{name:21} skipped: {reason}")
    wanted = [name for name in names if "skipped" not in rows.get(name, {})]
    report.write_json({**result, "rows": rows}, args.out)
    for first in range(0, len(wanted), args.together):
        for name, contender, found in measured(wanted[first : first + args.together], rows, args):
            rows.setdefault(name, {"contenders": {}})["contenders"][contender] = found
            report.write_json({**result, "rows": rows}, args.out)
            print(line_of(name, contender, found), flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file for every number")
    parser.add_argument("--model", choices=MODELS, default="flux")
    parser.add_argument("--schemes", default=",".join(SCHEMES))
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--together", type=int, default=2, help="rows prepared at the same time")
    parser.add_argument("--limit", type=float, default=120, help="seconds to get ready, to measure")
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


def left_of(names: Sequence[str], rows: Mapping[str, Any], args: argparse.Namespace) -> list[Key]:
    """Return the schemes and contenders to measure, eager first: errors are judged by it."""
    left: list[Key] = []
    for name in names:
        before = rows.get(name, {"contenders": {}})["contenders"]
        asked = sorted(args.contenders.split(","), key=lambda contender: contender != "eager")
        new = [each for each in asked if "failed" in before.get(each, {"failed": "not yet"})]
        left += [(name, each) for each in asked if each in new or (new and each == "eager")]
    return left


def measured(
    names: Sequence[str], rows: Mapping[str, Any], args: argparse.Namespace
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield what each contender of these rows found; they are prepared together."""
    left = left_of(names, rows, args)
    commands = {each: partial(words_of, *each, args=args) for each in left}
    compilers = sum(contender != "eager" for _, contender in left)
    threads = max(1, (os.cpu_count() or 1) // max(1, compilers))
    with (
        tempfile.TemporaryDirectory() as folder,
        prepared_apart.prepared(commands, Path(folder), STAGES, args.limit, threads) as started,
    ):
        judges: dict[str, Any] = {}
        for each in started:
            found = each.measure(args.limit)
            kept = each.folder / "result.pt"
            if "failed" not in found and kept.is_file():
                results = torch.load(kept)
                if each.name == "eager":
                    judges[each.scheme] = results
                if judge := judges.get(each.scheme):
                    found["error"] = accuracy.judge(
                        results["found"], judge["found"], judge["exact"]
                    )
            yield each.scheme, each.name, found


def words_of(scheme: str, contender: str, folder: Path, args: argparse.Namespace) -> list[str]:
    words = ["--one", scheme, contender, str(folder), "--out", str(args.out)]
    words += ["--model", args.model, "--samples", str(args.samples), *["--tiny"] * args.tiny]
    return [sys.executable, __file__, *words]


def line_of(name: str, contender: str, found: Mapping[str, Any]) -> str:
    begin = f"{name:21} {contender:14} "
    if "failed" in found:
        return f"{begin}failed: {found['failed']}"
    peak = (found["peak_bytes"] or 0) / 2**20
    error = f"{found['error']['rms']:.2e}" if "error" in found else "not judged without eager"
    numbers = f"{found['timing']['p50_ms']:.2f} ms, {peak:.0f} MiB, first {found['first_s']} s"
    return f"{begin}{numbers}, error {error}"


def measure_here(scheme_name: str, contender: str, folder: str, args: argparse.Namespace) -> None:
    """Prepare a contender, stage by stage, wait to be asked, and answer what was measured."""
    prepared_apart.show_stack_when_asked()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    scheme = SCHEMES[scheme_name]
    for package in (
        "diffusers.models.modeling_utils",
        *scheme.needs,
        *["strop"] * (contender == "strop"),
    ):
        importlib.import_module(package)
    prepared_apart.reached("imported")
    full, tiny, size, tiny_size = MODELS[args.model]
    workload = (tiny if args.tiny else full)(device, torch.bfloat16)
    timer.synchronise(device)
    prepared_apart.reached("built")
    names = list(linears(workload.target))
    quantise(workload.target, scheme, names)
    timer.give_back(device)
    timer.synchronise(device)
    weights = timer.allocated(device)
    prepared_apart.reached("quantised")
    given = workload.inputs(tiny_size if args.tiny else size, 1)
    call = called(workload, scheme, contender, given)
    begin = time.perf_counter()
    found = call().clone()
    timer.synchronise(device)
    numbers: dict[str, Any] = {
        "first_s": round(time.perf_counter() - begin, 3),
        "weights_bytes": weights,
        "num_linears": len(names),
    }
    prepared_apart.reached("first call")
    wait_for_builds(workload, contender)
    prepared_apart.reached("built kernels")
    prepared_apart.wait_for_turn()
    timings = timer.time_calls({"": call}, device, samples=args.samples, inner=2)
    numbers["timing"] = timings[""].to_dict()
    timer.forget_peak(device)
    call()
    timer.synchronise(device)
    numbers["peak_bytes"] = timer.peak(device) or None
    numbers |= counts_of(workload, contender)
    kept = {"found": found.cpu()}
    if contender == "eager":
        kept["exact"] = exact_of(workload, scheme, names, given).cpu()
    torch.save(kept, Path(folder) / "result.pt")
    prepared_apart.answer(Path(folder), numbers)


def called(
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
