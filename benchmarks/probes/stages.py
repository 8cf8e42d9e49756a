"""When is the host through with each part of a picture, and when is the GPU?

python benchmarks/probes/stages.py [P5-512 P5x ...] --out FOLDER

Rows of pictures of ``strop bench infer``, optimised, no profiler: milliseconds from the call until
the host begins and ends each part of the pipeline, and until the GPU has done its work. Where the
two are as one, the GPU waits for the host. Medians of eleven pictures. Behind that, what Python
does in one picture, by cProfile.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import pstats
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import contest
import torch

import strop
from strop.bench.infer_contenders import Field
from strop.bench.infer_rows import chosen_rows
from strop.dispatch.dispatcher import Dispatcher
from strop.dispatch.module_state import ModuleState
from strop.runtime.run.cuda_graphs import Captured, GraphPool
from strop.runtime.run.executor import Bound

DEVICE, PICTURES, SHOWN = torch.device("cuda"), 11, 90
FIRST_STEPS = "unet 3"  # until when all is printed
# of a pipeline, where they are
PARTS = (
    "check_inputs",
    "encode_prompt",
    "maybe_convert_prompt",
    "tokenizer.__call__",
    "tokenizer_2.__call__",
    "scheduler.set_timesteps",
    "prepare_latents",
    "image_processor.preprocess",
    "vae.encode",
    "scheduler.add_noise",
    "prepare_extra_step_kwargs",
    "scheduler.step",
    "vae.decode",
    "image_processor.postprocess",
)
# of ours, by the class
OURS: tuple[tuple[Any, str], ...] = (
    (Dispatcher, "_serve_any"),
    (Dispatcher, "_has_changed"),
    (ModuleState, "has_moved"),
    (GraphPool, "run"),
    (Captured, "replay"),
    (Bound, "make_timetable"),
    (torch.cuda.CUDAGraph, "replay"),
)
INNER = frozenset(kind.__name__ for kind, _ in OURS)


class Marks:
    """Times of one picture, by part and how often it has been called."""

    def __init__(self) -> None:
        self.host: dict[str, tuple[float, float]] = {}
        self.events: dict[str, torch.cuda.Event] = {}
        self.counts: Counter[str] = Counter()
        self.begin = time.perf_counter()
        self.first = torch.cuda.Event(enable_timing=True)
        self.first.record()

    def around(self, part: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = call(*args, **kwargs)
        end = time.perf_counter()
        self.counts[part] += 1
        name = f"{part} {self.counts[part]}"
        self.host[name] = (start - self.begin, end - self.begin)
        if part.split(".")[0] not in INNER:  # an event costs some microseconds
            self.events[name] = torch.cuda.Event(enable_timing=True)
            self.events[name].record()
        return result

    def times(self) -> dict[str, tuple[float, float, float]]:
        torch.cuda.synchronize()
        done = {name: self.first.elapsed_time(event) for name, event in self.events.items()}
        return {
            name: (start * 1e3, end * 1e3, done.get(name, float("nan")))
            for name, (start, end) in self.host.items()
        }


class Watch:
    """Stands around the parts of a pipeline. ``marks``: of the picture at hand."""

    def __init__(self, pipe: Any) -> None:
        self.marks = Marks()
        for kind, name in OURS:  # by the class: a forward that somebody replaces is looked at
            self._replace(kind, name, partial(_part_of, f"{kind.__name__}.{name}"))
        for part in PARTS:
            owner = pipe
            *path, name = part.split(".")
            for step in path:
                owner = getattr(owner, step, None)
            if owner is None:
                continue
            if name == "__call__":
                setattr(pipe, path[0], _Called(self, part, owner))
            else:
                self._replace(owner, name, lambda *args, part=part: part)

    def _replace(self, owner: Any, name: str, part_of: Callable[..., str]) -> None:
        call = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            return self.marks.around(part_of(*args), call, *args, **kwargs)

        setattr(owner, name, watched)


def _part_of(name: str, of: Any, *args: Any) -> str:
    """A call of a module of ours by the module's name."""
    return str(of.name) if isinstance(of, Dispatcher) and name.endswith("_serve_any") else name


class _Called:
    """A tokenizer, watched."""

    def __init__(self, watch: Watch, part: str, original: Any) -> None:
        self._watch, self._part, self._original = watch, part, original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._watch.marks.around(self._part, self._original, *args, **kwargs)


def profiled(call: Callable[[], Any]) -> str:
    profile, text = cProfile.Profile(), io.StringIO()
    profile.runcall(call)
    stats = pstats.Stats(profile, stream=text).strip_dirs()
    stats.sort_stats("cumulative").print_stats(SHOWN)
    stats.sort_stats("tottime").print_stats(SHOWN)
    return text.getvalue()


@torch.no_grad()
def measure(name: str, out: Path) -> dict[str, Any]:
    (row,) = chosen_rows([name])
    field = Field(row.case(torch.float16), DEVICE, strop.Options(strict=True))
    call, *_ = field.start("strop", row.size, row.batch)
    field.wait()
    for _ in range(3):
        call()
    text = profiled(call)
    (out / f"cprofile-{name}.txt").write_text(text)
    watch = Watch(field.target)
    seen = defaultdict[str, list[tuple[float, float, float]]](list)
    totals = []
    for _ in range(PICTURES):
        torch.cuda.synchronize()
        watch.marks = Marks()
        call()
        torch.cuda.synchronize()
        totals.append((time.perf_counter() - watch.marks.begin) * 1e3)
        for part, times in watch.marks.times().items():
            seen[part].append(times)
    parts = {
        part: [round(statistics.median(column), 3) for column in zip(*times, strict=True)]
        for part, times in seen.items()
    }
    return {"row": name, "ms": round(statistics.median(totals), 3), "parts": parts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", default=["P5-512"])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows = []
    for name in args.rows:
        rows.append(found := measure(name, args.out))
        print(f"{name}: {found['ms']} ms; host begins, ends; GPU is done")
        begins = found["parts"][FIRST_STEPS][0]
        for part, (start, end, done) in sorted(found["parts"].items(), key=lambda each: each[1]):
            if start <= begins or start > 0.9 * found["parts"]["vae.decode 1"][0]:
                print(f"  {start:9.3f} {end:9.3f} {done:9.3f}  {part}", flush=True)
    contest.write("stages", args, {"rows": rows})


if __name__ == "__main__":
    main()
