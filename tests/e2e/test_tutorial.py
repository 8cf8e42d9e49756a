"""The notebook of examples/, run cell by cell, and the Dockerfile, read as text."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

from tests.scripts import run_script

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "dreambooth.ipynb"
_COMMAND = re.compile(r"(?:pip install|jupyter notebook) .*")


def sources() -> list[str]:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_the_notebook_is_whole_and_has_no_outputs() -> None:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)
    for source in sources():
        ast.parse(source)


def test_the_notebook_runs(tmp_path: Path) -> None:
    """With a few steps, which teach the model nothing yet."""
    text = "\n\n".join(sources())
    for line, other in (
        ('HERE = Path(".")', f"HERE = Path({str(ROOT / 'examples')!r})"),
        ("STEPS = 600", "STEPS = 4"),
    ):
        assert text.count(line) == 1
        text = text.replace(line, other)
    script, out = tmp_path / "cells.py", tmp_path / "tutorial"
    script.write_text(text)
    run_script(script)
    assert (out / "before_and_after.png").is_file()
    assert "<img" in (out / "runs" / "report.html").read_text()


def test_the_image_is_made_by_the_commands_of_the_readme() -> None:
    told = set(_COMMAND.findall((ROOT / "README.md").read_text(encoding="utf-8")))
    done = _COMMAND.findall((ROOT / "Dockerfile").read_text(encoding="utf-8"))
    assert len(done) == 3
    for command in done:  # the server of a container needs more words
        assert any(command == line or command.startswith(f"{line} --") for line in told), command
    assert told >= {'pip install -e ".[diffusion]"', 'pip install -e ".[train]" notebook'}
