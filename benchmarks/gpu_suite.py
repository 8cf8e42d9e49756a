"""Everything worth knowing about one GPU in one run of less than nine minutes.

    python benchmarks/gpu_suite.py --out DIR [--only bringup,full,...] [--budget 520]

Every step ends in a JSON file of its own; a step that fails writes its traceback there and the
next one runs. With ``--device cpu --unet tiny-unet --pipe tiny-pipe`` the script
tries itself out on a CPU.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import io
import os
import pstats
import subprocess
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import strop
from strop.bench import (
    accuracy,
    environment,
    infer,
    infer_contenders,
    infer_report,
    infer_rows,
    models,
    peers,
    quality,
    report,
    timer,
)
from strop.bench import compile as compile_bench
from strop.bench.cases import BenchCase, case_named
from strop.debug.explain import explain

ROOT = Path(__file__).resolve().parents[1]
PYTEST_INI = """[pytest]
addopts = --import-mode=importlib
markers =
    gpu: needs an NVIDIA GPU
    slow: more than ten seconds on two cores
"""


@dataclass
class Suite:
    """The run: its clock, its folders, and the lines of the last table."""

    device: torch.device
    out: Path
    cache_dir: Path
    end: float
    args: argparse.Namespace
    lines: list[tuple[str, str]] = field(default_factory=list)

    def left(self) -> float:
        return self.end - time.monotonic()

    def say(self, step: str, text: str) -> None:
        self.lines.append((step, text))
        print(f"[{step}] {text}", flush=True)

    def options(self, folder: str = "main") -> strop.Options:
        return strop.Options(cache_dir=str(self.cache_dir / folder))


def gpu_tests(suite: Suite) -> dict[str, Any]:
    """pytest -m gpu, with a configuration that needs no plugin."""
    ini = suite.out / "pytest.ini"
    ini.write_text(PYTEST_INI)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu",
        "-q",
        "-c",
        str(ini),
        "--rootdir",
        str(ROOT),
        "-p",
        "no:cacheprovider",
        "--continue-on-collection-errors",
        "--tb=short",
        "tests",
    ]
    start, limit_s = time.monotonic(), min(suite.left(), suite.args.tests_s)
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s, check=False
        )
        text, code = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as error:
        text, code = (error.stdout or b"").decode(errors="replace"), -1
    (suite.out / "pytest.txt").write_text(text)
    last = text.strip().splitlines()[-1:] or ["no output"]
    suite.say("tests", f"rc {code}, {time.monotonic() - start:.0f} s: {last[0][:150]}")
    return {"rc": code, "tail": text[-6000:]}


def bringup(suite: Suite) -> dict[str, Any]:
    """Tiny models, fp32 and fp16, with and without CUDA graphs, against eager."""
    found: dict[str, Any] = {}
    sizes = {
        "tiny-unet": ((64, 64), (96, 64), (128, 160)),
        "tiny-vae": ((64, 64), (32, 48), (96, 64)),
    }
    dtypes = (torch.float32, torch.float16) if suite.device.type == "cuda" else (torch.float32,)
    for name, shapes in sizes.items():
        for dtype in dtypes:
            case = replace(case_named(name), sizes=shapes, dtype=dtype)
            judged = accuracy.references(case, suite.device)
            for graphs in (False, True):
                label = f"{name} {str(dtype)[6:]} {'graph' if graphs else 'no graph'}"
                found[label] = attempt(
                    suite, "bringup", lambda c=case, g=graphs, j=judged: _bringup(suite, c, g, j)
                )
                if "error" not in found[label]:
                    suite.say("bringup", f"{label}: {found[label]['text']}")
    return found


def _bringup(suite: Suite, case: BenchCase, graphs: bool, judged: Any) -> dict[str, Any]:
    ours = case.build(suite.device)
    strop.optimize(ours.target, options=replace(suite.options("tiny"), cuda_graphs=graphs))
    rows = []
    for shape, (eager, exact) in zip(case.shapes, judged, strict=True):
        given = ours.inputs(*shape)
        for _ in range(3):  # plain, captured, replayed
            rows.append(accuracy.judge(accuracy.run(ours, given), eager, exact))
    counts = explain(ours.target).summary()
    worst = max(rows, key=lambda r: r["rms"] / max(r["rms_eager"], 1e-12))
    bad = sum(not r["is_good"] for r in rows)
    text = (
        f"{bad} bad of {len(rows)}, worst rms {worst['rms']:.2e} (eager"
        f" {worst['rms_eager']:.2e}), {counts['num_graphs']} graphs,"
        f" {counts['num_launches']} launches, fallbacks {counts['fallbacks']}"
    )
    return {"rows": rows, "counts": counts, "text": text}


def full(suite: Suite) -> dict[str, Any]:
    """Cold and cached start of the UNet in fresh processes, then its kernels."""
    case = case_named(suite.args.unet)
    result = compile_bench.run(
        case,
        suite.out,
        str(suite.device),
        num_shapes=1,
        limit_s=max(suite.left() * 0.6, 30),
        cache_dir=suite.cache_dir / "main",
    )
    for row in report.compile_rows_of(result):
        suite.say("full", "  ".join(row))
    suite.say("full", f"stages {result['cold'].get('stages_s')}")
    if "failed" in result["cold"]:
        suite.say("full", "\n".join(result["cold"].get("log", [])))
    return result


def kernels(suite: Suite) -> dict[str, Any]:
    """Where the time of one step goes: torch.profiler over ours and over eager."""
    case = case_named(suite.args.unet)
    shape = case.shapes[0]
    ours = case.build(suite.device)
    strop.optimize(ours.target, options=suite.options())
    call = peers.caller(ours, *shape)
    for _ in range(3):
        call()
    found = explain(ours.target)
    (suite.out / "explain.html").write_text(found.html)
    (suite.out / "explain.txt").write_text(str(found))
    report.write_json(found.to_dict(), suite.out / "explain.json")
    generated = {k.name for g in found.graphs for k in g.kernels}
    mine = timer.profiled(call, generated)
    text = (
        f"launches {mine['launches']:.0f} (generated {mine['generated']:.0f}), report says"
        f" {found.num_launches}; kernel time {mine['us'] / 1e3:.2f} ms, of it generated"
        f" {mine['generated_us'] / 1e3:.2f} ms"
    )
    suite.say("kernels", text)
    for row in mine["top"][:12]:
        suite.say("kernels", f"{row['us']:9.1f} us {row['count']:5.0f}x  {row['name'][:90]}")
    del ours, call
    eager = peers.prepared(peers.peer_named("eager"), case, suite.device)
    theirs = timer.profiled(peers.caller(eager, *shape), set())
    suite.say("kernels", f"eager: {theirs['launches']:.0f} launches, {theirs['us'] / 1e3:.2f} ms")
    return {
        "strop": mine,
        "eager": theirs,
        "counts": found.summary(),
        "estimates": _estimates(found, mine),
    }


def _estimates(found: Any, mine: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Measured against estimated time for each generated kernel."""
    measured = {row["name"]: row["us"] for row in mine["top"]}
    expected: dict[str, float] = defaultdict(float)
    for component in found.components:
        for kernel in component.latest.kernels if component.latest else ():
            expected[kernel.name] += kernel.estimated_us
    return [
        {"name": n, "estimated_us": round(us, 2), "measured_us": measured.get(n)}
        for n, us in sorted(expected.items(), key=lambda item: -item[1])
    ]


