"""Collect a Report from what has been optimised and run (``strop.explain``)."""

from __future__ import annotations

import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from strop.api import dispatchers_of, optimize, restore, with_cached_parts, with_twins
from strop.backend import Compiled
from strop.debug.chosen import chosen
from strop.debug.costs import Machine, bytes_moved, machine, sent_bytes
from strop.debug.decoded import decoded_bytes, most_decoded_bytes
from strop.debug.listing import call_text, graph_text, listing, type_text
from strop.debug.report import (
    ComponentRow,
    GraphRow,
    KernelRow,
    PatternRow,
    RefusalRow,
    Report,
    StepRow,
)
from strop.debug.steps import step_rows
from strop.dispatch.counters import Counters
from strop.dispatch.derived_inputs import ServedModule, derived_inputs
from strop.dispatch.dispatcher import Dispatcher
from strop.dispatch.entry import Entry
from strop.dispatch.known_dispatchers import dispatcher_of
from strop.dispatch.model_offload import offload_text
from strop.dispatch.served_graph import ServedGraph
from strop.dispatch.signature import NumberRef, count_numbers, number_text
from strop.dispatch.unfolded_layers import unfolded_layers
from strop.dispatch.variants import Variant
from strop.errors import OptionError
from strop.fusion.plan import Refusal
from strop.ir.eight_bit import CODES
from strop.ir.graph import Ref
from strop.ir.program import CallStep, KernelStep, Program
from strop.options import Options
from strop.runtime.build.devices import gpu
from strop.runtime.build.processors import processor
from strop.runtime.run import bounds_checks, growing_memory
from strop.runtime.run.layouts import bytes_of
from strop.wording import counted

if TYPE_CHECKING:
    from strop.dispatch.dynamo import AotLog, AotRecord

UNCOUNTED = "working memory that torch.cuda.memory_allocated does not count"
UNRECORDED = (
    "graphs between passes were not kept: Options(record=True) or STROP_RECORD=1 keeps them, and"
    " compiles anew instead of loading a stored plan"
)


def explain(obj: Any, *args: Any, **kwargs: Any) -> Report:
    """Report what Strop made of ``obj`` and how it ran.

    An optimised module or pipeline is reported as it stands; with arguments it is called first.
    Any other module or pipeline is optimised, called and restored, and a plain function of
    tensors compiled, for the report alone: then the graph after each pass is in it too. For what
    torch.compile has returned, or has put into a module, it reports all that came through
    torch.compile in this process. Raises OptionError if there is nothing to run and nothing ran.
    """
    if _is_compiled(obj):
        from strop.debug.compiled import explain_compiled  # it describes graphs by what is here

        return explain_compiled(obj, args, kwargs)
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
            optimize(obj, options=Options.from_environment(record=True))
        if args or kwargs:
            with torch.no_grad():
                obj(*args, **kwargs)
        return report_of(with_twins(with_cached_parts(dispatchers_of(obj))))
    finally:
        if not was_optimised:
            restore(obj)


def _is_compiled(obj: Any) -> bool:
    """Tell whether torch.compile has made this, or a part of it."""
    if not isinstance(obj, nn.Module):
        return hasattr(obj, "_torchdynamo_orig_callable")
    if hasattr(obj, "_orig_mod"):
        return True
    parts = [part for part in obj.modules() if part._compiled_call_impl is not None]
    return any(dispatcher_of(part) is None for part in parts)


