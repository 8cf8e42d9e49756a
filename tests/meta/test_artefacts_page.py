"""The code of docs/artefacts.md runs, in a folder that holds what it names."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from strop.artefacts import building
from strop.cli import app
from tests.artefacts.keys import write_keys
from tests.scripts import run_script

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/artefacts.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.S | re.M)
COMMANDS = re.findall(r"^strop build (.*)$", PAGE, re.M)
CAN_SIGN = importlib.util.find_spec("cryptography") is not None
needs_library = pytest.mark.skipif(not CAN_SIGN, reason="needs the package cryptography")
needs_none = pytest.mark.skipif(CAN_SIGN, reason="all blocks run")


@pytest.mark.slow
@pytest.mark.parametrize(
    "num_blocks", [pytest.param(1, marks=needs_none), pytest.param(2, marks=needs_library)]
)
def test_the_code_runs(num_blocks: int, tiny_model: Path, tmp_path: Path) -> None:
    assert len(BLOCKS) == 2
    (tmp_path / "my-model").symlink_to(tiny_model)
    if num_blocks == 2:
        write_keys(tmp_path)
    page = tmp_path / "page.py"
    page.write_text("".join(BLOCKS[:num_blocks]))
    run_script(page)
    assert (tmp_path / "my-model.strop").exists()
    assert (tmp_path / "my-model.strop.minisig").exists() is (num_blocks == 2)


@needs_library
def test_the_commands_are_understood(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Path, Path]] = []

    def record(model: Path, targets: Any, path: Path, **given: Any) -> str:
        calls.append((model, path))
        return "done"

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(building, "build_artefact", record)
    (tmp_path / "my-model").symlink_to(tiny_model)
    write_keys(tmp_path)
    for command in COMMANDS:
        done = CliRunner().invoke(app, ["build", *shlex.split(command)], catch_exceptions=False)
        assert done.exit_code == 0, done.output
    assert len(calls) == len(COMMANDS) == 4
    assert all((model / "model_index.json").is_file() for model, _ in calls)
