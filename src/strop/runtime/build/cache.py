"""A content store on disk for plans, cubins and shared objects.

Every entry is one file, ``root/kind/key``: the data, then a trailer with its SHA-256. A trailer
leaves shared objects loadable as they lie (a loader ignores what follows an ELF image) and, unlike
a file beside it, cannot be out of step with the data. Writes are atomic, so that processes may
race; a damaged entry is removed and reads as missing. Where the folder cannot be written, as on a
full disk, entries go to a temporary folder that ends with the process. The root may hold files of
others, who chose it: what is no entry is neither listed nor removed.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import logging
import os
import re
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from strop.errors import CacheError

logger = logging.getLogger(__name__)

_MAGIC = b"strop-sha256"
_TRAILER_BYTES = hashlib.sha256().digest_size + len(_MAGIC)
KINDS = {
    "plan": "compiled graphs",
    "so": "CPU kernels",
    "cpp": "where each CPU kernel lies",
    "cubin": "GPU kernels",
}
_KEY = re.compile(r"[0-9a-f]+")  # a hash
_TEMPORARY = ".partial-"
TEMPORARY_SECONDS = 3600.0  # after which nobody is still writing a file


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """One stored file. ``used_s``: seconds since the epoch at which it was last read or written."""

    kind: str
    key: str
    path: Path
    num_bytes: int
    used_s: float


class DiskCache:
    """``read`` and ``write`` bytes by kind (of ``KINDS``) and key (a hash)."""

    def __init__(self, root: Path) -> None:
        self.root = root
        with contextlib.suppress(OSError):  # ``write`` says so
            _make_private(root)

    def path(self, kind: str, key: str) -> Path:
        """Return where an entry lies, whether it exists or not."""
        for name, is_known in ((kind, kind in KINDS), (key, _KEY.fullmatch(key))):
            if not is_known:
                raise CacheError(f"not a cache kind or key: {name!r}")
        spare = _SPARE.folder and _SPARE.folder / kind / key
        return spare if spare and spare.exists() else self.root / kind / key

    def read(self, kind: str, key: str) -> bytes | None:
        """The data of an entry whose checksum holds, else None."""
        path = self.path(kind, key)
        try:
            content = path.read_bytes()
        except OSError:  # missing, or not for us
            return None
        data = checked(content)
        with contextlib.suppress(OSError):  # removed by another process, or a read-only disk
            if data is None:
                logger.warning("removed the damaged cache entry %s", path)
                path.unlink()
            else:
                os.utime(path)  # many file systems do not record reads
        return data

    def write(self, kind: str, key: str, data: bytes) -> Path:
        """Store an entry; readers see all of it or nothing. A disk that takes none is no error."""
        self.path(kind, key)
        try:
            return _write(self.root / kind / key, data)
        except OSError as error:
            spare = _SPARE.folder_for(self.root, error)
        try:
            return _write(spare / kind / key, data)
        except OSError as error:
            raise CacheError(
                f"neither {self.root} nor {spare} can be written ({error.strerror or error}): set"
                " STROP_CACHE_DIR or TMPDIR to a folder with room"
            ) from error

    def entries(self) -> list[CacheEntry]:
        """List what is stored, the entry not used for longest first."""
        found = []
        for path in self._files("*"):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                if stat.S_ISREG(status.st_mode) and _KEY.fullmatch(path.name):
                    found.append(
                        CacheEntry(
                            path.parent.name, path.name, path, status.st_size, status.st_mtime
                        )
                    )
        return sorted(found, key=lambda entry: (entry.used_s, entry.path))

    def _files(self, names: str) -> Iterator[Path]:
        for kind in KINDS:
            yield from (self.root / kind).glob(names)

    def prune(self, max_bytes: int | None = None, unused_since_s: float = 0.0) -> int:
        """Remove what killed processes left half written, entries not used since then, and after
        them those not used for longest until the rest fits into ``max_bytes``; bytes removed."""
        removed = self._remove_abandoned()
        entries = self.entries()
        total = kept = sum(entry.num_bytes for entry in entries)
        for entry in entries:
            is_small = max_bytes is None or kept <= max_bytes
            if is_small and entry.used_s >= unused_since_s:
                break
            entry.path.unlink(missing_ok=True)
            kept -= entry.num_bytes
        return removed + total - kept

    def _remove_abandoned(self) -> int:
        """Bytes of temporary files whose process was killed."""
        removed, latest = 0, time.time() - TEMPORARY_SECONDS
        for path in self._files(f"{_TEMPORARY}*"):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                if status.st_mtime < latest:
                    path.unlink()
                    removed += status.st_size
        return removed

    def verify(self) -> list[CacheEntry]:
        """Remove the entries whose checksum does not hold; they are returned."""
        damaged = []
        for entry in self.entries():
            with contextlib.suppress(FileNotFoundError):  # another process may have removed it
                if checked(entry.path.read_bytes()) is None:
                    entry.path.unlink()
                    damaged.append(entry)
        return damaged


@dataclass
class _Spare:
    """Keep entries that no disk takes: one folder for this process, which ends with it."""

    folder: Path | None = None
    told: set[Path] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def folder_for(self, root: Path, error: OSError) -> Path:
        with self.lock:
            if self.folder is None:
                self.folder = Path(tempfile.mkdtemp(prefix="strop-"))
                atexit.register(shutil.rmtree, self.folder, ignore_errors=True)
            if root not in self.told:
                self.told.add(root)
                logger.warning(
                    "the cache %s cannot be written (%s): what is compiled is kept for"
                    " this process only",
                    root,
                    error.strerror or error,
                )
            return self.folder


_SPARE = _Spare()


def _write(path: Path, data: bytes) -> Path:
    _make_private(path.parent)
    with replacing(path, _TEMPORARY) as file:
        file.write(with_trailer(data))
    return path


@contextlib.contextmanager
def replacing(path: Path, prefix: str) -> Iterator[IO[bytes]]:
    """Open a new file beside ``path``, which takes its place once the body has written all of it.
    Where that fails nothing is left of it."""
    handle, temporary = tempfile.mkstemp(prefix=prefix, dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def with_trailer(data: bytes) -> bytes:
    """Return what a file with these data holds."""
    return data + hashlib.sha256(data).digest() + _MAGIC


def checked(content: bytes) -> bytes | None:
    """The data of a file, None if the trailer is missing or does not fit."""
    data, trailer = content[:-_TRAILER_BYTES], content[-_TRAILER_BYTES:]
    return data if trailer == hashlib.sha256(data).digest() + _MAGIC else None


def _make_private(folder: Path) -> None:
    """Create a folder for this user alone; refuse one that others can put programs into."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & stat.S_IWOTH:
        raise CacheError(
            f"{folder} belongs to another user or is writable by all: machine code in it cannot "
            "be trusted. Choose another cache folder or correct its owner and mode (0700)."
        )
