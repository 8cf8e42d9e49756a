"""What Strop is compared with: each peer as its own users would run it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from strop.bench import timer
from strop.bench.cases import BenchCase
from strop.bench.models import Workload
from strop.errors import OptionError


@dataclass(frozen=True, slots=True)
class Peer:
    """``prepare`` changes the modules in place. ``by_graph``: calls are captured by hand.

    ``is_apart``: runs in a process of its own under a time limit, because it may hang.
    """

    name: str
    prepare: Callable[[nn.Module], None]
    by_graph: bool = False
    is_apart: bool = False

    def serves(self, case: BenchCase, device: torch.device) -> str:
        """Why it cannot be measured here, or nothing."""
        if self.by_graph and device.type != "cuda":
            return "CUDA graphs need a GPU"
        if self.by_graph and case.kind != "step":
            return "a whole pipeline does not fit in a hand-made graph"
        return ""


def _channels_last(module: nn.Module) -> None:
    module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _compiled(module: nn.Module, **how: Any) -> None:
    _channels_last(module)
    module.forward = torch.compile(module.forward, **how)


PEERS: tuple[Peer, ...] = (
    Peer("eager", _channels_last),
    Peer("eager-graph", _channels_last, by_graph=True),
    Peer("inductor", _compiled, is_apart=True),
    Peer("inductor-graphs", partial(_compiled, mode="reduce-overhead"), is_apart=True),
    Peer("inductor-dynamic", partial(_compiled, dynamic=True), is_apart=True),
)


def peer_named(name: str) -> Peer:
    for peer in PEERS:
        if peer.name == name:
            return peer
    raise OptionError(f"no peer {name!r}; there are {', '.join(p.name for p in PEERS)}")


def hot_modules(target: Any) -> list[nn.Module]:
    """The modules that a user would hand to a compiler."""
    if isinstance(target, nn.Module):
        return [target]
    return [target.unet, target.vae.decoder]


def prepared(peer: Peer, case: BenchCase, device: torch.device) -> Workload:
    """A fresh model, set up for this peer."""
    workload = case.build(device)
    for module in hot_modules(workload.target):
        peer.prepare(module)
    return workload


def caller(workload: Workload, size: tuple[int, int], batch: int, *, by_graph: bool = False
           ) -> timer.Call:  # fmt: skip
    """A call without arguments at one shape."""
    given = workload.inputs(size, batch)

    def call() -> Any:
        with torch.no_grad():
            return workload.call(workload.target, given)

    return timer.captured(call) if by_graph else call


def measure(case: BenchCase, device: torch.device, name: str, samples: int) -> dict[str, Any]:
    """One peer on every shape of the case: seconds to the first result, then times."""
    peer = peer_named(name)
    workload = prepared(peer, case, device)
    rows = []
    for size, batch in case.shapes:
        call = caller(workload, size, batch, by_graph=peer.by_graph)
        start = time.perf_counter()
        _, peak = timer.with_peak(call, device)
        timer.synchronise(device)
        first_s = time.perf_counter() - start
        timing = timer.time_calls({name: call}, device, samples=samples)[name]
        rows.append({"size": size, "batch": batch, "first_s": round(first_s, 3),
                     **timing.to_dict(), "peak_bytes": peak})  # fmt: skip
    return {"rows": rows}
