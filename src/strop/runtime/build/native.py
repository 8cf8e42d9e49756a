"""Builds and loads generated C++ kernels.

A kernel is found by the SHA-256 of its text, the math header, the target and the compiler flags.
Kernels that are not on disk are compiled together, in one shared object per processor. A hit
needs no compiler.

Kernels for another processor than this one are compiled by a cross compiler, and not loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

# Loaded before any kernel: torch brings libgomp.so.1, and kernels then use the same thread pool.
from strop.errors import CacheError, CodegenError
from strop.ir.source import KernelSource
from strop.runtime.build.artefact import LOADED, StoredEntry
from strop.runtime.build.cache import DiskCache
from strop.runtime.build.processors import (
    compiler_for,
    target_flags,
    target_name,
)
from strop.wording import counted

log = logging.getLogger("strop")

_HEADER = Path(__file__).parents[2] / "codegen" / "rt" / "vmath.h"
_OLDEST_GCC = 11
_INCLUDE = '#include "vmath.h"\n'

# No -ffast-math: NaN and infinities count. -fno-trapping-math lets branches become blends, and
# -fno-thread-jumps keeps them so (exp is 5 % faster). -fwrapv: integers wrap, as in torch.
_FLAGS = (
    *("-std=c++20", "-shared", "-fPIC", "-fopenmp", "-fno-exceptions"),
    *("-fno-math-errno", "-fno-trapping-math", "-fno-thread-jumps"),
    *("-ffp-contract=fast", "-fwrapv", "-Wno-psabi"),
)

# The level is the first; the others are for what the compiler cannot optimise without a fault of
# its own.
_LEVELS = ("-O3", "-O2", "-O1", "-O0")
_OWN_FAULT = "internal compiler error"

# Characters. Longer texts are those of kernels that are written by hand, which many programs have:
# each is compiled by itself, so that its shared object is the same for all of them.
_LONG = 20_000

# Kernels need nothing of libstdc++, and the linker reads it for longer than all the others.
_LIBRARIES = ("-nodefaultlibs", "-lgomp", "-lm", "-lgcc", "-lc")


class BoundNativeKernel:
    """Hold a kernel with its arguments in place. ``pointers[i] = address`` redirects one of
    them."""

    __slots__ = ("call", "pointers", "scalars")

    def __init__(self, function: Any, pointers: Iterable[Any], scalars: Iterable[Any]) -> None:
        pointers, scalars = tuple(pointers), tuple(scalars)
        self.pointers = (ctypes.c_void_p * len(pointers))(*pointers)
        self.scalars = (ctypes.c_int64 * len(scalars))()
        self.scalars[:] = [*scalars]  # four times as fast as one by one
        addresses = (ctypes.addressof(self.pointers), ctypes.addressof(self.scalars))
        self.call = partial(function, *map(ctypes.c_void_p, addresses))

    def set_pointer(self, place: int, pointer: int) -> None:
        self.pointers[place] = pointer

    def set_scalar(self, place: int, value: int) -> None:
        self.scalars[place] = value

    def __call__(self) -> None:
        self.call()

    def again(self) -> BoundNativeKernel:
        """The same kernel with arguments of its own."""
        return BoundNativeKernel(self.call.func, self.pointers, self.scalars)


class NativeFunction:
    """A loaded kernel."""

    def __init__(self, library: ctypes.CDLL, symbol: str) -> None:
        self._function = library[symbol]
        self._function.restype = None

    def bind(self, pointers: Sequence[int], scalars: Sequence[int]) -> BoundNativeKernel:
        """Bind a kernel. ``pointers``: addresses of params, then of scratch; ``scalars``: s0, s1,
        ..."""
        return BoundNativeKernel(self._function, pointers, scalars)


class NativeKernels:
    """The kernels of this process, in memory and on disk. Threads may share it."""

    def __init__(self, store: DiskCache, compiler: str = "", target: str = "") -> None:
        """``target`` is one of TARGETS, or this processor; ``compiler`` a command, or the one that
        is usual for it."""
        self.num_built = 0
        self.num_cached = 0
        self._store = store
        self._target = target or target_name()
        self._compiler = compiler or compiler_for(self._target)
        self._flags = (*_FLAGS, *target_flags(self._target))
        self._header = _HEADER.read_text()
        self._lock, self._counting = threading.Lock(), threading.Lock()
        self._functions: dict[KernelSource, NativeFunction] = {}
        self._libraries: dict[str, ctypes.CDLL] = {}

    def build(self, sources: Sequence[KernelSource]) -> dict[KernelSource, NativeFunction]:
        """Load these kernels, compiling those that are not on disk.

        Raises CodegenError if the compiler is missing or refuses a kernel.
        """
        with self._lock:
            wanted = [s for s in dict.fromkeys(sources) if s not in self._functions]
            missing = [source for source in wanted if not self._load_cached(source)]
            self.num_cached += len(wanted) - len(missing)
            if missing:
                for source, unit in self._compile(missing).items():
                    library = self._library(unit)
                    if library is None:
                        raise CodegenError(f"{self._store.path('so', unit)} cannot be loaded")
                    self._functions[source] = NativeFunction(library, self._symbol(source))
            return {source: self._functions[source] for source in sources}

    def make(self, sources: Sequence[KernelSource]) -> None:
        """Compile what is not on disk, and load nothing: the processor need not be this one.

        Raises CodegenError as ``build`` does.
        """
        with self._lock:
            if missing := [s for s in dict.fromkeys(sources) if not self._is_made(s)]:
                self._compile(missing)

    def place(self, source: KernelSource) -> tuple[Path, str]:
        """Return the shared object that holds a kernel which was made, and its symbol there."""
        unit = self._stored("cpp", self._key(source)).decode()
        return self._store.path("so", unit), self._symbol(source)

    def _is_made(self, source: KernelSource) -> bool:
        unit = self._store.read("cpp", self._key(source))
        return unit is not None and self._is_on_disk(unit.decode(errors="replace"))

    def _key(self, source: KernelSource) -> str:
        return _sha256(source.text, self._header, _LEVELS[0], *self._flags, *_LIBRARIES)

    def _symbol(self, source: KernelSource) -> str:
        """Different kernels may have one name, so the key is a part of the symbol."""
        return f"{source.name}_{self._key(source)[:16]}"

    def _load_cached(self, source: KernelSource) -> bool:
        """An entry of kind "cpp" names the shared object that holds a kernel."""
        for place in (LOADED, self._store):
            unit = place.read("cpp", self._key(source))
            library = None if unit is None else self._library(unit.decode(errors="replace"))
            if library is not None and hasattr(library, self._symbol(source)):
                self._functions[source] = NativeFunction(library, self._symbol(source))
                return True
        return False

    def _library(self, unit: str) -> ctypes.CDLL | None:
        if unit not in self._libraries:
            if not self._is_on_disk(unit):
                return None
            try:
                self._libraries[unit] = ctypes.CDLL(str(self._store.path("so", unit)))
            except OSError:  # pruned by another process since
                return None
        return self._libraries[unit]

    def _is_on_disk(self, unit: str) -> bool:
        """Say whether a shared object lies where the loader of the system can open it. That of an
        artefact is written there."""
        try:
            if self._store.read("so", unit) is not None:  # verifies the checksum
                return True
        except CacheError:  # an artefact names something that is no key
            return False
        if (data := LOADED.read("so", unit)) is not None:
            self._store.write("so", unit, data)
        return data is not None

    def machine_code(self, sources: Sequence[KernelSource]) -> Iterator[StoredEntry]:
        """Yield all that another process needs to load these kernels. Raises CacheError where the
        cache lacks some, which ``build`` has put there."""
        units = dict[str, None]()
        for source in dict.fromkeys(sources):
            unit = self._stored("cpp", self._key(source))
            units[unit.decode()] = None
            yield StoredEntry("cpp", self._key(source), unit)
        for name in units:
            yield StoredEntry("so", name, self._stored("so", name))

    def _stored(self, kind: str, key: str) -> bytes:
        data = self._store.read(kind, key) or LOADED.read(kind, key)
        if data is None:
            raise CacheError(
                f"{self._store.root} no longer holds {kind}/{key}, which this process has loaded:"
                " somebody has emptied the cache since. Do the same in a new process"
            )
        return data

    def _compile(self, missing: Sequence[KernelSource]) -> dict[KernelSource, str]:
        """Return the key of the shared object that each kernel is in now."""
        if shutil.which(self._compiler) is None:
            raise CodegenError(
                f"{self._compiler} was not found, and the cache lacks "
                f"{counted(len(missing), 'CPU kernel')}. {self._remedy()}"
            )
        num_cores = len(os.sched_getaffinity(0))
        groups = _units(missing, num_cores)
        with ThreadPoolExecutor(num_cores + 1) as pool:  # one more: units are not equally long
            units = list(pool.map(self._compile_unit, groups))
        found = {s: unit for group, unit in zip(groups, units, strict=True) for s in group}
        for source, unit in found.items():
            self._store.write("cpp", self._key(source), unit.encode())
        return found

    def _remedy(self) -> str:
        if self._compiler == compiler_for(target_name()):
            return "Install a C++20 compiler (Debian, Ubuntu: apt-get install g++)."
        return (
            f"Install a C++20 compiler for {self._target} (Debian, Ubuntu: apt-get install"
            " g++-aarch64-linux-gnu), or name one in CXX."
        )

    def _compile_unit(self, group: Sequence[KernelSource]) -> str:
        """One shared object; its key in the store."""
        unit = _sha256(*sorted(self._key(source) for source in group))
        text = self._unit_text(group)
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "vmath.h").write_text(self._header)
            path, output = Path(folder) / "kernels.cpp", Path(folder) / "kernels.so"
            path.write_text(text)
            if error := self._run_compiler(path, output, group):
                kept = self._keep_refused(unit, text)
                raise CodegenError(f"the C++ compiler refused {kept}:\n{error}{self._doubt()}")
            self._store.write("so", unit, output.read_bytes())
        with self._counting:
            self.num_built += len(group)
        return unit

    def _doubt(self) -> str:
        """Say that the compiler is none of those that kernels are written for, or nothing."""
        done = subprocess.run(
            [self._compiler, "--version"], capture_output=True, text=True, check=False
        )
        first = done.stdout.strip().partition("\n")[0] or "a program that does not tell its version"
        version = re.search(r" (\d+)\.\d+", first)
        is_gcc = "Free Software Foundation" in done.stdout and version is not None
        if is_gcc and version is not None and int(version[1]) >= _OLDEST_GCC:
            return ""
        needed = f"kernels need GCC {_OLDEST_GCC} or newer under that name"
        return f"\n{self._compiler} is {first}; {needed}"

    def _run_compiler(self, path: Path, output: Path, group: Sequence[KernelSource]) -> str:
        """Compile a file, and return what the compiler has against it. Where it has a fault of its
        own, it is asked for less."""
        error = ""
        for level in _LEVELS:
            flags = (level, *self._flags, str(path), *_LIBRARIES, "-o", str(output))
            done = subprocess.run(
                [self._compiler, *flags], capture_output=True, text=True, check=False
            )
            if done.returncode == 0 and error:
                names = ", ".join(source.name for source in group)
                log.warning(
                    "%s had an internal error, and compiled with %s instead of %s: %s",
                    *(self._compiler, level, _LEVELS[0], names),
                )
            if done.returncode == 0:
                return ""
            error = done.stderr
            if _OWN_FAULT not in error:
                return error
        return error

    def _unit_text(self, group: Sequence[KernelSource]) -> str:
        parts = [_INCLUDE]
        for source in group:
            body = source.text.removeprefix(_INCLUDE)
            symbol = self._symbol(source)
            parts.append(f"\n#define {source.name} {symbol}\n{body}#undef {source.name}\n")
        return "".join(parts)

    def _keep_refused(self, unit: str, text: str) -> Path:
        path = self._store.root / "refused" / f"{unit[:16]}.cpp"
        with contextlib.suppress(OSError):  # a full disk
            path.parent.mkdir(mode=0o700, exist_ok=True)
            path.write_text(text)
        return path


def _sha256(*texts: str) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(len(text).to_bytes(8, "little") + text.encode())
    return digest.hexdigest()


def _units(sources: Sequence[KernelSource], num_cores: int) -> list[list[KernelSource]]:
    """Divide kernels into what is compiled together."""
    alone = [[source] for source in sources if len(source.text) >= _LONG]
    return alone + _split([s for s in sources if len(s.text) < _LONG], num_cores)


def _split(sources: Sequence[KernelSource], num_groups: int) -> list[list[KernelSource]]:
    """Split kernels into groups of about equal text, the longest kernels placed first."""
    groups: list[list[KernelSource]] = [[] for _ in range(min(num_groups, len(sources)))]
    sizes = [0] * len(groups)
    for source in sorted(sources, key=lambda s: -len(s.text)):
        smallest = sizes.index(min(sizes))
        groups[smallest].append(source)
        sizes[smallest] += len(source.text)
    return groups