def step_times(suite: Suite) -> dict[str, Any]:
    """The UNet step: ours, eager and eager in a hand-made graph, in turns."""
    return _infer(suite, "times", "P1")


def vae(suite: Suite) -> dict[str, Any]:
    return _infer(suite, "vae", "P4-512")


def more(suite: Suite) -> dict[str, Any]:
    """Other rows of ``strop bench infer``, as far as the time goes."""
    return _infer(suite, "more", *(n for n in suite.args.more.split(",") if n))


def _infer(suite: Suite, step: str, *names: str) -> dict[str, Any]:
    is_tiny = suite.args.unet.startswith("tiny")
    chosen = [*infer_contenders.DEFAULT_PEERS, *(["inductor"] if suite.args.inductor_s else [])]
    plan = infer_contenders.Plan(
        str(suite.device), "fp32" if is_tiny else "fp16", tuple(chosen), suite.args.iterations
    )
    results = infer.run(
        infer_rows.chosen_rows(names, tiny=is_tiny),
        plan,
        out=suite.out,
        budget_s=suite.left(),
        is_apart=False,
    )
    for line in report.plain_table(infer_report.rows_of(results)).splitlines()[1:]:
        suite.say(step, line)
    return {result["row"]: result for result in results}


def graph_replay(suite: Suite) -> dict[str, Any]:
    """The step without our own graphs, captured by hand: device time and nothing else."""
    case = case_named(suite.args.unet)
    ours = case.build(suite.device)
    strop.optimize(ours.target, options=replace(suite.options(), cuda_graphs=False))
    plain = peers.caller(ours, *case.shapes[0])
    replayed = peers.caller(ours, *case.shapes[0], by_graph=True)
    times = timer.time_calls({"no-graph": plain, "replay": replayed}, suite.device)
    for name, timing in times.items():
        suite.say(
            "replay",
            f"{name}: p50 {timing.p50_ms:.3f} ms ({timing.p20_ms:.3f} to {timing.p80_ms:.3f})",
        )
    return {name: timing.to_dict() for name, timing in times.items()}


