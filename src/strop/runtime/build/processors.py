"""Say for which processors C++ is compiled, and which of them this machine's is."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from strop.errors import OptionError, UnsupportedError
from strop.ir.device import CPU, Device

X86, ARM = "x86-64", "AArch64"


@dataclass(frozen=True, slots=True)
class CpuTarget:
    """Describe processors of one ``kind`` that can do so much: the compiler's ``flags``, the vector
    instructions ``isa`` of kernels written by hand (``Device.isa``), and ``features``, which are
    all named in /proc/cpuinfo of a processor that it fits."""

    kind: str
    flags: tuple[str, ...]
    isa: str = ""
    features: frozenset[str] = frozenset()


# What a processor is called among the targets of an artefact: few of them, so that a cache can be
# shared. Those of one kind are in order, the most able first, and each can run what is below it.
# "v8.6" names its products of bf16 and int8, which processors without the rest of Armv8.6 have too.
_V8_2 = frozenset({"atomics", "asimdhp", "asimdrdm", "asimddp"})
_V8_6 = _V8_2 | {"i8mm", "bf16"}
# g++ 12 loses sums of loops that it runs by vectors with some lanes off, as SVE can: results were 0
# or NaN (``tests/codegen/test_aarch64.py``). What fills no vector is computed one by one.
_WHOLE_VECTORS = "--param=vect-partial-vector-usage=0"
TARGETS: Mapping[str, CpuTarget] = {
    "cpu-v4": CpuTarget(X86, ("-march=x86-64-v4", "-mprefer-vector-width=512"), "avx512"),
    "cpu-v3": CpuTarget(X86, ("-march=x86-64-v3",), "avx2"),
    "cpu-v1": CpuTarget(X86, ("-march=x86-64",)),
    "aarch64-sve": CpuTarget(
        ARM,
        ("-march=armv8.2-a+fp16+dotprod+i8mm+bf16+sve", _WHOLE_VECTORS),
        "neon_bf16",
        _V8_6 | {"sve"},
    ),
    "aarch64-v8.6": CpuTarget(
        ARM, ("-march=armv8.2-a+fp16+dotprod+i8mm+bf16",), "neon_bf16", _V8_6
    ),
    "aarch64-v8.2": CpuTarget(ARM, ("-march=armv8.2-a+fp16+dotprod",), "neon", _V8_2),
    "aarch64-v8": CpuTarget(ARM, ("-march=armv8-a",), "neon"),
}
# what compiles for another kind of processors than this one's, as Debian calls it
CROSS_COMPILERS: Mapping[str, str] = {X86: "x86_64-linux-gnu-g++", ARM: "aarch64-linux-gnu-g++"}
COMPILER = "g++"

# What macOS calls the features; all processors of Apple's have the others of ``_V8_2``.
_OF_MACOS: Mapping[str, tuple[str, ...]] = {
    "FEAT_DotProd": ("atomics", "asimdhp", "asimdrdm", "asimddp"),
    "FEAT_I8MM": ("i8mm",),
    "FEAT_BF16": ("bf16",),
}


def check_system() -> None:
    """Raise UnsupportedError on systems for which no kernels are built: all but Linux."""
    name = platform.system()
    if name != "Linux":
        shown = {"Darwin": "macOS", "": "unknown"}.get(name, name)
        raise UnsupportedError(
            f"Strop compiles models on Linux only, and this system is {shown}: run the model"
            " without strop.optimize here, or on Linux (Windows: WSL 2; macOS: the Dockerfile)"
        )


def kind_here() -> str:
    """Return the kind of this machine's processor."""
    return ARM if platform.machine() in ("aarch64", "arm64") else X86


@cache
def target_name() -> str:
    """Return the target of this processor."""
    if kind_here() == ARM:
        return target_of_features(_features())
    capability = torch.backends.cpu.get_cpu_capability()
    return {"AVX512": "cpu-v4", "AVX2": "cpu-v3"}.get(capability, "cpu-v1")


def target_of_features(features: Collection[str]) -> str:
    """Return the most able target of an AArch64 processor with these features, by the names of
    /proc/cpuinfo."""
    has = frozenset(features)
    return next(name for name, row in TARGETS.items() if row.kind == ARM and row.features <= has)


def _features() -> Collection[str]:
    if platform.system() == "Darwin":
        asked = {name: f"hw.optional.arm.{name}" for name in _OF_MACOS}
        return [f for name, key in asked.items() if _is_set(key) for f in _OF_MACOS[name]]
    info = Path("/proc/cpuinfo")
    return features_of(info.read_text() if info.is_file() else "")


def features_of(cpuinfo: str) -> frozenset[str]:
    """Return what all cores of an AArch64 processor have, from the text of /proc/cpuinfo."""
    rows = (line.partition(":") for line in cpuinfo.splitlines())
    listed = [frozenset(text.split()) for name, _, text in rows if name.strip() == "Features"]
    return frozenset.intersection(*listed) if listed else frozenset()


def _is_set(key: str) -> bool:
    done = subprocess.run(["sysctl", "-n", key], capture_output=True, text=True, check=False)
    return done.stdout.strip() == "1"


def check_runs_here(target: str) -> None:
    """Raise OptionError for what is no target, or one that this processor cannot run."""
    here = target_name()
    able = targets_below(here)
    if target not in TARGETS:
        raise OptionError(
            f"target={target!r}: there is no such target; this processor runs {', '.join(able)}"
        )
    if target not in able:
        raise OptionError(
            f"target={target!r}: this processor is {here}, and runs kernels for {', '.join(able)};"
            f" `strop build --target {target}` makes an artefact for others"
        )


def targets_below(target: str) -> tuple[str, ...]:
    """Return all targets whose code a processor of one runs, itself first."""
    of_kind = [name for name, row in TARGETS.items() if row.kind == TARGETS[target].kind]
    return tuple(of_kind[of_kind.index(target) :])


def compiler_for(target: str, cross: str = "") -> str:
    """Return the command that compiles for a target: g++, or the cross compiler, as given or
    as Debian calls it, for another kind of processors."""
    kind = TARGETS[target].kind
    return COMPILER if kind == kind_here() else cross or CROSS_COMPILERS[kind]


def processor(target: str = "") -> Device:
    """Describe a processor by a target, or this one, which may be able to do more."""
    isa = TARGETS[target or target_name()].isa
    if not target and isa == "avx512" and torch.cpu._is_avx512_bf16_supported():
        isa = "avx512_bf16"
    has_vnni = not target and isa.startswith("avx512") and torch.cpu._is_vnni_supported()
    return replace(CPU, isa=isa, has_vnni=has_vnni)


def target_flags(target: str = "") -> tuple[str, ...]:
    """Return the compiler's flags for a target, or for this processor."""
    return TARGETS[target or target_name()].flags
