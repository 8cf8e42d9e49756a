"""Hold the report of ``strop.explain``: plain data, its counts, and its short text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from strop.debug.chosen import ChoiceRow
from strop.debug.costs import TOO_SLOW, is_too_slow
from strop.debug.roofline import ProfileRow, profile_lines
from strop.dispatch.derived_inputs import DerivedInput
from strop.wording import counted

_TOP = 8  # kernels in the short text


@dataclass(frozen=True, slots=True)
class KernelRow:
    """Describe one generated kernel of one graph.

    ``bytes_moved`` counts, over all its launches in a call, each buffer it touches once and in
    full, at the latest shape; ``estimated_us`` is that over the bandwidth of the multiprocessors
    that have a program, or what these wait and compute if that is longer (debug.costs);
    ``whole_us`` is that over the bandwidth of the device. ``num_programs`` is the fewest of a
    launch, 0 where that is unknown; ``num_sms`` counts the device's multiprocessors. ``flops`` is 0
    for a graph from the disk cache, and ``share`` that of the graph's bound.
    """

    name: str
    source: str
    origins: tuple[str, ...]
    operators: tuple[str, ...]
    num_launches: int
    bytes_moved: int
    estimated_us: float
    flops: int = 0
    share: float = 0.0
    num_programs: int = 0
    whole_us: float = 0.0
    num_sms: int = 0

    @property
    def is_slow(self) -> bool:
        """Tell whether it has too few programs for what it moves, or these have far more to do."""
        one = max(self.num_launches, 1)
        return is_too_slow(self.estimated_us / one, self.whole_us / one)

    @property
    def leaves_empty(self) -> bool:
        """Tell whether it has too few programs for what it moves."""
        return 0 < self.num_programs * TOO_SLOW < self.num_sms


@dataclass(frozen=True, slots=True)
class ValueRow:
    """Describe one value that a step computes. ``scheme``: how it gets to its readers
    (fusion.plan)."""

    text: str
    scheme: str  # "local", "regional" or "global"


@dataclass(frozen=True, slots=True)
class StepRow:
    """Describe one step of a program. ``bound_us``: no implementation of it is faster
    (debug.costs). ``estimated_us``: what its programs can do, where their number is known."""

    number: int
    kind: str  # "kernel", "call", or "opaque": torch runs it for want of a row
    title: str
    origin: str
    values: tuple[ValueRow, ...]
    reads: tuple[int, ...]  # steps whose results it reads
    bytes_moved: int
    flops: int
    bound_us: float
    bound_by: str  # "bandwidth" or "compute"
    num_programs: int = 0
    estimated_us: float = 0.0


@dataclass(frozen=True, slots=True)
class RefusalRow:
    """Say why a consumer did not join its producer's kernel."""

    producer: str
    consumer: str
    origin: str
    reason: str


