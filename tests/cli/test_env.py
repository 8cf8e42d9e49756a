"""Facts, help texts, and the pieces that need no model."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from strop.cli import pictures
from strop.cli.arguments import nearest_sizes, parse_size
from strop.cli.cores import CoreUse, threads_for
from strop.drawing.request import PictureSize

from .conftest import Invoke, said

VERBS = (
    ["generate"],
    ["explain"],
    ["env"],
    ["bench", "infer"],
    ["bench", "train"],
    ["bench", "compile"],
)


@pytest.mark.parametrize("verb", VERBS)
def test_help_teaches_with_examples(invoke: Invoke, verb: list[str]) -> None:
    result = invoke(*verb, "--help")
    assert result.exit_code == 0
    assert "Examples" in result.output
    assert f"strop {' '.join(verb)}" in said(result)


def test_help_names_every_verb_and_the_exit_codes(invoke: Invoke) -> None:
    text = said(invoke("--help"))
    for part in ("generate", "explain", "env", "bench", "with 1 when it has failed"):
        assert part in text


def test_the_command_imports_no_diffusers() -> None:
    code = (
        "import sys, strop.cli; print([m for m in ('diffusers', 'transformers', 'PIL')"
        " if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_env_as_text_and_as_json(invoke: Invoke, cache_folder: Path) -> None:
    (cache_folder / "plan").mkdir(exist_ok=True)
    (cache_folder / "plan" / "abc").write_bytes(b"x" * 2048)
    facts = json.loads(invoke("env", "--json").output)
    assert facts["packages"]["torch"] == torch.__version__
    assert facts["cpu"]["target"].startswith("-march=")
    assert facts["cache"]["bytes"] >= 2048
    assert facts["options"] == {"cache_dir": str(cache_folder)}
    text = invoke("env").output
    assert f"torch {torch.__version__}" in text
    assert "cache: folder" in text
    (cache_folder / "plan" / "abc").unlink()


def test_a_wrong_variable_of_the_environment_is_one_line(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STROP_STRICT", "maybe")
    result = invoke("env")
    assert result.exit_code == 1
    assert said(result).startswith("error: STROP_STRICT='maybe': expected 0, 1, true or false")


def test_version(invoke: Invoke) -> None:
    assert said(invoke("--version")).startswith("strop ")


def test_sizes() -> None:
    assert parse_size(" 96X64 ") == PictureSize(96, 64)
    assert str(PictureSize(96, 64)) == "96x64"
    assert nearest_sizes(64, 16) == (64,)
    assert nearest_sizes(70, 16) == (64, 80)
    assert nearest_sizes(3, 16) == (16,)


def test_threads_are_as_many_as_cores_are_free() -> None:
    assert threads_for(None, 8) == 8
    assert threads_for(0.2, 8) == 1
    assert threads_for(5.4, 8) == 5
    assert threads_for(60.0, 8) == 8


def test_cores_are_judged_over_a_while_only() -> None:
    before = CoreUse.now()
    if before is not None:
        assert before.free_since() is None
        earlier = CoreUse(before.clock - 10, before.idle - 10, before.own - 10)
        assert earlier.free_since() == pytest.approx(2, abs=0.2)


def test_psnr() -> None:
    picture = torch.zeros(3, 4, 4)
    assert math.isinf(pictures.psnr_db(picture, picture))
    assert pictures.psnr_db(picture, picture + 0.1) == pytest.approx(20)
    assert pictures.psnr_text(math.inf) == "PSNR infinite (equal)"
    assert pictures.psnr_text(125.0) == "PSNR > 120.0 dB"
    assert pictures.psnr_text(41.26) == "PSNR 41.3 dB"


def test_a_picture_that_cannot_be_saved_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.png"
    pictures.save(pictures.to_picture(torch.ones(3, 4, 4)), path)
    before = path.read_bytes()

    def full(self: Image.Image, target: Path, **_: str) -> None:
        target.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", full)
    with pytest.raises(OSError, match="No space"):
        pictures.save(pictures.to_picture(torch.zeros(3, 4, 4)), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_sheet_has_room_for_every_line() -> None:
    panel = pictures.Panel(Image.new("RGB", (60, 30)), "a caption of many words", ("a", "b"))
    one, two = pictures.sheet([panel], 1), pictures.sheet([panel] * 3, 2)
    assert two.width > one.width
    assert two.height > one.height
    assert one.height > 30 + 4 * 15
