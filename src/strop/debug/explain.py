"""``strop.explain``: collects a Report from what has been optimised and run."""

from __future__ import annotations

import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from strop.api import dispatchers_of, optimize, restore
from strop.debug.listing import listing
from strop.debug.report import ComponentRow, GraphRow, KernelRow, Report
from strop.errors import OptionError
from strop.ir.graph import Ref
from strop.ir.program import CallStep, KernelStep, Program
from strop.options import Options
from strop.runtime.dispatch import Dispatcher, Entry
from strop.runtime.variants import Variant

# Bytes a second, reads and writes together, as device-to-device copies measured them.
BANDWIDTH = {"H100": 2.98e12, "H200": 4.3e12}
OTHER_GPU_BANDWIDTH = 1.0e12  # a guess
CPU_BANDWIDTH = 20e9  # a guess


def explain(obj: Any, *args: Any, **kwargs: Any) -> Report:
    """What Strop made of ``obj`` and how it ran.

    An optimised module or pipeline is reported as it stands; with arguments it is called first.
    Any other module or pipeline is optimised, called and restored. A plain function of tensors is
    compiled for the report alone. Raises OptionError if there is nothing to run and nothing ran.
    """
    if not isinstance(obj, nn.Module) and not hasattr(obj, "components"):
        return _explain_function(obj, args, kwargs)
    was_optimised = bool(dispatchers_of(obj))
    if not was_optimised and not (args or kwargs):
        raise OptionError(
            f"strop.explain: this {type(obj).__name__} is not optimised; call strop.optimize and"
            " run it first, or give explain the arguments of a call"
        )
    try:
        if not was_optimised:
            optimize(obj)
        if args or kwargs:
            with torch.no_grad():
                obj(*args, **kwargs)
        return report_of(dispatchers_of(obj))
    finally:
        if not was_optimised:
            restore(obj)


