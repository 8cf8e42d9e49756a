"""Measure whole networks at many batch sizes, one compile against one per size (``strop bench
batches``).

Strop compiles once and serves every batch; Inductor compiles each batch for itself, which is its
fastest mode. On a GPU every contender runs in a hand-made CUDA graph over static arguments.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

import strop
from strop.bench import accuracy, environment, timer
from strop.bench.kernel import own_code
from strop.bench.turns import in_turns
from strop.options import Options

BATCHES = (1, 2, 4, 8, 16, 33)
PEERS = ("eager", "inductor")
INNER = 20  # calls a sample on a GPU: what the one before has left in the cache takes no part


@dataclass(frozen=True, slots=True)
class Network:
    """Describe a network; ``result`` picks the tensor to compare from what the network returns."""

    name: str
    build: Callable[[], nn.Module]
    arguments: Callable[[int, torch.dtype], dict[str, Tensor]]  # of a batch
    result: Callable[[Any], Tensor]
    channels_last: bool = False


def _bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    return cast(nn.Module, BertModel(BertConfig()))


def _bert_tiny() -> nn.Module:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        vocab_size=128,
    )
    return cast(nn.Module, BertModel(config))


def _tokens(
    batch: int, dtype: torch.dtype, length: int = 128, words: int = 30522
) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(batch)
    return {"input_ids": torch.randint(words, (batch, length), generator=source)}


def _resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return cast(nn.Module, ResNetForImageClassification(ResNetConfig(num_labels=1000)))


def _pictures(batch: int, dtype: torch.dtype) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(batch)
    return {"pixel_values": torch.randn(batch, 3, 224, 224, generator=source).to(dtype)}


NETWORKS = (
    Network("bert-base", _bert, _tokens, lambda out: out.last_hidden_state),
    Network("resnet50", _resnet, _pictures, lambda out: out.logits, channels_last=True),
    Network(
        "bert-tiny",
        _bert_tiny,
        partial(_tokens, length=8, words=128),
        lambda out: out.last_hidden_state,
    ),
)


def run(
    network: Network,
    device: torch.device,
    dtype: torch.dtype,
    batches: Sequence[int] = BATCHES,
    peers: Sequence[str] = PEERS,
    samples: int = 20,
    apart: bool = False,
) -> dict[str, Any]:
    """Return one row per batch: milliseconds of every contender, seconds of its first call, our
    error.

    ``apart``: each batch is compiled in a process of its own, all at once, and timed in turn.
    """
    if apart:
        works = [
            partial(_alone, network.name, device, dtype, batch, peers, samples) for batch in batches
        ]
        found = list(in_turns(works))
        rows, counts = [row for row, _ in found], _together([counts for _, counts in found])
    else:
        field = _Field.of(network, device, dtype, peers, samples)
        rows = [list(field.steps(batch))[1] for batch in batches]
        counts = strop.explain(field.ours).summary()
    return {
        "kind": "batches",
        "network": network.name,
        "dtype": str(dtype),
        "samples": samples,
        "is_apart": apart,
        "environment": environment.describe(device),
        "rows": rows,
        "counts": counts,
    }


def _alone(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    batch: int,
    peers: Sequence[str],
    samples: int,
) -> Iterator[Any]:
    """Yield one batch for ``in_turns``: its row, and what Strop counted."""
    (network,) = (n for n in NETWORKS if n.name == name)
    field = _Field.of(network, device, dtype, peers, samples)
    steps = field.steps(batch)
    yield next(steps)
    yield next(steps), strop.explain(field.ours).summary()


def _together(counts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge the counts of processes that all made the same graph; a count that differs becomes
    None."""
    return {
        name: value if all(c[name] == value for c in counts) else None
        for name, value in counts[0].items()
    }


@dataclass(frozen=True, slots=True)
class _Field:
    """Hold the contenders of one network."""

    network: Network
    ours: nn.Module
    eager: nn.Module
    exact: nn.Module
    peers: Sequence[str]
    samples: int

    @staticmethod
    def of(
        network: Network,
        device: torch.device,
        dtype: torch.dtype,
        peers: Sequence[str],
        samples: int,
    ) -> _Field:
        torch._dynamo.config.recompile_limit = 1000
        ours = strop.optimize(
            _made(network, device, dtype),
            options=Options.from_environment(strict=True, cuda_graphs=False),
        )
        eager = _made(network, device, dtype)
        exact = _made(network, torch.device("cpu"), torch.float64)
        return _Field(network, ours, eager, exact, peers, samples)

    def steps(self, batch: int) -> Iterator[Any]:
        """Yield None when everything is compiled and judged, then the row."""
        parameter = next(self.eager.parameters())
        device, dtype = parameter.device, parameter.dtype
        given = {n: t.to(device) for n, t in self.network.arguments(batch, dtype).items()}
        if self.network.channels_last:
            given = {n: t.contiguous(memory_format=torch.channels_last) for n, t in given.items()}
        calls: dict[str, Callable[[], Any]] = {"strop": _without_grad(self.ours, given)}
        for peer in self.peers:
            # weights of its own: those that another has just read may lie in the cache
            module = _made(self.network, device, dtype)
            fast = module if peer == "eager" else torch.compile(own_code(module), dynamic=False)
            calls[peer] = _without_grad(fast, given)
        first, found = {}, {}
        for name, call in calls.items():
            start = time.perf_counter()
            found[name] = self.network.result(call()).cpu()
            first[name] = round(time.perf_counter() - start, 3)
        # fp64 on a CPU takes its time
        judged = self._judged(given, found["strop"]) if batch == 1 else None
        yield None
        timed = calls if device.type == "cpu" else {n: timer.captured(c) for n, c in calls.items()}
        inner = 1 if device.type == "cpu" else INNER
        times = timer.time_calls(timed, device, samples=self.samples, inner=inner)
        yield {
            "batch": batch,
            "first_s": first,
            "error": judged,
            "times": {name: t.to_dict() for name, t in times.items()},
        }

    def _judged(self, given: dict[str, Tensor], ours: Tensor) -> dict[str, Any]:
        wide = {
            n: t.cpu().to(torch.float64 if t.is_floating_point() else t.dtype)
            for n, t in given.items()
        }
        truth = self.network.result(_without_grad(self.exact, wide)())
        plain = self.network.result(_without_grad(self.eager, given)()).cpu()
        return accuracy.judge(ours, plain, truth)


def _made(network: Network, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Give every contender equal weights, whatever its type, and batch norms as training leaves
    them. A new batch norm multiplies by 1 - 5e-6, whose only effect in fp16 is how ties are
    broken."""
    torch.manual_seed(0)
    module = network.build()
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.running_mean, part.running_var = torch.randn(2, part.num_features) / 8
            part.running_var = part.running_var.exp()
            part.weight.data.uniform_(0.75, 1.25)
    module = module.to(device, dtype).eval().requires_grad_(False)
    if network.channels_last:
        module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return module


def _without_grad(module: Callable[..., Any], given: dict[str, Tensor]) -> Callable[[], Any]:
    def call() -> Any:
        with torch.no_grad():
            return module(**given)

    return call


def rows_of(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the table: its header, then one row per batch."""
    names = list(result["rows"][0]["times"])
    table = [("batch", *(f"{name} ms" for name in names), *(f"{n} first s" for n in names))]
    for row in result["rows"]:
        times = (f"{row['times'][name]['p50_ms']:.3f}" for name in names)
        firsts = (f"{row['first_s'][name]:.2f}" for name in names)
        table.append((str(row["batch"]), *times, *firsts))
    return table
