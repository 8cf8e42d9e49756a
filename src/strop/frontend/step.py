"""Trace a training step once, for every size: results and gradients in one graph.

Autograd runs on the fake tensors of ``capture``, so that one pass of make_fx sees forward and
backward. AOTAutograd behind Dynamo walks through the same module three times, with wrappers around
the fake tensors; for a UNet that takes almost three times as long (docs/log/). What this cannot
say raises CaptureError: writes into arguments or into a part of a buffer, results that share
memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch.fx import GraphModule, Node
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    make_fx,
    maybe_enable_thunkify,
    track_tensor_tree,
)
from torch.fx.graph import CodeGen
from torch.overrides import TorchFunctionMode

from strop.errors import CaptureError
from strop.frontend import joint
from strop.frontend.asked_of_tensors import (
    attributes_of,
    is_asked_by_tracers,
    refuse_attributes,
    refuse_unknown_of_step,
)
from strop.frontend.capture import (
    ONE_AT_A_TIME,
    KnownSizes,
    fake_input,
    fake_roots,
    known_sizes,
    settings,
    tracing,
    without_empty,
)
from strop.frontend.checkpoints import tagged_checkpoints
from strop.frontend.differentiated import refuse_wrapped
from strop.frontend.effects import check_constants, check_state, no_effects
from strop.frontend.functional import make_functional, storage_of
from strop.frontend.joint import TANGENT
from strop.frontend.known_results import RememberingMode, quick_devices
from strop.frontend.layout_reads import READS
from strop.frontend.module_tensors import named_state, state_places
from strop.frontend.operators import COMPOSITES
from strop.frontend.origins import settle_origins
from strop.frontend.other_memory import refuse_other_memory
from strop.frontend.python_classes import mark_parameters
from strop.frontend.repeated_blocks import UNWATCHED, TraceWatch
from strop.frontend.repeated_gradients import RepeatedGradients
from strop.frontend.shape_rules import TracedSizes
from strop.ir.graph import Ref
from strop.ir.tensor_spec import TensorSpec

_TABLE = {**COMPOSITES, **joint.RETARGET}


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """Hold a traced step. Placeholders of ``graph``: the state in ``state_names`` order, arguments,
    then a tangent for each result that is differentiable. It gives the results, what the buffers in
    ``written`` hold behind the call, then a gradient, or None, for each tensor that wants one."""

    graph: GraphModule
    state_names: tuple[str, ...]
    sizes: KnownSizes
    origins: Mapping[str, str]
    leaves: tuple[Any, ...]  # of what the module returns: Ref for a result, or the value itself
    out_spec: pytree.TreeSpec
    differentiable: tuple[bool, ...]  # of the results
    layout_reads: tuple[str, ...] = ()  # what the forward asks about the memory of tensors
    within: tuple[tuple[int, ...], ...] = ()  # for each result, those that are computed from it
    written: tuple[int, ...] = ()  # numbers of the state whose new values the graph gives, too

    @property
    def num_results(self) -> int:
        return len(self.differentiable)


class _Retarget(TorchFunctionMode):
    """Retarget operators that have gradients to forms that fuse, and note what a forward asks about
    memory. What tracers ask before and behind it is no question of the forward's."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: dict[str, None] = {}
        self._is_forward = False

    @contextmanager
    def of_forward(self) -> Iterator[None]:
        """Note what is asked in the body."""
        self._is_forward = True
        try:
            yield
        finally:
            self._is_forward = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        refuse_other_memory(func)
        refuse_unknown_of_step(func)
        if self._is_forward and func in READS and not is_asked_by_tracers():
            self.asked[READS[func]] = None
        return _TABLE.get(func, func)(*args, **(kwargs or {}))


