"""The recipes of CONTRIBUTING.md, followed to the letter in a copy of the source."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import strop

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "CONTRIBUTING.md").read_text()
RECIPES = {
    part.partition("\n")[0].removeprefix("Recipe: "): part
    for part in GUIDE.split("\n## ")
    if part.startswith("Recipe: ")
}
CHECKS = ("test_layers.py", "test_sizes.py", "test_ops_table.py::test_a_row_is_complete")
# "New file `F`:" or "In `F`, below `LINE`" or "and below `LINE`", and the block that follows
STEP = re.compile(
    r"^(?:New file `(?P<new>[^`]+)`|In `(?P<old>[^`]+)`, below (?P<a>`+)(?P<line>.+?)(?P=a)|"
    r"and below (?P<b>`+)(?P<more>.+?)(?P=b))[^\n]*(?:\n[^\n]+)*\n\n"
    r"```(?:python)?\n(?P<code>.*?)^```",
    re.M | re.S,
)


def steps(recipe: str) -> Iterator[tuple[str, str, str]]:
    """(file, the line to insert below or nothing for a new file, code), in order."""
    file = ""
    for found in STEP.finditer(recipe):
        file = found["new"] or found["old"] or file
        yield file, found["line"] or found["more"] or "", found["code"]


def follow(recipe: str, root: Path) -> list[Path]:
    """Do what it says below ``root``; the new tests."""
    tests = []
    for file, line, code in steps(recipe):
        path = root / file
        if not line:
            assert not path.exists(), f"{file} is there already"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(code)
            tests += [path] if file.startswith("tests/") else []
            continue
        lines = path.read_text().splitlines(keepends=True)
        places = [n for n, text in enumerate(lines) if line in text]
        assert len(places) == 1, f"{file} has {len(places)} lines with {line!r}"
        path.write_text("".join([*lines[: places[0] + 1], code, *lines[places[0] + 1 :]]))
    return tests


def test_there_are_six() -> None:
    assert list(RECIPES) == [
        "an operator",
        "a pass",
        "a rule of fusion",
        "a library call",
        "a hand-written kernel",
        "a pattern",
    ]
    for name, recipe in RECIPES.items():
        if name == "an operator":  # tests/meta/test_ops_table.py follows that one
            continue
        blocks = recipe.count("\n```") // 2
        assert len(list(steps(recipe))) == blocks > 0, f"{name}: a block that no step leads to"


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "an operator"])
def test_recipe(name: str, tmp_path: Path) -> None:
    skipped = shutil.ignore_patterns("weights")  # what is compiled of files is true of copies
    shutil.copytree(Path(strop.__file__).parent, tmp_path / "src" / "strop", ignore=skipped)
    # the tests as well: pytest takes the folder of a new test for all there is of ``tests``
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=skipped)
    tests = follow(RECIPES[name], tmp_path)
    assert tests
    # all other files have been checked where they lie
    touched = [file.removeprefix("src/strop/") for file, *_ in steps(RECIPES[name])]
    chosen = " or ".join(("not test_file", *(f"test_file[{file}]" for file in touched)))
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (tmp_path / "src", tmp_path))),
        "STROP_CACHE_DIR": str(tmp_path / "cache"),
    }
    checks = [str(tmp_path / "tests" / "meta" / check) for check in CHECKS]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-c",
        os.devnull,
        "--import-mode=importlib",
        "-k",
        f"({chosen}) and not test_compiler_and_runtime_load_without_debug",
        *map(str, tests),
        *checks,
    ]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
