"""Options of the test suite, and fixtures of several folders."""

from __future__ import annotations

import gc
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden")


NIGHTLY = Path(__file__).with_name("nightly.txt")


def nightly_tests() -> dict[str, int]:
    """Prefixes of ids -> of how many tests one stays in ``make test``; 0: none does."""
    found = {}
    for line in NIGHTLY.read_text().splitlines():
        if line and not line.startswith("#"):
            prefix, _, part = line.partition(" 1/")
            found[prefix] = int(part or 0)
    return found


@pytest.hookimpl(tryfirst=True)  # before those are left out that have the mark
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    parts, seen = nightly_tests(), Counter[str]()
    without = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(without)
        name = item.nodeid
        prefix = next((p for p in (name, name.partition("[")[0]) if p in parts), "")
        if prefix:
            part, number = parts[prefix], seen[prefix]
            seen[prefix] += 1
            if not part or number % part:
                item.add_marker(pytest.mark.nightly)


def pytest_sessionstart() -> None:
    gc.disable()  # until all is imported


def pytest_collection_finish() -> None:
    """Collect garbage once for all that has been imported: a million objects, over which each full
    collection walks."""
    gc.collect()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def same_text_is_compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Most tests have a kernel cache of their own, and many have the same model: g++ took half of
    the time of such tests. One in front of it keeps what was made, for scripts of tests too."""
    compiler = shutil.which("g++")
    if compiler is None:
        yield
        return
    folder = tmp_path_factory.mktemp("compiled")
    ahead = folder / "bin" / "g++"
    ahead.parent.mkdir()
    ahead.write_text(COMPILER_AHEAD.format(compiler=compiler, folder=folder))
    ahead.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(ahead.parent), prepend=os.pathsep)
        yield


# Called with "FLAGS FILE.cpp LIBRARIES -o FILE" it takes or makes "folder/SHA-256 of all it reads".
COMPILER_AHEAD = """#!/bin/sh
text= out= rest= last=
for each; do
  case "$last $each" in
    "-o "*) out=$each ;;
    *.cpp) text=$each ;;
    *) rest="$rest $each" ;;
  esac
  last=$each
done
test -n "$text" -a -n "$out" || exec {compiler} "$@"
kept={folder}/$( (echo "$rest"; cat "${{text%/*}}"/*.h "$text") | sha256sum | cut -c1-64)
test -f "$kept" && exec cp "$kept" "$out"
{compiler} "$@" || exit
cp "$out" "$kept.$$" && mv "$kept.$$" "$kept"
"""


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Let torch.compile begin anew, and leave nothing behind for the tests that follow."""
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One kernel cache for all tests, so that the tiny model is compiled once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A diffusers folder in the format of the shipped weights, with random weights."""
    pytest.importorskip("diffusers")
    from strop.models.sprites import network, settings, vocabulary

    folder = tmp_path_factory.mktemp("model")
    built = network.parts(settings.TINY)
    network.pipeline(built, settings.TINY.noise).save_pretrained(folder)
    vocabulary.write(folder / "tokenizer")
    return folder


@pytest.fixture(scope="session")
def weighing_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same folder with a text encoder whose results have a mean, as those of every trained one
    have: the rule for weights of words divides by it."""
    import torch
    from transformers import CLIPTextModel

    folder = tmp_path_factory.mktemp("weighing") / "model"
    shutil.copytree(tiny_model, folder)
    encoder = CLIPTextModel.from_pretrained(folder / "text_encoder")
    with torch.no_grad():
        next(b for name, b in encoder.named_parameters() if "final_layer_norm.bias" in name).fill_(
            0.2
        )
    encoder.save_pretrained(folder / "text_encoder")
    return folder


@pytest.fixture(scope="session")
def tiny_dit(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sprites-dit folder with random weights everywhere, where an untrained one has zeros."""
    import torch

    from strop.models.sprites import dit, load_from, settings

    folder = tmp_path_factory.mktemp("dit")
    dit.write(settings.TINY_DIT, tiny_model, folder)
    transformer = load_from(folder).transformer
    source = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in transformer.parameters():
            if not weight.any():
                weight.normal_(0, 0.1, generator=source)
    transformer.save_pretrained(folder / "transformer", safe_serialization=True)
    return folder


@pytest.fixture
def shipped_dit(
    tiny_dit: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """The tiny models in the place of those that ship: sprites-dit without what it shares."""
    from strop.models import sprites

    whole, folder = tmp_path / "weights", tmp_path / "dit_weights"
    shutil.copytree(tiny_model, whole)
    for part in ("transformer", "scheduler"):
        shutil.copytree(tiny_dit / part, folder / part)
    shutil.copy(tiny_dit / "model_index.json", folder)
    monkeypatch.setattr(sprites, "WEIGHTS", whole)
    monkeypatch.setattr(sprites, "DIT_WEIGHTS", folder)
    return folder