@dataclass
class _Flat:
    """Run the step as a function of tensors alone, and keep what it found out when it ran."""

    module: nn.Module
    call: Callable[..., Any]
    names: tuple[str, ...]
    wants: Sequence[bool]
    watch: _Retarget
    leaves: tuple[Any, ...] = ()
    out_spec: Any = None
    differentiable: tuple[bool, ...] = ()
    within: tuple[tuple[int, ...], ...] = ()

    def __call__(self, *primals: Tensor) -> list[Any]:
        with maybe_enable_thunkify():  # a size is a node only where one reads it
            return self._traced(*primals)

    def _traced(self, *primals: Tensor) -> list[Any]:
        state, usual = dict(zip(self.names, primals, strict=False)), attributes_of(primals)
        held = list(state_places(self.module.named_modules()))
        mark_parameters((state[name], table[key]) for name, table, key in held)
        swapped = nn.utils.stateless._reparametrize_module(self.module, state, tie_weights=True)
        with swapped:
            with self.watch.of_forward():
                results_as_given = self.call(*primals[len(self.names) :])
            found, self.out_spec = pytree.tree_flatten(results_as_given)
            check_state({name: table.get(key) for name, table, key in held}, state)
        results = [leaf for leaf in found if isinstance(leaf, Tensor)]
        refuse_attributes((*results, *primals), usual)
        if not all(isinstance(x, Tensor | int | float | str | None) for x in found):
            raise CaptureError("it returns sizes, or objects that are no tensors")
        numbers = iter(range(len(results)))
        self.leaves = tuple(Ref(next(numbers)) if isinstance(x, Tensor) else x for x in found)
        self.differentiable = tuple(r.requires_grad for r in results)
        self.within = _within(results)
        given = [r for r in results if r.requires_grad]
        if not given:
            raise CaptureError("no result has a gradient")
        tangents = [_tangent(number, result) for number, result in enumerate(given)]
        wanted = [p for p, wants in zip(primals, self.wants, strict=True) if wants]
        # in this thread: tracing is its own
        with torch.autograd.set_multithreading_enabled(False):
            return [*results, *torch.autograd.grad(given, wanted, tangents, allow_unused=True)]


def capture_step(
    module: nn.Module,
    call: Callable[..., Any],
    specs: Sequence[TensorSpec],
    hints: Mapping[str, int],
    wants: Sequence[bool],
    watch: TraceWatch = UNWATCHED,
) -> CapturedStep:
    """Trace ``call(*tensors)``, which runs ``module``, and its gradients by the tensors of the
    module's state and then the arguments that ``wants`` says. Raises CaptureError."""
    specs, hints = without_empty(specs, hints)
    shape_env = TracedSizes()
    mode = RememberingMode(shape_env=shape_env, allow_non_fake_inputs=True)
    mode.cache_enabled = False  # to look up symbolic sizes takes longer than to work results out
    state, origins = named_state(module), dict[str, str]()
    retarget = _Retarget()
    flat = _Flat(module, call, tuple(state), wants, retarget)
    with ONE_AT_A_TIME, settings(), torch.enable_grad(), _nobodys_hooks(), tagged_checkpoints():
        roots = fake_roots(mode, hints)
        primals: list[Tensor] = [
            mode.from_tensor(t.detach(), static_shapes=True) for t in state.values()
        ]
        with mode:
            primals += [fake_input(spec, roots) for spec in specs]
        primals = [t.requires_grad_(w) for t, w in zip(primals, wants, strict=True)]
        with (
            no_effects(module, private=True),
            tracing(module, mode, retarget, origins),
            RepeatedGradients(module, origins, watch).watched(),
            quick_devices(),
            _use_lazy_graph_module(True),  # nobody runs its code: it is not written
        ):
            gm = make_fx(flat, joint.DECOMPOSITIONS, tracing_mode="real")(*primals)
        refuse_wrapped(gm)
        settle_origins(gm, module, origins)
        _arrange(gm)
        given = gm.graph.find_nodes(op="placeholder")
        own = dict(zip(given, (not w for w in wants[: len(state)]), strict=False))
        written = make_functional(gm, [node for node, is_buffer in own.items() if is_buffer])
        _return_also(gm, len(flat.differentiable), list(written.values()))
        gm.graph.eliminate_dead_code()  # not before: what is written to may be read by nobody
    _check_aliases(gm, flat)
    check_constants(gm, module)
    sizes = known_sizes(module, shape_env, gm, roots, specs, hints, fixes_numbers=False)
    asked, places = tuple(retarget.asked), {node: place for place, node in enumerate(own)}
    return CapturedStep(
        gm,
        tuple(state),
        sizes,
        origins,
        flat.leaves,
        flat.out_spec,
        flat.differentiable,
        asked,
        flat.within,
        tuple(places[node] for node in written),
    )


