"""List a model's kernels that are farthest above what the device could do (``strop bench
worst``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from strop.api import optimize
from strop.bench import environment
from strop.bench import models as builds
from strop.bench.infer_contenders import DTYPES
from strop.bench.models import Build, Size
from strop.bench.network_models import NETWORKS
from strop.bench.transformer_models import TRANSFORMERS
from strop.bench.zoo import ZOO
from strop.bench.zoo_inputs import Inputs
from strop.debug.costs import SHORT_US, TOO_SLOW
from strop.debug.profile import profiled
from strop.debug.roofline import ProfileRow, TimedStep
from strop.errors import OptionError
from strop.options import Options

ROUNDS = 3  # profiles of a call


@dataclass(frozen=True, slots=True)
class WorstKernel:
    """Describe launches of one kernel on as many bytes; times and bytes are those of one launch.
    ``us`` is their mean, and ``low_us`` and ``high_us`` are the extremes. ``times``: its bound, or
    what a kernel takes that has next to nothing to do."""

    title: str
    kind: str
    count: int
    us: float
    low_us: float
    high_us: float
    bound_us: float
    estimated_us: float
    bytes_moved: int
    num_programs: int  # 0 where unknown
    times: float
    is_too_slow: bool


def worst_kernels(profiles: Iterable[ProfileRow], rounds: int = 1) -> tuple[WorstKernel, ...]:
    """Return what was timed, first what is too slow, and of that what loses most in all.
    ``profiles`` hold as many calls as there were ``rounds``."""
    found: dict[tuple[object, ...], list[TimedStep]] = {}
    for step in (step for profile in profiles for step in profile.by_loss):
        key = step.title, step.kind, step.bytes_moved, step.bound_us, step.num_programs
        found.setdefault(key, []).append(step)
    rows = [_row(steps, rounds) for steps in found.values()]
    return tuple(sorted(rows, key=lambda r: (not r.is_too_slow, -r.count * (r.us - r.bound_us))))


def _row(steps: list[TimedStep], rounds: int) -> WorstKernel:
    """Sum up; one launch that is too slow makes all of them so."""
    first, timed = steps[0], sorted(step.us or 0.0 for step in steps)
    us = sum(timed) / len(timed)
    return WorstKernel(
        first.title,
        first.kind,
        len(steps) // rounds,
        round(us, 3),
        round(timed[0], 3),
        round(timed[-1], 3),
        first.bound_us,
        first.estimated_us,
        first.bytes_moved,
        first.num_programs,
        round(us / max(first.bound_us, SHORT_US), 2),
        any(step.is_too_slow for step in steps),
    )


@dataclass(frozen=True, slots=True)
class Subject:
    """Say how a model is made at full size, and which call of it is timed."""

    build: Build
    size: Size
    batch: int
    dtype: torch.dtype = torch.float16  # on a GPU


SUBJECTS: Mapping[str, Subject] = {
    "sd15-unet": Subject(builds.unet_workload(builds.SD15_UNET), (512, 512), 2),
    "sdxl-unet": Subject(builds.unet_workload(builds.SDXL_UNET), (1024, 1024), 2),
    "sd-vae": Subject(builds.vae_workload(builds.SD_VAE), (512, 512), 1),
    "flux": Subject(TRANSFORMERS["flux"][0], (1024, 1024), 1, torch.bfloat16),
    "wan": Subject(TRANSFORMERS["wan"][0], (480, 832), 1, torch.bfloat16),
    **{
        network.name: Subject(network.full, network.size, 2, DTYPES[network.dtype])
        for network in NETWORKS
    },
}


def names() -> tuple[str, ...]:
    """Return those at full size, then the zoo's, which are tiny."""
    return (*SUBJECTS, *(model.name for model in ZOO))


def run(name: str, device: torch.device, rounds: int = ROUNDS) -> dict[str, Any]:
    """Compile a model, time each step of one call so many times over, and return the kernels, the
    worst first."""
    module, inputs, dtype = _made(name, device)
    optimize(module, options=Options.from_environment(record=True))
    profiles, calls_us = list[ProfileRow](), list[float]()
    for _ in range(rounds):
        report = profiled(module, **inputs)
        found = [c.profile for c in report.components if c.profile]
        if not found:
            raise OptionError(f"{name} cannot be timed: {'; '.join(report.notes)}")
        profiles += found
        calls_us.append(round(sum(p.call_us for p in found), 3))
    kernels = worst_kernels(profiles, rounds)
    return {
        "kind": "worst",
        "model": name,
        "dtype": str(dtype),
        "call_us": sorted(calls_us)[rounds // 2],
        "calls_us": calls_us,
        "bound_us": round(sum(p.bound_us for p in profiles) / rounds, 3),
        "method": profiles[0].method,
        "ceilings": str(profiles[0].ceilings),
        "num_too_slow": sum(kernel.count for kernel in kernels if kernel.is_too_slow),
        "kernels": [asdict(kernel) for kernel in kernels],
        "environment": environment.describe(device),
    }


def _made(name: str, device: torch.device) -> tuple[Any, Mapping[str, Any], torch.dtype]:
    if name in SUBJECTS:
        subject = SUBJECTS[name]
        dtype = subject.dtype if device.type == "cuda" else torch.float32
        work = subject.build(device, dtype)
        return work.target, work.inputs(subject.size, subject.batch), dtype
    model = next(model for model in ZOO if model.name == name)
    (shape,) = model.sizes.some(1)
    return model.made().to(device), _on(device, model.given(shape)), torch.float32


def _on(device: torch.device, inputs: Inputs) -> Inputs:
    move: Callable[[Any], Any] = lambda value: value.to(device)  # noqa: E731
    return dict(torch.utils._pytree.tree_map_only(torch.Tensor, move, inputs))


def rows_of(result: Mapping[str, Any], top: int) -> list[tuple[str, ...]]:
    """Return the table, its header first; all that are too slow are in it."""
    kernels = result["kernels"]
    shown = kernels[: max(top, sum(kernel["is_too_slow"] for kernel in kernels))]
    times = ("us", "from", "to", "bound", "estimated")
    header = ("kernel", "count", *times, "MB", "programs", "x bound", "")
    return [header, *map(_line, shown)]


def _line(kernel: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        kernel["title"],
        str(kernel["count"]),
        f"{kernel['us']:.1f}",
        f"{kernel['low_us']:.1f}",
        f"{kernel['high_us']:.1f}",
        f"{kernel['bound_us']:.1f}",
        f"{kernel['estimated_us']:.1f}",
        f"{kernel['bytes_moved'] / 1e6:.2f}",
        str(kernel["num_programs"] or "-"),
        f"{kernel['times']:.1f}",
        f"more than {TOO_SLOW} x" if kernel["is_too_slow"] else "",
    )
