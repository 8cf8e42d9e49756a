"""Describe where a number was measured. Everything is read, nothing is set."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

import strop

_PACKAGES = ("torch", "triton", "diffusers", "transformers", "numpy")
_GPU_FIELDS = (
    "driver_version",
    "clocks.sm",
    "clocks.max.sm",
    "clocks.mem",
    "power.limit",
    "temperature.gpu",
    "utilization.gpu",
)


# A GPU at its power limit lowers its clock: a step that runs alone is faster than many in a row.
_LOAD_FIELDS = ("clocks.sm", "power.draw.instant", "temperature.gpu")
_LOAD_S = 0.5  # until clocks have settled


def describe(device: torch.device) -> dict[str, Any]:
    """Return versions, machine and commit, for the JSON of a result."""
    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "strop": strop.__version__,
        "python": platform.python_version(),
        **{name: version_of(name) for name in _PACKAGES},
        "cpu": cpu_name(),
        "cpu_vectors": torch.backends.cpu.get_cpu_capability(),  # names of processors hide them
        "cpu_threads": torch.get_num_threads(),
        "commit": commit(),
        "switches": switches(),
    }
    if device.type == "cuda":
        found |= {
            "gpu": torch.cuda.get_device_name(device),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            **gpu_state(),
        }
    return found


def switches() -> dict[str, Any]:
    """Return options that the environment sets to another value than the default; no folders."""
    given, usual = strop.Options.from_environment(), strop.Options()
    values = {knob.name: getattr(given, knob.name) for knob in fields(given)}
    return {
        name: value
        for name, value in values.items()
        if name not in ("cache_dir", "dump") and value != getattr(usual, name)
    }


def device_label(device: torch.device) -> str:
    """Return a short name for files: "h100", "cpu", or "h100-as-sm86" with STROP_ARCH."""
    if device.type != "cuda":
        return device.type
    words = torch.cuda.get_device_name(device).lower().split()
    plain = [w for w in words if w not in ("nvidia", "geforce", "tesla", "80gb", "hbm3", "pcie")]
    arch = strop.Options.from_environment().arch
    return ("-".join(plain) or "gpu") + (f"-as-sm{arch}" if arch else "")


def version_of(package: str) -> str:
    """Return the running version: a package that only lies on the import path has no metadata."""
    loaded = getattr(sys.modules.get(package), "__version__", None)
    if loaded is not None:
        return str(loaded)
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def gpu_state() -> dict[str, str]:
    """Return driver and clocks, as nvidia-smi shows them; empty without it."""
    if shutil.which("nvidia-smi") is None:
        return {}
    return _values(_output(_query(_GPU_FIELDS)), _GPU_FIELDS)


def gpu_load(call: Callable[[], object], settle_s: float = _LOAD_S) -> dict[str, str]:
    """Return clock, power and temperature while ``call``, which returns when its work is done, runs
    again and again; empty without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return {}
    end = time.monotonic() + settle_s
    while time.monotonic() < end:
        call()
    with subprocess.Popen(_query(_LOAD_FIELDS), stdout=subprocess.PIPE, text=True) as asked:
        while asked.poll() is None:
            call()
        assert asked.stdout is not None
        return _values(asked.stdout.read().strip(), _LOAD_FIELDS)


def _query(names: Sequence[str]) -> list[str]:
    return ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader"]


def _values(text: str, names: Sequence[str]) -> dict[str, str]:
    values = text.splitlines()[0].split(", ") if text else []
    return dict(zip(names, values, strict=False))


def commit() -> str:
    """Return the commit of the checkout that this package runs from, and whether files differ from
    it; empty when it was installed."""
    root = Path(strop.__file__).parents[2]
    if shutil.which("git") is None or not (root / ".git").exists():
        return ""
    head = _output(["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"])
    changed = _output(["git", "-C", str(root), "status", "--porcelain", "--", "src"])
    return f"{head} with changes" if head and changed else head


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
