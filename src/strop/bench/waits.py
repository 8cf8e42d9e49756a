"""Time what a user waits for behind each change of a pipeline: eager, compiled, with Strop."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

import strop
from strop.api import dispatchers_of
from strop.bench.infer_contenders import Deadline, Found, attempt
from strop.bench.timer import peak, synchronise, wall_ms
from strop.bench.wait_changes import CHANGES, FIRST, LORA, Change
from strop.bench.wait_models import MODELS
from strop.bench.wait_profile import profiled
from strop.bench.wait_scene import Given, Scene
from strop.runtime.build.compilers import BUILDS
from strop.runtime.run import cuda_graphs

Counts = dict[str, float]
COMPILE_S = "compile_s"  # among counts: the seconds that torch's compilers took


def _no_counts(pipe: Any) -> Counts:
    return {}


@dataclass(frozen=True, slots=True)
class Way:
    """Describe a way to run a pipeline. ``compiler`` compiles; ``by_blocks``: the repeated blocks
    of the denoiser alone, also where diffusers' pages compile the whole. ``is_swapping``: with
    diffusers' hot-swap of LoRAs."""

    title: str
    compiler: str = ""
    by_blocks: bool = False
    is_swapping: bool = False

    @property
    def counts(self) -> Callable[[Any], Counts]:
        return {"strop": _strop_counts, "torch": _dynamo_counts}.get(self.compiler, _no_counts)


WAYS: Mapping[str, Way] = {
    "eager": Way("eager"),
    "strop": Way("Strop", "strop"),
    "compile": Way("torch.compile", "torch"),
    "hotswap": Way("torch.compile, hot-swap", "torch", is_swapping=True),
    "compile-blocks": Way("torch.compile of blocks", "torch", by_blocks=True),
    "hotswap-blocks": Way("torch.compile of blocks, hot-swap", "torch", True, is_swapping=True),
}


def prepare(scene: Scene, way: Way, backend: str) -> None:
    """Do what a user does once with a new pipeline. For hot-swap the first LoRA has to be there
    before anything is compiled."""
    if way.compiler == "strop":
        strop.optimize(scene.pipe)
        scene.adopt = strop.optimize
    if way.compiler != "torch":
        return
    how: dict[str, Any] = {"dynamic": True, "backend": backend}
    is_whole = not (way.by_blocks or scene.model.has_blocks)
    model = scene.denoiser
    scene.compile = partial(model.compile if is_whole else model.compile_repeated_blocks, **how)
    scene.adopt = lambda net: net.compile(**how)
    if way.is_swapping:
        scene.pipe.enable_lora_hotswap(target_rank=scene.rank)
        scene.is_swapping = True
    else:
        scene.compile()


def _strop_counts(pipe: Any) -> Counts:
    """Count what Strop has done for the parts of a pipeline. Kernels that nobody waits for
    are built in the background and do not count."""
    found = Counter[str]()
    for dispatcher in dispatchers_of(pipe).values():
        counters = dispatcher.counters
        found["graph"] += dispatcher.variants.num_captures
        found["binding"] += counters.rebinds
        found["weight write"] += dispatcher.state.effective.num_writes
        found["eager call"] += counters.eager_calls
    found["kernel"] = BUILDS.num_built
    found["CUDA graph"] = sum(pool.num_captures for pool in cuda_graphs._POOLS.values())
    return dict(found)


def _dynamo_counts(pipe: Any) -> Counts:
    """Count what Dynamo has compiled; a frame that failed, or was one too many, runs in eager."""
    from torch._dynamo.utils import calculate_time_spent, counters

    frames = counters["frames"]
    return {
        "graph": counters["stats"]["unique_graphs"],
        "frame": frames["ok"],
        "failed frame": frames["total"] - frames["ok"],
        COMPILE_S: round(calculate_time_spent().get("total_wall_time", 0.0), 2),
    }


@dataclass(frozen=True, slots=True)
class WaitPlan:
    """Say what to time, apart from model and way; plain data, which goes to a process as JSON."""

    groups: tuple[str, ...]
    steps: int = 4
    rank: int = 16
    repeats: int = 2
    is_tiny: bool = False
    backend: str = "inductor"  # of torch.compile


@dataclass
class Session:
    """Change one pipeline in turn, and time it."""

    scene: Scene
    way: Way
    plan: WaitPlan
    profile: Path | None = None  # the folder for a profile of each wait, if they are wanted
    is_prepared: bool = False
    counted: Counts = field(default_factory=dict)

    def timed(self, change: Change) -> Found:
        """Return the seconds of a change, of the picture behind it and of those after that, with
        what was compiled for them."""
        scene, file = self.scene, change.file(self.scene)
        with self._profiled(change):
            start = self._now()
            more = self._acted(change, file)
            acted = self._now()
            with torch.no_grad():
                scene.draw(**more)
            drawn = self._now()
        done, draw = self._done(), partial(scene.draw, **more)
        with torch.no_grad():
            times = [wall_ms(draw, scene.device) for _ in range(self.plan.repeats)]
        seconds = [round(ms / 1e3, 4) for ms in times]
        steady = min(seconds)
        found: Found = {
            "wait_s": round(max(drawn - start - steady, 0.0), 4),
            "change_s": round(acted - start, 4),
            "picture_s": round(drawn - acted, 4),
            "steady_s": steady,
            "samples": seconds,
            "done": done,
            "done_later": self._done(),
        }
        if scene.device.type == "cuda":
            found["peak_gib"] = round(peak(scene.device) / 2**30, 2)
        return found

    def _acted(self, change: Change, file: Any) -> Given:
        if not self.is_prepared:
            prepare(self.scene, self.way, self.plan.backend)
            self.is_prepared = True
        return change.act(self.scene, file) or {}

    def _profiled(self, change: Change) -> AbstractContextManager[None]:
        if self.profile is None:
            return nullcontext()
        return profiled(self.profile / f"{change.name.replace(' ', '_')}.txt")

    def _now(self) -> float:
        synchronise(self.scene.device)
        return time.perf_counter()

    def _done(self) -> Counts:
        """Return what was counted since the last time. Parts that join begin at nothing."""
        before, self.counted = self.counted, self.way.counts(self.scene.pipe)
        found = {name: round(n - before.get(name, 0), 2) for name, n in self.counted.items()}
        return {name: number for name, number in found.items() if number}


def rows_of(
    model: str, way: str, plan: WaitPlan, clock: Deadline, profile: Path | None = None
) -> Iterator[Found]:
    """Time the changes of a model in one way until time is over. What follows a change of its group
    that failed is left out. ``profile``: the folder for a profile of each."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    scene = Scene.of(MODELS[model], device, is_tiny=plan.is_tiny, steps=plan.steps, rank=plan.rank)
    session, failed = Session(scene, WAYS[way], plan, profile), set[str]()
    for change in chosen(way, plan.groups):
        row: Found = {"model": model, "way": way, "change": change.name}
        if clock.left() <= 0:
            yield row | {"skipped": "time was over"}
        elif failed & {FIRST, change.group}:
            yield row | {"skipped": "a change before it failed"}
        else:
            found = attempt(partial(session.timed, change))  # other groups may still be timed
            failed |= {change.group} if "failed" in found else set()
            yield row | found


def chosen(way: str, groups: Sequence[str]) -> list[Change]:
    """Return the changes of these groups, behind the first picture. With hot-swap a model is not
    compiled before its first LoRA, with which it begins."""
    if WAYS[way].is_swapping:
        return [change for change in CHANGES if change.group == LORA and LORA in groups]
    return [change for change in CHANGES if change.group in (FIRST, *groups)]
