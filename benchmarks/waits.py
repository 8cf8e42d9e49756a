"""Time what a user waits for behind a change: the seconds until the next picture is there.

    python benchmarks/waits.py [--models sd15,sdxl,flux] [--ways eager,strop,compile,hotswap]
        [--changes size,batch,lora] [--minutes 9] [--out FILE] [--profile FOLDER] [--tiny]

Each model is a whole pipeline of diffusers, at full size with random weights (fp16; Flux.1: bf16);
a picture takes --steps steps. For each change the wait is the time of the change and of the next
picture, less that of a picture after it. What was compiled meanwhile is counted. Each way to run a
model has a process of its own, with empty caches of compilers (--caches keeps them):

    eager            diffusers as it is
    strop            strop.optimize(pipe)
    compile          pipe.unet.compile(dynamic=True); Flux.1: compile_repeated_blocks(dynamic=True)
    hotswap          the same with pipe.enable_lora_hotswap, behind the first LoRA; others come with
                     hotswap=True (changes of LoRAs alone)
    compile-blocks   compile_repeated_blocks(dynamic=True) of UNets as well
    hotswap-blocks   the same with hot-swap

Time that is over costs what has not been timed by then, and nothing else: run those models, ways
and changes again with the same --out, whose other rows stay. Compiling SDXL takes a process of
torch.compile many minutes: give it a run of its own (--models sdxl --ways compile).

--profile writes for each wait what the host did in it, to FOLDER/MODEL_WAY/CHANGE.txt: functions by
their time, and what garbage collection took. Waits are then longer, and go to no --out.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

from strop.bench import environment, report
from strop.bench.infer_contenders import Deadline
from strop.bench.wait_changes import CHANGES, FIRST, GROUPS
from strop.bench.wait_models import MODELS
from strop.bench.waits import COMPILE_S, WAYS, WaitPlan, chosen, rows_of
from strop.wording import counted

CACHES = {
    "STROP_CACHE_DIR": "strop",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
}
GRACE_S = 20.0  # for the change that is being timed when time is over
Row = dict[str, Any]


def main() -> None:
    args = parsed()
    if args.one:
        measure_here(args)
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result = begun(args, environment.describe(device))
    clock, plan = Deadline.of(60 * args.minutes), plan_of(args)
    for model in args.models:
        for way in args.ways:
            rows = measured_apart(model, way, args, clock)
            done = {row["change"] for row in rows}
            why = "time was over" if clock.left() <= 0 else "its process ended"
            rows += [
                {"model": model, "way": way, "change": change.name, "skipped": why}
                for change in chosen(way, plan.groups)
                if change.name not in done
            ]
            merge(result, rows)
            if args.out:
                report.write_json(result, args.out)
    print("\n" + table(result["rows"]))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    groups = [group for group in GROUPS if group != FIRST]
    add = parser.add_argument
    add("--models", type=names_of(MODELS), default=[*MODELS], help=", ".join(MODELS))
    add("--ways", type=names_of(WAYS), default=["eager", "strop"], help=", ".join(WAYS))
    add("--changes", type=names_of(groups), default=groups, help=", ".join(groups))
    add("--minutes", type=float, default=9.0, help="after which nothing new begins (9)")
    add("--steps", type=int, default=4, help="of a picture (4)")
    add("--rank", type=int, default=16, help="of the LoRAs (16)")
    add("--repeats", type=int, default=2, help="pictures behind the next one, to compare with (2)")
    add("--backend", default="inductor", help="of torch.compile (inductor)")
    add("--caches", type=Path, help="a folder for the compilers' caches, which stays")
    add("--out", type=Path, help="JSON file; rows that it has of other ways and changes stay")
    add("--profile", type=Path, help="a folder for what the host does in each wait; not with --out")
    add("--tiny", action="store_true", help="tiny models: to try this out on a CPU")
    add("--one", nargs=4, metavar=("MODEL", "WAY", "SECONDS", "FILE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.profile and args.out:
        parser.error("--profile makes waits longer, so that they go to no --out")
    return args


def names_of(known: Any) -> Any:
    """Return what reads a list of names, each of which is known."""

    def read(text: str) -> list[str]:
        names = text.split(",")
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(
                f"there is no {', '.join(unknown)}; there are {', '.join(known)}"
            )
        return names

    return read


def plan_of(args: argparse.Namespace) -> WaitPlan:
    return WaitPlan(
        tuple(args.changes), args.steps, args.rank, args.repeats, args.tiny, args.backend
    )


def begun(args: argparse.Namespace, described: Row) -> Row:
    """Return the result without new rows: that of an earlier run on such a device, if any."""
    settings = {n: v for n, v in asdict(plan_of(args)).items() if n != "groups"}
    fresh = {"kind": "waits", "environment": described, **settings, "rows": []}
    if not (args.out and args.out.is_file()):
        return fresh
    earlier = json.loads(args.out.read_text())
    for name, now in (*settings.items(), ("gpu", described.get("gpu"))):
        had = earlier["environment"].get("gpu") if name == "gpu" else earlier.get(name)
        if had != now:
            sys.exit(f"{args.out} is of another run: {name} is {had!r} there and {now!r} here")
    return fresh | {"rows": earlier["rows"]}


def merge(result: Row, rows: Sequence[Row]) -> None:
    """Put rows in the place of those of the same model, way and change. One that was not timed now
    takes no other's place."""
    known = {key_of(row): row for row in result["rows"]}
    now = {name: result["environment"][name] for name in ("date", "commit")}
    for row in rows:
        if "skipped" not in row or "wait_s" not in known.get(key_of(row), {}):
            known[key_of(row)] = row | now
    order = [change.name for change in CHANGES]
    names = [*MODELS], [*WAYS], order
    result["rows"] = sorted(
        known.values(),
        key=lambda row: [n.index(k) for n, k in zip(names, key_of(row), strict=True)],
    )


