"""What a forward asks of Python or of torch by a call is a part of its program's key."""

from __future__ import annotations

import os
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from strop.dispatch.asked_values import QUESTIONS, Answers, questions_of
from tests.dispatch.test_global_guards import check, optimized, reads

NAME = "STROP_TESTS_GAIN"
GAIN: ContextVar[Any] = ContextVar("gain", default=2.0)
LOCAL = threading.local()
LOCAL.gain = 2.0


def imports(self: Any, x: Tensor) -> Tensor:
    import strop_tests_settings  # type: ignore[import-not-found]

    gain: float = strop_tests_settings.gain
    return x * gain


def imports_from(self: Any, x: Tensor) -> Tensor:
    from strop_tests_settings import gain

    return x * gain


def _settings() -> Any:
    return sys.modules["strop_tests_settings"]


CUDA, CUDNN = torch.backends.cuda, torch.backends.cudnn
CASES: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[], Any]]] = {
    "context": (lambda self, x: x * GAIN.get(), lambda: GAIN.set(3.0)),
    "thread": (lambda self, x: x * LOCAL.gain, lambda: setattr(LOCAL, "gain", 3.0)),
    "thread, not there yet": (
        lambda self, x: x * getattr(LOCAL, "other", 1.0),
        lambda: setattr(LOCAL, "other", 3.0),
    ),
    "getenv": (
        lambda self, x: x * float(os.getenv("STROP_TESTS_GAIN", "2")),
        lambda: os.environ.update({NAME: "3"}),
    ),
    "environ": (
        lambda self, x: x * float(os.environ.get("STROP_TESTS_GAIN", "2")),
        lambda: os.environ.update({NAME: "3"}),
    ),
    "import": (imports, lambda: setattr(_settings(), "gain", 3.0)),
    "import from": (imports_from, lambda: setattr(_settings(), "gain", 3.0)),
    "type of tensors": (
        lambda self, x: x + torch.full((8,), 0.1).double().to(x.dtype) * 1e6,
        lambda: torch.set_default_dtype(torch.float64),
    ),
    "threads": (
        lambda self, x: x * torch.get_num_threads(),
        lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    ),
    "deterministic": (
        lambda self, x: x * (3 if torch.are_deterministic_algorithms_enabled() else 1),
        lambda: torch.use_deterministic_algorithms(True),
    ),
    "precision": (
        lambda self, x: x * len(torch.get_float32_matmul_precision()),
        lambda: torch.set_float32_matmul_precision("medium"),
    ),
    "attention": (
        lambda self, x: x * (3 if torch.backends.cuda.flash_sdp_enabled() else 1),
        lambda: torch.backends.cuda.enable_flash_sdp(False),
    ),
    "convolutions": (
        lambda self, x: x * (3 if torch.backends.cudnn.benchmark else 1),
        lambda: setattr(torch.backends.cudnn, "benchmark", True),
    ),
    "products": (
        lambda self, x: x * (3 if torch.backends.cuda.matmul.allow_tf32 else 1),
        lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    ),
}


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    settings = types.ModuleType("strop_tests_settings")
    settings.gain = 2.0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, settings.__name__, settings)
    context, threads = GAIN.set(2.0), torch.get_num_threads()
    precision, flash = torch.get_float32_matmul_precision(), CUDA.flash_sdp_enabled()
    yield
    GAIN.reset(context)
    LOCAL.__dict__.pop("other", None)
    LOCAL.gain = 2.0
    os.environ.pop(NAME, None)
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision(precision)
    CUDA.enable_flash_sdp(flash)
    CUDNN.benchmark = CUDA.matmul.allow_tf32 = False


@pytest.mark.parametrize("name", CASES)
def test_another_answer_is_another_graph(name: str, tmp_path: Path) -> None:
    body, change = CASES[name]
    module = optimized(reads(body), tmp_path)
    for _ in range(3):
        check(module)
    assert module.forward.variants.num_captures == 1
    change()
    for _ in range(3):
        check(module)
    assert module.forward.variants.num_captures == 2
    again = optimized(reads(body), tmp_path)
    check(again)
    assert again.forward.variants.num_captures == 0, "on disk under its own key"


def test_objects_in_a_context_count_as_one(tmp_path: Path) -> None:
    """Code keeps one there for the length of a call."""
    module = optimized(reads(lambda self, x: x * 2 if GAIN.get() != 3 else x), tmp_path)
    for value in (object(), object(), None):
        GAIN.set(value)
        check(module)
    assert module.forward.variants.num_captures == 1


def test_an_equal_answer_is_the_same_object() -> None:
    answers = iter([1000.5, 500.25 * 2 + 0.0, 1001.5, "a b", "a " + "b", object(), object()])
    table = Answers(lambda: next(answers))
    first, again, other, text, same, thing, another = (table[""] for _ in range(7))
    assert first is again
    assert other == 1001.5
    assert text is same
    assert thing is another


def test_equal_answers_of_two_looks_are_one_object() -> None:
    """A variable of the environment is a new text whenever it is read."""
    first, second = (Answers(lambda: "".join(["tr", "ue"])) for _ in range(2))
    assert first[""] is second[""]


def test_true_is_not_one() -> None:
    answers = iter([1, True, 1.0])
    table = Answers(lambda: next(answers))
    assert [type(table[""]) for _ in range(3)] == [int, bool, float]


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda function: function.__name__)
def test_each_setting_of_torch_is_asked_for(question: Callable[[], Any]) -> None:
    (found,) = questions_of(question, frozenset())
    assert found.table[found.key] == question()


def test_a_plain_value_asks_nothing() -> None:
    for value in (torch.relu, torch.nn, os, 1.0, object(), {"a": 1}, check):
        assert not questions_of(value, frozenset({"benchmark", "get"}))
