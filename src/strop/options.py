"""Every knob of Strop, and the only file that reads the environment."""

from __future__ import annotations

import difflib
import functools
import os
from collections.abc import Callable, Iterable
from dataclasses import Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from strop.errors import OptionError
from strop.ir.device import check_arch


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
    arch: int = _knob(
        0,
        "compile, and run on a newer GPU, as if on one of this architecture: 80, 86, 87 or 89;"
        " 0: the GPU's own",
        "STROP_ARCH",
    )
    disable: tuple[str, ...] = _knob((), "names of passes to skip", "STROP_DISABLE")
    early_launch: bool = _knob(
        True, "launch a kernel before the one before it has ended (sm_90)", "STROP_EARLY_LAUNCH"
    )
    in_place: bool = _knob(
        True, "write a kernel's result over an operand that nobody reads again", "STROP_IN_PLACE"
    )
    narrow_conv: bool = _knob(
        True,
        "convolutions of up to four channels, before or after, by a kernel of ours (GPUs)",
        "STROP_NARROW_CONV",
    )
    tma_attention: bool = _knob(
        True,
        "attention by a kernel of ours that the tensor memory"
        " accelerator feeds, at sizes where it is faster (inference,"
        " sm_90)",
        "STROP_BOX_ATTENTION",
    )
    tma_geglu: bool = _knob(
        False,
        "a linear and the GEGLU behind it by one such kernel, at sizes"
        " where that is faster (inference, sm_90)",
        "STROP_BOX_GEGLU",
    )
    wgmma_gemm: bool = _knob(
        True,
        "convolutions, linears and GEGLU by a kernel of ours in PTX,"
        " at sizes where it is faster (inference, sm_90)",
        "STROP_GROUP_PRODUCT",
    )
    product_sum: bool = _knob(
        True,
        "sums with a linear in the place of the other operand, where"
        " such a kernel does it (inference, sm_90)",
        "STROP_PRODUCT_SUM",
    )
    upsampled_conv: bool = _knob(
        True,
        "convolutions of upsampled pictures from the smaller ones,"
        " by sums of their taps (inference, sm_90)",
        "STROP_UPSAMPLED_CONV",
    )
    skinny_gemm: bool = _knob(
        True, "linears of up to four rows by a kernel of ours (inference, sm_90)", "STROP_FEW_ROWS"
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
        check_arch(self.arch)

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
                values[knob.name] = _parse(knob, text)
        return replace(Options(), **(values | overrides))

    def key(self) -> str:
        """The part that changes what is compiled, as text."""
        return ";".join(
            f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.metadata["keyed"]
        )

    @property
    def in_training(self) -> Options:
        """Without what has been measured for inference alone."""
        skipped = tuple(dict.fromkeys((*self.disable, "linear_add")))
        return replace(
            self,
            tma_attention=False,
            tma_geglu=False,
            wgmma_gemm=False,
            skinny_gemm=False,
            disable=skipped,
        )

    def on(self, *, has_wgmma: bool) -> Options:
        """Without what a GPU cannot do, where a graph is another for it. ``has_wgmma``:
        it multiplies tiles in shared memory, as the kernels for these steps do."""
        return self if has_wgmma else replace(self, product_sum=False, upsampled_conv=False)

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


def use_arch(arch: int) -> None:
    """Set STROP_ARCH for this process and those that it starts. Raises OptionError for an
    architecture that does not exist."""
    check_arch(arch)
    os.environ["STROP_ARCH"] = str(arch)  # noqa: TID251


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


def _parse(knob: Field[Any], text: str) -> Any:
    name, default = knob.metadata["env"], knob.default
    if isinstance(default, bool):
        if text.lower() not in ("0", "1", "true", "false"):
            raise OptionError(f"{name}={text!r}: expected 0, 1, true or false")
        return text.lower() in ("1", "true")
    if isinstance(default, int):
        if not text.isdigit():
            raise OptionError(f"{name}={text!r}: expected a whole number: {knob.metadata['doc']}")
        return int(text)
    if isinstance(default, float):
        try:
            return float(text)
        except ValueError:
            raise OptionError(f"{name}={text!r}: expected a number from 0.0 to 1.0") from None
    return tuple(filter(None, text.split(","))) if isinstance(default, tuple) else text