class _Called(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


def _explain_function(function: Callable[..., Any], args: tuple[Any, ...],
                      kwargs: dict[str, Any]) -> Report:  # fmt: skip
    if not callable(function) or not (args or kwargs):
        raise OptionError(
            f"strop.explain got a {type(function).__name__}; it takes an optimised module or"
            " pipeline, or a callable together with the arguments of a call"
        )
    module = _Called(function).eval()
    # A cache of its own: a stored plan is known by its module's class, and here all share one.
    with tempfile.TemporaryDirectory() as folder:
        optimize(module, options=Options.from_environment(cache_dir=folder))
        with torch.no_grad():
            module(*args, **kwargs)
        name = getattr(function, "__name__", "function")
        return report_of(dict(zip([name], dispatchers_of(module).values(), strict=True)))


def report_of(dispatchers: Mapping[str, Dispatcher]) -> Report:
    graphs = [variant for d in dispatchers.values() for variant in d.variants.all]
    devices = {spec.device for graph in graphs for spec in graph.specs}
    on_gpu = next((d for d in devices if d.type == "cuda"), None)
    name = torch.cuda.get_device_name(on_gpu) if on_gpu else "CPU"
    bandwidth = bandwidth_of(name)
    components = tuple(_component(n, d, bandwidth) for n, d in dispatchers.items())
    return Report(components, name, bandwidth)


def bandwidth_of(device_name: str) -> float:
    if device_name == "CPU":
        return CPU_BANDWIDTH
    return next((b for n, b in BANDWIDTH.items() if n in device_name), OTHER_GPU_BANDWIDTH)


def _component(name: str, dispatcher: Dispatcher, bandwidth: float) -> ComponentRow:
    counters, entries = dispatcher.counters, dispatcher._entries
    latest = _latest(dispatcher)
    graphs = tuple(_graph(v, latest, bandwidth) for v in dispatcher.variants.all)
    return ComponentRow(
        name=name,
        graphs=graphs,
        num_recompiles=num_recompiles(dispatcher.variants.variants),
        num_captures=dispatcher.variants.num_captures,
        num_shapes=len(entries),
        num_calls=counters.calls,
        num_eager_calls=counters.eager_calls,
        num_replays=counters.replays,
        num_rebinds=counters.rebinds,
        num_launches=counters.launches,
        fallbacks=dict(counters.fallbacks),
        nonfinite=tuple(counters.nonfinite),
    )


def _latest(dispatcher: Dispatcher) -> Entry | None:
    """The entry of the shape that was met last."""
    served = [e for e in dispatcher._entries.values() if e.variant is not None]
    return served[-1] if served else None


def num_recompiles(variants: Mapping[Any, Sequence[Variant]]) -> int:
    """Graphs beyond one, and one ragged one, for each way to call (see Report)."""
    made: Counter[Hashable] = Counter()
    for (structure, skeleton, tensors), graphs in variants.items():
        for graph in graphs:
            made[structure, _layout(skeleton), tensors, graph.is_ragged] += 1
    return sum(count - 1 for count in made.values())


def _layout(skeleton: Any) -> Hashable:
    """A skeleton without its plain values: where tensors are, and the names of the rest."""
    if isinstance(skeleton, Ref):
        return skeleton
    if not isinstance(skeleton, tuple):
        return None
    kind, *items = skeleton
    if kind == "dict":
        return (kind, *((key, _layout(value)) for key, value in items))
    return (kind, *(_layout(item) for item in items))


def _graph(variant: Variant, latest: Entry | None, bandwidth: float) -> GraphRow:
    program, compiled = variant.program, variant.compiled
    is_latest = latest is not None and latest.variant is variant
    sizes = dict(latest.env) if latest is not None and is_latest else dict(program.hints)
    refusals = Counter(r.reason for r in compiled.plan.refusals) if compiled else Counter()
    passes = compiled.passes if compiled else ()
    calls = Counter(operator_of(step) for step in program.call_steps)
    return GraphRow(
        sizes=sizes,
        is_latest=is_latest,
        is_ragged=variant.is_ragged,
        from_disk=variant.from_disk,
        num_nodes=program.num_nodes,
        num_compiled_nodes=program.num_compiled_nodes,
        kernels=_kernels(program, sizes, bandwidth),
        calls=dict(calls),
        num_opaque_calls=sum(step.op == "aten" for step in program.call_steps),
        guards=tuple(map(str, program.guards)),
        seconds=dict(variant.seconds),
        passes=tuple((p.name, p.seconds, p.nodes_before, p.nodes_after) for p in passes),
        refusals=dict(refusals),
        plan=listing(program),
    )


def operator_of(step: CallStep) -> str:
    """ "linear", "conv2d", or the ATen overload of an opaque call."""
    return str(dict(step.attrs)["target"]) if step.op == "aten" else step.op


def _kernels(program: Program, sizes: Mapping[str, int], bandwidth: float
             ) -> tuple[KernelRow, ...]:  # fmt: skip
    steps: dict[int, list[KernelStep]] = defaultdict(list)
    for step in program.kernel_steps:
        steps[step.kernel].append(step)
    rows = []
    for number, launches in steps.items():
        source = program.sources[number]
        moved = sum(bytes_moved(program, step, sizes) for step in launches)
        rows.append(KernelRow(
            name=source.name,
            source=source.text,
            origins=tuple(dict.fromkeys(step.origin for step in launches)),
            operators=launches[0].ops,
            num_launches=len(launches),
            bytes_moved=moved,
            estimated_us=round(moved / bandwidth * 1e6, 3),
        ))  # fmt: skip
    return tuple(rows)


def bytes_moved(program: Program, step: KernelStep, sizes: Mapping[str, int]) -> int:
    """Each buffer that a kernel touches, once and in full."""
    total = 0
    for number in dict.fromkeys(step.buffers):
        numel = 1
        for size in program.buffers[number].shape:
            numel *= size.eval(sizes)
        total += numel * program.buffers[number].dtype.itemsize
    return total
