"""Load artefacts: what a module or pipeline needs is then read instead of compiled.

Machine code is a program, whatever its checksum. So a file is opened only if the caller trusts it,
or names its fingerprint, or if it lies in the private cache folder of this very user.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from strop.errors import CacheError, OptionError
from strop.options import Options
from strop.runtime.build.artefact import Artefact

_FINGERPRINT = re.compile(r"sha256:[0-9a-f]{64}")


def open_artefact(path: Path, trust: bool | str, options: Options) -> Artefact:
    """Open a file that is trusted. Raises CacheError for one that is not, or that is damaged, and
    OptionError for a ``trust`` that is neither a bool nor a fingerprint."""
    if isinstance(trust, str) and not _FINGERPRINT.fullmatch(trust):
        raise OptionError(
            f"trust={trust!r}: expected True, or the fingerprint that strop.save has given,"
            " 'sha256:' and 64 digits from 0 to f"
        )
    if not isinstance(trust, bool | str):
        raise OptionError(f"trust={trust!r}: expected True, False or a fingerprint")
    if not path.is_file():
        raise CacheError(
            f"{path} is {'no file' if path.exists() else 'not there'}: strop.save or"
            " `strop build` makes one"
        )
    if not trust and (reason := _why_not_private(path, options.cache_path)):
        raise CacheError(
            f"{path} holds machine code, which can do all that a program can, and {reason}."
            " strop.load takes trust=True if you know who made it,"
            " trust='sha256:...' if you were told its fingerprint, or a file in your own cache"
            f" folder, {options.cache_path}"
        )
    artefact = Artefact(path)
    if isinstance(trust, str) and trust != f"sha256:{artefact.fingerprint}":
        artefact.close()
        raise CacheError(
            f"{path} has the fingerprint sha256:{artefact.fingerprint}, not {trust}: it is another"
            " file than the one that you trust"
        )
    return artefact


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