@dataclass(frozen=True, slots=True)
class PatternRow:
    """Say what became of a pattern (``strop.pattern``): the modules where its replacement runs, and
    where it nearly matched, each with the reason why it did not."""

    name: str
    origins: tuple[str, ...]
    misses: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class GraphRow:
    """Describe one compiled graph. ``calls``: library calls of one run, by operator."""

    sizes: Mapping[str, int]
    is_latest: bool  # it served the latest shape; else ``sizes`` are those it was traced with
    is_ragged: bool
    from_disk: bool
    num_nodes: int
    num_compiled_nodes: int
    kernels: tuple[KernelRow, ...]
    calls: Mapping[str, int]
    num_opaque_calls: int
    guards: tuple[str, ...]
    seconds: Mapping[str, float]
    passes: tuple[tuple[str, float, int, int], ...]  # name, seconds, nodes before and after
    refusals: Mapping[str, int]  # why a consumer did not join its producer's kernel
    plan: str
    steps: tuple[StepRow, ...] = ()
    choices: tuple[ChoiceRow, ...] = ()  # which kernels run the calls, on a GPU
    edges: tuple[RefusalRow, ...] = ()  # each of ``refusals``
    texts: tuple[tuple[str, str], ...] = ()  # stage and graph after it; Options.record keeps them
    patterns: tuple[PatternRow, ...] = ()  # near misses are not kept on disk
    role: str = "inference"  # or "forward", "backward" of a training step
    num_saved: int = 0  # tensors that a forward keeps for its backward
    fixed: tuple[str, ...] = ()  # sizes that the module's code fixes, each with what asked for it
    num_copied_blocks: int = 0  # repeated ones that were not traced
    traced_blocks: tuple[str, ...] = ()  # those that had to be, though one of their kind had been
    decoded_bytes: int = 0  # of weights kept in another type, in full, that a call writes
    most_decoded_bytes: int = 0  # of these at one time, as weights that are read give theirs back
    eight_bit: Mapping[str, str] = field(default_factory=dict)  # weights in 8 bits, each with how
    exact: tuple[tuple[str, str], ...] = ()  # linears' modules without though asked, and why
    exchanges: Mapping[str, int] = field(default_factory=dict)  # with other processes, by kind
    sent_bytes: int = 0  # in them, by this process to all others together, in a call

    @property
    def bound_us(self) -> float:
        return sum(step.bound_us for step in self.steps)


@dataclass(frozen=True, slots=True)
class ComponentRow:
    """Describe one optimised module and what has happened to it."""

    name: str
    graphs: tuple[GraphRow, ...]
    num_recompiles: int
    num_captures: int
    num_shapes: int
    num_calls: int
    num_eager_calls: int
    num_replays: int
    num_rebinds: int
    num_launches: int
    fallbacks: Mapping[str, int]
    nonfinite: tuple[str, ...]
    findings: tuple[str, ...] = ()  # of Options.check
    derived: tuple[DerivedInput, ...] = ()  # what is read in the place of weights and arguments
    weights_bytes: int = 0
    offloaded: str = ""  # how its weights get to the device, if they lie on the host between calls
    unfolded: Mapping[str, int] = field(default_factory=dict)  # layers with adapters, by reason
    casts: Mapping[str, int] = field(default_factory=dict)  # layers under layerwise casting
    num_trained_calls: int = 0
    traced_by_torch: Mapping[str, int] = field(default_factory=dict)  # training calls, by reason
    profile: ProfileRow | None = None  # measured by debug.profile
    texts: tuple[str, ...] = ()  # what becomes of calls that are split, over devices or steps
    num_full_steps: int = 0  # calls under a step cache that were computed in full
    num_cached_steps: int = 0  # those of which a part came from an earlier step

    @property
    def latest(self) -> GraphRow | None:
        return next((g for g in self.graphs if g.is_latest), None)

    @property
    def beside_bytes(self) -> int:
        """Return the memory that derived inputs take beside the weights."""
        return sum(row.beside_bytes for row in self.derived)

    def derived_of(self, kind: str) -> DerivedInput | None:
        return next((row for row in self.derived if row.kind == kind), None)


