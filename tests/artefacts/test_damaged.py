"""Damaged artefacts give a clear error, or what they lack is compiled: never another result."""

from __future__ import annotations

import hashlib
import json
import logging
import random
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import strop
from strop.errors import CacheError, StropError
from strop.runtime.build.artefact import (
    FORMAT,
    HEADER_BYTES,
    Artefact,
    StoredEntry,
    header_of,
    write_artefact,
)
from tests.artefacts.test_artefacts import Net, X, forget, fresh_process, options, run, saved

__all__ = ["fresh_process"]  # a fixture, which runs by itself
ABOUT = {"parts": {}}
ENTRIES = (StoredEntry("plan", "ab12", b"{}"), StoredEntry("cpp", "cd", b"ab12"))


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.strop"
    write_artefact(path, ABOUT, ENTRIES)
    return path


def table_of(content: bytes) -> tuple[int, Any]:
    offset, length = struct.unpack_from("<QQ", content, 16)
    return offset, json.loads(content[offset : offset + length])


def with_table(content: bytes, table: Any, *, form: int = FORMAT) -> bytes:
    """The file with another table, and all checksums of the file right."""
    offset, _ = table_of(content)
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return header_of(offset, text, form) + content[HEADER_BYTES:offset] + text


def made_right(content: bytes) -> bytes:
    """The file with the checksums of the file right again, if its table can be read."""
    try:
        _, table = table_of(content)
        for row in table["sections"]:
            _, _, start, num_bytes, _ = row
            row[-1] = hashlib.sha256(content[start : start + num_bytes]).hexdigest()
        return with_table(content, table)
    except (ValueError, TypeError, LookupError, struct.error):
        head = content[: HEADER_BYTES - 32]
        return head + hashlib.sha256(head).digest() + content[HEADER_BYTES:]


def test_entries_come_back(small: Path) -> None:
    artefact = Artefact(small)
    assert artefact.about == ABOUT
    assert [artefact.read(e.kind, e.key) for e in ENTRIES] == [e.data for e in ENTRIES]
    assert artefact.read("plan", "cd") is None
    assert artefact.fingerprint == hashlib.sha256(small.read_bytes()[:HEADER_BYTES]).hexdigest()
    assert small.stat().st_mode & 0o077 == 0  # machine code that others cannot change


def test_every_byte_counts(small: Path) -> None:
    content = small.read_bytes()
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        small.write_bytes(damaged)
        with pytest.raises(CacheError, match=str(small)):
            Artefact(small)


def test_every_length_counts(small: Path) -> None:
    content = small.read_bytes()
    for cut in (*range(len(content)), None):
        small.write_bytes(content + b"\0" if cut is None else content[:cut])
        with pytest.raises(CacheError, match=rf"{small}.*again"):
            Artefact(small)


@pytest.mark.parametrize(
    ("form", "message"), [(FORMAT + 1, "made by a newer Strop"), (0, "which is too old")]
)
def test_another_format_is_refused(small: Path, form: int, message: str) -> None:
    content = small.read_bytes()
    small.write_bytes(with_table(content, table_of(content)[1], form=form))
    with pytest.raises(CacheError, match=message):
        Artefact(small)


def test_what_is_no_artefact_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.strop"
    with pytest.raises(CacheError, match=r"is not there: strop\.save"):
        strop.load(Net().eval(), path, trust=True)
    path.mkdir()
    with pytest.raises(CacheError, match="is no file"):
        strop.load(Net().eval(), path, trust=True)
    path.rmdir()
    path.write_bytes(b"PK\3\4" + bytes(200))
    with pytest.raises(CacheError, match="is no artefact of Strop: it begins with"):
        Artefact(path)


def moved(row: list[Any]) -> list[Any]:
    return [*row[:2], row[2] + 1, *row[3:]]


