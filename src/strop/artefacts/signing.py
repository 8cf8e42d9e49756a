"""Sign artefacts, and check signatures, in minisign's format (https://jedisct1.github.io/minisign).

Keys are those of ``minisign -G -W``. A key signs BLAKE2b of all bytes of a file, and the signature
lies beside it, in FILE.minisig, so that ``minisign -V`` checks it too:

    public key   "Ed", the key's number (8 bytes), the key (32)
    secret key   "Ed", how it is encrypted (2; zeros: it is not), "B2", salt and limits (48), the
                 number (8), seed (32) and public key (32), BLAKE2b of "Ed", number and keys (32)
    signature    "ED", the number (8), the signature (64); a comment; the signature of both

Each is a line of base64 below a line with a comment that nobody has signed.
"""

from __future__ import annotations

import base64
import hashlib
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strop.errors import CacheError, OptionError
from strop.runtime.build.artefact import Artefact
from strop.wording import counted

SUFFIX = ".minisig"
_KEYS, _PREHASHED, _PLAIN, _CHECKED = b"Ed", b"ED", bytes(2), b"B2"
_UNSIGNED, _SIGNED = "untrusted comment: ", "trusted comment: "
_NUMBER_BYTES, _KEY_BYTES, _SIGNATURE_BYTES = 8, 32, 64
_LIMITS_BYTES = 48  # salt and limits of a key's encryption
_MOST_BYTES = 1 << 16  # of a file with a key or signature
_AGAIN = "`minisign -G -W` makes a pair of keys"


@dataclass(frozen=True, slots=True)
class PublicKey:
    """Hold what checks signatures."""

    number: bytes
    point: bytes


@dataclass(frozen=True, slots=True)
class SecretKey:
    """Hold what signs."""

    number: bytes
    seed: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class FileSignature:
    """Hold a signature of a file, and one of that and a comment."""

    number: bytes
    of_file: bytes
    comment: str
    of_both: bytes


def read_public_key(path: Path) -> PublicKey:
    """Read a key. Raises OptionError for a file that holds none."""
    content = _content_of_key(path, len(_KEYS) + _NUMBER_BYTES + _KEY_BYTES, "public key")
    return PublicKey(content[2:10], content[10:])


def read_secret_key(path: Path) -> SecretKey:
    """Read a key. Raises OptionError for a file that holds none, or that a password protects."""
    start = 6 + _LIMITS_BYTES
    length = start + _NUMBER_BYTES + 3 * _KEY_BYTES
    content = _content_of_key(path, length, "secret key")
    if content[2:4] != _PLAIN:
        raise OptionError(
            f"{path} is a secret key that a password protects, for which Strop does not ask:"
            f" {_AGAIN} without one"
        )
    number, seed = content[start : start + 8], content[start + 8 : start + 40]
    own = hashlib.blake2b(_KEYS + content[start:-_KEY_BYTES], digest_size=_KEY_BYTES).digest()
    if content[4:6] != _CHECKED or own != content[-_KEY_BYTES:]:
        raise OptionError(f"{path} is a damaged secret key: its checksum is wrong; {_AGAIN}")
    return SecretKey(number, seed)


def check_can_sign() -> None:
    """Raise OptionError where the library for signatures is missing."""
    _library()


def sign_artefact(path: Path, fingerprint: str, key: SecretKey) -> Path:
    """Sign the artefact at a path, if it is still the one of this fingerprint, and return the file
    with the signature. Raises CacheError where that cannot be written."""
    artefact = Artefact(path)
    try:
        if artefact.fingerprint != fingerprint:
            raise CacheError(f"{path} has been replaced since it was written: it is not signed")
        digest = artefact.digest()
    finally:
        artefact.close()
    signer = _library().Ed25519PrivateKey.from_private_bytes(key.seed)
    comment = f"timestamp:{int(time.time())}\tfile:{path.name}\thashed"
    of_file = signer.sign(digest)
    of_both = signer.sign(of_file + comment.encode())
    target = path.with_name(path.name + SUFFIX)
    lines = (
        f"{_UNSIGNED}signature of an artefact of Strop",
        base64.b64encode(_PREHASHED + key.number + of_file).decode(),
        f"{_SIGNED}{comment}",
        base64.b64encode(of_both).decode(),
    )
    try:
        target.write_text("\n".join(lines) + "\n")
    except OSError as error:
        raise CacheError(f"{target} cannot be written: {error.strerror or error}") from error
    return target