@dataclass(frozen=True, slots=True)
class Report:
    """Report what has been compiled and run.

    num_graphs: compiled graphs. num_recompiles: graphs that were made because a size or a plain
    argument value changed; what a component needs anyway is one graph for each module structure,
    argument layout, dtypes and device, and one more for sizes off the grid (ragged).
    num_launches: of one call of every component at its latest shape, without what is hoisted out
    of denoise loops. From a CUDA graph these are its kernel nodes, otherwise calls of generated
    kernels and library calls. num_kernels:
    distinct generated kernels. num_opaque_calls: calls in one run that torch serves because no
    stage knows their operator. compiled_node_share: share of the graphs' compute nodes that are
    inside generated kernels; library calls are the rest. fallbacks: calls that ran in eager.
    """

    components: tuple[ComponentRow, ...]
    device: str
    bandwidth: float  # bytes a second behind the estimated times
    notes: tuple[str, ...] = field(default=())

    @property
    def graphs(self) -> tuple[GraphRow, ...]:
        return tuple(graph for component in self.components for graph in component.graphs)

    @property
    def num_graphs(self) -> int:
        return len(self.graphs)

    @property
    def num_recompiles(self) -> int:
        return sum(c.num_recompiles for c in self.components)

    @property
    def num_launches(self) -> int:
        return sum(c.num_launches for c in self.components)

    @property
    def num_kernels(self) -> int:
        return len({k.source for graph in self.graphs for k in graph.kernels})

    @property
    def num_opaque_calls(self) -> int:
        return sum(c.latest.num_opaque_calls for c in self.components if c.latest)

    @property
    def compiled_node_share(self) -> float:
        nodes = sum(g.num_nodes for g in self.graphs)
        return sum(g.num_compiled_nodes for g in self.graphs) / nodes if nodes else 0.0

    @property
    def fallbacks(self) -> dict[str, int]:
        return {f"{c.name}: {why}": n for c in self.components for why, n in c.fallbacks.items()}

    @property
    def calls(self) -> dict[str, int]:
        """Return library calls of one run of every component at its latest shape."""
        found: Counter[str] = Counter()
        for component in self.components:
            if component.latest:
                found.update(component.latest.calls)
        return dict(found)

    def stage_seconds(self) -> dict[str, float]:
        """Return the seconds in each compiler stage, over all graphs made by this process."""
        total: Counter[str] = Counter()
        for graph in self.graphs:
            total.update(dict(graph.seconds))
        return {name: round(float(seconds), 4) for name, seconds in total.items()}

    def summary(self) -> dict[str, Any]:
        """Return the counts alone."""
        return {
            "num_graphs": self.num_graphs,
            "num_recompiles": self.num_recompiles,
            "num_captures": sum(c.num_captures for c in self.components),
            "num_launches": self.num_launches,
            "num_kernels": self.num_kernels,
            "num_opaque_calls": self.num_opaque_calls,
            "compiled_node_share": round(self.compiled_node_share, 4),
            "calls": self.calls,
            "fallbacks": self.fallbacks,
            "nonfinite": [text for c in self.components for text in c.nonfinite],
            "findings": [text for c in self.components for text in c.findings],
        }

    def to_dict(self) -> dict[str, Any]:
        """Return everything, as JSON knows it."""
        return self.summary() | {
            "device": self.device,
            "bandwidth_bytes_per_s": self.bandwidth,
            "stage_seconds": self.stage_seconds(),
            "components": [asdict(c) for c in self.components],
            "notes": list(self.notes),
        }

    @property
    def html(self) -> str:
        """Return one self-contained page."""
        from strop.debug.html import page

        return page(self)

    def __str__(self) -> str:
        lines = [
            f"{counted(self.num_graphs, 'graph')}, {counted(self.num_recompiles, 'recompile')},"
            f" {counted(self.num_launches, 'launch')} a call,"
            f" {counted(self.num_kernels, 'generated kernel')},"
            f" {counted(self.num_opaque_calls, 'opaque call')},"
            f" {self.compiled_node_share:.0%} of the nodes compiled ({self.device})"
        ]
        for component in self.components:
            lines += _component_lines(component)
        return "\n".join([*lines, *self.notes])


