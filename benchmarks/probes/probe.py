"""Measures what the design rests on, on one GPU.

python benchmarks/probes/probe.py --out probes.json [--only 1,2,3] [--skip 7] [--budget 400]

Each probe stands alone: an error in one is printed and the next one runs. After an error that
poisons the CUDA context, or a probe that hangs, the process starts over with the probes left.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import os
import pathlib
import sys
import threading
import time
import traceback
from typing import Any

# name: (title, module, function, seconds it may take); run in this order.
PROBES: dict[str, tuple[str, str, str, float]] = {
    "1": ("launch cost and limits", "p_launch", "run_launch", 20),
    "2": ("CUDA graph nodes", "p_launch", "run_graph", 15),
    "4": ("convolution", "p_conv", "run", 60),
    "6": ("GroupNorm+SiLU", "p_norm", "run", 90),
    "5": ("attention", "p_attn", "run", 30),
    "3": ("GEMM", "p_gemm", "run", 25),
    "10": ("eager baseline", "p_host", "run_baseline", 60),
    "8": ("capture", "p_capture", "run", 45),
    "9": ("host", "p_host", "run", 70),
    "7": ("Triton convolution", "p_norm", "run_conv", 20),
}


class Store:
    """The JSON file: one entry per probe, written after each."""

    def __init__(self, path: pathlib.Path, resume: bool) -> None:
        self.path = path
        self.data: dict[str, Any] = {"probes": {}}
        if resume and path.exists():
            self.data = json.loads(path.read_text())

    def put(self, name: str, entry: dict[str, Any]) -> None:
        self.data["probes"][name] = entry
        text = json.dumps(self.data, indent=1, default=str)
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(text)
        temporary.replace(self.path)


def restart(args: argparse.Namespace, todo: list[str], end: float) -> None:
    """Replace this process by one that runs the probes left."""
    left = str(max(0.0, end - time.monotonic()))
    words = ["--out", str(args.out), "--budget", left, "--only", ",".join(todo) or "none"]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, os.path.abspath(__file__), "--resume", *words])


def context_broken() -> bool:
    import torch

    try:
        torch.cuda.synchronize()
    except Exception:
        return True
    return False


def run_one(name: str, ctx: Any) -> dict[str, Any]:
    title, module, function, _ = PROBES[name]
    print(f"\n[{name}] {title}", flush=True)
    ctx.rows = []
    start = time.perf_counter()
    entry: dict[str, Any] = {"title": title}
    try:
        entry["result"] = getattr(importlib.import_module(module), function)(ctx)
    except Exception as error:
        entry["error"] = traceback.format_exc()[-3000:]
        frames = [
            f"{pathlib.Path(f.filename).name}:{f.lineno}"
            for f in traceback.extract_tb(error.__traceback__)
        ]
        ctx.row(f"  FAILED {type(error).__name__}: {str(error)[:300]} at {' < '.join(frames[-4:])}")
    entry["rows"] = ctx.rows
    entry["seconds"] = round(time.perf_counter() - start, 1)
    print(f"  [{name}] took {entry['seconds']} s", flush=True)
    return entry


def guarded(name: str, ctx: Any, store: Store, args: argparse.Namespace, todo: list[str]) -> None:
    """Run one probe under a watchdog; start over if it hangs or breaks the context."""
    cap = PROBES[name][3]

    def hung() -> None:
        faulthandler.dump_traceback(all_threads=True)
        store.put(name, {"title": PROBES[name][0], "error": "hung", "rows": ctx.rows})
        restart(args, todo, ctx.end)

    timer = threading.Timer(cap * 1.5 + 25, hung)
    timer.daemon = True
    timer.start()
    ctx.probe_end = time.monotonic() + cap
    entry = run_one(name, ctx)
    broken = context_broken()
    timer.cancel()
    entry["context_broken"] = broken
    store.put(name, entry)
    if broken:
        print("  the CUDA context is broken: starting over", flush=True)
        restart(args, todo, ctx.end)


def chosen(args: argparse.Namespace) -> list[str]:
    only = [p for p in args.only.split(",") if p]
    skip = args.skip.split(",")
    return [name for name in PROBES if (not only or name in only) and name not in skip]


def summary(store: Store) -> None:
    print("\n===== summary =====")
    for name, entry in store.data["probes"].items():
        state = "FAILED" if "error" in entry else "ok"
        seconds = entry.get("seconds", "?")
        print(f"[{name}] {entry['title']}: {state}, {seconds} s")


def tables(store: Store) -> None:
    """The rows of a finished run."""
    for name, entry in store.data["probes"].items():
        print(f"\n[{name}] {entry['title']}")
        for row in entry.get("rows", []):
            print(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("probes.json"))
    parser.add_argument("--only", default="")
    parser.add_argument("--skip", default="")
    parser.add_argument("--budget", type=float, default=400.0)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--show", action="store_true", help="print the rows of --out, run nothing")
    args = parser.parse_args()
    end = time.monotonic() + args.budget
    store = Store(args.out, args.resume or args.show)
    if args.show:
        tables(store)
        return
    started = time.perf_counter()
    import torch
    from common import Ctx

    print(f"torch {torch.__version__}, imported in {time.perf_counter() - started:.1f} s")
    if not torch.cuda.is_available():
        sys.exit("no CUDA device")
    ctx = Ctx(end=end)
    todo = chosen(args)
    while todo:
        name = todo.pop(0)
        if ctx.end - time.monotonic() < 3:
            print(f"[{name}] skipped: the budget of {args.budget:.0f} s is spent")
            continue
        guarded(name, ctx, store, args, todo)
    summary(store)


if __name__ == "__main__":
    main()
