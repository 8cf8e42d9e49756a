"""Try what Strop needs on a machine, and say what is missing and how to get it
(``strop doctor``)."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from strop.cli.env import bytes_text
from strop.cli.mistakes import plain, reported
from strop.errors import StropError
from strop.options import Options

if TYPE_CHECKING:
    import torch

EXAMPLES = """[bold]Examples[/]
$ strop doctor
$ strop doctor --json
$ STROP_CACHE_DIR=/scratch/strop strop doctor
"""
OK, ADVICE, FAULT = "ok", "advice", "fault"
_MARKS = {OK: "[green]ok[/]     ", ADVICE: "[yellow]advice[/] ", FAULT: "[bold red]fault[/]  "}
LEAST_FREE_BYTES = 1 << 30  # kernels and plans of a few models
OLDEST_CAPABILITY = (8, 0)  # that Triton compiles for
EXTRAS = {  # what cannot be done without them
    "diffusion": "pipelines of diffusers, strop generate",
    "train": "strop train",
    "optimizers": "strop train --optimizer of other libraries",
    "quantised": "strop train --base_weights",
    "serve": "strop serve",
    "ray": "strop serve --ray",
    "sign": "signatures of artefacts",
}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Say what was looked at, how it stands ("ok", "advice" or "fault"), and what to do about it.
    Without a fault models are compiled on some device; advice names what would be there else."""

    name: str
    state: str
    text: str
    remedy: str = ""


@reported
def command(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Compile a small model on each device, look for packages and room, and say what is missing.

    Ends with 1 if there is a fault, without which Strop would serve no model here."""
    options, found = Options.from_environment(), list[Diagnosis]()
    for finding in examine(options):
        found.append(finding)
        if not as_json:
            _print(finding)
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in found], indent=1))
    if any(finding.state == FAULT for finding in found):
        raise typer.Exit(1)


def _print(finding: Diagnosis) -> None:
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"{_MARKS[finding.state]} {finding.name}: {plain(finding.text)}")
    if finding.remedy:
        console.print(f"        -> {plain(finding.remedy)}")


def examine(options: Options) -> Iterator[Diagnosis]:
    """Yield a finding for each thing that is looked at, as soon as it is known. Where the system is
    another one than Linux, nothing else is looked at."""
    if found := [*_system(options)]:
        yield from found
        return
    for check in CHECKS:
        yield from check(options)


def _system(options: Options) -> Iterator[Diagnosis]:
    from strop.runtime.build.processors import check_system

    try:
        check_system()
    except StropError as error:
        what, _, how = str(error).partition(": ")
        yield Diagnosis("system", FAULT, what, how)


def _torch(options: Options) -> Iterator[Diagnosis]:
    wanted, version = _requirement("torch"), importlib.metadata.version("torch")
    if _is_in(version, wanted):
        yield Diagnosis("torch", OK, version)
    else:
        how = f'pip install "torch{wanted}"'
        yield Diagnosis("torch", FAULT, f"{version}, which Strop is not tested with", how)


def _cache(options: Options) -> Iterator[Diagnosis]:
    folder = options.cache_path
    above = next(path for path in (folder, *folder.parents) if path.exists())
    other = "set STROP_CACHE_DIR to a folder that can be written, with room"
    if not os.access(above, os.W_OK):
        text = f"{folder} cannot be written: kernels are built again in each process"
        yield Diagnosis("cache", ADVICE, text, other)
        return
    free = shutil.disk_usage(above).free
    text = f"{folder} has {bytes_text(free)} of room"
    is_enough = free >= LEAST_FREE_BYTES
    yield Diagnosis("cache", OK if is_enough else ADVICE, text, "" if is_enough else other)


def _cpu(options: Options) -> Iterator[Diagnosis]:
    import torch

    yield _tried(
        torch.device("cpu"),
        "install g++ 11 or newer (Debian, Ubuntu: apt-get install g++; Fedora: dnf install"
        " gcc-c++)",
    )


def _gpus(options: Options) -> Iterator[Diagnosis]:
    import torch

    if not torch.cuda.is_available():
        yield _without_gpu()
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        if (properties.major, properties.minor) < OLDEST_CAPABILITY:
            capability = f"{properties.major}.{properties.minor}"
            text = f"{properties.name} has compute capability {capability}; models run in eager"
            yield Diagnosis(
                f"cuda:{index}", ADVICE, text, "kernels need 8.0 or newer: docs/devices.md"
            )
        else:
            yield _tried(
                torch.device("cuda", index),
                "pip install triton, in the version that torch names, and a driver for CUDA"
                f" {torch.version.cuda} or newer",
            )


def _without_gpu() -> Diagnosis:
    import torch

    if not Path("/proc/driver/nvidia/version").exists() and shutil.which("nvidia-smi") is None:
        return Diagnosis("gpu", OK, "none here: models on a CPU are compiled")
    if torch.version.cuda is None:
        text = f"there is an NVIDIA driver, but torch {torch.__version__} is a build for CPUs"
        how = "install a CUDA build of torch: https://pytorch.org/get-started/locally"
        return Diagnosis("gpu", ADVICE, text, how)
    text = f"torch for CUDA {torch.version.cuda} finds no GPU"
    return Diagnosis(
        "gpu", ADVICE, text, "see nvidia-smi, the driver's CUDA, and CUDA_VISIBLE_DEVICES"
    )


def _tried(device: torch.device, remedy: str) -> Diagnosis:
    """Compile a small model into a cache of its own, and compare its result with eager's."""
    import torch
    from torch import nn

    import strop

    name = "cpu" if device.type == "cpu" else f"{device} ({torch.cuda.get_device_name(device)})"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)).eval().to(device)
    x = torch.randn(5, 64, device=device)
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        expected = model(x)
        try:
            strop.optimize(model, options=Options.from_environment(cache_dir=folder, strict=True))
            found = model(x)
        except (StropError, ImportError, OSError) as error:
            return Diagnosis(name, FAULT, f"a small model cannot be compiled: {error}", remedy)
        strop.restore(model)
    if not torch.allclose(found, expected, rtol=1e-4, atol=1e-5):
        text = "a small model gives another result than eager"
        return Diagnosis(name, FAULT, text, "this is a bug: report it with what strop env says")
    return Diagnosis(name, OK, "compiles and runs a small model, with eager's result")


