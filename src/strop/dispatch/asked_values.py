"""Watch what code asks of Python and of torch by a call: variables of the environment and of a
context, a thread's own values, and settings of torch.

No name stands for these values, so a table here asks anew whenever it is read. Values that are no
numbers and texts count as one, with None: code keeps objects there for the length of a call.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import ModuleType
from typing import Any, NamedTuple

import torch

from strop.dispatch.identities import CONSTANTS

# Settings of torch that decide about results or that code may compute with. How gradients are
# switched is none of them: all is traced without.
QUESTIONS: tuple[Callable[[], Any], ...] = (
    torch.get_default_dtype,
    torch.get_num_threads,
    torch.get_num_interop_threads,
    torch.get_float32_matmul_precision,
    torch.are_deterministic_algorithms_enabled,
    torch.is_deterministic_algorithms_warn_only_enabled,
    torch.backends.cuda.cudnn_sdp_enabled,
    torch.backends.cuda.flash_sdp_enabled,
    torch.backends.cuda.math_sdp_enabled,
    torch.backends.cuda.mem_efficient_sdp_enabled,
    torch.backends.mha.get_fastpath_enabled,
)
ENVIRONMENT = os.environ  # noqa: TID251 - the user's code reads it
OF_ENVIRONMENT = frozenset({"environ", "getenv"})
_QUESTIONS = {id(function) for function in QUESTIONS}
_SETTINGS = type(torch.backends.cudnn)  # a module whose attributes are properties
_OF_PRODUCTS = type(torch.backends.cuda.matmul)  # an object that hands attributes on
_SETTINGS_OF_PRODUCTS = frozenset(
    {
        "allow_tf32",
        "allow_fp16_reduced_precision_reduction",
        "allow_bf16_reduced_precision_reduction",
        "allow_fp16_accumulation",
    }
)
_OTHER = type("Other", (), {"__repr__": lambda self: "None or an object"})()
_UNSET = object()
_ANSWERS: dict[tuple[type, Any], Any] = {}  # each answer that was ever given -> itself


class Answers:
    """Show what a function returns as a table of any entries. Equal answers are one object,
    whichever table gives them: looks at modules compare by identity, and each scan of a module
    makes new tables."""

    def __init__(self, ask: Callable[[], Any]) -> None:
        self._ask, self._last = ask, _UNSET

    def __getitem__(self, key: str) -> Any:
        found = self._ask()
        if found is None or not isinstance(found, CONSTANTS):
            return _OTHER
        if type(found) is not type(self._last) or found != self._last:
            self._last = _ANSWERS.setdefault((type(found), found), found)
        return self._last


class Question(NamedTuple):
    """Name what is asked: a table, and the key in it."""

    label: str
    table: Answers
    key: str


def questions_of(value: Any, names: frozenset[str]) -> list[Question]:
    """Return what code asks of ``value``, of which it names ``names``; nothing of most values."""
    return list(_questions(value, names))


def _questions(value: Any, names: frozenset[str]) -> Iterator[Question]:
    if id(value) in _QUESTIONS:
        yield Question("()", Answers(value), "()")
    elif isinstance(value, ContextVar):
        yield Question(".get()", Answers(lambda: value.get(None)), "get")
    elif isinstance(value, threading.local):
        yield from _of_thread(value, names.difference(dir(type(value))))
    elif isinstance(value, _OF_PRODUCTS):
        for name in sorted(names & _SETTINGS_OF_PRODUCTS):
            yield Question(f".{name}", _attribute(value, name), name)
    elif isinstance(value, ModuleType) and isinstance(value, _SETTINGS):
        for name in sorted(names & vars(type(value)).keys()):
            if not name.startswith("_"):
                yield Question(f".{name}", _attribute(value, name), name)


def _of_thread(value: threading.local, names: frozenset[str]) -> Iterator[Question]:
    """Yield one question for all names, as code of a large file has hundreds; one for each where a
    class makes up values."""
    if hasattr(type(value), "__getattr__"):
        for name in sorted(names):
            yield Question(f".{name}", _attribute(value, name), name)
    elif names:
        yield Question(".*", Answers(lambda: _own_values(value, names)), "*")


def _own_values(value: threading.local, names: frozenset[str]) -> str:
    """Return a text that tells what a thread has under these names."""
    own = vars(value)
    found = ((name, own[name]) for name in sorted(names & own.keys()))
    return repr([(n, type(v), v if isinstance(v, CONSTANTS) else _OTHER) for n, v in found])


def _attribute(value: Any, name: str) -> Answers:
    return Answers(lambda: getattr(value, name, None))


def variables(words: frozenset[str]) -> Iterator[Question]:
    """Yield a question for each variable of the environment that texts in code may name."""
    for word in sorted(words):
        if word.isidentifier():
            yield Question(f"[{word!r}]", _variable(word), word)


def _variable(name: str) -> Answers:
    return Answers(lambda: ENVIRONMENT.get(name))