class _Called(nn.Module):
    """Wrap a function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


def _explain_function(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Report:
    if not callable(function) or not (args or kwargs):
        raise OptionError(
            f"strop.explain got a {type(function).__name__}; it takes an optimised module or"
            " pipeline, or a callable together with the arguments of a call"
        )
    module = _Called(function).eval()
    # A cache of its own: a stored plan is known by its module's class, and here all share one.
    with tempfile.TemporaryDirectory() as folder:
        optimize(module, options=Options.from_environment(cache_dir=folder, record=True))
        with torch.no_grad():
            module(*args, **kwargs)
        name = getattr(function, "__name__", "function")
        return report_of(dict(zip([name], dispatchers_of(module).values(), strict=True)))


def report_of(dispatchers: Mapping[str, Dispatcher]) -> Report:
    able, on_gpu = machine_of(list(dispatchers.values()))
    components = tuple(component_row(n, d, able) for n, d in dispatchers.items())
    return report_on(components, able, on_gpu)


def machine_of(dispatchers: Sequence[Dispatcher]) -> tuple[Machine, torch.device | None]:
    """Return what the graphs of these run on, and the GPU among it."""
    graphs = [variant for d in dispatchers for variant in d.variants.all]
    devices = {spec.device for graph in graphs for spec in graph.specs}
    on_gpu = next((torch.device(d) for d in devices if d.type == "cuda"), None)
    arch = next((d.options.arch for d in dispatchers), 0)
    return machine(gpu(on_gpu.index or 0).as_arch(arch) if on_gpu else processor()), on_gpu


def report_on(
    components: tuple[ComponentRow, ...],
    able: Machine,
    on_gpu: torch.device | None,
    notes: tuple[str, ...] = (),
) -> Report:
    """Return the report with these components, and what holds for all of them."""
    has_all = all(graph.texts for c in components for graph in c.graphs)
    held = growing_memory.held_by_device() if on_gpu else {}
    beside = (f"{UNCOUNTED}: {size / 1e6:.2f} MB of {place}" for place, size in held.items())
    notes += (*bounds_checks.unreported(), *beside, *(() if has_all else (UNRECORDED,)))
    return Report(components, able.device.name, able.bandwidth, notes)


def component_row(name: str, dispatcher: Dispatcher, able: Machine) -> ComponentRow:
    counters, entries = dispatcher.counters, dispatcher.shapes.entries
    latest = _latest(dispatcher)
    graphs = tuple(_graph(v, latest, able) for v in dispatcher.variants.all)
    log = getattr(dispatcher, "log", None)  # of a TrainingDispatcher
    records = [*(log.records if log else ()), *dispatcher.cut.through_aot]
    graphs += tuple(trained_row(record, able) for record in records)
    pieces = [graph for graph in dispatcher.cut.graphs if isinstance(graph, ServedGraph)]
    graphs += tuple(_graph(v, None, able) for piece in pieces for v in piece.variants.all)
    return ComponentRow(
        name=name,
        graphs=graphs,
        num_recompiles=num_recompiles(dispatcher.variants.variants),
        num_captures=dispatcher.variants.num_captures,
        num_shapes=len({id(entry) for entry in entries}),
        num_calls=counters.calls,
        num_eager_calls=counters.eager_calls,
        num_replays=counters.replays + (log.step_replays if log else 0),
        num_rebinds=counters.rebinds,
        num_launches=counters.launches
        + trained_launches(records)
        + sum(d.counters.launches for piece in pieces for d in piece.dispatchers),
        fallbacks={**counters.fallbacks, **(log.fallbacks if log else {})},
        nonfinite=tuple(counters.nonfinite),
        findings=tuple(counters.findings),
        derived=derived_inputs(
            ServedModule(dispatcher.state, dispatcher.loop, counters.hoisted, _latest(dispatcher))
        ),
        weights_bytes=bytes_of(dispatcher.state.tensors),
        offloaded=_place_text(dispatcher),
        unfolded=unfolded_layers(dispatcher.module),
        casts=Counter(str(cast) for cast in dispatcher.state.casts.values() if cast.compute_dtype),
        num_trained_calls=getattr(dispatcher, "trained_calls", 0),
        traced_by_torch=dict(getattr(dispatcher, "traced_by_torch", {})),
        texts=(
            *dispatcher.texts,
            *_short_text(counters),
            *filter(None, [counters.large_pages]),
            *(step_graph_texts(log) if log else ()),
        ),
        num_full_steps=getattr(dispatcher, "num_full", 0),
        num_cached_steps=getattr(dispatcher, "num_cached", 0),
    )


def step_graph_texts(log: AotLog) -> list[str]:
    """Say how many training steps were replayed from CUDA graphs, and why others were not."""
    texts = []
    if log.step_captures:
        pairs = counted(log.step_captures, "pair")
        replays = counted(log.step_replays, "training step")
        texts.append(f"{replays} replayed CUDA graphs of forward and backward ({pairs} captured)")
    for reason, count in log.against_step_graphs.items():
        shapes = counted(count, "shape")
        texts.append(f"no CUDA graphs for {shapes} of its training step: {reason}")
    return texts


def _short_text(counters: Counters) -> list[str]:
    """Say how many calls were no more than a replay, in a line, if any was."""
    count = counters.short_replays
    reason = counters.slow_look
    how = f", with the module looked at in Python, as there is no native code: {reason}"
    return [f"{counted(count, 'replay')} took the short way{how * bool(reason)}"] if count else []


def _place_text(dispatcher: Dispatcher) -> str:
    """Say how weights get to the device, or nothing where they stay there."""
    return str(dispatcher.hosted) or offload_text(dispatcher.component)


def trained_launches(records: Iterable[AotRecord]) -> int:
    """Count the launches of one step at the latest shapes: of each role, the newest graph that has
    run."""
    latest = {r.role: r.runner.latest for r in records if r.runner and r.runner.latest}
    return sum(bound.num_launches for bound in latest.values())


def trained_row(record: AotRecord, able: Machine) -> GraphRow:
    """Describe a graph that came through torch.compile."""
    compiled, bound = record.compiled, record.runner.latest if record.runner else None
    row = _graph_row(
        compiled.program, compiled, dict(bound.env if bound else compiled.program.hints), able
    )
    seconds = {**record.stages, **compiled.seconds, "all": record.seconds}
    return replace(
        row,
        role=record.role,
        num_saved=compiled.graph.num_saved,
        seconds=seconds,
        is_latest=bound is not None,
    )


def _latest(dispatcher: Dispatcher) -> Entry | None:
    """Return the entry that served the latest call, or else the newest one that is left."""
    entries = dispatcher.shapes.entries
    if any(entry is dispatcher.latest for entry in entries):
        return dispatcher.latest
    return next(reversed(entries), None)


def num_recompiles(variants: Mapping[Any, Sequence[Variant]]) -> int:
    """Count the graphs beyond one, and one ragged one, for each way to call (see Report)."""
    made: Counter[Hashable] = Counter()
    for (structure, skeleton, tensors), graphs in variants.items():
        for graph in graphs:
            given = tensors[: len(tensors) - count_numbers(skeleton)]
            made[structure, _layout(skeleton), given, graph.is_ragged] += 1
    return sum(count - 1 for count in made.values())


def _layout(skeleton: Any) -> Hashable:
    """Return a skeleton without its plain values: where tensors are, and the names of the rest."""
    if isinstance(skeleton, Ref):
        return skeleton
    if isinstance(skeleton, NumberRef):  # a float as others, but that it is an input
        return _layout(number_text(0.0))
    if not isinstance(skeleton, tuple):
        return None
    kind, *items = skeleton
    if kind == "dict":
        return (kind, *((key, _layout(value)) for key, value in items))
    return (kind, *(_layout(item) for item in items))


def _graph(variant: Variant, latest: Entry | None, able: Machine) -> GraphRow:
    program, compiled = variant.program, variant.compiled
    is_latest = latest is not None and latest.variant is variant
    sizes = dict(latest.env) if latest is not None and is_latest else dict(program.hints)
    row = _graph_row(program, compiled, sizes, able)
    return replace(
        row,
        is_latest=is_latest,
        is_ragged=variant.is_ragged,
        fixed=variant.fixed,
        num_copied_blocks=variant.num_copied_blocks,
        traced_blocks=variant.traced_blocks,
        eight_bit=_in_eight_bits(program, variant.state_names),
        from_disk=variant.from_disk,
        seconds=_seconds(variant),
    )


def _graph_row(
    program: Program, compiled: Compiled | None, sizes: dict[str, int], able: Machine
) -> GraphRow:
    refusals = Counter(r.reason for r in compiled.plan.refusals) if compiled else Counter()
    passes = compiled.passes if compiled else ()
    running = [step for step in program.at(sizes) if isinstance(step, CallStep)]
    calls = Counter(map(operator_of, running))
    steps = step_rows(program, compiled, sizes, able)
    return GraphRow(
        sizes=sizes,
        is_latest=False,
        is_ragged=False,
        from_disk=False,
        num_nodes=program.num_nodes,
        num_compiled_nodes=program.num_compiled_nodes,
        kernels=_kernels(program, steps, sizes, able),
        calls=dict(calls),
        num_opaque_calls=sum(n for name, n in calls.items() if name.startswith("aten.")),
        guards=tuple(map(str, program.guards)),
        seconds={},
        passes=tuple((p.name, p.seconds, p.nodes_before, p.nodes_after) for p in passes),
        refusals=dict(refusals),
        plan=listing(program),
        steps=steps,
        choices=chosen(program, sizes, able.device),
        edges=tuple(map(_refusal, compiled.plan.refusals)) if compiled else (),
        texts=_texts(compiled),
        patterns=_patterns(program, compiled),
        decoded_bytes=decoded_bytes(program, sizes),
        most_decoded_bytes=most_decoded_bytes(program, sizes),
        exact=program.exact,
        exchanges=Counter(dict(step.attrs)["how"] for step in running if step.op == "exchange"),
        sent_bytes=sent_bytes(program, sizes),
    )


def _in_eight_bits(program: Program, names: Sequence[str]) -> dict[str, str]:
    """Return the weights that a program reads as codes, each with the format."""
    made = [spec for spec in program.inputs if spec.made.endswith(CODES)]
    return {names[number]: spec.made.split()[0] for spec in made for number in spec.merged}


def _patterns(program: Program, compiled: Compiled | None) -> tuple[PatternRow, ...]:
    """Return the patterns in force when a graph was compiled; for a stored graph, those that
    matched."""
    origins: dict[str, list[str]] = (
        {name: [] for name in compiled.patterns.names} if compiled else {}
    )
    for step in program.call_steps:
        if step.op == "pattern":
            origins.setdefault(dict(step.attrs)["name"], []).append(step.origin)
    misses: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for miss in compiled.patterns.misses if compiled else ():
        misses[miss.pattern].append((miss.origin, miss.reason))
    return tuple(
        PatternRow(name, tuple(where), tuple(misses[name])) for name, where in origins.items()
    )


def _seconds(variant: Variant) -> dict[str, float]:
    """Return the seconds of each stage; ``kernels`` are those that the first call waited for."""
    later = variant.later
    return {**variant.seconds, **({"kernels_later": later.seconds} if later.num_built else {})}


def _refusal(refusal: Refusal) -> RefusalRow:
    producer, consumer = refusal.producer, refusal.consumer
    made, read = (f"{node.op} {type_text(node)}" for node in (producer, consumer))
    return RefusalRow(made, read, consumer.origin, refusal.reason)


def _texts(compiled: Compiled | None) -> tuple[tuple[str, str], ...]:
    if compiled is None or compiled.imported is None:
        return ()
    graphs = [("imported", compiled.imported)]
    graphs += [(record.name, record.graph) for record in compiled.passes if record.graph]
    return tuple((name, graph_text(graph)) for name, graph in graphs)


def operator_of(step: CallStep) -> str:
    """Return "linear", "conv2d", the ATen overload of an opaque call, or "pattern" and its name."""
    return call_text(step.op, dict(step.attrs))


def _kernels(
    program: Program, costs: Sequence[StepRow], sizes: Mapping[str, int], able: Machine
) -> tuple[KernelRow, ...]:
    steps: dict[int, list[KernelStep]] = defaultdict(list)
    flops: Counter[int] = Counter()
    bound: dict[int, float] = defaultdict(float)
    estimated: dict[int, float] = defaultdict(float)
    programs: dict[int, list[int]] = defaultdict(list)
    for step, cost in zip(program.at(sizes), costs, strict=True):
        if isinstance(step, KernelStep):
            steps[step.kernel].append(step)
            flops[step.kernel] += cost.flops
            bound[step.kernel] += cost.bound_us
            programs[step.kernel].append(cost.num_programs)
            estimated[step.kernel] += cost.estimated_us
    total = sum(cost.bound_us for cost in costs) or 1.0
    rows = []
    for number, launches in steps.items():
        source = program.sources[number]
        moved = sum(bytes_moved(program, step, sizes) for step in launches)
        rows.append(
            KernelRow(
                name=source.name,
                source=source.text,
                origins=tuple(dict.fromkeys(step.origin for step in launches)),
                operators=launches[0].ops,
                num_launches=len(launches),
                bytes_moved=moved,
                estimated_us=round(estimated[number], 3),
                flops=flops[number],
                share=round(bound[number] / total, 4),
                num_programs=min(programs[number]),
                whole_us=round(able.moving_us(moved, 0), 3),
                num_sms=able.device.sms,
            )
        )
    return tuple(rows)