def _extras(options: Options) -> Iterator[Diagnosis]:
    from packaging.requirements import Requirement

    every = [Requirement(text) for text in importlib.metadata.requires("strop") or ()]
    known = importlib.metadata.metadata("strop").get_all("Provides-Extra") or ()
    for extra, what in EXTRAS.items():
        if extra not in known:
            text = f"{what}: the installed package is older than its code, and does not name it"
            yield Diagnosis(extra, ADVICE, text, "install Strop again: pip install -e .")
            continue
        wanted = [each for each in every if each.marker and each.marker.evaluate({"extra": extra})]
        missing = [text for each in wanted if (text := _lack(each.name, str(each.specifier)))]
        if missing:
            how = f"pip install 'strop[{extra}]'"
            yield Diagnosis(extra, ADVICE, f"{what}: without {', '.join(missing)}", how)
        else:
            yield Diagnosis(extra, OK, f"{what}: all packages are there")


def _lack(package: str, specifier: str) -> str:
    """Return what is missing of a package, or nothing."""
    if package == "strop":
        return ""
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return package
    return "" if _is_in(version, specifier) else f"{package}{specifier} ({version} is there)"


def _is_in(version: str, specifier: str) -> bool:
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(specifier).contains(version.partition("+")[0], prereleases=True)


def _requirement(package: str) -> str:
    """Return the versions of a package that Strop needs."""
    from packaging.requirements import Requirement

    every = (Requirement(text) for text in importlib.metadata.requires("strop") or ())
    return next((str(r.specifier) for r in every if r.name == package and not r.marker), "")


CHECKS: Sequence[Callable[[Options], Iterator[Diagnosis]]] = (_torch, _cache, _cpu, _gpus, _extras)
