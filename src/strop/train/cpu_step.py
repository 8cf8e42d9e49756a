"""Run steps on a CPU: torch's fused CPU kernels, around which clip, average and shadow are put.

Host and device are one here, so the scalars are Python numbers, and a step that is skipped is a
branch. Arrays whose type is not that of their states are converted for the call, and so are states
in 8 bits.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from strop.errors import UnsupportedError
from strop.ir import philox
from strop.train import quantized
from strop.train.layout import Item, Layout, state_dtype
from strop.train.rules import UpdateRule
from strop.train.shards import gathered
from strop.train.step import Memory, Request

_CHUNK_ELEMENTS = 1 << 24  # of converted or scaled copies at a time
_KEY_STRIDE = 0x1E3779B97F4A7C15  # odd, as in ``settle``


@dataclass(frozen=True, slots=True)
class _Entry:
    item: Item
    grad: Tensor


class CpuStep:
    """Runs steps with torch."""

    def __init__(self, rule: UpdateRule, memory: Memory, seed: int | None) -> None:
        self.memory = memory
        self._rule, self._seed = rule, seed

    def load(self, request: Request) -> None:
        """Load nothing: every step reads the groups."""

    @contextmanager
    def loaded(self) -> Iterator[tuple[object, ...]]:
        raise UnsupportedError("steps on a CPU branch on numbers, so that no graph can replay them")
        yield ()

    def run(self, layout: Layout, grads: Sequence[Tensor], request: Request) -> None:
        entries = [_Entry(i, g) for i, g in zip(layout.items, grads, strict=True)]
        factor, skip = self._settle(grads, request)
        slots = [item.slot for item in layout.items]
        if slots and not skip:
            self.memory.steps[slots] += 1
            for chunk in _chunks(entries):
                self._update(chunk, request, factor)
        if request.schedule is not None and layout.items:
            averages = [item.average for item in layout.items if item.average is not None]
            values = [item.param.to(state_dtype(item.param)) for item in layout.items]
            torch._foreach_lerp_(averages, values, float(self.memory.weight))
        for item in layout.items:
            if item.shadow is not None:
                item.shadow.copy_(item.param)

    def _settle(self, grads: Sequence[Tensor], request: Request) -> tuple[float, bool]:
        """Return the factor of the gradients, and whether to skip the step."""
        memory = self.memory
        factor = 1.0 if request.scale is None else 1.0 / float(request.scale)
        bad = request.found_inf is not None and bool(request.found_inf)
        if request.measured:
            norms = torch._foreach_norm(list(grads), 2, torch.float64) if grads else ()
            total = float(torch.stack(norms).norm()) if norms else 0.0
            # Squares of finite fp64 numbers may overflow.
            bad = bad or not (math.isfinite(total) or all(bool(g.isfinite().all()) for g in grads))
            if request.shards is not None:
                own = torch.tensor([total, bad], dtype=torch.float64)
                every = gathered(own, request.shards)
                total, bad = float(every[:, 0].norm()), bool(every[:, 1].any())
            norm = total * factor
            memory.norm.fill_(norm)
            if request.clips:
                ratio = request.max_norm / (norm + 1e-6)
                factor *= 1.0 if ratio > 1.0 else ratio  # NaN stays
        memory.nonfinite.fill_(float(bad))
        memory.counters[1] += 1
        if request.schedule is not None:
            memory.counters[0] += 1
            memory.scalars[2] = 1.0 - request.schedule.decay_at(int(memory.counters[0]))
        return factor, bad and request.skips

    def _update(self, entries: Sequence[_Entry], request: Request, factor: float) -> None:
        buckets: dict[tuple[int, int, bool, torch.dtype], list[_Entry]] = defaultdict(list)
        for e in entries:
            is_first = bool(self.memory.steps[e.item.slot] == 1)
            key = (e.item.group, len(e.item.states), is_first, state_dtype(e.item.param))
            buckets[key].append(e)
        for (group, _, is_first, dtype), bucket in buckets.items():
            params = [e.item.param.to(dtype) for e in bucket]
            grads = [e.grad.to(dtype) for e in bucket]
            if factor != 1.0:  # NaN as well
                grads = list(torch._foreach_mul(grads, factor))
            states = [_states(e.item) for e in bucket]
            self._call(bucket, params, grads, states, request.numbers[group], is_first)
            for e, moments in zip(bucket, states, strict=True):
                if e.item.scales:
                    quantized.store(moments, e.item.states, e.item.scales)
            for e, param in zip(bucket, params, strict=True):
                if param.dtype != e.item.param.dtype:
                    e.item.param.copy_(self._rounded(param, e.item))

    def _call(
        self,
        bucket: Sequence[_Entry],
        params: list[Tensor],
        grads: list[Tensor],
        states: Sequence[tuple[Tensor, ...]],
        numbers: tuple[float, ...],
        is_first: bool,
    ) -> None:
        lr, a, b, c, weight_decay, decoupled, sign, _ = numbers
        if self._rule.name == "adam":
            call = torch._fused_adamw_ if decoupled else torch._fused_adam_
            steps = [self.memory.steps[e.item.slot] for e in bucket]
            call(
                params,
                grads,
                [s[0] for s in states],
                [s[1] for s in states],
                [],
                steps,
                lr=lr,
                beta1=a,
                beta2=b,
                weight_decay=weight_decay,
                eps=c,
                amsgrad=False,
                maximize=sign < 0,
            )
        else:
            torch._fused_sgd_(
                params,
                grads,
                [s[0] for s in states if s],
                weight_decay=weight_decay,
                momentum=a,
                lr=lr,
                dampening=b,
                nesterov=bool(c),
                maximize=sign < 0,
                is_first_step=is_first,
            )

    def _rounded(self, values: Tensor, item: Item) -> Tensor:
        """Round fp32 values that become the parameter; to bf16 at random if a seed was given."""
        if self._seed is None or item.param.dtype != torch.bfloat16:
            return values
        key = self._seed + int(self.memory.counters[1]) * _KEY_STRIDE & (1 << 64) - 1
        key -= (key >> 63) << 64
        flat = values.as_strided((values.numel(),), (1,))
        position = torch.arange(len(flat)) + (item.slot << 40)
        noise = (philox.uniform(torch.tensor(key), position) * 65536.0).to(torch.int32)
        bits = flat.view(torch.int32)
        bits = torch.where(flat.isfinite(), bits + noise, bits) & -65536
        rounded = torch.where(flat.isnan(), flat, bits.view(torch.float32))
        return rounded.as_strided(values.shape, values.stride())


def _states(item: Item) -> tuple[Tensor, ...]:
    if not item.scales:
        return item.states
    return quantized.load(item.states, item.scales, item.param)


def _chunks(entries: Sequence[_Entry]) -> Iterator[list[_Entry]]:
    """Runs of entries of a bounded size, so that copies stay small."""
    chunk: list[_Entry] = []
    size = 0
    for e in entries:
        if chunk and size + e.grad.numel() > _CHUNK_ELEMENTS:
            yield chunk
            chunk, size = [], 0
        chunk.append(e)
        size += e.grad.numel()
    if chunk:
        yield chunk
