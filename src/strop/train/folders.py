"""Reads folders of pictures: which files are whole pictures, and what their captions are."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
from PIL import Image, ImageOps

from strop.errors import OptionError
from strop.train.ranks import ALONE, Ranks
from strop.wording import counted

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
METADATA = ("metadata.jsonl", "metadata.csv")
SIDECARS = (".txt", ".caption")
_READERS = 8
_SHOWN = 5  # names in a message


@dataclass(frozen=True)
class Picture:
    """Describe a file that was decoded once, with its size in pixels and a hash of its bytes."""

    path: Path
    name: str
    captions: tuple[str, ...]  # each batch draws one of them
    width: int
    height: int
    digest: str


@dataclass(frozen=True)
class BadFile:
    """Name a file that is no whole picture, and why."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


@dataclass(frozen=True)
class Folder:
    """Hold pictures sorted by name, what was left out, and the conditioning picture of each, if
    there are any."""

    path: Path
    pictures: tuple[Picture, ...]
    bad: tuple[BadFile, ...]
    conditions: tuple[Path, ...] = ()
    digest_of_conditions: str = ""

    @property
    def digest(self) -> str:
        """Hash names, captions and contents: a folder that was moved has the same hash."""
        rows: list[Any] = [
            [p.name, p.captions if p.captions[1:] else p.captions[0], p.digest]
            for p in self.pictures
        ]
        more = [self.digest_of_conditions] if self.conditions else []
        return hashlib.sha256(json.dumps(rows + more).encode()).hexdigest()


Captions = Callable[[Path], tuple[str, ...] | None]
Progress = Callable[[int, int], None]


def read_captioned(
    folder: Path,
    column: str,
    most: int | None = None,
    on_progress: Progress = lambda n, of: None,
    ranks: Ranks = ALONE,
    others: Collection[Path] = (),
) -> Folder:
    """Read pictures with captions from ``metadata.jsonl``, ``metadata.csv`` or a ``.txt`` beside
    each. Each rank decodes its share. ``others`` are real paths of files that belong to pictures.

    Raises OptionError for a folder that is missing, and for pictures without a caption.
    """
    files = [path for path in files_in(folder) if not others or path.resolve() not in others]
    rows, lost = _metadata(folder, files, column)
    named = dict(rows)
    wanted = list(named) if named else files

    def captions(path: Path) -> tuple[str, ...] | None:
        return named[path] if named else _sidecar(path)

    candidates = [path for path in wanted if not _is_note(path)]
    without = [p for p in candidates if p.suffix.lower() in SUFFIXES and captions(p) is None]
    if without:
        raise OptionError(
            f"{folder}: {_names(without)} without a caption; write a .txt beside each, or "
            f'metadata.jsonl with lines {{"file_name": ..., "{column}": ...}}'
        )
    found = _read(folder, candidates, captions, on_progress, ranks)
    bad = (*lost, *found.bad, *_stray_notes(files))
    if named:
        known = {*named, *(item.path for item in lost)}
        unnamed = [path for path in files if path not in known and not _is_note(path)]
        bad += tuple(BadFile(path, "is in no metadata file") for path in unnamed)
    _check_not_empty(found)
    return Folder(folder, found.pictures[:most], bad)


def read_subject(
    folder: Path,
    prompt: str,
    *,
    may_be_empty: bool = False,
    on_progress: Progress = lambda n, of: None,
    ranks: Ranks = ALONE,
) -> Folder:
    """Read pictures of one subject, which share a prompt. Each rank decodes its share."""
    files = files_in(folder)
    paths = [path for path in files if not _is_note(path)]
    found = _read(folder, paths, lambda path: (prompt,), on_progress, ranks)
    if not may_be_empty:
        _check_not_empty(found)
    return Folder(folder, found.pictures, (*found.bad, *_stray_notes(files)))


