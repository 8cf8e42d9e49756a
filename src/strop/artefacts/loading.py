"""Load artefacts: what a module or pipeline needs is then read instead of compiled.

Machine code is a program, whatever its checksum. So a file is opened only if the caller trusts it,
names its fingerprint or a key that has signed it, or if it lies in the private cache folder of this
very user.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from functools import partial
from os import PathLike
from pathlib import Path

from strop.artefacts.signing import check_can_sign, check_signature, read_public_key
from strop.errors import CacheError, OptionError
from strop.options import Options
from strop.runtime.build.artefact import Artefact

Trust = bool | str | PathLike[str]  # True, a fingerprint, or the file of a public key
_FINGERPRINT = re.compile(r"sha256:[0-9a-f]{64}")


def open_artefact(path: Path, trust: Trust, options: Options) -> Artefact:
    """Open a file that is trusted. Raises CacheError for one that is not, or that is damaged, and
    OptionError for a ``trust`` that is neither a bool, a fingerprint nor a file with a key."""
    check = _check_of(trust)
    if not path.is_file():
        raise CacheError(
            f"{path} is {'no file' if path.exists() else 'not there'}: strop.save or"
            " `strop build` makes one"
        )
    if not trust and (reason := _why_not_private(path, options.cache_path)):
        raise CacheError(
            f"{path} holds machine code, which can do all that a program can, and {reason}."
            " strop.load takes trust=True if you know who made it,"
            " trust='sha256:...' if you were told its fingerprint, trust='maker.pub' if you have"
            " the public key of who signed it, or a file in your own cache folder,"
            f" {options.cache_path}"
        )
    artefact = Artefact(path)
    try:
        check(artefact)
    except BaseException:
        artefact.close()
        raise
    return artefact


def _check_of(trust: Trust) -> Callable[[Artefact], None]:
    """Return what raises CacheError for an artefact that a caller does not mean."""
    if isinstance(trust, bool):
        return lambda artefact: None
    if isinstance(trust, str) and _FINGERPRINT.fullmatch(trust):
        return partial(_check_fingerprint, trust=trust)
    if isinstance(trust, str | PathLike) and Path(trust).is_file():
        check_can_sign()
        return partial(check_signature, key=read_public_key(Path(trust)), key_path=Path(trust))
    raise OptionError(
        f"trust={trust!r}: expected True, the fingerprint that strop.save has given ('sha256:' and"
        " 64 digits from 0 to f), or the file of a public key, which is not there"
    )


def _check_fingerprint(artefact: Artefact, trust: str) -> None:
    if trust != f"sha256:{artefact.fingerprint}":
        raise CacheError(
            f"{artefact.path} has the fingerprint sha256:{artefact.fingerprint}, not {trust}: it is"
            " another file than the one that you trust"
        )


def _why_not_private(path: Path, folder: Path) -> str:
    """Say why a file may have been put there by somebody else, or nothing."""
    real, root = path.resolve(), folder.resolve()
    if not real.is_relative_to(root):
        return "does not lie in your cache folder"
    between = [parent for parent in real.parents if parent.is_relative_to(root)]
    for place in (real, *between):
        status = place.stat()
        if status.st_uid != os.getuid():
            return f"{place} belongs to another user"
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return f"{place} can be written by others (mode {stat.S_IMODE(status.st_mode):04o})"
    return ""