def _component_lines(c: ComponentRow) -> list[str]:
    lines = [
        f"{c.name}: {counted(c.num_calls, 'call')} ({c.num_eager_calls} eager,"
        f" {counted(c.num_replays, 'replay')}), {counted(len(c.graphs), 'graph')},"
        f" {counted(c.num_recompiles, 'recompile')}, {counted(c.num_shapes, 'shape')},"
        f" {counted(c.num_launches, 'launch')}"
    ]
    lines += [f"  {text}" for text in c.texts]
    lines += ["  derived inputs:"] if c.derived else []
    lines += [f"  {c.offloaded}"] if c.offloaded else []
    lines += [f"    {row}" for row in c.derived]
    lines += [f"    {_beside_text(c)}"] if c.derived and c.weights_bytes else []
    lines += [
        f"  adapters of {counted(count, 'layer')} are traced as they are: {why}"
        for why, count in c.unfolded.items()
    ]
    lines += [f"  layerwise casting of {counted(n, 'layer')}: {how}" for how, n in c.casts.items()]
    lines += [f"  fallback {count}x: {why}" for why, count in c.fallbacks.items()]
    lines += [f"  traced by torch {count}x: {why}" for why, count in c.traced_by_torch.items()]
    lines += [f"  not finite: {text}" for text in c.nonfinite]
    lines += [f"  check: {text}" for text in c.findings]
    for graph in c.graphs:
        lines += [f"  {line}" for line in _graph_lines(graph)]
    lines += [f"  {line}" for line in profile_lines(c.profile)] if c.profile else []
    return lines


def _beside_text(c: ComponentRow) -> str:
    return (
        f"together {c.beside_bytes / 1e6:.2f} MB beside {c.weights_bytes / 1e6:.2f} MB of weights"
        f" ({c.beside_bytes / c.weights_bytes:.1%})"
    )


def _graph_lines(g: GraphRow) -> list[str]:
    sizes = ", ".join(f"{k}={v}" for k, v in g.sizes.items())
    kind = "ragged graph" if g.is_ragged else "graph"
    kind = kind if g.role == "inference" else f"{g.role} {kind}"
    launches = counted(sum(k.num_launches for k in g.kernels), "launch")
    lines = [
        f"{kind} at {sizes or 'fixed sizes'}: {g.num_compiled_nodes}/"
        f"{counted(g.num_nodes, 'node')} in {counted(len(g.kernels), 'kernel')} ({launches})"
    ]
    if g.calls:
        lines.append("  calls: " + ", ".join(f"{n} {op}" for op, n in g.calls.items()))
    if g.choices:
        lines.append("  by: " + ", ".join(_kernels_of_calls(g)))
        costly = sorted(g.choices, key=lambda row: -row.count * row.us)
        lines += [f"    {row}" for row in costly[:_TOP]]
    if g.from_disk:
        lines.append("  from the disk cache")
    else:
        lines.append("  " + ", ".join(f"{k} {v:.2f} s" for k, v in g.seconds.items()))
        lines += [
            f"    {name}: {before} -> {counted(after, 'node')}, {seconds:.3f} s"
            for name, seconds, before, after in g.passes
            if before != after
        ]
    if g.steps:
        lines.append("  " + _bound_line(g))
    for k in sorted(g.kernels, key=lambda k: -k.bytes_moved)[:_TOP]:
        lines.append(
            f"  {k.num_launches:4d}x {k.name}  {k.bytes_moved / 1e6:.2f} MB"
            f"  {k.flops / 1e6:.2f} MFLOP"
            f"  ~{k.estimated_us:.1f} us  {k.share:.1%}  <- {_from(k.origins)}"
        )
    lines += [_slow_line(k) for k in g.kernels if k.is_slow]
    lines += [f"  {text}" for text in (*_exchange_texts(g), *_decoded_texts(g))]
    lines += [f"  {text}" for text in _eight_bit_texts(g)]
    lines += [f"  its code fixes {text}" for text in g.fixed]
    lines += [f"  {text}" for text in _block_texts(g)]
    for op, origins in _opaque(g).items():
        lines.append(
            f"  {len(origins):4d}x {op} in torch  <- {_from(tuple(dict.fromkeys(origins)))}"
        )
    for pattern in g.patterns:
        lines += _pattern_lines(pattern)
    for reason, count in sorted(g.refusals.items(), key=lambda item: -item[1])[:_TOP]:
        lines.append(f"  {counted(count, 'edge', '4d')} not fused: {reason}")
    return lines