def check_signature(artefact: Artefact, key: PublicKey, key_path: Path) -> None:
    """Raise CacheError unless the file beside an artefact holds a signature of it, by this key."""
    path = artefact.path.with_name(artefact.path.name + SUFFIX)
    signature = read_signature(path)
    if signature.number != key.number:
        raise CacheError(
            f"{path} is by the key {_shown(signature.number)}, and {key_path} is the key"
            f" {_shown(key.number)}: whose signature it is cannot be said"
        )
    if not is_signed(artefact.digest(), signature, key):
        raise CacheError(
            f"{path} does not sign {artefact.path}, or not by the key in {key_path}: one of them"
            " was changed since. Copy both again from whom you have them"
        )


def is_signed(digest: bytes, signature: FileSignature, key: PublicKey) -> bool:
    """Tell whether a key has signed a digest, and the comment of the signature."""
    from cryptography.exceptions import InvalidSignature

    try:
        checker = _library().Ed25519PublicKey.from_public_bytes(key.point)
        checker.verify(signature.of_file, digest)
        checker.verify(signature.of_both, signature.of_file + signature.comment.encode())
    except InvalidSignature:
        return False
    return True


def read_signature(path: Path) -> FileSignature:
    """Read a signature. Raises CacheError for a file that holds none."""
    try:
        lines = _lines(path)
        if len(lines) != 4:
            raise ValueError(f"it has {counted(len(lines), 'line')}, not 4")
        if not lines[2].startswith(_SIGNED):
            raise ValueError(f"its third line does not begin with {_SIGNED!r}")
        content = base64.b64decode(lines[1], validate=True)
        of_both = base64.b64decode(lines[3], validate=True)
        if content[:2] != _PREHASHED:
            raise ValueError("it is not of the kind that signs a hash, which minisign makes now")
        if (len(content), len(of_both)) != (10 + _SIGNATURE_BYTES, _SIGNATURE_BYTES):
            raise ValueError("it is too short or too long")
    except OSError as error:
        raise CacheError(
            f"{path} cannot be read ({error.strerror or error}): the signature of an artefact lies"
            " beside it. `strop build --sign` and strop.save(..., sign=) write it"
        ) from error
    except ValueError as error:
        raise CacheError(f"{path} is no signature: {error}") from error
    return FileSignature(content[2:10], content[10:], lines[2].removeprefix(_SIGNED), of_both)


def _content_of_key(path: Path, num_bytes: int, kind: str) -> bytes:
    """Read the second line of a file with a key."""
    try:
        lines = _lines(path)
        content = base64.b64decode(lines[1], validate=True) if len(lines) == 2 else b""
    except OSError as error:
        raise OptionError(f"{path} cannot be read: {error.strerror or error}; {_AGAIN}") from error
    except ValueError:
        content = b""
    if len(content) != num_bytes or not content.startswith(_KEYS):
        raise OptionError(f"{path} is no {kind} of minisign; {_AGAIN}")
    return content


def _lines(path: Path) -> list[str]:
    """Read a short text. Raises ValueError for anything else."""
    with path.open("rb") as file:
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise ValueError("it is too long")
    return content.decode().rstrip("\r\n").replace("\r\n", "\n").split("\n")


def _shown(number: bytes) -> str:
    """Write a key's number as minisign does."""
    return number[::-1].hex().upper()


def _library() -> Any:
    """Return what knows Ed25519. Raises OptionError where it is missing."""
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise OptionError(
            "signatures of artefacts need the package cryptography, which is missing here:"
            " pip install 'strop[sign]'"
        ) from error
    return ed25519
