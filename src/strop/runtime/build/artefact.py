"""An artefact is one file with what a process would otherwise trace and compile.

It holds entries of the disk cache as they lie there, each with its own checksum, and a table of
them. Opening maps the file, checks all of it, and evaluates nothing:

    bytes  0-7    "STROPART"
    bytes  8-15   format, and 0, as two numbers of 4 bytes (little-endian, as all numbers)
    bytes 16-31   where the table begins and how long it is, as two numbers of 8 bytes
    bytes 32-63   SHA-256 of the table
    bytes 64-95   SHA-256 of bytes 0-63
    then          the entries, one after the other, and the table, as JSON, up to the end

The table says what the artefact is for (``about``), and of each entry its kind, key, offset, length
and SHA-256. So each byte of the file is covered, and the SHA-256 of the first 96 bytes, its
fingerprint, stands for all of it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
import re
import struct
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.errors import CacheError
from strop.runtime.build.cache import KINDS, checked, replacing, with_trailer
from strop.wording import counted

log = logging.getLogger("strop")

FORMAT = 1
MAGIC = b"STROPART"
_HEAD = struct.Struct("<8sIIQQ32s")  # bytes 0-63
DIGEST_BYTES = hashlib.sha256().digest_size
HEADER_BYTES = _HEAD.size + DIGEST_BYTES
_KEY = re.compile(r"[0-9a-f]{1,128}")
# what a table that was written by something else may raise
_DAMAGE = (ValueError, TypeError, LookupError, RecursionError)


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """This is an entry of the disk cache: its kind, its key and its data."""

    kind: str
    key: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Section:
    """This says where an entry lies in the file."""

    kind: str
    key: str
    offset: int
    num_bytes: int
    sha256: str

    @property
    def end(self) -> int:
        return self.offset + self.num_bytes


def write_artefact(path: Path, about: Mapping[str, Any], entries: Iterable[StoredEntry]) -> str:
    """Write a file, of which readers see all or nothing, and return its fingerprint.

    Raises CacheError where the file cannot be written.
    """
    try:
        with replacing(path, f".{path.name}-") as file:
            header = _write(file, about, entries)
    except OSError as error:
        raise CacheError(f"{path} cannot be written: {error.strerror or error}") from error
    return hashlib.sha256(header).hexdigest()


def _write(file: Any, about: Mapping[str, Any], entries: Iterable[StoredEntry]) -> bytes:
    """Write all of it and return the header, which comes last."""
    file.write(bytes(HEADER_BYTES))
    rows, offset = [], HEADER_BYTES
    for entry in entries:
        content = with_trailer(entry.data)
        digest = hashlib.sha256(content).hexdigest()
        rows.append([entry.kind, entry.key, offset, len(content), digest])
        file.write(content)
        offset += len(content)
    table = json.dumps({"about": about, "sections": rows}).encode()
    file.write(table)
    header = header_of(offset, table)
    file.seek(0)
    file.write(header)
    return header


def header_of(offset: int, table: bytes, form: int = FORMAT) -> bytes:
    """Return the first bytes of a file whose table lies there."""
    head = _HEAD.pack(MAGIC, form, 0, offset, len(table), hashlib.sha256(table).digest())
    return head + hashlib.sha256(head).digest()


class Artefact:
    """This is an open file. ``read`` gives an entry, if it is sound."""

    def __init__(self, path: Path) -> None:
        """Open a file and check it. Raises CacheError for what is damaged, no artefact, or of
        another format."""
        self.path = path
        self._map = _mapped(path)
        self._header = self._map[:HEADER_BYTES]  # a copy, which stays as it is checked
        try:
            self.fingerprint = self._checked_header()
            self.about, self.sections = self._checked_table()
            for section in self.sections.values():
                if self._content(section) is None:
                    raise self._damage(f"{section.kind} {section.key[:16]} at {section.offset}")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._map.close()

    def read(self, kind: str, key: str) -> bytes | None:
        """Return the data of an entry, or None where there is none, or it is no longer as it was
        when the file was opened."""
        section = self.sections.get((kind, key))
        if section is None:
            return None
        content = self._content(section)
        data = None if content is None else checked(content)
        if data is None:
            log.warning("%s: %s %s is damaged, and is left out", self.path, kind, key[:16])
        return data

    def digest(self) -> bytes:
        """Return BLAKE2b of all bytes of the file, which is what signatures sign. They are those
        that were checked: raises CacheError for a file that has changed since it was opened."""
        digest = hashlib.blake2b(self._header)
        for section in self.sections.values():
            if (content := self._content(section)) is None:
                raise self._damage(f"{section.kind} {section.key[:16]} at {section.offset}")
            digest.update(content)
        digest.update(self._table())
        return digest.digest()

    def _checked_header(self) -> str:
        """Check the first bytes, and return the fingerprint."""
        header = self._header
        magic, form, *_ = _HEAD.unpack_from(header)
        if magic != MAGIC:
            raise CacheError(
                f"{self.path} is no artefact of Strop: it begins with {magic!r}, not with"
                f" {MAGIC!r}; strop.save and `strop build` make one"
            )
        if form > FORMAT:
            raise CacheError(
                f"{self.path} is of format {form}, and this Strop reads {FORMAT}: it was made by a"
                " newer Strop, or its header is damaged. Update Strop, or make the file again with"
                " this one"
            )
        if hashlib.sha256(header[: _HEAD.size]).digest() != header[_HEAD.size :]:
            raise self._damage("its header")
        if form < FORMAT:
            raise CacheError(f"{self.path} is of format {form}, which is too old; {_AGAIN}")
        return hashlib.sha256(header).hexdigest()

    def _checked_table(self) -> tuple[Mapping[str, Any], dict[tuple[str, str], Section]]:
        *_, offset, _, _ = _HEAD.unpack_from(self._header)
        try:
            return _parse(self._table(), offset)
        except _DAMAGE as error:
            raise self._damage(f"its table ({error})") from error

    def _table(self) -> bytes:
        """Copy the table, and return the copy if its checksum holds."""
        *_, offset, length, digest = _HEAD.unpack_from(self._header)
        if offset + length != self._map.size():
            raise CacheError(
                f"{self.path} has {counted(self._map.size(), 'byte')} instead of {offset + length}:"
                f" it is cut off, or something was written behind it; {_AGAIN}"
            )
        table = self._map[offset : offset + length]
        if hashlib.sha256(table).digest() != digest:
            raise self._damage("its table")
        return table

    def _content(self, section: Section) -> bytes | None:
        """Copy an entry, and return the copy if its checksum holds. A file that others cut off
        since would end this process if it were read there."""
        if self._map.size() < section.end:
            return None
        content = self._map[section.offset : section.end]
        return content if hashlib.sha256(content).hexdigest() == section.sha256 else None

    def _damage(self, what: str) -> CacheError:
        return CacheError(f"{self.path} is damaged: {what} is not as it was written; {_AGAIN}")


_AGAIN = "copy or make it again (strop.save, `strop build`)"


def _mapped(path: Path) -> mmap.mmap:
    """Map a file that is as long as a header at least."""
    try:
        with path.open("rb") as file:
            num_bytes = os.fstat(file.fileno()).st_size
            if num_bytes >= HEADER_BYTES:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: somebody has just emptied it
        raise CacheError(f"{path} cannot be read: {error}") from error
    length = counted(num_bytes, "byte")
    raise CacheError(
        f"{path} is no artefact, or its end is missing: it has {length}, and the header alone has"
        f" {HEADER_BYTES}; {_AGAIN}"
    )


def _parse(table: bytes, end: int) -> tuple[Mapping[str, Any], dict[tuple[str, str], Section]]:
    """Read the table. Sections lie one after the other, from the header to the table, so that none
    overlaps another, and no byte is left unchecked."""
    content = json.loads(table)
    about, rows = content["about"], content["sections"]
    if not isinstance(about, dict):
        raise ValueError("it does not say what the file is for")
    found, expected = dict[tuple[str, str], Section](), HEADER_BYTES
    for kind, key, offset, num_bytes, sha256 in rows:
        if kind not in KINDS or not _KEY.fullmatch(key) or not isinstance(sha256, str):
            raise ValueError(f"it has an entry {kind!r}, {key!r}")
        if type(num_bytes) is not int or num_bytes < 0 or offset != expected:
            raise ValueError(f"{kind} {key[:16]} lies at {offset!r} and is {num_bytes!r} long")
        if (kind, key) in found:
            raise ValueError(f"it has {kind} {key[:16]} twice")
        expected += num_bytes
        found[kind, key] = Section(kind, key, int(offset), num_bytes, sha256)
    if expected != end:
        raise ValueError(f"its entries end at {expected}, and it begins at {end}")
    return about, found


class LoadedArtefacts:
    """These are the artefacts that this process reads, the latest first, beside the disk cache."""

    def __init__(self) -> None:
        self._artefacts: tuple[Artefact, ...] = ()
        self._lock = threading.Lock()

    def use(self, artefact: Artefact) -> None:
        """Read entries from this one as well. One of the same content takes its place."""
        with self._lock:
            others = [a for a in self._artefacts if a.fingerprint != artefact.fingerprint]
            self._artefacts = (artefact, *others)

    def read(self, kind: str, key: str) -> bytes | None:
        """Return the data of an entry, or None."""
        found = (artefact.read(kind, key) for artefact in self._artefacts)
        return next((data for data in found if data is not None), None)

    def clear(self) -> None:
        """Read from none any more."""
        with self._lock:
            self._artefacts = ()


LOADED = LoadedArtefacts()
