"""Trace a block that repeats once, with its gradients.

When a block of a new look has run, its gradients are traced at once, for tangents of no meaning,
and both are noted. The block then stands in autograd's graph as one function: where its gradient is
asked for, the noted nodes are copied, with the gradients of its results in the places of the
tangents. What was traced for the tangents is read by nobody, and falls away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.fx import Node

from strop.frontend.block_look import holds
from strop.frontend.block_reuse import Uncopied
from strop.frontend.copied_nodes import (
    RecordedNodes,
    copy_nodes,
    last_node,
    node_of,
    nodes_behind,
    record,
    tensor_of,
    written_by,
)
from strop.frontend.functional import OutsideWriteError, memory_of, storage_of
from strop.frontend.repeated_blocks import UNREPEATABLE, BlockCall, BlocksAlike


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """Hold the nodes of a block's forward and of its gradients by the tensors at ``wanted``, which
    are numbers among those that it was given. ``results``: the nodes of what it makes, and whether
    each has a gradient."""

    forward: RecordedNodes
    backward: RecordedNodes
    spec: pytree.TreeSpec
    wanted: tuple[int, ...]
    results: tuple[tuple[Node, bool], ...]


class RepeatedGradients(BlocksAlike):
    """Copy the nodes of blocks that are like earlier ones, and those of their gradients."""

    def run_first(self, call: BlockCall) -> tuple[Any, Any]:
        if not torch.is_grad_enabled() or not _is_apart(call):
            return call.forward(), Uncopied("its weights are computed, or need no gradient")
        if call.look.numbers:
            return call.forward(), Uncopied("it holds or is given a number that is an input")
        if call.look.objects:  # which a second run of its forward would write into twice
            return call.forward(), Uncopied("it is given an object")
        if any(map(_counts_batches, call.block.modules())):
            return call.forward(), Uncopied("it counts its batches")
        last = last_node(call.tracer)
        known = _recorded_step(call)
        if any(_writes_outside(node) for node in nodes_behind(last, call.tracer)):
            raise OutsideWriteError("a block that repeats writes into its buffers")  # twice
        if known is None:  # what was traced just now is read by nobody
            return call.forward(), Uncopied(UNREPEATABLE)
        same = {node: node for node in (*known.forward.given, *known.forward.nodes)}
        return self._result(known, call, same), known

    def run_like(self, known: RecordedStep, call: BlockCall) -> Any:
        nodes = copy_nodes(known.forward, call.look.nodes, call.path, self._origins, call.tracer)
        return self._result(known, call, nodes)

    def _result(self, known: RecordedStep, call: BlockCall, nodes: Mapping[Node, Node]) -> Any:
        """Return a block's result, as one function of what it was given. ``nodes``: what stands for
        each known node of the forward."""
        applied = _Applied(known, call, nodes, self._origins)
        made = _Block.apply(applied, *(call.look.tensors[n] for n in known.wanted))  # type: ignore[no-untyped-call]
        tensors = dict(zip((node for node, _ in known.results), made, strict=True))
        given = dict(zip(known.forward.given, call.look.tensors, strict=True))
        leaves = [
            leaf
            if not isinstance(leaf, Node)
            else tensors[leaf]
            if leaf in tensors
            else given[leaf]
            for leaf in known.forward.leaves
        ]
        return pytree.tree_unflatten(leaves, known.spec)


@dataclass(frozen=True, slots=True)
class _Applied:
    """This is one call of a block whose nodes are known."""

    known: RecordedStep
    call: BlockCall
    nodes: Mapping[Node, Node]
    origins: dict[str, str]

    def results(self) -> list[Tensor]:
        found = (self.nodes[node] for node, _ in self.known.results)
        return [tensor_of(node, self.call.tracer) for node in found]

    def gradients(self, tangents: Sequence[Tensor]) -> list[Tensor | None]:
        """Add the nodes of the gradients to the graph, for these of its results."""
        tracer, known = self.call.tracer, self.known
        given = [t for t, (_, has) in zip(tangents, known.results, strict=True) if has]
        nodes_given = [_node(tangent, tracer) for tangent in given]
        own = dict(zip(nodes_given, given, strict=True))
        inner = [self.nodes[node] for node in known.backward.given[len(given) :]]
        now = [*nodes_given, *inner]
        nodes = copy_nodes(known.backward, now, self.call.path, self.origins, tracer)
        found = [None if leaf is None else nodes[leaf] for leaf in known.backward.leaves]
        return [
            None if node is None else own[node] if node in own else tensor_of(node, tracer)
            for node in found
        ]


class _Block(torch.autograd.Function):
    """Stand for a block in autograd's graph."""

    @staticmethod
    def forward(ctx: Any, applied: _Applied, *given: Tensor) -> tuple[Tensor, ...]:
        ctx.applied, results = applied, applied.results()
        kinds = zip(results, applied.known.results, strict=True)
        ctx.mark_non_differentiable(*(tensor for tensor, (_, has) in kinds if not has))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *ctx.applied.gradients(tangents))


