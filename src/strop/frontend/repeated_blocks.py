"""Trace a block that repeats once: later ones get copies of the first one's nodes.

A diffusion transformer is some fifty blocks of one class. Of two whose modules, settings and
arguments are alike (``block_look.py`` says what that is), the second computes what the first does,
from other weights. While a block runs under the tracer its nodes are noted; where a block is like a
noted one, its forward does not run: the nodes are copied, with its own weights and arguments in
their places. The graph is the one that a whole trace gives, so fusion crosses the borders of
blocks as ever.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from strop.frontend.block_look import Look, Settings, look_at, module_look, repeated
from strop.frontend.block_reuse import CHANGES_ITSELF, BlockReuse, Uncopied
from strop.frontend.copied_nodes import RecordedNodes, copy_nodes, last_node, record, tensor_of
from strop.frontend.layout_reads import LayoutReads
from strop.frontend.numbers import Numbers
from strop.ir.program import NumberGuard

_LEAST_PARTS = 3  # modules in a block, with itself: to look at a smaller one takes as long
ASKS_OTHERWISE = "its code asks about a number, and gets another answer"
UNREPEATABLE = "it reads or writes what it was not given, or draws random numbers"
_unwatched = torch._C.DisableTorchFunction  # the questions are ours, not the forward's


@dataclass(frozen=True, slots=True)
class TraceWatch:
    """Hold what a trace asks and tells those who have begun it: ``surroundings`` gives what code
    has changed outside of arguments and weights so far; ``entered`` hears of each module that is
    traced, or copied; ``numbers`` are the settings that are inputs of the trace."""

    surroundings: Callable[[], Hashable] = tuple
    entered: Callable[[nn.Module], object] = id
    numbers: Settings = frozenset()


UNWATCHED = TraceWatch()


@dataclass(frozen=True, slots=True)
class BlockCall:
    """This is a call of a block that is being traced."""

    path: str
    block: nn.Module
    forward: Callable[[], Any]  # with the caller's own arguments, containers among them
    forward_of: Callable[..., Any]
    look: Look
    tracer: Any


class BlocksAlike(ABC):
    """Stand before the forwards of blocks, and tell which are like earlier ones."""

    def __init__(self, module: nn.Module, origins: dict[str, str], watch: TraceWatch) -> None:
        self._origins, self._watch = origins, watch
        self._paths = {id(part): path for path, part in module.named_modules()}
        self._blocks = repeated(module, _LEAST_PARTS, watch.numbers)
        self._kinds = {id(block): _kind_of(block) for block in self._blocks}
        self._known: dict[Hashable, Any] = {}  # Uncopied: has to run
        self.reuse = BlockReuse()
        self._note_others(module)

    @abstractmethod
    def run_first(self, call: BlockCall) -> tuple[Any, Any]:
        """Run a block of a new look. Return its result, and what ``run_like`` gets of it;
        ``Uncopied`` where it cannot be copied."""

    @abstractmethod
    def run_like(self, known: Any, call: BlockCall) -> Any:
        """Return the result of a block that looks like a known one."""

    def _note_others(self, module: nn.Module) -> None:
        """Note blocks that are no copies of repeated ones of their kind."""
        first = {self._kinds[id(block)]: block for block in reversed(self._blocks)}
        classes = {type(block) for block in self._blocks}
        seen = {id(part) for block in self._blocks for part in block.modules()}
        for part in module.modules():
            is_other = type(part) in classes and id(part) not in seen
            block = first.get(_kind_of(part)) if is_other else None
            if block is not None:
                self.reuse.note_built_otherwise(part, block)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Stand there within the body."""
        for block in self._blocks:
            forward = functools.partial(self._run, block, block.forward)
            block.__dict__["forward"] = functools.update_wrapper(forward, block.forward)
        try:
            yield
        finally:
            for block in self._blocks:
                block.__dict__.pop("forward", None)

    def _run(
        self, block: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        mode, surroundings = get_proxy_mode(), self._watch.surroundings
        if mode is None:  # another thread's call
            return forward(*args, **kwargs)
        with _unwatched():
            around = surroundings()
            look = look_at(block, (args, kwargs), mode.tracer, is_first=not around)
        kind = self._kinds[id(block)]
        if look is None:
            self.reuse.note_unlike(block, kind)
            return forward(*args, **kwargs)
        with _unwatched():
            key = (look.key, self._asked(look), around)
        known = self._known.get(key)
        if isinstance(known, Uncopied):
            self.reuse.note(block, [known.reason])
            return forward(*args, **kwargs)
        own = functools.partial(forward, *args, **kwargs)
        call = BlockCall(self._paths[id(block)], block, own, forward, look, mode.tracer)
        if known is not None and not self.suits(known, look):
            self.reuse.note(block, [ASKS_OTHERWISE])
            return forward(*args, **kwargs)
        if known is not None:
            self.reuse.num_copied += 1
            with _unwatched():
                for part in block.modules():
                    self._watch.entered(part)
                return self.run_like(known, call)
        self.reuse.note_first(block, kind, key)
        result, made = self.run_first(call)
        with _unwatched():
            is_same = module_look(block) == look.module and around == surroundings()
            is_same = is_same and look.holds((args, kwargs))
            self._known[key] = made if is_same else Uncopied(CHANGES_ITSELF)
        return result

    def suits(self, known: Any, look: Look) -> bool:
        """Tell whether the answers that a known block got about numbers are those of another."""
        return True

    def _asked(self, look: Look) -> Hashable:
        """Return what else of arguments tells blocks apart."""
        return ()


@dataclass(frozen=True, slots=True)
class RecordedBlock:
    """Hold the nodes of a block, and what its code has asked about numbers."""

    nodes: RecordedNodes
    spec: pytree.TreeSpec
    numbers: tuple[int, ...]
    guards: tuple[NumberGuard, ...]

    def guards_of(self, look: Look) -> Iterator[NumberGuard]:
        """Yield what another block's code would ask about its own numbers."""
        own = dict(zip(self.numbers, look.numbers, strict=True))
        return (replace(guard, number=own.get(guard.number, guard.number)) for guard in self.guards)


class RepeatedBlocks(BlocksAlike):
    """Copy the nodes of blocks that are like earlier ones, without their gradients."""

    def __init__(
        self,
        module: nn.Module,
        origins: dict[str, str],
        watch: TraceWatch,
        reads: LayoutReads,
        numbers: Numbers,
    ) -> None:
        super().__init__(module, origins, watch)
        self._reads, self._numbers = reads, numbers

    def suits(self, known: RecordedBlock, look: Look) -> bool:
        return all(guard.holds(self._numbers.values) for guard in known.guards_of(look))

    def _asked(self, look: Look) -> Hashable:
        return tuple(map(self._reads.is_own, look.tensors))

    def run_first(self, call: BlockCall) -> tuple[Any, Any]:
        last, num_asked = last_node(call.tracer), self._reads.num_asked
        num_guards = len(self._numbers.asked)
        result = call.forward()
        # where a value came from may decide what a question about its memory gives
        if self._reads.num_asked != num_asked:
            return result, Uncopied("its forward asks how its arguments lie in memory")
        with _unwatched():
            leaves, spec = pytree.tree_flatten(result)
            if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
                return result, Uncopied("its result has a gradient")
            found = record(call.path, last, call.look.given, leaves, call.tracer)
        if found is None:
            return result, Uncopied(UNREPEATABLE)
        guards = tuple(self._numbers.asked[num_guards:])
        return result, RecordedBlock(found, spec, call.look.numbers, guards)

    def run_like(self, known: RecordedBlock, call: BlockCall) -> Any:
        recorded = known.nodes
        self._numbers.asked += known.guards_of(call.look)
        nodes = copy_nodes(recorded, call.look.given, call.path, self._origins, call.tracer)
        own = dict(zip(call.look.nodes, call.look.tensors, strict=True))

        def leaf_of(leaf: Any) -> Any:
            if not isinstance(leaf, Node):
                return leaf
            node = nodes[leaf]
            return own[node] if node in own else tensor_of(node, call.tracer)

        return pytree.tree_unflatten(map(leaf_of, recorded.leaves), known.spec)


def _kind_of(block: nn.Module) -> Hashable:
    """Return what blocks have in common of which one might be a copy of the other."""
    return type(block), tuple((p.shape, p.dtype) for p in block.parameters())
