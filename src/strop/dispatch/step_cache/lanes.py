"""Say which steps of a denoise loop may be taken from a step cache.

A lane is what one prompt's calls have in common within one loop: the same conditions, of the same
memory, to which nobody has written, from the same thread. A call with other conditions begins a
lane of its own, with a full step. Nothing outlives the loop.

Sources: the first step is computed in full by every cache; TeaCache (Liu et al. 2024,
arXiv:2411.19108) computes the last one in full, too. Ma et al. 2023 (DeepCache, arXiv:2312.00858)
choose intervals from 2 to 5, ParaAttention thresholds from 0.05 to 0.2.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor

from strop.runtime.derived.sources import versions_of
from strop.runtime.loop.denoise_loop import DenoiseLoop

NUM_LAST = 1  # steps that are always computed in full, beside the first ones of a rule
MOST_LANES = 8  # of one loop: the oldest goes first
UNKNOWN_LENGTH = "nobody says how many steps the loop has: give its bar a total"
UNCOUNTED = (
    "conditions or weights are tensors of inference mode, and torch does not count what code"
    " between two steps writes to them: draw under torch.no_grad(), or without callbacks"
)
# Arguments that are others at each step
VARYING = frozenset(
    {
        "sample",
        "hidden_states",
        "timestep",
        "down_block_additional_residuals",
        "mid_block_additional_residual",
        "controlnet_block_samples",
        "controlnet_single_block_samples",
        "block_controlnet_hidden_states",
    }
)


@dataclass(frozen=True, slots=True)
class Rule:
    """Say which steps are computed in full: the first ``num_first``; then, of a UNet's, one of
    ``interval``, of a transformer's those whose first block adds something that is ``threshold`` or
    more from what it added at the last full step, by the mean change relative to the mean size."""

    num_first: int
    interval: int
    threshold: float


RULES = {"cautious": Rule(3, 2, 0.08), "balanced": Rule(3, 3, 0.12), "fast": Rule(5, 5, 0.24)}


@dataclass
class CacheLane:
    """Hold what is kept for the calls of one lane. ``known``: what the module was at the last full
    step."""

    key: Hashable
    conditions: Sequence[Any]  # keeps their memory, so that no others get its address
    start: int  # how many steps of the loop went before the first of this lane
    num_calls: int = 0
    since_full: int = 0
    kept: tuple[Any, ...] = ()
    known: Any = None

    @property
    def position(self) -> int:
        return self.start + self.num_calls

    def must_be_full(self, loop: DenoiseLoop, rule: Rule) -> bool:
        """Say whether the next call is to be computed in full, whatever the rule says."""
        is_first = self.num_calls < rule.num_first
        return is_first or not self.kept or self.position >= loop.num_calls - NUM_LAST

    def forget(self) -> None:
        self.kept, self.since_full = (), 0


def lane_for(
    loop: DenoiseLoop, owner: int, call: Mapping[str, Any], weights: Sequence[Tensor]
) -> CacheLane | str:
    """Return the lane of a call by its arguments, or why there is none."""
    if not loop.num_calls:
        return UNKNOWN_LENGTH
    if loop.has_user_code and versions_of(weights) is None:
        return UNCOUNTED
    conditions, spec = pytree.tree_flatten({n: v for n, v in call.items() if n not in VARYING})
    tensors = [leaf for leaf in conditions if isinstance(leaf, Tensor)]
    versions = versions_of(tensors)
    if versions is None and loop.has_user_code:
        return UNCOUNTED
    key = (
        owner,
        threading.get_ident(),
        versions,
        spec,
        tuple(map(_identity, conditions)),
        tuple(map(_form, pytree.tree_leaves({n: call[n] for n in sorted(VARYING & call.keys())}))),
    )
    lane = loop.lanes.get(key)
    if lane is None:
        start = _start(loop)
        while len(loop.lanes) >= MOST_LANES:
            del loop.lanes[next(iter(loop.lanes))]
        lane = loop.lanes[key] = CacheLane(key, conditions, start)
    return lane


def _start(loop: DenoiseLoop) -> int:
    """Return how many steps of the loop went before a lane that begins now: as many as before the
    newest one, if that has made one call, which is then taken to be of the same step."""
    newest: CacheLane | None = next(reversed(loop.lanes.values()), None)
    return newest.start if newest is not None and newest.num_calls == 1 else loop.furthest


def advance(loop: DenoiseLoop, lane: CacheLane, *, is_full: bool) -> None:
    """Note that a call of a lane is done. If the lane was forgotten meanwhile, as the module was
    looked at anew, it stays: what it keeps was computed since."""
    loop.lanes[lane.key] = lane
    lane.num_calls += 1
    lane.since_full = 0 if is_full else lane.since_full + 1
    loop.furthest = max(loop.furthest, lane.position)


def _form(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.device
    return (type(leaf),)


def _identity(leaf: Any) -> Hashable:
    """Return what is equal for one condition and no other that lives at the same time."""
    if isinstance(leaf, Tensor):
        return leaf.data_ptr(), leaf.stride(), _form(leaf)
    if leaf is None or isinstance(leaf, bool | int | float | str):
        return type(leaf), leaf
    return id(leaf)