def host(suite: Suite) -> dict[str, Any]:
    """Microseconds of host work in a call whose graph replay does nothing."""
    case = case_named(suite.args.unet)
    ours = case.build(suite.device)
    strop.optimize(ours.target, options=suite.options())
    call = peers.caller(ours, *case.shapes[0])
    for _ in range(3):
        call()
    from strop.api import dispatchers_of

    (dispatcher,) = dispatchers_of(ours.target).values()
    dispatcher.loop.begin()  # as inside a pipeline's denoise loop
    call()
    with no_replay():
        empty = [_host_us(call, suite.device) for _ in range(7)]
        trace = cProfile.Profile()
        trace.runcall(lambda: [call() for _ in range(100)])
    text = io.StringIO()
    pstats.Stats(trace, stream=text).sort_stats("tottime").print_stats(25)
    (suite.out / "host_profile.txt").write_text(text.getvalue())
    median = sorted(empty)[len(empty) // 2]
    suite.say("host", f"{median:.1f} us a call without the replay (limit 100)")
    return {"us": empty, "median_us": median}


def _host_us(call: timer.Call, device: torch.device, calls: int = 50) -> float:
    timer.synchronise(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls * 1e6


@contextmanager
def no_replay() -> Any:
    """CUDA graphs whose replay returns at once."""
    original = torch.cuda.CUDAGraph.replay
    torch.cuda.CUDAGraph.replay = lambda self: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.cuda.CUDAGraph.replay = original  # type: ignore[method-assign]


def pipe(suite: Suite) -> dict[str, Any]:
    """Many sizes through a plain pipeline: what is compiled again, and what runs in eager."""
    case = case_named(suite.args.pipe)
    if case.name == "sd15-pipe":
        builder = models.pipeline_workload(models.SD15_UNET, models.SD_VAE, models.CLIP_L, steps=4)
        case = replace(case, builder=builder)
    ours = case.build(suite.device)
    strop.optimize(ours.target, options=suite.options())
    rows = []
    for size, batch in case.shapes:
        if suite.left() < 20:
            suite.say("pipe", f"out of time after {len(rows)} shapes")
            break
        call = peers.caller(ours, size, batch)
        first, second = (timer.elapsed_ms(call, suite.device) for _ in range(2))
        rows.append({"size": size, "batch": batch, "first_ms": first, "second_ms": second})
        suite.say("pipe", f"{size} b{batch}: first {first:.0f} ms, second {second:.0f} ms")
    found = explain(ours.target)
    counts = found.summary()
    suite.say(
        "pipe",
        f"{counts['num_graphs']} graphs, {counts['num_recompiles']} recompiles,"
        f" fallbacks {counts['fallbacks']}, not finite {counts['nonfinite']}",
    )
    (suite.out / "explain_pipe.txt").write_text(str(found))
    return {"rows": rows, "counts": counts}


def dynamo(suite: Suite) -> dict[str, Any]:
    """Plain torch.compile at two sizes: what the second compile costs of the first."""
    from strop.backend import dynamo_backend
    from strop.dispatch.dynamo import AOT_LOG

    torch._dynamo.reset()
    case = case_named(suite.args.unet)
    ours = case.build(suite.device)
    where = {"cache_dir": tempfile.mkdtemp(dir=suite.out)}
    ours.target.compile(backend=dynamo_backend, options=where)
    rows = []
    for (height, width), batch in [((512, 512), 2), ((512, 768), 2)]:
        done = len(AOT_LOG.records)
        total = timer.elapsed_ms(peers.caller(ours, (height, width), batch), suite.device)
        (record,) = AOT_LOG.records[done:]
        rows.append(
            {
                "size": [height, width],
                "call_s": round(total / 1e3, 2),
                "strop_s": round(record.seconds, 3),
                "kernels_built": record.kernels_built,
                "kernels": len(record.compiled.program.sources),
            }
        )
        suite.say("dynamo", str(rows[-1]))
    return {
        "rows": rows,
        "fallbacks": AOT_LOG.fallbacks,
        "second_of_first": round(rows[1]["strop_s"] / rows[0]["strop_s"], 3),
    }


def sprites(suite: Suite) -> dict[str, Any]:
    try:
        result = quality.run(suite.out, str(suite.device), options=suite.options())
    except FileNotFoundError as error:
        suite.say("sprites", "left out: the package has no weights")
        return {"left_out": str(error)}
    suite.say("sprites", str({k: v for k, v in result.items() if k.endswith(("db", "good"))}))
    return result


STEPS: dict[str, Callable[[Suite], dict[str, Any]]] = {
    "bringup": bringup,
    "full": full,
    "kernels": kernels,
    "times": step_times,
    "replay": graph_replay,
    "host": host,
    "vae": vae,
    "pipe": pipe,
    "tests": gpu_tests,
    "sprites": sprites,
    "dynamo": dynamo,
    "more": more,
}
NEEDS_GPU = {"tests", "kernels", "replay", "host"}


def attempt(suite: Suite, step: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result, or the traceback: a harness goes on whatever a step throws."""
    try:
        return work()
    except Exception:
        text = traceback.format_exc()
        suite.say(step, "FAILED " + text.strip().splitlines()[-1][:300])
        (suite.out / f"{step}_traceback.txt").write_text(text)
        return {"error": text}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help=f"of {','.join(STEPS)}")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "runs/gpu")))
    parser.add_argument("--budget", type=float, default=520.0, help="seconds for everything")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--unet", default="sd15-unet-512")
    parser.add_argument("--pipe", default="sd15-pipe")
    parser.add_argument("--more", default="P2,P2b", help="rows of strop bench infer")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--tests-s", type=float, default=150.0, help="limit of the tests")
    parser.add_argument("--inductor-s", type=float, default=0.0, help="0: leave Inductor out")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    device = torch.device(args.device)
    with tempfile.TemporaryDirectory() as folder:
        suite = Suite(device, args.out, Path(folder), time.monotonic() + args.budget, args)
        seconds: dict[str, float] = {}
        for name in args.only.split(",") if args.only else STEPS:
            if suite.left() < 15 or (device.type != "cuda" and name in NEEDS_GPU):
                suite.say(name, "left out")
                continue
            start = time.monotonic()
            result = attempt(suite, name, lambda step=STEPS[name]: step(suite))
            seconds[name] = round(time.monotonic() - start, 1)
            report.write_json(result, args.out / f"step_{name}.json")
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    summary = {
        "environment": environment.describe(device),
        "seconds": seconds,
        "lines": suite.lines,
    }
    report.write_json(summary, args.out / "suite.json")
    print("\n" + "\n".join(f"{step:8s} {text}" for step, text in suite.lines))
    print(f"seconds {seconds}")


if __name__ == "__main__":
    main()
