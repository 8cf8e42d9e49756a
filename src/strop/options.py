"""Every knob of Strop, and the only file that reads the environment."""

from __future__ import annotations

import difflib
import functools
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from strop.errors import OptionError

# Kernels that were measured in inference, and passes whose calls only WGMMA kernels do well.
INFERENCE_KERNELS = (
    "skinny_gemm",
    "wgmma_gemm",
    "wgmma_attention",
    "cross_attention",
    "tma_attention",
)
WGMMA_PASSES = ("product_sum", "upsampled_conv")


def _knob(default: Any, doc: str, env: str = "", *, keyed: bool = True) -> Any:
    return field(default=default, metadata={"doc": doc, "env": env, "keyed": keyed})


@dataclass(frozen=True, slots=True)
class Options:
    """How to compile. Options marked as keyed are part of the cache key."""

    strict: bool = _knob(
        False,
        "raise where a module or an operator would fall back to torch",
        "STROP_STRICT",
        keyed=False,
    )
    cuda_graphs: bool = _knob(
        True,
        "replay a CUDA graph from the second use of a shape on",
        "STROP_CUDA_GRAPHS",
        keyed=False,
    )
    hoist: bool = _knob(
        True,
        "compute what depends on the prompt or on timesteps, and on weights, once a denoise loop",
        "STROP_HOIST",
        keyed=False,
    )
    graph_budget_bytes: int = _knob(
        2 << 30,
        "device memory that captured graphs may hold",
        "STROP_GRAPH_BUDGET_BYTES",
        keyed=False,
    )
    check_finite: bool = _knob(
        True,
        "look for NaN and inf in the first run of every shape",
        "STROP_CHECK_FINITE",
        keyed=False,
    )
    disable: tuple[str, ...] = _knob((), "names of passes to skip", "STROP_DISABLE")
    early_launch: bool = _knob(
        True, "launch a kernel before the one before it has ended (sm_90)", "STROP_EARLY_LAUNCH"
    )
    in_place: bool = _knob(
        True, "write a kernel's result over an operand that nobody reads again", "STROP_IN_PLACE"
    )
    kernels_off: tuple[str, ...] = _knob(
        (), "names of hand-written kernels that may not run", "STROP_KERNELS_OFF"
    )
    cache_dir: str = _knob(
        "",
        "where plans and kernels are kept; empty: ~/.cache/strop",
        "STROP_CACHE_DIR",
        keyed=False,
    )
    dump: str = _knob(
        "",
        "folder for the files of every compiled graph, from ATen to kernels",
        "STROP_DUMP",
        keyed=False,
    )
    check: bool = _knob(
        False,
        "compare every step of a shape's first run with torch (slow)",
        "STROP_CHECK",
        keyed=False,
    )
    record: bool = _knob(
        False, "keep the graph before and after each pass, for explain", "STROP_RECORD", keyed=False
    )
    build_workers: int = _knob(
        0,
        "processes that compile kernels; 0: one a core, at most 16",
        "STROP_BUILD_WORKERS",
        keyed=False,
    )
    numerics: tuple[str, ...] = _knob(
        (),
        "patterns, by the name of their numerics, that may be less exact than torch",
        "STROP_NUMERICS",
    )

    memory_budget: float = _knob(
        1.0,
        "share of a training step's activations to keep, from 0 to 1; the rest is computed again",
        "STROP_MEMORY_BUDGET",
        keyed=False,
    )

    def __post_init__(self) -> None:
        for knob in fields(self):
            _check(knob.name, getattr(self, knob.name), knob.default)

    @staticmethod
    def from_environment(**overrides: Any) -> Options:
        """Defaults, then STROP_* variables, then ``overrides``.

        Raises OptionError for a STROP_* variable, an override or a value that nobody knows.
        """
        check_names(overrides, OPTION_NAMES, "option")
        known = [knob.metadata["env"] for knob in fields(Options)]
        given = [name for name in os.environ if name.startswith("STROP_")]  # noqa: TID251
        check_names(given, known, "environment variable")
        values: dict[str, Any] = {}
        for knob in fields(Options):
            text = os.environ.get(knob.metadata["env"]) if knob.metadata["env"] else None  # noqa: TID251
            if text is not None:
                values[knob.name] = _parse(knob.metadata["env"], text, knob.default)
        return replace(Options(), **(values | overrides))

    def key(self) -> str:
        """The part that changes what is compiled, as text."""
        return ";".join(
            f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.metadata["keyed"]
        )

    @property
    def in_training(self) -> Options:
        """These options without what was measured for inference alone."""
        return self.without(kernels=INFERENCE_KERNELS, passes=("linear_add",))

    def on(self, *, has_wgmma: bool) -> Options:
        """These options without the passes that make calls which only WGMMA kernels do well, on a
        GPU without WGMMA."""
        return self if has_wgmma else self.without(passes=WGMMA_PASSES)

    def without(self, *, kernels: Iterable[str] = (), passes: Iterable[str] = ()) -> Options:
        """These options with further kernels and passes switched off."""
        return replace(
            self,
            kernels_off=tuple(dict.fromkeys((*self.kernels_off, *kernels))),
            disable=tuple(dict.fromkeys((*self.disable, *passes))),
        )

    @property
    def wants_graphs(self) -> bool:
        """Whether the graph after each pass is kept: memory that only people need."""
        return self.record or bool(self.dump)

    @property
    def wants_compiler(self) -> bool:
        """Whether a stored plan will not do: it says what runs, not how it came about."""
        return self.wants_graphs or self.check

    @property
    def cache_path(self) -> Path:
        return Path(self.cache_dir).expanduser() if self.cache_dir else Path.home() / ".cache/strop"


