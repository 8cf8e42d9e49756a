"""Tell what a bug report needs to say about a machine (``strop env``)."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

import strop
from strop.cli.mistakes import reported
from strop.options import Options

EXAMPLES = """[bold]Examples[/]
$ strop env
$ strop env --json | python -m json.tool
$ STROP_CACHE_DIR=/tmp/cache strop env
"""
PACKAGES = ("torch", "triton", "diffusers", "transformers", "accelerate", "peft", "numpy")
Facts = dict[str, Any]


@reported
def command(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Show versions, processor, compiler, GPUs and cache, ready to paste into a bug report."""
    facts = describe(Options.from_environment())
    typer.echo(json.dumps(facts, indent=1) if as_json else as_text(facts))


def describe(options: Options) -> Facts:
    """Return all facts by section. This only reads."""
    return {
        "strop": strop.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": {name: _version(name) for name in PACKAGES},
        "cpu": _cpu(),
        "gpus": _gpus(),
        "cache": _cache(options.cache_path),
        "options": {
            f.name: getattr(options, f.name)
            for f in fields(options)
            if getattr(options, f.name) != f.default
        },
    }


def as_text(facts: Facts) -> str:
    """Return one line per fact."""
    lines = []
    for name, value in facts.items():
        if isinstance(value, list):
            lines += [f"{name}[{n}]: {_inline(item)}" for n, item in enumerate(value)]
            lines += [] if value else [f"{name}: none"]
        elif isinstance(value, dict):
            lines.append(f"{name}: {_inline(value) or 'defaults'}")
        else:
            lines.append(f"{name}: {value}")
    return "\n".join(lines)


def _inline(facts: Facts) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in facts.items())


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _cpu() -> Facts:
    import torch

    from strop.runtime.build.processors import target_flags

    return {
        "name": _cpu_name(),
        "threads": torch.get_num_threads(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "target": " ".join(target_flags()),
        "compiler": _compiler(),
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def _compiler() -> str:
    """Return the first line of ``g++ --version``."""
    if shutil.which("g++") is None:
        return "g++ absent: CPU kernels cannot be built (Debian, Ubuntu: apt-get install g++)"
    done = subprocess.run(
        ["g++", "--version"], capture_output=True, text=True, check=False, timeout=20
    )
    return done.stdout.partition("\n")[0] or "g++ does not run"


def _gpus() -> list[Facts]:
    import torch

    if not torch.cuda.is_available():
        return []

    from strop.runtime.build import driver

    found = []
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        found.append(
            {
                "name": gpu.name,
                "capability": f"{gpu.major}.{gpu.minor}",
                "memory": bytes_text(gpu.total_memory),
                "multiprocessors": gpu.multi_processor_count,
                "cuda": torch.version.cuda,
                "driver": f"for CUDA {driver.version()}",
                "cudnn": torch.backends.cudnn.version(),
            }
        )
    return found


def _cache(folder: Path) -> Facts:
    from strop.runtime.build.cache import KINDS

    files = [f for kind in KINDS for f in (folder / kind).glob("*") if f.is_file()]
    home = Path.home()
    shown = f"~/{folder.relative_to(home)}" if folder.is_relative_to(home) else str(folder)
    size = sum(f.stat().st_size for f in files)
    return {"folder": shown, "entries": len(files), "size": bytes_text(size), "bytes": size}


def bytes_text(count: int) -> str:
    """Write a number of bytes as in "3.2 MiB"."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.4g} {unit}"
        amount /= 1024
    return f"{amount:.4g} GiB"
