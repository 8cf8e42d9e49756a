"""Names and values of options that nobody knows, wherever they are given."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import strop
from strop.cli import app
from strop.errors import OptionError
from strop.options import Options

from .nets import Net, X, optimized

WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "unknown keyword": (lambda: strop.optimize(Net(), stirct=True), "did you mean strict"),
    "option as a keyword": (
        lambda: strop.optimize(Net(), strict=True),
        r"options=strop.Options\(strict=True\)",
    ),
    "options as a dict": (
        lambda: strop.optimize(Net(), options={"strict": True}),
        "options is a dict; strop.optimize takes strop.Options",
    ),
    "a truth as text": (lambda: Options(strict="yes"), "strict='yes': expected True or False"),
    "a step cache by an unknown word": (
        lambda: Options(numerics=("step_cache:quick",)),
        r"there is no step cache step_cache:quick .*; there are step_cache, step_cache:cautious",
    ),
    "two step caches": (
        lambda: Options(numerics=("step_cache", "step_cache:fast")),
        "give one step cache, not 2",
    ),
    "a step cache for a module": (
        lambda: strop.optimize(Net(), options=Options(numerics=("step_cache",))),
        "is for the denoise loop of a pipeline, and a module by itself has none",
    ),
    "a number below 0": (lambda: Options(build_workers=-1), "build_workers=-1: expected a whole"),
    "an architecture that is too old": (
        lambda: Options(arch=75),
        r"arch=75: kernels need compute capability 8\.0 or newer; there are 80, 86, 87, 89",
    ),
    "an architecture of no GPU": (
        lambda: Options(arch=85),
        "arch=85: there is no such GPU architecture, or none that Strop knows; there are 80, 86",
    ),
    "an architecture as text": (lambda: Options(arch="sm_86"), "arch='sm_86': expected a whole"),
    "one name, not a tuple": (lambda: Options(disable="dot_merge"), "expected a tuple of names"),
    "a name of no option": (
        lambda: Options(stirct=True),
        r"no option stirct \(did you mean strict\?\)",
    ),
    "an unknown override": (lambda: Options.from_environment(workers=2), "no option workers"),
    "neither module nor pipeline": (lambda: strop.optimize(torch.sin), "takes a torch.nn.Module"),
    "components of another kind": (
        lambda: strop.optimize(SimpleNamespace(components=[Net()])),
        "got a SimpleNamespace; it takes a torch.nn.Module",
    ),
    "nothing to restore": (lambda: strop.restore(None), "restore got a NoneType; it takes"),
    "train as text": (lambda: strop.optimize(Net(), train="yes"), "train='yes'; it takes True"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_option_says_what_is_right(name: str) -> None:
    make, text = WRONG[name]
    with pytest.raises(OptionError, match=text):
        make()


def test_an_unknown_pass_is_named_with_those_there_are() -> None:
    module = optimized(Net(), disable=("dotmerge",))
    with torch.no_grad(), pytest.raises(OptionError, match=r"dotmerge \(did you mean dot_merge"):
        module(X)


def test_an_unknown_variable_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STROP_STRIKT", "1")
    with pytest.raises(OptionError, match=r"variable STROP_STRIKT \(did you mean STROP_STRICT"):
        strop.optimize(Net())
    result = CliRunner().invoke(app, ["env"])
    assert result.exit_code == 1
    assert "did you mean STROP_STRICT" in result.output


@pytest.mark.parametrize("options", [{"stirct": True}, {"strict": "yes"}], ids=str)
def test_torch_compile_names_wrong_options(options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    fast = torch.compile(Net().eval(), backend="strop", options=options)
    with torch.no_grad(), pytest.raises(Exception, match=r"strict") as found:
        fast(X)
    assert "OptionError" in repr(found.value) or isinstance(found.value, OptionError)


def test_torch_compile_names_a_wrong_mode() -> None:
    torch._dynamo.reset()
    fast = torch.compile(Net().eval(), backend="strop", mode="max-autotone")
    with torch.no_grad(), pytest.raises(Exception, match=r"max-autotone.*max-autotune") as found:
        fast(X)
    assert "OptionError" in repr(found.value) or isinstance(found.value, OptionError)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["generate", "x", "--sied", "1"], "--sied"),
        (["cache", "list", "--colour"], "--colour"),
        (["bisect"], "Missing argument"),
        (["draw"], "No such command 'draw'"),
    ],
)
def test_the_command_line_names_what_it_does_not_know(words: list[str], expected: str) -> None:
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert expected in " ".join(result.output.split())