OPTION_NAMES = tuple(knob.name for knob in fields(Options))


def check_names(given: Iterable[str], known: Iterable[str], what: str) -> None:
    """Raise OptionError for names that are not ``known``, with the likely ones."""
    known = tuple(known)
    unknown = [name for name in given if name not in known]
    if unknown:
        close = [c for name in unknown for c in difflib.get_close_matches(name, known, n=1)]
        hint = f" (did you mean {', '.join(close)}?)" if close else ""
        raise OptionError(
            f"there is no {what} {', '.join(unknown)}{hint}; there are {', '.join(known)}"
        )


def _naming(init: Callable[..., None]) -> Callable[..., None]:
    """``Options(stirct=True)`` as well, of which Python would say no more than a TypeError."""

    @functools.wraps(init)
    def known(self: Options, *args: Any, **given: Any) -> None:
        check_names(given, OPTION_NAMES, "option")
        init(self, *args, **given)

    return known


Options.__init__ = _naming(Options.__init__)  # type: ignore[method-assign]


_EXPECTED = {
    bool: "True or False",
    int: "a whole number, 0 or more",
    str: "a text",
    tuple: "a tuple of names",
    float: "a number from 0.0 to 1.0",
}


def _check(name: str, value: Any, default: Any) -> None:
    kind = type(default)
    fits = type(value) is kind and (kind is not int or value >= 0)
    if kind is float:
        fits = type(value) in (int, float) and 0 <= value <= 1
    if not fits or (kind is tuple and not all(isinstance(item, str) for item in value)):
        raise OptionError(f"{name}={value!r}: expected {_EXPECTED[kind]}")


def _parse(name: str, text: str, default: Any) -> Any:
    if isinstance(default, bool):
        if text.lower() not in ("0", "1", "true", "false"):
            raise OptionError(f"{name}={text!r}: expected 0, 1, true or false")
        return text.lower() in ("1", "true")
    if isinstance(default, int):
        if not text.isdigit():
            raise OptionError(f"{name}={text!r}: expected a whole number")
        return int(text)
    if isinstance(default, float):
        try:
            return float(text)
        except ValueError:
            raise OptionError(f"{name}={text!r}: expected a number from 0.0 to 1.0") from None
    return tuple(filter(None, text.split(","))) if isinstance(default, tuple) else text