def open_rgb(path: Path) -> Image.Image:
    """Open a picture, upright and in RGB. Raises OptionError for numbers of unknown range."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PIL, about palettes and odd metadata
        with Image.open(path) as opened:
            return _in_8_bits(ImageOps.exif_transpose(opened), opened.format).convert("RGB")


def _in_8_bits(picture: Image.Image, format_name: str | None) -> Image.Image:
    """Keep the upper half of greys of 16 bits, as colours of 16 bits do; PIL would cut them off."""
    mode = picture.mode
    if mode.startswith("I;16") or (mode == "I" and format_name == "PNG"):  # by age of PIL
        return Image.fromarray((numpy.asarray(picture) >> 8).astype(numpy.uint8))
    if mode in ("I", "F"):
        raise OptionError(
            f"has numbers of unknown range (PIL's mode {mode}); save it with 8 or 16 bits a channel"
        )
    return picture


def files_in(folder: Path) -> list[Path]:
    """Return the files of a folder and of those in it, but for hidden ones, in their order. Raises
    OptionError where there is no folder."""
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise OptionError(f"the folder {folder} {what}; give the folder of the pictures")
    found = sorted(path for path in folder.rglob("*") if path.is_file() or _dangles(path))
    return [p for p in found if not any(part[0] == "." for part in p.relative_to(folder).parts)]


def _dangles(path: Path) -> bool:
    return path.is_symlink() and not path.exists()


def _is_note(path: Path) -> bool:
    """Tell whether it is text that belongs to pictures."""
    return path.name in METADATA or path.suffix.lower() in SIDECARS


def _stray_notes(files: Sequence[Path]) -> list[BadFile]:
    """Return texts that could be captions and lie beside no picture: somebody may have misspelt a
    name, and a caption that is left out without a word is one that nobody misses."""
    pictures = {path.with_suffix("") for path in files if path.suffix.lower() in SUFFIXES}
    return [
        BadFile(path, "is the caption of no picture")
        for path in files
        if path.suffix.lower() in SIDECARS and path.with_suffix("") not in pictures
    ]


def _sidecar(path: Path) -> tuple[str, ...] | None:
    for suffix in SIDECARS:
        beside = path.with_suffix(suffix)
        if beside.is_file():
            try:
                return (beside.read_text(encoding="utf-8-sig").strip(),)
            except UnicodeDecodeError as error:
                raise OptionError(f"{beside} is not UTF-8 text: {error}") from error
    return None


def _metadata(
    folder: Path, files: Iterable[Path], column: str
) -> tuple[list[tuple[Path, tuple[str, ...]]], list[BadFile]]:
    """Return paths and captions of all metadata files, and the files that they name without
    cause."""
    rows: list[tuple[Path, tuple[str, ...]]] = []
    lost: list[BadFile] = []
    for source in (path for path in files if path.name in METADATA):
        for number, row in rows_of(source):
            where = f"{source}, line {number}"
            name, texts = _texts(where, row, "file_name"), _texts(where, row, column)
            path = source.parent / name[0]
            if not path.resolve().is_relative_to(folder.resolve()):
                raise OptionError(f"{where}: {path} is outside {folder}")
            if path.is_file():
                rows.append((path, texts))
            else:
                lost.append(BadFile(path, f"is named in {source.name} and does not exist"))
    return rows, lost


def _texts(where: str, row: dict[str, Any], key: str) -> tuple[str, ...]:
    """Return a text, or those of a list: diffusers' scripts take several captions, too."""
    if key not in row:
        raise OptionError(
            f"{where}: no text under {key!r}, only {', '.join(map(str, row))}; "
            "--caption_column names the captions"
        )
    value = row[key]
    is_list = isinstance(value, list) and key != "file_name"
    texts = tuple(value) if is_list else (value,)
    if not texts or not all(isinstance(text, str) for text in texts):
        choice = "" if key == "file_name" else ", or a list of texts"
        raise OptionError(f"{where}: {key!r} is {value!r}; write a text{choice}")
    return texts