def _return_also(gm: GraphModule, place: int, values: Sequence[Node]) -> None:
    """Have a graph return these values, from this place among its results on."""
    (output,) = gm.graph.find_nodes(op="output")
    returned = list(output.args[0])
    returned[place:place] = values
    output.args = (returned,)


def _within(results: Sequence[Tensor]) -> tuple[tuple[int, ...], ...]:
    """Return for each result the numbers of those whose gradient goes through it."""
    nodes = [result.grad_fn for result in results]
    if sum(node is not None for node in nodes) < 2:
        return ()
    found: list[list[int]] = [[] for _ in results]
    for outer, start in enumerate(nodes):
        seen, stack = set[Any](), [start]
        while stack:
            node = stack.pop()
            if node is not None and node not in seen:
                seen.add(node)
                stack += [following for following, _ in node.next_functions]
        for inner, node in enumerate(nodes):
            if node is not start and node in seen:
                found[inner].append(outer)
    return tuple(map(tuple, found))


def _tangent(number: int, result: Tensor) -> Tensor:
    """Make a placeholder in the middle of the trace, like the result, which nobody knew before."""
    proxies = get_proxy_mode()
    assert proxies is not None
    with disable_proxy_modes_tracing(), torch.no_grad():
        is_dense = is_non_overlapping_and_dense_or_false(result)
        strides = result.stride() if is_dense else result.contiguous().stride()
        fake = torch.empty_strided(result.shape, strides, dtype=result.dtype, device=result.device)
    name = f"{TANGENT}{number}"
    proxy = proxies.tracer.create_proxy("placeholder", name, (), {}, name=name)
    track_tensor_tree(fake, proxy, constant=None, tracer=proxies.tracer)
    return fake


def _arrange(gm: GraphModule) -> None:
    """Put placeholders first, and take out detached values, which are there for autograd alone."""
    graph = gm.graph
    given = [node for node in graph.nodes if node.op == "placeholder"]
    for before, node in itertools.pairwise(given):
        before.append(node)
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.detach.default):
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
    graph.set_codegen(CodeGen())  # it is never run, and has more placeholders than arguments
    gm.recompile()


def _check_aliases(gm: GraphModule, flat: _Flat) -> None:
    (output,) = gm.graph.find_nodes(op="output")
    results: list[Node] = output.args[0][: len(flat.differentiable)]
    given = {storage_of(node) for node in gm.graph.find_nodes(op="placeholder")}
    storages = [storage_of(node) for node in results]
    if given.intersection(storages) or len(set(storages)) < len(storages):
        raise CaptureError("a result shares memory with an argument, a weight or another result")


@contextmanager
def _nobodys_hooks() -> Iterator[None]:
    """Turn off autocast's cache, which would keep fake casts of weights beyond the trace, and hooks
    of saved tensors: a checkpoint around the call would compute again what is traced."""
    hooks: Any = torch.autograd.graph
    is_hooked = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
    plain = hooks.saved_tensors_hooks(_same, _same) if is_hooked else nullcontext()
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with plain:
            yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _same(tensor: Tensor) -> Tensor:
    return tensor
