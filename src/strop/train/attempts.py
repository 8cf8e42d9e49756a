"""Go on after a launcher has started all processes again, as one of them has died or hung.

A note in the output folder says what this training is called and where it began. Its checkpoints
have its name, so that a further attempt goes on from the last of them: not from one that another
training has left there, nor from where the command says, which is where the first attempt began.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from strop.errors import CacheError
from strop.train import checkpoint, files

log = logging.getLogger("strop")
NAME = ".attempt.json"


@dataclass(frozen=True)
class Start:
    """Say what a training is called, and which checkpoint it goes on from, if from any."""

    run: str
    folder: Path | None


def start(output: Path, attempt: int, find: Callable[[], Path | None]) -> Start:
    """Return where this attempt starts; the first one where ``find`` says."""
    note = output / NAME
    if attempt and note.is_file():
        known = json.loads(note.read_text())
        begun = Path(known["folder"]) if known["folder"] else None
        return Start(known["run"], newest_of(output, known["run"]) or begun)
    note.unlink(missing_ok=True)  # a further attempt is the first one, if this raises
    found = Start(uuid.uuid4().hex, find())
    content = asdict(found) | {"folder": str(found.folder) if found.folder else None}
    files.write_json(note, content)
    return found


def newest_of(output: Path, run: str) -> Path | None:
    """Return the newest whole checkpoint of a training, or None."""
    for _, folder in reversed(checkpoint.numbered(output)):
        try:
            checkpoint.verify(folder)
        except CacheError as error:
            log.warning("%s; looking for one before it", error)
            continue
        if checkpoint.state_of(folder).get("run") == run:
            return folder
    return None
