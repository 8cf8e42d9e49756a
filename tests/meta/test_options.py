"""Options: every knob documented, every value from the environment checked."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields

import pytest

from strop import Options
from strop.errors import OptionError

KNOBS = {knob.name: knob for knob in fields(Options)}


@pytest.mark.parametrize("knob", KNOBS.values(), ids=KNOBS.keys())
def test_knob_says_what_it_does(knob) -> None:
    assert len(knob.metadata["doc"]) > 20
    assert knob.metadata["env"] in ("", f"STROP_{knob.name.upper()}")


def test_the_environment_fills_in_what_the_caller_leaves_open(monkeypatch) -> None:
    monkeypatch.setenv("STROP_STRICT", "1")
    monkeypatch.setenv("STROP_CUDA_GRAPHS", "false")
    monkeypatch.setenv("STROP_BUILD_WORKERS", "3")
    monkeypatch.setenv("STROP_DISABLE", "dot_merge,canonicalize")
    options = Options.from_environment(build_workers=5)
    assert options.strict
    assert not options.cuda_graphs
    assert options.build_workers == 5, "arguments win over the environment"
    assert options.disable == ("dot_merge", "canonicalize")


@pytest.mark.parametrize(
    ("name", "text", "hint"),
    [
        ("STROP_STRICT", "yes", "0, 1, true or false"),
        ("STROP_BUILD_WORKERS", "many", "a whole number"),
        ("STROP_GRAPH_BUDGET_BYTES", "-1", "a whole number"),
        ("STROP_ARCH", "sm_86", "a whole number: .* 80, 86, 87 or 89"),
        ("STROP_ARCH", "8.6", "a whole number"),
    ],
)
def test_a_wrong_value_is_named(monkeypatch, name: str, text: str, hint: str) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(OptionError, match=hint) as caught:
        Options.from_environment()
    assert name in str(caught.value)
    assert text in str(caught.value)


def test_only_what_changes_the_code_is_in_the_key() -> None:
    assert Options(strict=True, cache_dir="elsewhere").key() == Options().key()
    assert Options(disable=("dot_merge",)).key() != Options().key()
    assert len({Options(arch=arch).key() for arch in (0, 80, 86)}) == 3


def test_options_do_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        Options().strict = True  # type: ignore[misc]