def key_of(row: Row) -> tuple[str, str, str]:
    return row["model"], row["way"], row["change"]


def measured_apart(model: str, way: str, args: argparse.Namespace, clock: Deadline) -> list[Row]:
    """Return the rows that a new process has written when it ends, or when its time is over."""
    if clock.left() <= 0:
        return []
    with ExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory()))
        caches = args.caches or folder
        own = {name: str(caches / kind) for name, kind in CACHES.items()}
        file, given = folder / "rows.json", [f"--changes={','.join(args.changes)}"]
        given += [f"--{n}={getattr(args, n)}" for n in ("steps", "rank", "repeats", "backend")]
        given += [f"--profile={args.profile / f'{model}_{way}'}"] if args.profile else []
        given += ["--tiny"] * args.tiny + ["--one", model, way, f"{clock.left():.1f}", str(file)]
        process = subprocess.Popen(
            [sys.executable, __file__, *given], env=os.environ | own, start_new_session=True
        )
        try:
            process.wait(clock.left() + GRACE_S)
        except subprocess.TimeoutExpired:
            print(f"{model} {way}: cut, as its time is over", flush=True)
        finally:
            with suppress(ProcessLookupError):  # compilers leave pools of workers behind
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return json.loads(file.read_text()) if file.is_file() else []


def measure_here(args: argparse.Namespace) -> None:
    model, way, seconds, file = args.one
    diffusers.logging.set_verbosity_error()  # they speak of each file
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    rows: list[Row] = []
    for row in rows_of(model, way, plan_of(args), Deadline.of(float(seconds)), args.profile):
        rows.append(row)
        report.write_json(rows, Path(file))
        print(f"{model} {way:14} {row['change']:28} {cell(row)}", flush=True)


def cell(row: Row) -> str:
    """Return the wait with what was compiled, and beside it the seconds of a picture."""
    if "wait_s" not in row:
        return row.get("failed") or row["skipped"]
    counts = dict(row["done"])
    seconds = counts.pop(COMPILE_S, None)
    shown = [counted(int(number), name) for name, number in counts.items()]
    shown += [f"{seconds:.0f} s of compiling"] if seconds else []
    done = f" ({', '.join(shown)})" if shown else ""
    return f"{row['wait_s']:.2f}{done} + {row['steady_s']:.2f}"


def table(rows: Sequence[Row]) -> str:
    """Return Markdown: a row for each model and change, a column for each way."""
    ways = [way for way in WAYS if any(row["way"] == way for row in rows)]
    found = {key_of(row): cell(row) for row in rows}
    lines = [["model", "change", *(WAYS[way].title for way in ways)]]
    lines += [["---"] * len(lines[0])]
    for model, change in dict.fromkeys((row["model"], row["change"]) for row in rows):
        lines.append([model, change, *(found.get((model, way, change), "") for way in ways)])
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"Seconds of waiting (and what was made) + seconds of a picture\n\n{text}"


if __name__ == "__main__":
    main()
