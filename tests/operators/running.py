"""The ways in: all samples of a case in one compile, without and with gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._dynamo.utils import counters

from strop.api import optimize_module
from strop.dispatch.dynamo import AotLog, compile_dynamo
from strop.dispatch.training import TrainingDispatcher
from strop.options import Options
from tests.operators.samples import Sample, function_of

DIRECTIONS = ("forward", "backward")
SEED = 7


@dataclass(frozen=True)
class Outcome:
    """``results`` by sample; ``reasons`` why something ran in torch. ``is_eager``: all of it."""

    results: list[Any]
    reasons: tuple[str, ...] = ()
    is_eager: bool = False


def module_of(samples: Sequence[Sample]) -> nn.Module:
    """A module whose forward calls all samples."""
    kind = type("Samples", (nn.Module,), {"forward": function_of(samples, "self")})
    module: nn.Module = kind().eval()
    return module


def eager(samples: Sequence[Sample], given: Sequence[Sequence[Tensor]]) -> list[Any]:
    torch.manual_seed(SEED)
    return [sample(*tensors) for sample, tensors in zip(samples, given, strict=True)]


def optimized(samples: Sequence[Sample], tensors: Sequence[Tensor], folder: str) -> Outcome:
    """Through ``strop.optimize``; with ``train=True`` where gradients are enabled."""
    module = module_of(samples)
    options = Options(cache_dir=folder, record=True, check_finite=False)
    dispatcher = optimize_module(module, options, train=torch.is_grad_enabled())
    torch.manual_seed(SEED)
    results = module(*tensors)
    reasons = dict.fromkeys(dispatcher.counters.fallbacks)
    if isinstance(dispatcher, TrainingDispatcher):
        reasons |= dict.fromkeys(f"traced by torch: {r}" for r in dispatcher.traced_by_torch)
        reasons |= dict.fromkeys(_why_foreign(dispatcher.log))
    return Outcome(results, tuple(reasons), dispatcher.counters.eager_calls > 0)


def compiled(samples: Sequence[Sample], tensors: Sequence[Tensor], folder: str) -> Outcome:
    """Through ``torch.compile(backend="strop")``."""
    torch._dynamo.reset()
    counters.clear()
    log = AotLog()
    backend = partial(compile_dynamo, record_in=log, options=Options(cache_dir=folder))
    function = torch.compile(function_of(samples), dynamic=False, backend=backend)
    torch.manual_seed(SEED)
    results = function(*tensors)
    breaks = [text.partition("\n")[0] for text in counters["graph_break"]]
    reasons = dict.fromkeys([*_why_foreign(log), *(f"Dynamo: {text}" for text in breaks)])
    return Outcome(results, tuple(reasons), not log.records)


def without_strop(samples: Sequence[Sample], given: Sequence[Sequence[Tensor]]) -> list[Any]:
    """What torch.compile makes of them with torch's own kernels."""
    torch._dynamo.reset()
    function = torch.compile(function_of(samples), dynamic=False, backend="aot_eager")
    torch.manual_seed(SEED)
    found: list[Any] = function(*(t for tensors in given for t in tensors))
    return found


def _why_foreign(log: AotLog) -> list[str]:
    causes = [cause for r in log.records for cause in r.compiled.program.foreign_causes]
    return [*log.fallbacks, *causes]


WAYS: dict[str, Callable[..., Outcome]] = {"optimize": optimized, "compile": compiled}


def gradients(
    results: Sequence[Any], given: Sequence[Sequence[Tensor]]
) -> list[list[Tensor | None]]:
    """By sample and argument, of a weighted sum of all results that have gradients. One backward
    pass, as the samples may be one node of autograd."""
    leaves = [leaf for leaf in pytree.tree_leaves(list(results)) if isinstance(leaf, Tensor)]
    sums = [leaf for leaf in leaves if leaf.requires_grad]
    inputs = [[t for t in tensors if t.requires_grad] for tensors in given]
    flat = [t for tensors in inputs for t in tensors]
    found: Iterator[Tensor | None] = itertools.repeat(None)
    if sums and flat:
        found = iter(torch.autograd.grad(sums, flat, list(map(_weights, sums)), allow_unused=True))
    return [[next(found) for _ in tensors] for tensors in inputs]


def _weights(t: Tensor) -> Tensor:
    """Numbers from -1 to 1 that every type has exactly, in a dense tensor."""
    numbers = (torch.arange(t.numel()) * 7 % 17).reshape(t.shape) / 8 - 1
    return numbers.to(t.dtype)
