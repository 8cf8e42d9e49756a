"""Decide which values of a training step the forward keeps, and which the backward computes again.

The choice is torch's min-cut over a joint graph in which norms are statistics and arithmetic
(``frontend.joint``): what is cheap to compute from something that has to be kept anyway is not
kept. ``Options.memory_budget`` below 1 has more computed again, down to whole layers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config, partitioners
from torch._functorch.partitioners import (
    has_recomputable_rng_ops,
    min_cut_rematerialization_partition,
)
from torch._guards import TracingContext
from torch.fx import GraphModule, Node
from torch.fx._lazy_graph_module import _use_lazy_graph_module

from strop.errors import ShapeError, UnsupportedError
from strop.frontend.complex_numbers import take_apart
from strop.frontend.equal_nodes import can_merge, merged
from strop.frontend.joint import keep_less
from strop.ir.graph import memory_order
from strop.ir.program import Program

Order = tuple[int, ...] | None
_ONE_AT_A_TIME = threading.RLock()  # what is patched is torch's own, of all threads
LEAST_BUDGET = 1e-3  # at 0 torch computes seeds again, which would be other ones

# What is arithmetic is computed again however long its chain: our kernels fuse all of it. What a
# library call of the backward reads is kept, as it has to be in memory anyway.
_CHOICE: dict[str, Any] = {
    "ban_recompute_used_far_apart": False,
    "ban_recompute_long_fusible_chains": False,
}


@dataclass
class Joint:
    """One step's two graphs: what compiling the first one tells the second."""

    budget: float
    num_results: int = 0  # of the forward that are the caller's; the others are kept
    orders: dict[str, Order] = field(default_factory=dict)  # of kept tensors, as they lie
    # places of what is kept among the results, and among the arguments, where it is written to
    overwritten: list[tuple[int, int]] = field(default_factory=list)

    def partition(
        self, joint: GraphModule, inputs: Sequence[Any], *, num_fwd_outputs: int, **keywords: Any
    ) -> tuple[GraphModule, GraphModule]:
        """Serve as ``partition_fn`` of AOTAutograd."""
        from strop.dispatch.least_cut import least_cuts  # loads networkx: for training alone

        self.num_results = num_fwd_outputs
        take_apart(joint)
        keep_less(joint)
        choice = {**_CHOICE, "activation_memory_budget": max(self.budget, LEAST_BUDGET)}
        if can_merge(joint.graph):
            joint.graph, choice["cse"] = merged(joint.graph), False
        with (
            _ONE_AT_A_TIME,
            config.patch(**choice),
            _nothing_draws_again(joint),
            least_cuts(),
            _use_lazy_graph_module(True),  # nobody runs the code of the two
        ):
            forward, backward = min_cut_rematerialization_partition(
                joint, inputs, num_fwd_outputs=num_fwd_outputs, **keywords
            )
        again = [n.name for n in backward.graph.nodes if n.target is torch.ops.strop.seed.default]
        if again:
            raise UnsupportedError(f"the backward would draw dropout masks of its own: {again}")
        self._note_writes(forward)
        return forward, backward

    def _note_writes(self, forward: GraphModule) -> None:
        """Note which kept values are arguments that the forward writes to in the end, such as a
        buffer that counts: the backward wants what they held before."""
        writes = forward.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
        written = {node.args[0] for node in writes}
        given = list(forward.graph.find_nodes(op="placeholder"))
        kept = enumerate(self._kept(forward), self.num_results)
        self.overwritten = [(place, given.index(item)) for place, item in kept if item in written]

    def num_saved(self, forward: GraphModule) -> int:
        """Tensors that the forward keeps."""
        return sum(isinstance(item.meta.get("val"), Tensor) for item in self._kept(forward))

    def note(self, forward: GraphModule, program: Program) -> None:
        """Note how the plan of the forward has laid out what it keeps. None of it is overwritten,
        so that a backward may run twice."""
        context = TracingContext.try_get()
        if context is not None and context.fw_metadata is not None:
            context.fw_metadata.bw_donated_idxs = []
        for fx, item in zip(self._kept(forward), program.returned[self.num_results :], strict=True):
            if item.tensor is not None:
                try:
                    self.orders[fx.name] = memory_order(item.tensor.strides, item.tensor.shape)
                except ShapeError:
                    self.orders[fx.name] = None  # not dense: copied at the backward's door

    def _kept(self, forward: GraphModule) -> list[Node]:
        returned = next(fx for fx in forward.graph.nodes if fx.op == "output").args[0]
        return list(returned[self.num_results :])


@contextmanager
def _nothing_draws_again(joint: GraphModule) -> Iterator[None]:
    """Torch takes checkpointed attention for one that draws numbers, and would have the backward
    run it in a state of the generator that the forward keeps. What does draw is kept by us."""
    if not has_recomputable_rng_ops(joint):
        yield
        return
    vars(partitioners)["has_recomputable_rng_ops"] = lambda joint: False
    try:
        yield
    finally:
        vars(partitioners)["has_recomputable_rng_ops"] = has_recomputable_rng_ops
