"""Declare every option of Strop; no other file reads the environment."""

from __future__ import annotations

import difflib
import functools
import os
from collections.abc import Callable, Iterable
from dataclasses import Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from strop.errors import OptionError
from strop.ir.device import EIGHT_BIT, Device, check_arch

# Kernels that were measured in inference, and passes whose calls only WGMMA kernels do well.
INFERENCE_KERNELS = (
    "skinny_gemm",
    "wgmma_gemm",
    "wgmma_attention",
    "cross_attention",
    "tma_attention",
    "short_attention",
    "packed_weights",
)
# Backwards read what these leave out, or nothing was measured.
TRAINED_WITHOUT = (
    "activated_linear",
    "aligned_linear",
    "causal_masks",
    "eight_bit_attention",
    "eight_bit_choice",
    "eight_bit_convs",
    "gated_codes",
    "joined_calls",
    "linear_add",
)
# Numerics by name that no pattern is about. Of step caches there is one for each word, which says
# how often steps are taken from the cache; the name alone is "balanced".
STEP_CACHE = "step_cache"
STEP_CACHE_WORDS = ("cautious", "balanced", "fast")
STEP_CACHES = {STEP_CACHE: "balanced"} | {f"{STEP_CACHE}:{word}": word for word in STEP_CACHE_WORDS}
NAMED_NUMERICS = (*EIGHT_BIT, *STEP_CACHES)  # patterns of a user's own have others

WGMMA_PASSES = (
    "eight_bit_attention",
    "eight_bit_convs",
    "gated_codes",
    "joined_calls",
    "low_rank_pair",
    "normed_linear",
    "product_sum",
    "upsampled_conv",
)


