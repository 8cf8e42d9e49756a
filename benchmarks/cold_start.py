"""Time the first call of a model in a new process with an empty cache, and the second one.

python benchmarks/cold_start.py [--rows sd15,sdxl,flux,wan,sd15-train] [--contenders strop,inductor]
    [--out FILE] [--tiny]

The clock starts when the model and its inputs are on the device, and stops when the first result is
there. Strop's modules have been compiled to bytecode before, as pip does where it installs them; to
import them counts. "optimize_s" is that and ``strop.optimize``. Weights are random, at full size.
Rows whose name ends in "-train" time a forward and its backward. "inductor" compiles as diffusers
recommends: repeated blocks once where a model has them, else the whole; "inductor-whole" the whole.
"artefact" has a file of ``strop.save``, which a process before it has written, and neither Triton
nor g++; its clock covers ``strop.load``, and what would run in eager is an error.

Before the clock starts, each process imports libraries ("imports_s"), makes the context of the GPU
("context_s"), and makes weights and inputs ("weights_s").
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.new_process import measured_alone

ROWS = {
    "sd15": ("sd15-unet", (512, 512), 2, "float16", 6.0),
    "sdxl": ("sdxl-unet", (1024, 1024), 2, "float16", 8.0),
    "flux": ("flux", (1024, 1024), 1, "bfloat16", 10.0),
    "wan": ("wan", (480, 832), 1, "bfloat16", 8.0),
    "sd15-train": ("sd15-unet", (512, 512), 4, "float32", 20.0),
    "sdxl-train": ("sdxl-unet", (1024, 1024), 1, "bfloat16", 20.0),
}  # model, size, batch, type of weights, the most seconds that Strop may take
MUSTS_S = {("sd15", "artefact"): 1.0, ("sdxl", "artefact"): 1.8}  # in the place of those
TINY_SIZE = (64, 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", default="sd15,sdxl,flux,wan,sd15-train", help=", ".join(ROWS))
    parser.add_argument(
        "--contenders", default="strop", help="strop, artefact, inductor, inductor-whole, eager"
    )
    parser.add_argument("--repeats", type=int, default=1, help="new processes for each")
    parser.add_argument("--out", type=Path, help="JSON file for every number")
    parser.add_argument("--tiny", action="store_true", help="tiny models: to try this out")
    parser.add_argument("--one", nargs=2, metavar=("ROW", "CONTENDER"), help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measured_here(*args.one, args.file, is_tiny=args.tiny)))
        return
    import torch

    import strop
    from strop.bench import environment, report

    compileall.compile_dir(Path(strop.__file__).parent, quiet=1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result: dict[str, Any] = {"kind": "cold-start", "environment": environment.describe(device)}
    rows: dict[str, Any] = {}
    for row in args.rows.split(","):
        rows[row] = {"must_s": must_s(row, "strop")}
        for contender in args.contenders.split(","):
            with tempfile.TemporaryDirectory() as folder:
                more = ["--file", f"{folder}/model.strop", *["--tiny"] * args.tiny]
                if contender == "artefact":
                    saved = measured_alone(__file__, ["--one", row, "save", *more])
                    print(f"{row:11} saved {saved}", flush=True)
                words = ["--one", row, contender, *more]
                found = [measured_alone(__file__, words) for _ in range(args.repeats)]
            seconds = [one["first_s"] for one in found if "first_s" in one]
            is_judged = device.type == "cuda" and not args.tiny
            must = must_s(row, contender) if is_judged else None
            rows[row][contender] = {"samples": seconds, "must_s": must, "processes": found}
            for one in found:
                print(f"{row:11} {contender:15} {shown(one, must)}", flush=True)
        if args.out:
            report.write_json({**result, "rows": rows}, args.out)


def must_s(row: str, contender: str) -> float | None:
    """Return the most seconds that a contender may take, or None for others than Strop."""
    return MUSTS_S.get((row, contender), ROWS[row][-1] if contender == "strop" else None)


def shown(one: dict[str, Any], must: float | None) -> str:
    """Write what a process found, the seconds that count first."""
    if must is None or "first_s" not in one:
        return str(one)
    verdict = "holds" if one["first_s"] <= must else "MISSED"
    return f"first {one['first_s']:.3f} s, must {must:.1f} s: {verdict}; {one}"


def measured_here(row: str, contender: str, file: Path, *, is_tiny: bool) -> dict[str, Any]:
    if contender == "artefact":
        take_compilers_away()
    before: dict[str, float] = {}
    with timed(before, "imports_s"):
        import torch

        import strop
        from strop.bench.infer_rows import MODELS
        from strop.bench.models import load_libraries
        from strop.bench.timer import peak, synchronise

        load_libraries()

    name, size, batch, type_name, _ = ROWS[row]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with timed(before, "context_s"):
        torch.zeros(1, device=device)
        synchronise(device)
    is_trained = row.endswith("-train")
    with timed(before, "weights_s"):
        build = (MODELS[name].tiny if is_tiny else MODELS[name].full)(1)
        dtype = getattr(torch, type_name) if device.type == "cuda" else torch.float32
        workload = build(device, dtype)
        given = workload.inputs(TINY_SIZE if is_tiny else size, batch)
        if is_trained:
            workload.target.requires_grad_(True).train()
        synchronise(device)
    run = step_of(workload, given, is_trained)
    seconds = []
    start = time.perf_counter()
    prepare(workload.target, contender, file, is_trained)
    optimized = time.perf_counter() - start
    for _ in range(3):
        run()
        synchronise(device)
        seconds.append(round(time.perf_counter() - start, 3))
        start = time.perf_counter()
    if contender == "save":
        return {"saved": str(strop.save(workload.target, file))}
    found: dict[str, Any] = {"first_s": seconds[0], "second_s": seconds[1], "third_s": seconds[2]}
    found["optimize_s"] = round(optimized, 3)
    found |= before
    if device.type == "cuda":
        found["peak_gib"] = round(peak(device) / 2**30, 2)
    return found | stages_of(workload.target, contender)


def take_compilers_away() -> None:
    """Let this process have neither Triton nor g++, and no eager in the place of what they make."""
    sys.modules["triton"] = None  # type: ignore[assignment]
    os.environ |= {"PATH": "", "STROP_STRICT": "1"}


@contextlib.contextmanager
def timed(found: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    found[name] = round(time.perf_counter() - start, 3)


def step_of(workload: Any, given: Any, is_trained: bool) -> Callable[[], None]:
    import torch

    def step() -> None:
        with contextlib.nullcontext() if is_trained else torch.no_grad():
            result = workload.call(workload.target, given)
        if is_trained:
            result.float().square().mean().backward()

    return step


def prepare(model: Any, contender: str, file: Path, is_trained: bool) -> None:
    import torch

    import strop

    if contender in ("strop", "save"):
        strop.optimize(model, train=is_trained)
    elif contender == "artefact":
        strop.load(model, file, trust=True)
    elif contender == "inductor" and getattr(model, "_repeated_blocks", None):
        model.compile_repeated_blocks(fullgraph=True)
    elif contender in ("inductor", "inductor-whole"):
        model.compile()
    elif contender != "eager":
        raise SystemExit(f"there is no contender {contender!r}")
    torch.manual_seed(0)


def stages_of(model: Any, contender: str) -> dict[str, Any]:
    if contender not in ("strop", "artefact"):
        return {}
    import strop

    found = strop.explain(model)
    return {"stages_s": found.stage_seconds(), "counts": found.summary()}


if __name__ == "__main__":
    main()