TABLES = {
    "no JSON": lambda table: b"{",
    "nested too deep": lambda table: b"[" * 100_000,
    "a list": lambda table: [],
    "nothing about it": lambda table: table | {"about": None},
    "no sections": lambda table: {"about": {}},
    "a number of sections": lambda table: table | {"sections": 3},
    "a section too few": lambda table: table | {"sections": table["sections"][1:]},
    "a moved section": lambda table: table | {"sections": [moved(r) for r in table["sections"]]},
    "a short row": lambda table: table | {"sections": [r[:-1] for r in table["sections"]]},
    "a huge section": lambda table: (
        table | {"sections": [[*r[:3], 2**70, r[4]] for r in table["sections"]]}
    ),
    "a negative section": lambda table: (
        table | {"sections": [[*r[:3], -1, r[4]] for r in table["sections"]]}
    ),
    "another kind": lambda table: table | {"sections": [["py", *r[1:]] for r in table["sections"]]},
    "a path as key": lambda table: (
        table | {"sections": [[r[0], "../x", *r[2:]] for r in table["sections"]]}
    ),
    "a list as key": lambda table: (
        table | {"sections": [[r[0], [], *r[2:]] for r in table["sections"]]}
    ),
    "a number as digest": lambda table: (
        table | {"sections": [[*r[:4], 7] for r in table["sections"]]}
    ),
}


@pytest.mark.parametrize("change", TABLES)
def test_a_table_that_says_nonsense_is_refused(small: Path, change: str) -> None:
    content = small.read_bytes()
    small.write_bytes(with_table(content, TABLES[change](table_of(content)[1])))
    with pytest.raises(CacheError, match=r"is damaged: its table"):
        Artefact(small)


def test_an_entry_that_changes_while_it_is_open_is_left_out(
    small: Path, caplog: pytest.LogCaptureFixture
) -> None:
    artefact, content = Artefact(small), small.read_bytes()
    with small.open("r+b") as file:
        file.seek(HEADER_BYTES)
        file.write(b"x")
    assert artefact.read("plan", "ab12") is None
    assert "plan ab12 is damaged, and is left out" in caplog.text
    small.write_bytes(content)
    with small.open("r+b") as file:
        file.truncate(HEADER_BYTES + 3)
    assert artefact.read("cpp", "cd") is None


# a few hundred at random, 2,000 every night


def mutated(content: bytes, source: random.Random) -> bytes:
    """Flip bits, cut, or write zeros; the checksums of the file are right in half of the cases."""
    damaged, kind = bytearray(content), source.choice(["flip", "flip", "flip", "cut", "zeros"])
    place = source.randrange(len(content))
    if kind == "flip":
        for _ in range(source.choice([1, 1, 8])):
            damaged[source.randrange(len(content))] ^= 1 << source.randrange(8)
    elif kind == "cut":
        del damaged[place : place + source.choice([1, 64, len(content)])]
    else:
        damaged[place : place + 16] = bytes(len(damaged[place : place + 16]))
    return made_right(bytes(damaged)) if source.random() < 0.5 else bytes(damaged)


@pytest.mark.parametrize(
    "count", [300, pytest.param(2000, marks=[pytest.mark.nightly, pytest.mark.slow])]
)
def test_mutations(tmp_path: Path, count: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)  # a line for each entry that is left out
    path = saved(tmp_path)
    content, module = path.read_bytes(), Net().eval()
    expected = run(strop.load(Net().eval(), path, trust=True, options=options(tmp_path / "x")), X)
    fingerprint = f"sha256:{Artefact(path).fingerprint}"
    outcomes = Counter[str]()
    source = random.Random(count)
    for _ in range(count):
        forget()
        damaged = mutated(content, source)
        path.write_bytes(damaged)
        if damaged != content:
            with pytest.raises(StropError, match=str(path)):
                strop.load(module, path, trust=fingerprint)
        try:
            # what is left out is read from the disk cache, as a compiler would take long
            strop.load(module, path, trust=True, options=options(tmp_path / "before"))
        except CacheError:
            outcomes["refused"] += 1
        else:
            assert torch.equal(run(module, X), expected)
            outcomes["served"] += 1
        finally:
            strop.restore(module)
    assert outcomes["refused"] > count // 2, outcomes
    assert outcomes["served"] > count // 20, outcomes
