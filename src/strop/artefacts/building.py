"""Build an artefact from a model's configuration, for devices that this machine need not have."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from strop.artefacts.planning import PlanningDispatcher
from strop.artefacts.saving import Gathered, SavedArtefact, gather, write_gathered
from strop.artefacts.signing import SecretKey
from strop.artefacts.skeletons import pipeline_of
from strop.diffusion.parts import compiled_modules
from strop.diffusion.pipeline import optimize_pipeline, restore_pipeline
from strop.dispatch.dispatcher import Dispatcher
from strop.dispatch.known_dispatchers import dispatcher_of
from strop.errors import OptionError
from strop.ir.cards import A100, H100, RTX_3090, RTX_4090
from strop.ir.device import Device
from strop.options import Options
from strop.runtime.build.ahead import AheadLoader
from strop.runtime.build.processors import TARGETS, processor, target_name
from strop.wording import counted

Say = Callable[[str], None]  # is told what is going on
NUM_STEPS = 2
BATCHES = (1, 2)  # pictures of one call: some graphs are for a batch of 1 alone

# The cards that stand for their architectures: kernels are chosen by a card's numbers. Another card
# of the architecture may want a few kernels more, which it then compiles.
CARDS: Mapping[str, Device] = {
    "sm_80": A100,
    "sm_86": RTX_3090,
    "sm_89": RTX_4090,
    "sm_90": H100,
}


def check_targets(names: Sequence[str]) -> tuple[str, ...]:
    """Return targets, each once, with the name of this processor for "cpu". Raises OptionError for
    a name that is none."""
    known = ("cpu", *TARGETS, *CARDS)
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise OptionError(
            f"there is no target {', '.join(unknown) or 'given'}; there are {', '.join(known)}"
        )
    return tuple(dict.fromkeys(target_name() if name == "cpu" else name for name in names))


def build_artefact(
    model: Path,
    targets: Sequence[str],
    path: Path,
    *,
    dtype: torch.dtype,
    sizes: Sequence[tuple[int, int]],
    options: Options,
    say: Say,
    key: SecretKey | None = None,
    compiler: str = "",
) -> SavedArtefact:
    """Compile the pipeline that a folder describes, for all sizes, and write an artefact, which is
    signed if there is a key. ``sizes`` are heights and widths of pictures that are traced; without
    any it is the model's own. ``compiler`` is the command that compiles for processors of another
    kind than this machine's; without it, the one that Debian has.

    Raises OptionError for a folder or target that cannot be built for, UnsupportedError for a
    module that would run in eager, and CacheError where the file cannot be written.
    """
    names = check_targets(targets)
    say(f"reading {model}")
    pipe = pipeline_of(model, dtype)
    found = [_gathered(pipe, name, sizes, options, say, compiler) for name in names]
    say(f"writing {path}")
    return write_gathered(found, path, key)


def _gathered(
    pipe: Any,
    target: str,
    sizes: Sequence[tuple[int, int]],
    options: Options,
    say: Say,
    compiler: str,
) -> Gathered:
    """Return all that is compiled of a pipeline for one target."""
    device = CARDS.get(target) or processor(target)
    place = torch.device("cuda", 0) if device.arch else None

    def tell(done: int, total: int) -> None:
        say(f"{target}: {done} of {total} kernels of a graph")

    loader = AheadLoader(target, device, options, tell, compiler)
    optimize_pipeline(pipe, options, kind=partial(PlanningDispatcher, loader=loader, place=place))
    try:
        parts = _parts(pipe)
        say(f"{target}: tracing {', '.join(parts)}")
        for given in _calls(pipe, sizes):
            with torch.no_grad():
                pipe(**given)
        graphs = sum(len(part.variants.all) for part in parts.values())
        say(f"{target}: compiling the kernels of {counted(graphs, 'graph')}")
        return gather(parts)
    finally:
        restore_pipeline(pipe)


def _parts(pipe: Any) -> dict[str, Dispatcher]:
    found = {name: dispatcher_of(module) for name, module in compiled_modules(pipe).items()}
    return {name: part for name, part in found.items() if part is not None}


def _calls(pipe: Any, sizes: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    """Return the arguments of the calls that are traced. Raises OptionError for a pipeline that
    cannot be called with a text alone."""
    parameters = inspect.signature(type(pipe).__call__).parameters
    missing = [name for name in ("image", "control_image", "mask_image") if name in parameters]
    if "prompt" not in parameters or missing:
        raise OptionError(
            f"`strop build` draws from a text alone, and a {type(pipe).__name__} takes"
            f" {' and '.join(missing) or 'no prompt'}: optimise and call it where it runs, and save"
            " that with strop.save"
        )
    usual: dict[str, Any] = {"prompt": "", "num_inference_steps": NUM_STEPS, "output_type": "pt"}
    shapes = [{"height": height, "width": width} for height, width in sizes] or [{}]
    batches = BATCHES if "num_images_per_prompt" in parameters else ()
    counts = [{"num_images_per_prompt": count} for count in batches] or [{}]
    return [usual | shape | count for shape in shapes for count in counts]
