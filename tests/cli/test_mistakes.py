"""Mistakes made on purpose: each is found before any slow work, and the message says what to do."""

from __future__ import annotations

import errno
import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import typer

from strop.cli import arguments
from strop.cli.mistakes import CommandError, reported

from .conftest import Invoke, said

pytestmark = pytest.mark.filterwarnings("ignore")

PROMPT = "a red circle above a blue square"


@pytest.fixture(autouse=True)
def _never_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake must be found before the model is loaded."""

    def load(*_: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("strop.cli.models.load", load)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--size", "100x64"], "the nearest: 96x64, 112x64"),
        (["--size", "100x70"], "96x64, 96x80, 112x64, 112x80"),
        (["--size", "8x16"], "the nearest: 16x16"),
        (["--size", "0x64"], "the nearest: 16x64"),
        (["--size", "big"], "write WIDTHxHEIGHT in pixels, like 96x64"),
        (["--size", "99984x99984"], "more than 16,777,216 pixels"),
        (["--steps", "0"], "greater than or equal to 1"),
        (["--seed", "-1"], "greater than or equal to 0"),
        (["--device", "tpu"], "'auto', 'cpu', 'cuda'"),
        (["--arch", "75"], "arch=75: kernels need compute capability 8.0 or newer"),
        (["--arch", "sm_86"], "'sm_86' is no architecture; write a number, like 86"),
        (["--dtype", "fp16", "--device", "cpu"], "use --dtype fp32 or --device cuda"),
        (["--compare", "--no-optimize"], "leave out --no-optimize"),
        (["-o", "out.bmp"], "must end in .png, .jpg, .jpeg, .webp"),
        (["--negative", "blurry"], "does not know 'blurry'"),
    ],
)
def test_wrong_arguments_end_with_2(
    invoke: Invoke, as_sprites: Path, words: list[str], expected: str
) -> None:
    result = invoke("generate", PROMPT, *words)
    assert result.exit_code == 2, result.output
    assert expected in said(result)


def test_an_unknown_word_names_the_vocabulary_and_the_likely_word(
    invoke: Invoke, as_sprites: Path
) -> None:
    result = invoke("generate", "a red cirle above a [blue] house")
    assert result.exit_code == 2
    text = said(result)
    assert "'cirle' (did you mean 'circle'?)" in text
    assert "'[blue]'" in text
    assert "'house'" in text
    assert "purple" in text
    assert "diamond" in text


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["-o", "absent/out.png"], "mkdir -p absent"),
        (["-o", "folder.png"], "folder.png is a folder"),
        (["--model", "absent"], "no diffusers model in absent"),
    ],
)
def test_what_is_not_there_ends_with_1(
    invoke: Invoke, as_sprites: Path, tmp_path: Path, words: list[str], expected: str
) -> None:
    (tmp_path / "folder.png").mkdir()
    result = invoke("generate", PROMPT, *words)
    assert result.exit_code == 1
    assert expected in said(result)
    assert "Traceback" not in result.output


def test_a_model_without_sizes_says_which_file_is_wrong(
    invoke: Invoke, tiny_model: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "model"
    shutil.copytree(tiny_model, broken)
    (broken / "unet" / "config.json").write_text("{")
    result = invoke("generate", PROMPT, "--model", str(broken))
    assert result.exit_code == 1
    assert "config.json is no JSON" in said(result)
    (broken / "unet" / "config.json").write_text(json.dumps({"kind": "transformer"}))
    assert "no block_out_channels" in said(invoke("generate", PROMPT, "--model", str(broken)))
    (broken / "unet" / "config.json").unlink()
    assert "config.json is missing" in said(invoke("generate", PROMPT, "--model", str(broken)))


def test_damaged_and_missing_parts_are_named(
    invoke: Invoke, tiny_model: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "model"
    shutil.copytree(tiny_model, broken)
    weights = broken / "text_encoder" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    result = invoke("generate", PROMPT, "--model", str(broken))
    assert result.exit_code == 1
    assert f"{weights} is damaged" in said(result)
    shutil.rmtree(broken / "tokenizer")
    assert "lacks tokenizer" in said(invoke("generate", PROMPT, "--model", str(broken)))


def test_missing_weights_of_the_package(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from strop.models import sprites

    monkeypatch.setattr(sprites, "WEIGHTS", tmp_path / "absent")
    result = invoke("generate", PROMPT)
    assert result.exit_code == 1
    assert "reinstall strop" in said(result)


@pytest.mark.parametrize(
    "words", [["generate", PROMPT], ["explain"], ["bench", "infer", "P1"], ["bench", "train", "P8"]]
)
def test_a_missing_extra_is_named(
    invoke: Invoke, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "diffusers" else find(name)
    )
    result = invoke(*words)
    assert result.exit_code == 1
    assert "pip install 'strop[diffusion]'" in said(result)


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (["explain", "--html", "page.txt"], 2, "must end in .html"),
        (["explain", "--json", "absent/x.json"], 1, "mkdir -p absent"),
        (["explain", "--size", "100x64"], 2, "the nearest: 96x64"),
        (["explain", "--model", "sd15-unet", "--size", "100x64"], 2, "multiples of 8 pixels"),
        (["bench", "infer", "huge"], 2, "there are P1, P2"),
        (["bench", "infer", "P1", "--tiny", "--device", "cpu", "-o", "file"], 1, "file is a file"),
        (["bench", "train", "huge"], 2, "there are P8, P9"),
        (["bench", "train", "P8", "--only", "huge"], 2, "there are strop, strop-graph"),
        (["bench", "compile", "tiny-unet", "-o", "file"], 1, "file is a file"),
        (["bench", "models", "-o", "absent/a.json"], 1, "mkdir -p absent"),
        (["bench", "models", "--page", "folder"], 1, "folder is a folder"),
        (["bench", "kernel", "-o", "absent/a.json"], 1, "mkdir -p absent"),
        (["bench", "kernel", "softmax", "-o", "folder"], 1, "folder is a folder"),
        (["bench", "batches", "bert-tiny", "-o", "folder"], 1, "folder is a folder"),
        (["bench", "table", "--results", "absent"], 1, "no rows in absent"),
    ],
)
def test_mistakes_of_the_other_verbs(
    invoke: Invoke, as_sprites: Path, words: list[str], code: int, expected: str, tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    result = invoke(*words)
    assert result.exit_code == code, result.output
    assert expected in said(result)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"row": "P1", "kind": "infer", "contend', "P1_gpu.json cannot be read"),
        ("\xff\xfe", "P1_gpu.json cannot be read"),
        ('{"row": "P1", "kind": "infer"}', "P1_gpu.json lacks its contenders or its date"),
        ('{"row": "P0", "kind": "infer"}', "no rows in"),
        ("[]", "no rows in"),
    ],
)
def test_a_damaged_result_is_named(
    invoke: Invoke, tmp_path: Path, text: str, expected: str
) -> None:
    (tmp_path / "P1_gpu.json").write_bytes(text.encode("latin-1"))
    result = invoke("bench", "table", "--results", str(tmp_path))
    assert result.exit_code == 1, result.output
    assert expected in said(result)


def test_a_folder_of_results_is_made(tmp_path: Path) -> None:
    """A benchmark that has taken minutes writes into it."""
    arguments.make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(CommandError, match="is a file; give the name of a folder"):
        arguments.make_folder(tmp_path / "file")
    with pytest.raises(CommandError, match=r"no folder .*inside can be made"):
        arguments.make_folder(tmp_path / "file" / "inside")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device"),
            "no space left on device; make room, or",
        ),
        (OSError(errno.ENOSPC, "No space left", "/x/out.png"), "error: /x/out.png: no space left;"),
        (OSError(errno.EROFS, "Read-only file system", "/x"), "/x: read-only file system; this"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), "change who may: chmod, chown"),
        (OSError(errno.EMFILE, "Too many open files"), "ulimit -n 4096"),
        (OSError("a text of a library"), "error: a text of a library"),
        (OSError(errno.ENXIO, "No such device", "/x"), "error: /x: no such device"),
    ],
    ids=str,
)
def test_what_the_system_refuses_is_answered_by_what_to_do(
    error: OSError, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    @reported
    def command() -> None:
        raise error

    with pytest.raises(typer.Exit):
        command()
    assert expected in " ".join(capsys.readouterr().err.split())
