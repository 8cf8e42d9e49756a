"""Library calls that kernels written by hand do instead: the one place that knows all of these.

``own_calls_at`` says which calls those are at one shape, ``instead`` has one of them done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from strop.ir.device import Device
from strop.ir.program import CallStep, Program, Step
from strop.ir.source import KernelSource
from strop.runtime.build.loader import KernelLoader
from strop.runtime.run import own_calls
from strop.runtime.run.folded_taps import FoldedTaps
from strop.runtime.run.narrow_convolution import NarrowConvolution
from strop.runtime.run.sizes import Sizes
from strop.runtime.run.wide_attention import WideAttention, working_bytes


@dataclass(frozen=True, slots=True)
class OwnCalls:
    """The calls that kernels do at one shape, by step. ``chosen``: which kernels. ``wide``: the
    working memory, in bytes, of attentions whose heads are wider than a library's kernel takes."""

    chosen: Mapping[int, own_calls.Own]
    wide: Mapping[int, int]

    @property
    def sources(self) -> list[KernelSource]:
        """The kernels that must be built before they are called."""
        return [source for own in self.chosen.values() for source in own.sources]

    @property
    def scratch(self) -> dict[int, Sequence[int]]:
        return {position: [size] for position, size in self.wide.items()}


def own_calls_at(
    program: Program, steps: Sequence[Step | None], sizes: Sizes, device: Device
) -> OwnCalls:
    """``steps``: those that run at these sizes."""
    chosen = own_calls.chosen(program, steps, sizes.all, device)
    return OwnCalls(chosen, working_bytes(program, steps, chosen, sizes.all))


def instead(
    own: OwnCalls,
    program: Program,
    position: int,
    library: own_calls.Call,
    kernels: KernelLoader,
    stream: int,
    *,
    early: bool,
    memory: Tensor | None,
) -> own_calls.Call:
    """What does the call of a step: ``library``, or a kernel of ours, which leaves to it operands
    that do not lie as it wants them. ``early``: the launch before is one of ours; ``memory``: the
    scratch of the step."""
    step = program.steps[position]
    assert isinstance(step, CallStep)
    if step.kernel is not None:
        kind = FoldedTaps if step.op == "folded_taps" else NarrowConvolution
        return kind(program.sources[step.kernel], library, kernels, stream)
    if position in own.chosen:
        chosen = own.chosen[position]
        return own_calls.instead(step, chosen, library, kernels, stream, early=early)
    if position in own.wide:
        assert memory is not None
        return WideAttention(dict(step.attrs)["scale"], kernels, stream, memory)
    return library
