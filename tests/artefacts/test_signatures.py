"""A signature stands for trust, if it is of this very file, by this very key."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import strop
from strop.artefacts import building
from strop.artefacts.saving import gather
from strop.artefacts.signing import (
    check_signature,
    is_signed,
    read_public_key,
    read_secret_key,
    read_signature,
    sign_artefact,
)
from strop.cli import app
from strop.errors import CacheError, OptionError
from strop.runtime.build.artefact import Artefact, StoredEntry, write_artefact
from tests.artefacts.keys import content_of, write_key, write_keys
from tests.artefacts.test_artefacts import (
    Net,
    X,
    forbid_compilers,
    forget,
    fresh_process,
    loaded,
    options,
    run,
    saved,
)

__all__ = ["fresh_process"]  # a fixture, which runs by itself
# minisign's own: a public key, and its signature of "test"
PUBLIC = "untrusted comment: x\nRWQf6LRCGA9i53mlYecO4IzT51TGPpvWucNSCh1CBM0QTaLn73Y7GFO3\n"
SIGNATURE = """untrusted comment: signature from minisign secret key
RUQf6LRCGA9i559r3g7V1qNyJDApGip8MfqcadIgT9CuhV3EMhHoN1mGTkUidF/z7SrlQgXdy8ofjb7bNJJylDOocrCo8KLzZwo=
trusted comment: timestamp:1556193335\tfile:test
y/rUw2y8/hOUYjZU71eHp/Wo1KZ40fGy2VJEDl34XMJM+TX48Ss/17u3IvIfbVR1FkZZSNCisQbuQY+bHwhEBg==
"""


@pytest.fixture
def needs_library() -> None:
    pytest.importorskip("cryptography")


def small(folder: Path, text: bytes = b"{}") -> Path:
    """An artefact with one entry."""
    path = folder / "small.strop"
    write_artefact(path, {"parts": {}}, [StoredEntry("plan", "ab12", text)])
    return path


def signed(folder: Path) -> tuple[Path, Path, Path]:
    """An artefact, its signature, and the public key."""
    public, secret = write_keys(folder)
    path = small(folder)
    artefact = Artefact(path)
    return path, sign_artefact(path, artefact.fingerprint, read_secret_key(secret)), public


@pytest.mark.usefixtures("needs_library")
def test_a_signature_that_minisign_made_is_read(tmp_path: Path) -> None:
    key, signature = tmp_path / "x.pub", tmp_path / "x.minisig"
    key.write_text(PUBLIC)
    signature.write_text(SIGNATURE)
    found, public = read_signature(signature), read_public_key(key)
    assert is_signed(hashlib.blake2b(b"test").digest(), found, public)
    assert not is_signed(hashlib.blake2b(b"tess").digest(), found, public)


@pytest.mark.usefixtures("needs_library")
def test_a_public_key_stands_for_trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    public, secret = write_keys(tmp_path)
    module = strop.optimize(Net().eval(), options=options(tmp_path / "before"))
    expected = run(module, X)
    report = strop.save(module, tmp_path / "net.strop", sign=secret)
    assert report.signature == tmp_path / "net.strop.minisig"
    assert f"signed: {report.signature}" in str(report)
    assert "file:net.strop" in report.signature.read_text()
    forget()
    forbid_compilers(monkeypatch)
    for key in (public, str(public)):
        served = loaded(tmp_path, report.path, trust=key)
        assert torch.equal(run(served, X), expected)
        assert served.forward.variants.num_captures == 0


@pytest.mark.usefixtures("needs_library")
def test_all_bytes_of_a_file_are_signed(tmp_path: Path) -> None:
    path = small(tmp_path)
    artefact = Artefact(path)
    assert artefact.digest() == hashlib.blake2b(path.read_bytes()).digest()
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"x")
    with pytest.raises(CacheError, match="is damaged: its table"):
        artefact.digest()
    path.write_bytes(content[:100] + b"x" + content[101:])
    with pytest.raises(CacheError, match="is damaged: plan ab12 at 96"):
        artefact.digest()


def another_key(path: Path, signature: Path) -> Path:
    return write_keys(path.parent, "other", seed=8)[0]


def another_number(path: Path, signature: Path) -> Path:
    return write_keys(path.parent, "other", number=bytes(8))[0]


def another_artefact(path: Path, signature: Path) -> None:
    small(path.parent, b"[]")


def another_comment(path: Path, signature: Path) -> None:
    signature.write_text(signature.read_text().replace("small.strop", "large.strop"))


def the_old_kind(path: Path, signature: Path) -> None:
    lines = signature.read_text().splitlines()
    signature.write_text("\n".join([lines[0], "RWQ" + lines[1][3:], *lines[2:]]))


def no_signature(path: Path, signature: Path) -> None:
    signature.unlink()


def half_a_signature(path: Path, signature: Path) -> None:
    signature.write_text("\n".join(signature.read_text().splitlines()[:2]))


def a_short_signature(path: Path, signature: Path) -> None:
    signature.write_text(signature.read_text()[:-5] + "\n")


def a_huge_signature(path: Path, signature: Path) -> None:
    signature.write_bytes(b"\n" * 2**17)


CHANGES: dict[Callable[[Path, Path], Path | None], str] = {
    another_key: "does not sign .*small.strop, or not by the key",
    another_number: "is by the key 0807060504030201, and .* is the key 0000000000000000",
    another_artefact: "does not sign",
    another_comment: "does not sign",
    the_old_kind: "is no signature: it is not of the kind",
    no_signature: "small.strop.minisig cannot be read",
    half_a_signature: "is no signature: it has 2 lines",
    a_short_signature: "is no signature",
    a_huge_signature: "is no signature: it is too long",
}


@pytest.mark.usefixtures("needs_library")
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_another_signature_is_refused(
    tmp_path: Path, change: Callable[[Path, Path], Path | None]
) -> None:
    path, signature, public = signed(tmp_path)
    key = change(path, signature) or public
    with pytest.raises(CacheError, match=CHANGES[change]):
        strop.load(Net().eval(), path, trust=key)


@pytest.mark.usefixtures("needs_library")
def test_every_byte_of_a_signature_counts(tmp_path: Path) -> None:
    path, signature, public = signed(tmp_path)
    content, meant = signature.read_bytes(), read_signature(signature)
    artefact, key = Artefact(path), read_public_key(public)
    refused, begin = 0, content.index(b"\n") + 1
    for place in range(begin, len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        signature.write_bytes(damaged)
        try:
            check_signature(artefact, key, public)
        except CacheError:
            refused += 1
        else:
            assert read_signature(signature) == meant  # base64 has bits that stand for nothing
    assert refused > len(content) - begin - 10


@pytest.mark.usefixtures("needs_library")
def test_a_file_that_was_replaced_is_not_signed(tmp_path: Path) -> None:
    _, secret = write_keys(tmp_path)
    fingerprint = Artefact(small(tmp_path)).fingerprint
    with pytest.raises(CacheError, match="has been replaced since it was written"):
        sign_artefact(small(tmp_path, b"[]"), fingerprint, read_secret_key(secret))


# keys


@pytest.mark.usefixtures("needs_library")
def test_what_is_no_key_is_refused(tmp_path: Path) -> None:
    public, secret = write_keys(tmp_path)
    with pytest.raises(OptionError, match=r"maker\.pub is no secret key of minisign; `minisign -G"):
        read_secret_key(public)
    with pytest.raises(OptionError, match="is no public key"):
        read_public_key(secret)
    with pytest.raises(OptionError, match="none cannot be read: No such file"):
        read_secret_key(tmp_path / "none")
    content = content_of(secret)
    write_key(secret, content[:60] + b"x" + content[61:])
    with pytest.raises(OptionError, match="its checksum is wrong"):
        read_secret_key(secret)
    write_key(secret, content[:2] + b"Sc" + content[4:])
    with pytest.raises(OptionError, match="a password protects, for which Strop does not ask"):
        read_secret_key(secret)
    public.write_bytes(bytes(range(256)))
    with pytest.raises(OptionError, match="is no public key"):
        read_public_key(public)


@pytest.mark.usefixtures("needs_library")
def test_a_secret_key_is_not_shown(tmp_path: Path) -> None:
    key = read_secret_key(write_keys(tmp_path)[1])
    assert "seed" not in repr(key)


def test_trust_has_to_be_said_clearly(tmp_path: Path) -> None:
    path = small(tmp_path)
    wrong: tuple[Any, ...] = ("", "maker.pub", tmp_path, "sha256:12", 1, None, b"x")
    for trust in wrong:
        with pytest.raises(OptionError, match=r"expected True, the fingerprint .* public key"):
            strop.load(Net().eval(), path, trust=trust)


def test_without_the_library_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("cryptography.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    key = tmp_path / "x.pub"
    key.write_text(PUBLIC)
    with pytest.raises(OptionError, match=r"pip install 'strop\[sign\]'"):
        strop.load(Net().eval(), small(tmp_path), trust=key)
    path = saved(tmp_path)
    module = loaded(tmp_path, path)  # needs none
    run(module, X)
    with pytest.raises(OptionError, match=r"pip install 'strop\[sign\]'"):
        strop.save(module, path, sign=key)


# the command


@pytest.mark.usefixtures("needs_library")
def test_the_command_signs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = strop.optimize(Net().eval(), options=options(tmp_path / "before"))
    run(module, X)
    found = gather(strop.api.dispatchers_of(module))
    monkeypatch.setattr(building, "pipeline_of", lambda *_: None)
    monkeypatch.setattr(building, "_gathered", lambda *_: found)
    public, secret = write_keys(tmp_path)
    path = tmp_path / "x.strop"
    words = ["build", "--model", "sd15", "--target", "cpu", "-o", str(path)]
    runner = CliRunner()
    wrong = runner.invoke(app, [*words, "--sign", str(public)], env={"COLUMNS": "200"})
    assert wrong.exit_code == 1
    assert "is no secret key of minisign" in wrong.output
    assert not path.exists()
    done = runner.invoke(app, [*words, "--sign", str(secret)], catch_exceptions=False)
    assert f"signed: {path}.minisig" in done.output
    loaded(tmp_path, path, trust=public)