def _decoded_texts(g: GraphRow) -> list[str]:
    """Return a line on weights that are decoded, if there are any."""
    if not g.decoded_bytes:
        return []
    most = f"{g.most_decoded_bytes / 1e6:.2f} MB of it at a time"
    return [
        f"decodes {g.decoded_bytes / 1e6:.2f} MB of weights kept in another type a call, {most}"
    ]


def _exchange_texts(g: GraphRow) -> list[str]:
    """Return a line on what processes send each other, if they do."""
    if not g.exchanges:
        return []
    kinds = ", ".join(f"{count} {how}" for how, count in g.exchanges.items())
    return [f"sends {g.sent_bytes / 1e6:.2f} MB to other processes a call: {kinds}"]


def _eight_bit_texts(g: GraphRow) -> list[str]:
    """Return lines on linears in 8 bits, and on those that stay exact, by reason."""
    counts, reasons = Counter(g.eight_bit.values()), dict[str, list[str]]()
    for module, reason in g.exact:
        reasons.setdefault(reason, []).append(module)
    found = [f"{counted(count, 'linear')} in {name}" for name, count in counts.items()]
    return [
        *found,
        *(
            f"{counted(len(modules), 'linear')} exact: {reason}  <- {_from(tuple(modules))}"
            for reason, modules in reasons.items()
        ),
    ]


def _why_slow(k: KernelRow) -> str:
    return "leaves the GPU empty" if k.leaves_empty else "has more to do than to move"


def _slow_line(k: KernelRow) -> str:
    return (
        f"  {k.name} {_why_slow(k)}: {counted(k.num_programs, 'program')} a launch, together"
        f" ~{k.estimated_us:.1f} us, {k.whole_us:.1f} us by its bytes alone"
        f"  <- {_from(k.origins)}"
    )


def _block_texts(g: GraphRow) -> list[str]:
    """Return a line on repeated blocks, if there are any."""
    copied = (
        f"{counted(g.num_copied_blocks, 'repeated block')} copied" if g.num_copied_blocks else ""
    )
    again = f"traced again: {'; '.join(g.traced_blocks)}" if g.traced_blocks else ""
    return ["; ".join(filter(None, (copied, again)))] if copied or again else []


def _kernels_of_calls(g: GraphRow) -> list[str]:
    """Count how many calls each row of the kernel library runs."""
    counts: Counter[str] = Counter()
    for row in g.choices:
        counts[row.kernel] += row.count
    return [f"{count} {kernel}" for kernel, count in counts.most_common()]


def _pattern_lines(p: PatternRow) -> list[str]:
    where = f"  <- {_from(tuple(dict.fromkeys(p.origins)))}" if p.origins else ""
    lines = [f"  {len(p.origins):4d}x pattern {p.name}{where}"]
    shown = [f"       not in {origin or 'the module'}: {why}" for origin, why in p.misses[:_TOP]]
    more = len(p.misses) - len(shown)
    return [*lines, *shown, *([f"       nor in {counted(more, 'other place')}"] if more else [])]


def _from(origins: tuple[str, ...]) -> str:
    more = f" and {len(origins) - 1} more" if len(origins) > 1 else ""
    return (origins[0] or "the module itself") + more


def _opaque(g: GraphRow) -> dict[str, list[str]]:
    """Return the modules that torch runs an operator for, by operator."""
    found: dict[str, list[str]] = {}
    for step in g.steps:
        if step.kind == "opaque":
            found.setdefault(step.title, []).append(step.origin)
    return found


def _bound_line(g: GraphRow) -> str:
    """Return where the time must go."""
    time: Counter[str] = Counter()
    for step in g.steps:
        time[f"{step.kind}s, {step.bound_by}"] += step.bound_us  # type: ignore[assignment]
    total = g.bound_us or 1.0
    parts = [f"{name} {us / total:.0%}" for name, us in time.most_common()]
    flops = sum(step.flops for step in g.steps)
    return f"at least {g.bound_us:.0f} us: {', '.join(parts)}; {flops / 1e9:.2f} GFLOP"
