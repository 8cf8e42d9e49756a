"""Time ``torch.compile(model, backend="strop")`` beside ``strop.optimize``, Inductor and eager.

python benchmarks/torch_compile.py [--rows sd15,sdxl,sd3,bert,resnet50,sd15-train,sd15-sizes]
    [--contenders backend,optimize,inductor,inductor-graph,eager] [--samples N] [--out FILE]
    [--tiny]

Each row of each contender has a process of its own with empty caches. "first_s" is the first call.
"samples_ms" are calls after it, ten in a row, as a denoise loop makes them; "waited_ms" are calls
for whose result the host waits, so that its own time stands in front of each. Rows whose name ends
in "-train" time a forward and its backward, by the statistics of the batch where it ends in
"-bn-train", and those that end in "-sizes" the first call at each of six sizes in turn. "inductor"
compiles the whole model; "-graph" captures one call of it in a hand-made CUDA graph, where there is
a GPU. "dynamo_s" is Dynamo's share, as ``strop.explain`` says it, "traces_s" the shares of Dynamo
and of Strop in each compile, and "second_to_first" how much longer a second one took, where there
is one. Weights are random, at full size.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.new_process import measured_alone

IN_A_ROW = 10  # calls of a sample that are launched without waiting
ROWS = {  # model, size or tokens, batch
    "sd15": ("sd15-unet", (512, 512), 2),
    "sdxl": ("sdxl-unet", (1024, 1024), 2),
    "sd3": ("sd3-medium", (1024, 1024), 2),
    "bert": ("bert-base", (1, 128), 8),
    "resnet50": ("resnet50", (224, 224), 8),
    "sd15-train": ("sd15-unet", (512, 512), 4),
    "sdxl-train": ("sdxl-unet", (1024, 1024), 1),
    "sd3-train": ("sd3-medium", (1024, 1024), 1),
    "resnet50-train": ("resnet50", (224, 224), 8),
    "resnet50-bn-train": ("resnet50", (224, 224), 8),
    "bert-train": ("bert-base", (1, 128), 8),
    "sd15-sizes": ("sd15-unet", (512, 512), 2),
}
SIX = (  # batch, height, width
    (2, 512, 512),
    (2, 512, 768),
    (4, 640, 512),
    (3, 768, 768),
    (2, 1024, 576),
    (6, 448, 640),
)
Call = Callable[[], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", default="sd15,sdxl,sd3,bert,resnet50,sd15-train,sd15-sizes")
    parser.add_argument("--contenders", default="backend,optimize,inductor,inductor-graph,eager")
    parser.add_argument("--samples", type=int, default=20, help="of each way to time calls (20)")
    parser.add_argument("--out", type=Path, help="JSON file for every number")
    parser.add_argument("--tiny", action="store_true", help="tiny models: to try this out")
    parser.add_argument("--one", nargs=2, metavar=("ROW", "CONTENDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measured_here(*args.one, args.samples, is_tiny=args.tiny)))
        return
    import torch

    from strop.bench import environment, report

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result: dict[str, Any] = {"kind": "torch-compile", "environment": environment.describe(device)}
    rows: dict[str, Any] = {}
    for row in args.rows.split(","):
        rows[row] = {}
        for contender in args.contenders.split(","):
            words = ["--one", row, contender, "--samples", str(args.samples)]
            found = measured_alone(__file__, [*words, *["--tiny"] * args.tiny])
            rows[row][contender] = found
            print(f"{row:15} {contender:15} {found}", flush=True)
            if args.out:
                report.write_json({**result, "rows": rows}, args.out)


def measured_here(row: str, contender: str, num_samples: int, *, is_tiny: bool) -> dict[str, Any]:
    import torch

    from strop.bench.infer_rows import MODELS
    from strop.bench.timer import captured, synchronise

    name, size, batch = ROWS[row]
    kind = MODELS[name]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    is_trained, has_sizes = row.endswith("-train"), row.endswith("-sizes")
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    workload = (kind.tiny if is_tiny else kind.full)(1)(device, dtype)
    model = workload.target
    if is_trained:
        model.requires_grad_(True).train(row.endswith("-bn-train"))
    fast = prepared(model, contender, is_trained)
    sizes = [(batch, *size)] if not has_sizes else list(SIX)
    if is_tiny:
        smaller = (
            (one, kind.tiny_size or (rows // 8, columns // 8)) for one, rows, columns in sizes
        )
        sizes = [(one, *size) for one, size in smaller]
    given = (workload.inputs((rows, columns), one) for one, rows, columns in sizes)
    calls = [step_of(fast, each, is_trained) for each in given]
    seconds = []
    for call in calls:
        synchronise(device)
        start = time.perf_counter()
        call()
        synchronise(device)
        seconds.append(round(time.perf_counter() - start, 3))
    found: dict[str, Any] = {"first_s": seconds[0]}
    if has_sizes:
        found |= {"sizes": sizes, "first_calls_s": seconds, "all_s": round(sum(seconds), 3)}
    if contender.endswith("-graph"):
        if device.type != "cuda" or is_trained:
            return {"left_out": "a hand-made graph needs a GPU, and a call without a backward"}
        with torch.no_grad():
            calls = [captured(call) for call in calls]
    found["samples_ms"] = [samples_of(call, device, num_samples, IN_A_ROW) for call in calls]
    found["waited_ms"] = [samples_of(call, device, num_samples, 1) for call in calls]
    return found | counts_of(fast, contender)


def samples_of(call: Call, device: Any, count: int, in_a_row: int) -> list[float]:
    """Return milliseconds of a call of so many in a row, after some that capture and warm up."""
    from strop.bench.timer import elapsed_ms

    for _ in range(5):
        call()
    return [round(elapsed_ms(call, device, in_a_row), 4) for _ in range(count)]


def prepared(model: Any, contender: str, is_trained: bool) -> Any:
    import torch

    import strop

    if contender == "optimize":
        return strop.optimize(model, train=is_trained)
    if contender == "backend":
        return torch.compile(model, backend="strop")
    if contender.startswith("inductor"):
        return torch.compile(model)
    if contender != "eager":
        raise SystemExit(f"there is no contender {contender!r}")
    return model


def step_of(model: Any, given: Any, is_trained: bool) -> Call:
    import torch

    def step() -> Any:
        with contextlib.nullcontext() if is_trained else torch.no_grad():
            result = model(**given)
        first = tensors_of(result)[0]
        if is_trained:
            first.float().square().mean().backward()
        return first

    return step


def tensors_of(result: Any) -> Sequence[Any]:
    from torch.utils import _pytree as pytree

    return pytree.tree_leaves(result.to_tuple() if hasattr(result, "to_tuple") else result)


def counts_of(model: Any, contender: str) -> dict[str, Any]:
    if contender not in ("backend", "optimize"):
        return {}
    import strop

    report = strop.explain(model)
    found: dict[str, Any] = {"stages_s": report.stage_seconds(), "counts": report.summary()}
    if contender == "backend":
        from strop.dispatch.torch_compile import FRAMES

        clock = FRAMES.clock
        found["dynamo_s"] = round(clock.dynamo_seconds, 3)
        found["num_traces"] = clock.num_traces
        found["traces_s"] = [
            {"dynamo": round(trace.dynamo_seconds, 3), "strop": round(trace.own_seconds, 3)}
            for trace in clock.traces
        ]
        if clock.num_traces > 1:
            first, second = (trace.seconds for trace in clock.traces[:2])
            found["second_to_first"] = round(second / first, 3)
        found["notes"] = list(report.notes)
    return found


if __name__ == "__main__":
    main()
