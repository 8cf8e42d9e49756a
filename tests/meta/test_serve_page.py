"""The code of docs/serve.md runs: the server of its command, and the program that asks it."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from tests.meta.test_lora_page import _save_adapter
from tests.scripts import run_script

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/serve.md").read_text()
(COMMAND,) = re.findall(r"^```bash\nstrop (.*?)\n```", PAGE, re.S | re.M)
(BLOCK,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.S | re.M)
PORT = "8000"


@pytest.mark.slow
def test_the_code_runs(tiny_model: Path, cache_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "my-model").symlink_to(tiny_model)
    (tmp_path / "my-loras").mkdir()
    _save_adapter(tiny_model, tmp_path / "my-loras" / "ink.safetensors", 2)
    assert PORT in COMMAND
    words = [{PORT: "0"}.get(word, word) for word in shlex.split(COMMAND)]
    more = {"PYTHONPATH": str(ROOT / "src"), "STROP_CACHE_DIR": str(cache_folder)}
    with (
        (tmp_path / "log.txt").open("w") as log,
        subprocess.Popen(
            [sys.executable, "-m", "strop", *words, "--device", "cpu"],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, **more},
        ) as server,
    ):
        try:
            assert server.stdout is not None
            told = server.stdout.readline()
            address = re.search(r"http://127\.0\.0\.1:(\d+)", told)
            assert address, (tmp_path / "log.txt").read_text()
            page = tmp_path / "page.py"
            page.write_text(BLOCK.replace(f":{PORT}", f":{address[1]}"))
            run_script(page)
            server.send_signal(signal.SIGTERM)
            assert server.wait(60) == 0
        finally:
            server.kill()
    with Image.open(tmp_path / "circle-3.png") as picture:
        assert picture.size == (64, 96)
    assert (tmp_path / "circle-4.png").exists()
    assert (tmp_path / "square.png").exists()
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert all(line.startswith(("{", "warning:")) for line in lines)


def test_the_paths_of_the_page_are_those_of_the_server() -> None:
    from strop.serve import native_api, openai_api, pages, sdapi, sdapi_state

    parts = (openai_api, sdapi, sdapi_state, native_api, pages)
    known = {route.path for part in parts for route in part.router.routes}
    table = PAGE.split("## Interfaces")[1].split("##")[0]
    named = set(re.findall(r"`(?:GET|POST|GET` or `DELETE) (/[\w/.-]+)`", table))
    named |= {path for path in re.findall(r"(/[\w/.-]+)`", table) if path.count("/") > 1}
    shapes = {path.replace("{job_id}", "ID").replace("{number}", "0") for path in known}
    assert named <= shapes | {"/openapi.json"}, named - shapes
    assert {"/healthz", "/metrics", "/v1/images/generations", "/api/pictures"} <= named
