"""Files with keys as ``minisign -G -W`` writes them."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path


def write_keys(
    folder: Path, name: str = "maker", *, seed: int = 7, number: bytes = b"\1\2\3\4\5\6\7\10"
) -> tuple[Path, Path]:
    """Write a pair of keys, and return the files of the public and of the secret one."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    private = bytes([seed]) * 32
    point = Ed25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()
    checked = b"Ed" + number + private + point
    checksum = hashlib.blake2b(checked, digest_size=32).digest()
    secret = b"Ed" + bytes(2) + b"B2" + bytes(48) + checked[2:] + checksum
    files = folder / f"{name}.pub", folder / f"{name}.key"
    for file, content in zip(files, (b"Ed" + number + point, secret), strict=True):
        write_key(file, content)
    return files


def write_key(file: Path, content: bytes) -> None:
    file.write_text(f"untrusted comment: a key\n{base64.b64encode(content).decode()}\n")


def content_of(file: Path) -> bytes:
    return base64.b64decode(file.read_text().splitlines()[1])
