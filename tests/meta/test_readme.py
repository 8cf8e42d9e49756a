"""The README is short, its code blocks run, its numbers are those of the files that it names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import readme_table
from tests.scripts import run_script

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.S | re.M)
MOST_LINES = 200


def test_the_readme_is_short() -> None:
    assert README.count("\n") <= MOST_LINES
    assert len(BLOCKS) == 3
    assert BLOCKS[0].count("\n") <= 15


def test_the_readme_has_no_words_of_ours_for_rows() -> None:
    """A reader who has never seen the project cannot know what P1 or a "must" is."""
    assert not re.findall(r"\bP\d+\w*\b|\bmust / stretch\b", README)


def test_the_readme_names_the_two_commands() -> None:
    assert "    make demo " in README
    assert "    make test " in README


def test_the_table_of_results_is_that_of_the_files() -> None:
    assert readme_table.main(["--check"]) == 0


def test_the_numbers_of_what_is_supported_are_those_of_the_pages() -> None:
    compatibility = (ROOT / "docs" / "compatibility.md").read_text()
    models = (ROOT / "docs" / "models.md").read_text()
    rows, passed = (
        re.search(r"^\d.* rows|^\d+ of \d+ pass", t, re.M) for t in (compatibility, models)
    )
    assert rows is not None
    assert passed is not None
    assert f"lists {rows[0].split()[0]} pipelines" in README
    assert f"{passed[0].removesuffix(' pass')} architectures" in README


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_code_block(number: int, tmp_path: Path) -> None:
    """In a process of its own, without warnings as errors: users have none either."""
    script = tmp_path / f"block_{number}.py"
    script.write_text(BLOCKS[number])
    run_script(script)


@pytest.mark.parametrize("file", DOCUMENTS, ids=lambda f: str(f.relative_to(ROOT)))
def test_links(file: Path) -> None:
    text = re.sub(r"New file `[^`]+`", "", file.read_text())  # of a recipe
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
        assert (file.parent / target).exists(), f"{file.name} links to {target}"
    for path in re.findall(r"`((?:src|tests|docs|examples)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), f"{file.name} names {path}"
    for number in re.findall(r"decisions/(\d{4})", text):
        assert list((ROOT / "docs" / "decisions").glob(f"{number}-*.md")), number