def rows_of(source: Path) -> list[tuple[int, dict[str, Any]]]:
    """Return the rows of a metadata file, each with the number of its line. Raises OptionError for
    a file that is damaged."""
    try:
        text = source.read_text(encoding="utf-8-sig")
        if source.suffix == ".csv":
            return _table(source, text)
        # not by splitlines, which also ends lines at separators that JSON leaves as they are
        lines = [(n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise OptionError(f"{source} cannot be read: {error}") from error
    found = []
    for number, line in lines:
        try:
            row = json.loads(line)
        except ValueError as error:
            raise OptionError(f"{source}, line {number} is no JSON: {error}") from error
        if not isinstance(row, dict):
            raise OptionError(f'{source}, line {number}: write {{"file_name": ..., "text": ...}}')
        found.append((number, row))
    return found


def _table(source: Path, text: str) -> list[tuple[int, dict[str, Any]]]:
    """Return rows by their last lines: texts in quotes may have several."""
    reader = csv.DictReader(io.StringIO(text, newline=""))
    found = [(reader.line_num, dict(row)) for row in reader]
    for number, row in found:
        if None in row:  # where csv puts what is left over
            raise OptionError(
                f"{source}, line {number} has more fields than the first line; put "
                'texts with commas in quotes, as in a.png,"a ring, red"'
            )
    return found


def _read(
    folder: Path, paths: Sequence[Path], captions: Captions, on_progress: Progress, ranks: Ranks
) -> Folder:
    """Decode every file once: a damaged one is to be named now, not in the third epoch."""

    def inspect(own: Sequence[Path]) -> list[Picture | BadFile]:
        done = []
        with ThreadPoolExecutor(_READERS) as pool:
            for item in pool.map(lambda path: _inspect(folder, path, captions), own):
                done.append(item)
                on_progress(len(done), len(own))
        return done

    found = ranks.dealt(paths, inspect)
    pictures = [item for item in found if isinstance(item, Picture)]
    bad = [item for item in found if isinstance(item, BadFile)]
    return Folder(folder, tuple(sorted(pictures, key=lambda p: p.name)), tuple(bad))


def _inspect(folder: Path, path: Path, captions: Captions) -> Picture | BadFile:
    if _dangles(path):
        return BadFile(path, "is a link to a file that does not exist")
    if path.suffix.lower() not in SUFFIXES:
        return BadFile(path, f"is no picture ({', '.join(SUFFIXES)})")
    try:
        content = path.read_bytes()
        if not content:
            return BadFile(path, "is empty")
        picture = open_rgb(path)
    except OptionError as error:
        return BadFile(path, str(error))
    # PIL raises SyntaxError for broken PNGs, and other plain errors while it decodes.
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        return BadFile(path, f"is damaged ({error})")
    name = path.relative_to(folder).as_posix()
    digest = hashlib.sha256(content).hexdigest()
    return Picture(path, name, captions(path) or ("",), picture.width, picture.height, digest)


def _check_not_empty(folder: Folder) -> None:
    if not folder.pictures:
        left_out = f"; left out: {'; '.join(map(str, folder.bad[:_SHOWN]))}" if folder.bad else ""
        raise OptionError(
            f"the folder {folder.path} holds no pictures ({', '.join(SUFFIXES)}){left_out}"
        )


def check_files(folder: Folder, refuse: bool) -> None:
    """Raise OptionError for bad files, if these are to be refused."""
    if refuse and folder.bad:
        raise OptionError(
            f"{folder.path}: found {counted(len(folder.bad), 'file')} without a whole picture: "
            f"{'; '.join(map(str, folder.bad))}; repair or remove them, or use --bad_files skip"
        )


def check_sizes(folder: Folder, resolution: int) -> None:
    """Raise OptionError for pictures that would have to be enlarged."""
    small = [p for p in folder.pictures if min(p.width, p.height) < resolution]
    if small:
        shown = ", ".join(f"{p.name} ({p.width}x{p.height})" for p in small[:_SHOWN])
        raise OptionError(
            f"{folder.path}: found {counted(len(small), 'picture')} smaller than"
            f" {counted(resolution, 'pixel')}: {shown}"
            f"{', ...' if len(small) > _SHOWN else ''}; lower --resolution, or add "
            "--allow_upscaling"
        )


def _names(paths: list[Path]) -> str:
    shown = ", ".join(path.name for path in paths[:_SHOWN])
    rest = len(paths) - _SHOWN
    return f"{shown} and {rest} more are" if rest > 0 else f"{shown} {'are' if paths[1:] else 'is'}"