def _knob(
    default: Any, doc: str, env: str = "", *, keyed: bool = True, choices: tuple[str, ...] = ()
) -> Any:
    metadata = {"doc": doc, "env": env, "keyed": keyed, "choices": choices}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class Options:
    """Say how to compile. Options marked as keyed are part of the cache key."""

    strict: bool = _knob(
        False,
        "Raise an error where a module or an operator would fall back to torch.",
        "STROP_STRICT",
        keyed=False,
    )
    cuda_graphs: bool = _knob(
        True,
        "Capture a CUDA graph at the second call of a shape, and replay it from then on.",
        "STROP_CUDA_GRAPHS",
        keyed=False,
    )
    hoist: bool = _knob(
        True,
        "Compute once per denoise loop what depends only on prompt, timesteps and weights.",
        "STROP_HOIST",
        keyed=False,
    )
    graph_budget_bytes: int = _knob(
        2 << 30,
        "Let captured CUDA graphs hold at most this much device memory.",
        "STROP_GRAPH_BUDGET_BYTES",
        keyed=False,
    )
    weights_budget_bytes: int = _knob(
        0,
        "Let the weights of a module, or of the denoisers of a pipeline together, take at most this"
        " much GPU memory: what has no room is streamed from the host in each call. 0 sets no"
        " limit.",
        "STROP_WEIGHTS_BUDGET_BYTES",
        keyed=False,
    )
    check_finite: bool = _knob(
        True,
        "Search the first results of each shape for NaN and inf, and log what is found.",
        "STROP_CHECK_FINITE",
        keyed=False,
    )
    arch: int = _knob(
        0,
        "Compile, and run on a newer GPU, as if on a GPU of this architecture: 80, 86, 87 or 89."
        " 0 takes the GPU's own.",
        "STROP_ARCH",
    )
    target: str = _knob(
        "",
        "Compile for this target, and run here what a processor with fewer instructions runs; empty"
        " takes this processor's own. `strop build --target` compiles for other processors.",
        "STROP_TARGET",
        keyed=False,
    )
    disable: tuple[str, ...] = _knob((), "Skip the passes with these names.", "STROP_DISABLE")
    early_launch: bool = _knob(
        True,
        "Start a kernel before its predecessor has ended, by programmatic dependent launch"
        " (sm_90).",
        "STROP_EARLY_LAUNCH",
    )
    in_place: bool = _knob(
        True,
        "Let a kernel write its result over an operand that nothing reads afterwards.",
        "STROP_IN_PLACE",
    )
    kernels_off: tuple[str, ...] = _knob(
        (),
        "Never run the hand-written kernels with these names; `strop explain` shows which kernel"
        " runs each call.",
        "STROP_KERNELS_OFF",
    )
    cache_dir: str = _knob(
        "",
        "Keep plans and kernels in this folder; empty means ~/.cache/strop.",
        "STROP_CACHE_DIR",
        keyed=False,
    )
    dump: str = _knob(
        "",
        "Write every stage of each compiled graph, from ATen to kernels, into this folder.",
        "STROP_DUMP",
        keyed=False,
    )
    check: bool = _knob(
        False,
        "Compare every step of a shape's first run with torch, which is slow.",
        "STROP_CHECK",
        keyed=False,
    )
    record: bool = _knob(
        False,
        "Keep the graph before and after each pass, so that strop.explain can show it.",
        "STROP_RECORD",
        keyed=False,
    )
    build_workers: int = _knob(
        0,
        "Compile kernels in this many processes; 0 means one per core, at most 16.",
        "STROP_BUILD_WORKERS",
        keyed=False,
    )
    numerics: tuple[str, ...] = _knob(
        (),
        "Allow what is less exact than torch, by name: `int8` or `fp8` computes linears in 8 bits,"
        " `fp8` on Hopper wide 3x3 convolutions and long attention, too;"
        " `step_cache` computes a part of some steps of a pipeline's denoise loop and takes the"
        " rest from an earlier step, `step_cache:cautious` more seldom, `step_cache:fast` more"
        " often; a pattern has the name that it was declared with.",
        "STROP_NUMERICS",
    )
    exact_layers: tuple[str, ...] = _knob(
        (),
        "Leave layers at these paths exact where `numerics` allows 8 bits; `*` stands for any"
        " text, as in `transformer_blocks.0.*`.",
        "STROP_EXACT_LAYERS",
    )
    lora: str = _knob(
        "auto",
        "Add LoRA adapters into a second copy of the weights (`merged`), which costs a step"
        " nothing, or compute them beside the weights (`unmerged`), which takes little memory;"
        " `auto` merges unless a GPU has no room for the copy.",
        "STROP_LORA",
        keyed=False,
        choices=("auto", "merged", "unmerged"),
    )
    lora_max_rank: int = _knob(
        0,
        "Compile unmerged adapters for at least this rank, all those that are active together;"
        " more compile again. 0 takes the next power of two from 16 on.",
        "STROP_LORA_MAX_RANK",
        keyed=False,
    )

    large_pages: bool = _knob(
        False,
        "Put weights of a CPU on pages of 2 MB (Linux 6.1 or newer), where lookups in large tables"
        " find them sooner. It takes up to some seconds a GB once, and memory that forked processes"
        " share is there once for each.",
        "STROP_LARGE_PAGES",
        keyed=False,
    )
    memory_budget: float = _knob(
        1.0,
        "Keep this share of a training step's activations, from 0 to 1, and recompute the rest.",
        "STROP_MEMORY_BUDGET",
        keyed=False,
    )

    def __post_init__(self) -> None:
        for knob in fields(self):
            _check(knob, getattr(self, knob.name))
        check_arch(self.arch)
        self._check_numerics()
        _check_step_cache(self.numerics)

    def _check_numerics(self) -> None:
        """Raise OptionError for 8 bits in two formats, or where they cannot be had."""
        named = [name for name in self.numerics if name in EIGHT_BIT]
        if len(named) > 1:
            raise OptionError(f"numerics={self.numerics!r}: allow one of {' and '.join(EIGHT_BIT)}")
        if named and self.weights_budget_bytes:
            raise OptionError(
                f"numerics={self.numerics!r} keeps codes of all weights on the GPU, beside which"
                f" weights_budget_bytes={self.weights_budget_bytes} streams weights: leave one of"
                " the two out"
            )

    @staticmethod
    def from_environment(**overrides: Any) -> Options:
        """Take the defaults, then STROP_* variables, then ``overrides``.

        Raises OptionError for a STROP_* variable, an override or a value that nobody knows.
        """
        check_names(overrides, OPTION_NAMES, "option")
        known = [knob.metadata["env"] for knob in fields(Options)]
        given = [name for name in os.environ if name.startswith("STROP_")]  # noqa: TID251
        check_names(given, [*known, *_OF_COMMANDS], "environment variable")
        values: dict[str, Any] = {}
        for knob in fields(Options):
            text = os.environ.get(knob.metadata["env"]) if knob.metadata["env"] else None  # noqa: TID251
            if text is not None:
                values[knob.name] = _parse(knob, text)
        return replace(Options(), **(values | overrides))

    def key(self) -> str:
        """Return, as text, the options that change what is compiled."""
        told = replace(self, numerics=self.pattern_numerics)
        return ";".join(
            f"{f.name}={getattr(told, f.name)!r}" for f in fields(told) if f.metadata["keyed"]
        )

    @property
    def pattern_numerics(self) -> tuple[str, ...]:
        """The numerics that patterns are asked for; a step cache compiles what others compile."""
        return tuple(name for name in self.numerics if name not in STEP_CACHES)

    @property
    def step_cache(self) -> str:
        """The word for how often steps are taken from the cache; empty where none is."""
        return next((STEP_CACHES[name] for name in self.numerics if name in STEP_CACHES), "")

    @property
    def in_training(self) -> Options:
        """These options without what was measured for inference alone."""
        return self.without(kernels=INFERENCE_KERNELS, passes=TRAINED_WITHOUT)

    @property
    def eight_bit(self) -> str:
        """Return the format of 8 bits that ``numerics`` allows linears, if any."""
        return next((name for name in self.numerics if name in EIGHT_BIT), "")

    @property
    def exactly(self) -> Options:
        """Return these options without 8 bits."""
        kept = tuple(name for name in self.numerics if name not in EIGHT_BIT)
        return self if kept == self.numerics else replace(self, numerics=kept)

    def check_format(self, device: Device) -> None:
        """Raise OptionError where a device does not multiply in the format that is allowed."""
        own, is_gpu = self.eight_bit, bool(device.arch)
        least = EIGHT_BIT.get(own, 0)
        if (own == "int8" and not is_gpu) or device.arch >= least:
            return
        what = f"{device.name} has {device.arch / 10:.1f}" if is_gpu else f"{device.name} is none"
        raise OptionError(
            f"numerics=('{own}',) is for GPUs of compute capability {least / 10:.1f} or newer,"
            f" and {what}: numerics=('int8',) is for other GPUs, and for CPUs"
        )

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
    def may_hoist(self) -> bool:
        """Tell whether results may outlive a call: under a budget they would lie beside it."""
        return self.hoist and not self.weights_budget_bytes

    @property
    def wants_graphs(self) -> bool:
        """Tell whether the graph after each pass is kept, which only people read."""
        return self.record or bool(self.dump)

    @property
    def wants_compiler(self) -> bool:
        """Tell whether a graph must be compiled even where a plan of it is stored: a plan says
        what runs, not how it came about."""
        return self.wants_graphs or self.check

    @property
    def cache_path(self) -> Path:
        return Path(self.cache_dir).expanduser() if self.cache_dir else Path.home() / ".cache/strop"


