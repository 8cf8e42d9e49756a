"""Small files, small functions, and no error swallowed whole."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import strop

ROOT = Path(strop.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
BROAD = {"everything", "Exception", "BaseException"}

# file -> why it catches everything and does not raise it again
KEEPS = {
    "codegen/triton_worker.py": "sends the failure to the process that asked, which raises",
    "runtime/build/compilers.py": "a thread's failure is raised again by its caller",
    "runtime/run/lane_threads.py": "a thread's failure is raised again by its caller",
    "bench/load_threads.py": "a thread's failure is raised again by its caller",
    "bench/pipelines/twins.py": "whatever a pipeline raises is compared with what its twin raises",
    "serve/service.py": "whatever a batch raises is told to those who wait for its pictures",
    "bench/census.py": "whatever a model raises is its verdict, shown with its first line",
    "bench/turns.py": "sends the failure to the process that asked, which raises",
    "bench/infer_contenders.py": "whatever a peer raises is its result, shown beside the others",
    "bench/zoo_runs.py": "whatever a model raises is in its row, shown with its first line",
    "bench/zoo_times.py": "whatever a peer raises is its result, shown beside the others",
    "bench/cpu.py": "whatever a peer raises is its result, shown beside the others",
}


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_file(file: Path) -> None:
    text = file.read_text()
    assert text.count("\n") <= MAX_FILE_LINES, "split it"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            lines = node.end_lineno - node.lineno + 1
            assert lines <= MAX_FUNCTION_LINES, f"{node.name} has {lines} lines"
        if isinstance(node, ast.ExceptHandler) and str(file.relative_to(ROOT)) not in KEEPS:
            caught = ast.unparse(node.type) if node.type else "everything"
            cleans_up = isinstance(node.body[-1], ast.Raise)
            assert cleans_up or not BROAD & set(caught.strip("()").split(", ")), (
                f"line {node.lineno} catches {caught}: name what can go wrong there"
            )
