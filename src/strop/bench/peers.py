"""Set up what Strop is compared with: each peer as its own users would run it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

import strop
from strop.bench import timer
from strop.bench.cases import BenchCase
from strop.bench.models import Workload
from strop.errors import OptionError

MOST_SHAPES = 64


@dataclass(frozen=True, slots=True)
class Peer:
    """Describe a peer. ``prepare`` changes the modules in place; ``by_graph`` says that calls are
    captured by hand.

    Peers with the same ``setup`` share the prepared model. ``first_s`` is what a first call at a
    shape takes on a GPU, about, and ``limit_s`` when it is given up. ``is_whole`` says that
    ``prepare`` is given a pipeline where there is one, not its modules.
    """

    name: str
    prepare: Callable[[Any], None]
    setup: str
    by_graph: bool = False
    first_s: float = 3.0
    limit_s: float = 0.0  # none
    is_whole: bool = False

    @property
    def is_by_block(self) -> bool:
        """Tell whether blocks are compiled one by one, which only denoisers have."""
        return self.setup == "blocks"

    @property
    def is_slow(self) -> bool:
        """Tell whether its results are worth keeping for a later run."""
        return bool(self.limit_s)

    def serves(self, case: BenchCase, device: torch.device) -> str:
        """Return why it cannot be measured here, or nothing."""
        if self.by_graph and device.type != "cuda":
            return "CUDA graphs need a GPU"
        if self.by_graph and case.kind != "step":
            return "a whole pipeline does not fit in a hand-made graph"
        return ""


def _channels_last(module: nn.Module) -> None:
    for weight in module.parameters():
        if weight.dim() == 4:  # not those of a convolution over frames
            weight.data = weight.data.contiguous(memory_format=torch.channels_last)


def _compiled(module: nn.Module, **how: Any) -> None:
    _channels_last(module)
    module.forward = torch.compile(module.forward, **how)


def _compiled_blocks(module: nn.Module) -> None:
    """Compile repeated blocks, as diffusers recommends it for transformers."""
    _channels_last(module)
    # each random shape is compiled apart, and by default Dynamo gives up behind eight
    torch._dynamo.config.recompile_limit = MOST_SHAPES
    for block in repeated_blocks(module):
        block.compile(fullgraph=True, dynamic=False)


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the blocks that a user compiles one by one: those of the classes that a model of
    diffusers names, or else the members of its own lists that are all of one class. Raises
    OptionError where it has neither."""
    named = getattr(module, "_repeated_blocks", None) or ()
    found = [part for part in module.modules() if type(part).__name__ in named]
    lists = [part for part in module.children() if isinstance(part, nn.ModuleList)]
    alike = [part for part in lists if len(part) > 1 and len({type(block) for block in part}) == 1]
    found = found or [block for part in alike for block in part]
    if not found:
        raise OptionError(f"{type(module).__name__} has no blocks that repeat: leave this peer out")
    return found


def _naive(module: nn.Module) -> None:
    """Compute attention as products and a softmax with all scores in memory, as diffusers did
    before torch 2."""
    from diffusers.models.attention_processor import AttnProcessor

    _channels_last(module)
    for part in module.modules():
        choose = getattr(part, "set_processor", None)
        if callable(choose):
            choose(AttnProcessor())


def _on_one_gpu(target: Any) -> None:
    strop.optimize(target)


_STATIC = partial(_compiled, dynamic=False)

PEERS: tuple[Peer, ...] = (
    Peer("eager", _channels_last, "eager"),
    Peer("eager-graph", _channels_last, "eager", by_graph=True),
    Peer("eager-naive", _naive, "naive"),
    Peer("inductor", _STATIC, "inductor", first_s=80, limit_s=300),
    Peer("inductor-graph", _STATIC, "inductor", by_graph=True, first_s=80, limit_s=300),
    Peer("inductor-blocks", _compiled_blocks, "blocks", first_s=40, limit_s=200),
    Peer(
        "inductor-blocks-graph", _compiled_blocks, "blocks", by_graph=True, first_s=40, limit_s=200
    ),
    Peer("inductor-dynamic", partial(_compiled, dynamic=True), "dynamic", first_s=120, limit_s=400),
    Peer(
        "inductor-tuned",
        partial(_compiled, dynamic=False, mode="max-autotune"),
        "tuned",
        first_s=300,
        limit_s=600,
    ),
    # Strop with default options, for rows where it runs on several GPUs, or in 8 bits
    Peer("strop-one-gpu", _on_one_gpu, "one-gpu", first_s=40, is_whole=True),
)


def peer_named(name: str) -> Peer:
    for peer in PEERS:
        if peer.name == name:
            return peer
    raise OptionError(f"no peer {name!r}; there are {', '.join(p.name for p in PEERS)}")


def hot_modules(target: Any) -> list[nn.Module]:
    """Return the modules that a user would hand to a compiler."""
    if isinstance(target, nn.Module):
        return [target]
    return [denoiser_of(target), target.vae.decoder]


def denoiser_of(pipe: Any) -> nn.Module:
    """Return the model that a pipeline calls in each step."""
    found: nn.Module = pipe.components.get("unet") or pipe.components["transformer"]
    return found


def prepared(peer: Peer, workload: Workload) -> Workload:
    """Return a fresh model, set up for this peer."""
    modules = [workload.target] if peer.is_whole else hot_modules(workload.target)
    for module in modules[:1] if peer.is_by_block else modules:
        peer.prepare(module)
    return workload


def caller(
    workload: Workload, size: tuple[int, int], batch: int, *, by_graph: bool = False
) -> timer.Call:
    """Return a call without arguments at one shape."""
    given = workload.inputs(size, batch)

    def call() -> Any:
        with torch.no_grad():
            return workload.call(workload.target, given)

    return timer.captured(call) if by_graph else call