def use_arch(arch: int) -> None:
    """Set STROP_ARCH for this process and those that it starts. Raises OptionError for an
    architecture that does not exist."""
    check_arch(arch)
    os.environ["STROP_ARCH"] = str(arch)  # noqa: TID251


_OF_COMMANDS = ("STROP_SERVE_TOKEN",)  # a secret of 'strop serve', which is no option
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
    """Raise an OptionError that names the likely option for ``Options(stirct=True)`` too, where
    Python would raise a TypeError."""

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


def _check(knob: Field[Any], value: Any) -> None:
    name, choices = knob.name, knob.metadata["choices"]
    kind: type[Any] = type(knob.default)
    fits = type(value) is kind and not (type(value) is int and value < 0)
    if kind is float:
        fits = type(value) in (int, float) and 0 <= value <= 1
    if not fits or (kind is tuple and not all(isinstance(item, str) for item in value)):
        raise OptionError(f"{name}={value!r}: expected {_EXPECTED[kind]}")
    if choices and value not in choices:
        raise OptionError(f"{name}={value!r}: expected one of {', '.join(choices)}")


def _check_step_cache(numerics: Iterable[str]) -> None:
    given = [name for name in numerics if name.partition(":")[0] == STEP_CACHE]
    if unknown := [name for name in given if name not in STEP_CACHES]:
        check_names(unknown, STEP_CACHES, "step cache")
    if len(given) > 1:
        raise OptionError(f"numerics={tuple(numerics)!r}: give one step cache, not {len(given)}")


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
