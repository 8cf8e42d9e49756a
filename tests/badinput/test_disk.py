"""A cache that cannot be written, and a machine without a compiler."""

from __future__ import annotations

import errno
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from typer.testing import CliRunner

import strop
from strop.cli import app
from strop.errors import CodegenError, UnsupportedError
from strop.runtime.build import cache
from strop.runtime.build import loader as kernels

from .nets import Net, X, optimized

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No kernel of an earlier test is in memory."""
    kernels.kernel_loader.cache_clear()
    monkeypatch.setattr(cache, "_SPARE", cache._Spare())
    yield
    kernels.kernel_loader.cache_clear()


def assert_right(folder: Path, **options: Any) -> Any:
    module = optimized(Net(), cache_dir=str(folder), strict=True, **options)
    with torch.no_grad():
        torch.testing.assert_close(module(X), module.forward.eager(X))
        torch.testing.assert_close(module(X[:2]), module.forward.eager(X[:2]))
    return module.forward


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT], ids=str)
def test_a_disk_that_takes_nothing(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    usual = tempfile.mkstemp

    def refuse(*args: Any, **kwargs: Any) -> Any:
        if tmp_path in Path(kwargs.get("dir") or "/").parents:
            raise OSError(code, os.strerror(code))
        return usual(*args, **kwargs)

    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    for _ in range(2):
        assert_right(tmp_path / "cache")
    (message,) = [r.getMessage() for r in caplog.records if r.name.startswith("strop")]
    assert f"cannot be written ({os.strerror(code)}): what is compiled is kept" in message
    assert not [f for f in tmp_path.rglob("*") if f.is_file()]


def test_a_file_in_place_of_the_folder(tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "cache").write_text("")
    assert_right(tmp_path / "cache")
    (message,) = [r.getMessage() for r in caplog.records if r.name.startswith("strop")]
    assert "cannot be written" in message


# argv: the cache folder. A full or read-only file system is mounted there, for this process alone.
SCRIPT = """
import logging, sys
from pathlib import Path
import torch
sys.path.insert(0, {root!r})
from tests.badinput.test_disk import assert_right
lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())
logging.getLogger("strop").addHandler(handler)
assert_right(Path(sys.argv[1]))
print(lines)
assert len(lines) == 1 and "cannot be written" in lines[0], lines
"""


@pytest.mark.skipif(sys.platform != "linux", reason="mounts a file system")
@pytest.mark.parametrize("mount", ["size=24k", "ro"], ids=["full", "read-only"])
def test_a_real_file_system(mount: str, tmp_path: Path) -> None:
    folder, script = tmp_path / "mounted", tmp_path / "script.py"
    folder.mkdir()
    script.write_text(SCRIPT.format(root=str(ROOT)))
    prefix = ["unshare", "--user", "--map-root-user", "--mount"]
    mounting = f'mount -t tmpfs -o "{mount}" none "$0"'
    if subprocess.run([*prefix, "sh", "-c", mounting, str(folder)], capture_output=True).returncode:
        pytest.skip("this system lets nobody mount")
    command = [
        *prefix,
        "sh",
        "-c",
        f'{mounting} && exec "$1" "$2" "$0/cache"',
        str(folder),
        sys.executable,
        str(script),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_right(tmp_path / "built before")
    monkeypatch.setenv("PATH", str(tmp_path))
    kernels.kernel_loader.cache_clear()
    with pytest.raises(CodegenError, match=r"g\+\+ was not found.*apt-get install g\+\+"):
        assert_right(tmp_path / "empty")
    assert_right(tmp_path / "built before")  # a hit needs none


def test_the_command_line_without_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dumps = tmp_path / "dumps"
    assert_right(tmp_path / "cache", dump=str(dumps))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("STROP_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.chdir(tmp_path)
    kernels.kernel_loader.cache_clear()
    result = CliRunner().invoke(app, ["repro", str(next(dumps.iterdir()))])
    text = " ".join(result.output.split())
    assert "apt-get install g++" in text
    assert "apt-get install g++" in CliRunner().invoke(app, ["env"]).output


def test_a_broken_compiler_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "bin" / "g++"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\necho 'cc1plus: error: bad value for -march' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:/usr/bin:/bin")
    with pytest.raises(CodegenError, match="bad value for -march"):
        assert_right(tmp_path / "cache")


FSF = "Copyright (C) 2022 Free Software Foundation, Inc."


@pytest.mark.parametrize(
    ("version", "says"),
    [
        ("Apple clang version 15.0.0 (clang-1500.3.9.4)", "Apple clang version 15.0.0"),
        (f"g++ (GCC) 10.2.1 20210110\n{FSF}", "10.2.1"),
        ("", "does not tell its version"),
        (f"g++ (Debian 12.2.0-14) 12.2.0\n{FSF}", ""),
    ],
)
def test_another_compiler_under_the_name_is_named(
    version: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "bin" / "g++"
    fake.parent.mkdir()
    fake.write_text(
        f"#!/bin/sh\nif [ $1 = --version ]; then echo '{version}'; exit 0; fi\n"
        "echo \"unknown argument: '-fno-thread-jumps'\" >&2\nexit 1\n"
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:/usr/bin:/bin")
    with pytest.raises(CodegenError, match="unknown argument") as raised:
        assert_right(tmp_path / "cache")
    text = str(raised.value)
    assert ("kernels need GCC 11 or newer" in text) == bool(says)
    assert says in text


@pytest.mark.parametrize(("system", "name"), [("Darwin", "macOS"), ("Windows", "Windows")])
def test_another_system_than_linux(system: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes from ``optimize``, and the module stays as it was."""
    monkeypatch.setattr(platform, "system", lambda: system)
    module = Net().eval()
    torch._dynamo.reset()
    with pytest.raises(UnsupportedError, match=f"on Linux only, and this system is {name}: run"):
        strop.optimize(module)
    assert "forward" not in vars(module)
    compiled = torch.compile(Net().eval(), backend="strop")
    with torch.no_grad(), pytest.raises(BackendCompilerFailed, match="on Linux only"):
        compiled(X)
    torch._dynamo.reset()
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert f"this system is {name}" in " ".join(result.output.split())
