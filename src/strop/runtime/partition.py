"""Which values of a training step the forward keeps, and which the backward computes again.

The choice is torch's min-cut over a joint graph in which norms are statistics and arithmetic
(``frontend.joint``): what is cheap to compute from something that has to be kept anyway is not
kept. ``Options.memory_budget`` below 1 has more computed again, down to whole layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from strop.errors import ShapeError, UnsupportedError
from strop.frontend.functional import storage_of
from strop.frontend.importer import memory_order
from strop.frontend.step import TANGENT
from strop.ir.program import Program

_CONVOLUTIONS = {
    torch.ops.aten.convolution.default,
    torch.ops.aten.convolution_backward.default,
}
_HALVES = (torch.float16, torch.bfloat16)
Order = tuple[int, ...] | None
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

    def partition(self, joint: GraphModule, inputs: Sequence[Any], *, num_fwd_outputs: int,
                  **keywords: Any) -> tuple[GraphModule, GraphModule]:  # fmt: skip
        """``partition_fn`` of AOTAutograd."""
        self.num_results = num_fwd_outputs
        _drop_clones(joint)
        _widen_again(joint)
        for node in joint.graph.nodes:
            if node.target is torch.ops.strop.seed.default:
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE  # inside of a checkpoint too
        with config.patch(**_CHOICE, activation_memory_budget=max(self.budget, LEAST_BUDGET)):
            forward, backward = min_cut_rematerialization_partition(
                joint, inputs, num_fwd_outputs=num_fwd_outputs, **keywords
            )
        again = [n.name for n in backward.graph.nodes if n.target is torch.ops.strop.seed.default]
        if again:
            raise UnsupportedError(f"the backward would draw dropout masks of its own: {again}")
        return forward, backward

    def num_saved(self, forward: GraphModule) -> int:
        """Tensors that the forward keeps."""
        return sum(isinstance(item.meta.get("val"), Tensor) for item in self._kept(forward))

    def note(self, forward: GraphModule, program: Program) -> None:
        """How the plan of the forward has laid out what it keeps. None of it is overwritten, so
        that a backward may run twice."""
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


def _widen_again(joint: GraphModule) -> None:
    """Have casts to fp32 that a backward operator reads computed again, of half as many bytes.

    Under autocast a norm gets an fp32 copy of its input. The min-cut takes operators for kernels of
    their own, which need the copy in memory, and so kept it; our kernels read what was cast.
    """
    behind: set[Node] = set()  # what depends on gradients
    for node in joint.graph.nodes:
        is_gradient = node.op == "placeholder" and node.name.startswith(TANGENT)
        if is_gradient or not behind.isdisjoint(node.all_input_nodes):
            behind.add(node)
    for cast in joint.graph.find_nodes(op="call_function", target=torch.ops.aten._to_copy.default):
        if cast in behind or behind.isdisjoint(cast.users) or "recompute" in cast.meta:
            continue
        if cast.meta["val"].dtype == torch.float32 and cast.args[0].meta["val"].dtype in _HALVES:
            cast.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            cast.meta["ac_graph_id"] = 0  # torch 2.11 compares those of neighbours


def _drop_clones(joint: GraphModule) -> None:
    """Have convolutions read what was made contiguous for them: they lay out their operands
    themselves, and a backward that reads value and clone would have both kept."""
    for clone in joint.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default):
        source = clone.args[0]
        is_view = storage_of(source) in map(storage_of, source.all_input_nodes)
        readers = {user.target for user in clone.users}
        if source.op == "call_function" and not is_view and readers <= _CONVOLUTIONS:
            clone.replace_all_uses_with(source)
            joint.graph.erase_node(clone)