def _counts_batches(part: nn.Module) -> bool:
    is_norm = isinstance(part, nn.modules.batchnorm._NormBase)
    return is_norm and part.training and part.running_mean is not None


def _writes_outside(node: Node) -> bool:
    """Tell whether a node writes into a placeholder."""
    written = {storage_of(tensor) for tensor in written_by(node)}
    return bool(written) and any(
        storage_of(given) in written for given in node.graph.find_nodes(op="placeholder")
    )


def _is_apart(call: BlockCall) -> bool:
    """Tell whether the weights come from nowhere else, as arguments do: ``_recorded_step`` gives
    only these no past."""
    weights = call.look.tensors[_num_arguments(call) :]
    return all(weight.is_leaf for weight in weights)


def _num_arguments(call: BlockCall) -> int:
    return sum(isinstance(leaf, Tensor) for leaf in call.look.leaves)


def _recorded_step(call: BlockCall) -> RecordedStep | None:
    """Run a block on arguments without a past, and its gradients. Return the nodes of both, or None
    where these cannot be copied."""
    look, tracer = call.look, call.tracer
    own = {id(t): tensor_of(_node(t, tracer), tracer) for t in look.tensors[: _num_arguments(call)]}
    for tensor in look.tensors:
        if tensor.requires_grad and id(tensor) in own:
            own[id(tensor)].requires_grad_()
    last = last_node(tracer)
    args, kwargs = given = look.arguments(own)
    before = pytree.tree_leaves(given)
    leaves, spec = pytree.tree_flatten(call.forward_of(*args, **kwargs))
    if not holds(given, before):
        return None  # it writes into a container, and has to do so in the caller's own
    forward, made = record(call.path, last, look.nodes, leaves, tracer), _made(leaves, call)
    if forward is None or not made:
        return None
    wanted = _wanted(look.tensors)
    differentiable = [tensor for tensor in made.values() if tensor.requires_grad]
    tangents = [torch.zeros_like(tensor) for tensor in differentiable]
    known = (*(_node(t, tracer) for t in tangents), *forward.given, *forward.nodes)
    last = last_node(tracer)
    sources = [own.get(id(look.tensors[n]), look.tensors[n]) for n in wanted]
    gradients = torch.autograd.grad(differentiable, sources, tangents, allow_unused=True)
    backward = record(call.path, last, tuple(dict.fromkeys(known)), gradients, tracer)
    if backward is None:
        return None
    results = tuple((node, tensor.requires_grad) for node, tensor in made.items())
    return RecordedStep(forward, backward, spec, wanted, results)


def _made(leaves: Sequence[Any], call: BlockCall) -> dict[Node, Tensor]:
    """Return the tensors that a block has made, by their nodes; none where autograd could not take
    it for a function: a result is a view of what it was given, or none has a gradient."""
    given, found = set(call.look.nodes), dict[Node, Tensor]()
    memory = {memory_of(tensor) for tensor in call.look.tensors}
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            continue
        node = _node(leaf, call.tracer)
        if node in given:
            continue
        if memory_of(leaf) in memory:
            return {}
        memory.add(memory_of(leaf))
        found[node] = leaf
    return found if any(tensor.requires_grad for tensor in found.values()) else {}


def _wanted(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    first: dict[int, int] = {}
    for number, tensor in enumerate(tensors):
        if tensor.requires_grad:
            first.setdefault(id(tensor), number)
    return tuple(first.values())


def _node(tensor: Tensor, tracer: Any) -> Node:
    node = node_of(tensor, tracer)
    assert node is not None
    return node
