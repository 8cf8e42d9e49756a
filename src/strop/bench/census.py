"""Judge what becomes of each model of the zoo (``strop bench models``).

A model is good when one graph serves all its shapes without a recompile or a fallback, when at
least 95 % of its compute nodes other than library anchors are inside generated kernels, and when
each result, over all shapes together, is as accurate as eager's (``strop.testing``).
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import strop
from strop.api import dispatchers_of
from strop.bench import environment, zoo_times
from strop.bench.accuracy import full_precision
from strop.bench.zoo_inputs import Inputs, Shape
from strop.bench.zoo_model import ZooModel
from strop.errors import StropError
from strop.frontend.objects import as_tree
from strop.testing import assert_as_accurate_together
from strop.wording import counted

WANTED_SHARE = 0.95
Row = dict[str, Any]  # of one model, as a file has it
NUM_WEIGHTS = 4  # random ones: errors of one draw of weights are no independent samples
# calls that are matrix work of a library, as linear, conv2d and attention are
ANCHORS = (
    "aten.convolution.",
    "aten.lstm.",
    "aten.gru.",
    "aten.rnn_",
    "aten._scaled_dot_product",
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Hold what became of one model. ``opaque``: calls by overload in one run of the first graph,
    ``origins`` where in the model each comes from. ``kernel_share``: nodes in generated kernels
    over those and the opaque calls. ``failure``: the first line of what was raised. ``parity``:
    empty when good."""

    name: str
    family: str
    num_shapes: int
    is_strict: bool = False
    num_graphs: int = 0
    num_recompiles: int = 0
    num_kernels: int = 0
    kernel_share: float = 0.0
    fallbacks: Mapping[str, int] = field(default_factory=dict)
    opaque: Mapping[str, int] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)
    parts: str = ""  # where there are several graphs: what the first two are made for
    parity: str = ""
    failure: str = ""
    seconds: float = 0.0

    @property
    def is_captured(self) -> bool:
        return self.num_graphs > 0

    @property
    def is_good(self) -> bool:
        return not self.complaint

    @property
    def complaint(self) -> str:
        """Return the first thing that is wrong, or nothing."""
        if self.failure:
            return self.failure
        if self.fallbacks and not self.is_captured:
            return next(iter(self.fallbacks))
        if self.parity:
            return self.parity
        if self.fallbacks:
            return next(iter(self.fallbacks))
        if self.num_graphs != 1 or self.num_recompiles:
            graphs, shapes = counted(self.num_graphs, "graph"), counted(self.num_shapes, "shape")
            return f"{graphs} for {shapes}: {self.parts}"
        if self.kernel_share < WANTED_SHARE:
            return f"opaque: {', '.join(self.opaque)}"
        return "" if self.is_strict else "refused by strict=True"


class InFp64(TorchDispatchMode):
    """Keep fp64 where a model asks for fp32 in the middle, as norms and rotations do."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wide = pytree.tree_map(_widened, (args, kwargs or {}))
        return func(*wide[0], **wide[1])


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def judge(
    model: ZooModel, device: torch.device, options: strop.Options, num_shapes: int = 4
) -> Verdict:
    """Compile, run at that many shapes and compare; what is raised becomes the verdict."""
    started = time.perf_counter()
    samples = [
        Sample(shape, _on(device, model.given(shape, seed)), seed % NUM_WEIGHTS)
        for seed, shape in enumerate(model.sizes.some(num_shapes))
    ]
    samples.sort(key=lambda sample: sample.weights)
    found = Verdict(model.name, model.family, len(samples))
    try:
        with torch.no_grad(), full_precision():  # TF32 would hide what else differs
            found = replace(found, **_judged(model, samples, device, options))
    except Exception as error:
        found = replace(found, failure=_first_line(error))
    return replace(found, seconds=round(time.perf_counter() - started, 2))


@dataclass(frozen=True, slots=True)
class Sample:
    """Hold inputs at one shape, and the seed of the weights that they meet."""

    shape: Shape
    inputs: Inputs
    weights: int


Modules = Mapping[int, nn.Module]  # by the seed of their weights


def _judged(
    model: ZooModel, samples: Sequence[Sample], device: torch.device, options: strop.Options
) -> dict[str, Any]:
    modules = {seed: model.made(seed).to(device) for seed in {s.weights for s in samples}}
    wanted = [_results(kind, samples) for kind in (modules, _each(_channels_last, modules))]
    exact = _exact(modules, samples)
    module = model.made(0).to(device)
    is_strict = True
    try:
        results = _compiled(module, modules, samples, replace(options, strict=True))
    except StropError:
        is_strict = False
        strop.restore(module)
        results = _compiled(module, modules, samples, replace(options, strict=False))
    worse = [_parity(samples, results, eager, exact) for eager in wanted]
    # eager rounds differently in another memory order: either is a fair judge
    return {"is_strict": is_strict, "parity": "" if "" in worse else worse[0], **_counts(module)}


def _compiled(
    module: nn.Module, modules: Modules, samples: Sequence[Sample], options: strop.Options
) -> list[Any]:
    """Return one compiled module, which gets the other weights in place."""
    strop.optimize(module, options=options)
    results = []
    for sample in samples:
        module.load_state_dict(modules[sample.weights].state_dict())
        results.append(_eager(module, sample.inputs))
    return results


def _each(change: Callable[[nn.Module], nn.Module], modules: Modules) -> Modules:
    return {seed: change(module) for seed, module in modules.items()}


def _results(modules: Modules, samples: Sequence[Sample]) -> list[Any]:
    return [_eager(modules[sample.weights], sample.inputs) for sample in samples]


def _eager(module: nn.Module, inputs: Inputs) -> Any:
    return _cloned(module(**copy.deepcopy(inputs)))


def _channels_last(module: nn.Module) -> nn.Module:
    copied: nn.Module = copy.deepcopy(module)
    for weight in copied.parameters():
        if weight.dim() in (4, 5):
            last = torch.channels_last if weight.dim() == 4 else torch.channels_last_3d
            weight.data = weight.data.contiguous(memory_format=last)
    return copied


def _exact(modules: Modules, samples: Sequence[Sample]) -> list[Any]:
    wide = _each(lambda module: copy.deepcopy(module).double(), modules)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with InFp64():  # type: ignore[no-untyped-call]
            return [_cloned(wide[s.weights](**_cast(s.inputs))) for s in samples]
    finally:
        torch.set_default_dtype(before)


def _cloned(value: Any) -> Any:
    """Copy ``value``, so that caches become objects of their class again."""
    return pytree.tree_map_only(Tensor, torch.clone, as_tree(value))


def _cast(inputs: Inputs) -> Inputs:
    cast: Inputs = pytree.tree_map_only(
        Tensor, lambda t: t.double() if t.is_floating_point() else t.clone(), inputs
    )
    return cast


def _on(device: torch.device, inputs: Inputs) -> Inputs:
    moved: Inputs = pytree.tree_map_only(Tensor, lambda t: t.to(device), inputs)
    return moved


def _counts(module: nn.Module) -> dict[str, Any]:
    told = strop.explain(module)
    (dispatcher,) = dispatchers_of(module).values()
    steps = [step for v in dispatcher.variants.all[:1] for step in v.program.call_steps]
    opaque = [(str(dict(s.attrs)["target"]), s.origin) for s in steps if s.op == "aten"]
    compiled = sum(g.num_compiled_nodes for g in told.graphs[:1])
    others = sum(not target.startswith(ANCHORS) for target, _ in opaque)
    return {
        "num_graphs": told.num_graphs,
        "num_recompiles": told.num_recompiles,
        "num_kernels": told.num_kernels,
        "kernel_share": round(compiled / max(compiled + others, 1), 4),
        "parts": _parts(dispatcher.variants.all) if told.num_graphs != 1 else "",
        "fallbacks": {_short(why): n for c in told.components for why, n in c.fallbacks.items()},
        "opaque": dict(Counter(target for target, _ in opaque)),
        "origins": dict(reversed(opaque)),  # the first place of each
    }


def _parts(variants: Sequence[Any]) -> str:
    """Return what fixes sizes, or what the first two graphs are made for."""
    if variants and variants[0].fixed:
        return _short(f"its code fixes {variants[0].fixed[-1]}", 200)
    return " or ".join(map(_made_for, variants[:2]))


def _made_for(variant: Any) -> str:
    """Return sizes of the arguments and guards."""
    sizes = ", ".join(f"({', '.join(spec.shape)})" for spec in variant.specs[:2])
    guards = " and ".join(map(str, variant.program.guards))
    return _short(sizes + (f" if {guards}" if guards else ""), 120)


def _parity(
    samples: Sequence[Sample], results: Sequence[Any], eager: Sequence[Any], exact: Sequence[Any]
) -> str:
    """Return what differs, or an empty text. Floats are judged over all shapes together, each
    result by itself."""
    floats: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {}
    for sample, *triple in zip(samples, results, eager, exact, strict=True):
        (own, spec), (base, base_spec), (wide, _) = (
            pytree.tree_flatten(as_tree(result)) for result in triple
        )
        if spec != base_spec:  # caches are compared by class and attribute names
            return f"at {sample.shape}: results are built as {spec}, eager's as {base_spec}"
        for number, (a, b, c) in enumerate(zip(own, base, wide, strict=True)):
            if isinstance(b, Tensor) and b.is_floating_point():
                floats.setdefault(number, []).append((a, b, c.double()))
            elif not (torch.equal(a, b) if isinstance(b, Tensor) else a == b):
                return f"at {sample.shape}: result {number} is {a!r}, eager's {b!r}"[:200]
    for number, triples in floats.items():
        try:
            assert_as_accurate_together(triples)
        except AssertionError as error:
            return f"result {number}: {_first_line(error)}"
    return ""


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return _short(f"{type(error).__name__}: {lines[0] if lines else ''}")


def _short(text: str, limit: int = 300) -> str:
    return text if len(text) <= limit else f"{text[:limit]}..."


def run(
    models: Sequence[ZooModel],
    device: torch.device,
    options: strop.Options,
    each: Callable[[Verdict], None] = lambda _: None,
    num_shapes: int = 4,
) -> dict[str, Any]:
    """Return all verdicts as JSON; ``each`` hears of them as they come."""
    rows = []
    for model in models:
        verdict = judge(model, device, options, num_shapes)
        rows.append(verdict)
        each(verdict)
    found = environment.describe(device)
    return result_of([kept(verdict) for verdict in rows], found, num_shapes)


def result_of(rows: Sequence[Row], where: Mapping[str, Any], num_shapes: int) -> dict[str, Any]:
    """Return the contents of a file: what is ``kept`` of the verdicts, and their sums. ``where``:
    the environment in which they were judged."""
    return {
        "kind": "models",
        "environment": where,
        "num_shapes": num_shapes,
        "num_models": len(rows),
        "num_good": sum(row["is_good"] for row in rows),
        "missing": _missing(rows),
        "models": list(rows),
    }


def kept(verdict: Verdict) -> Row:
    """Return what a file keeps of a verdict: not what is empty."""
    found = {key: value for key, value in asdict(verdict).items() if value not in ("", {})}
    return {**found, "is_good": verdict.is_good, "complaint": verdict.complaint}


def _missing(rows: Sequence[Row]) -> list[Row]:
    """Return overloads that torch runs: calls over the zoo, models, and one place each."""
    calls: Counter[str] = Counter()
    models: dict[str, list[str]] = {}
    places: dict[str, str] = {}
    for row in rows:
        calls.update(row.get("opaque", {}))
        for overload in row.get("opaque", ()):
            models.setdefault(overload, []).append(row["name"])
            places.setdefault(overload, f"{row['name']}: {row['origins'][overload]}")
    ranked = sorted(calls, key=lambda o: (-len(models[o]), -calls[o], o))
    return [
        {"overload": o, "calls": calls[o], "models": models[o], "place": places[o]} for o in ranked
    ]


def rows_of(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the table of all models: a header, then a row for each."""
    rows: list[tuple[str, ...]] = [
        (
            *("model", "family", "passes", "graphs", "recompiles", "in kernels", "strict"),
            *(*zoo_times.header(result), "why not"),
        )
    ]
    for m in result["models"]:
        rows.append(
            (
                m["name"],
                m["family"],
                "yes" if m["is_good"] else "no",
                str(m["num_graphs"]),
                str(m["num_recompiles"]),
                f"{m['kernel_share']:.0%}" if m["num_graphs"] else "",
                "yes" if m["is_strict"] else "no",
                *zoo_times.cells(result, m),
                m["complaint"],
            )
        )
    return rows


def _processor(found: Mapping[str, Any]) -> str:
    vectors = found.get("cpu_vectors", "")
    return f"{found['cpu']} with {vectors}" if vectors else found["cpu"]


def markdown(result: Mapping[str, Any]) -> str:
    """Return the page ``docs/models.md``, or ``docs/models-gpu.md``."""
    found = result["environment"]
    is_gpu = "gpu" in found
    page = "docs/models-gpu.md" if is_gpu else "docs/models.md"
    other = "[a CPU](models.md)" if is_gpu else "[a GPU](models-gpu.md)"
    head = [
        f"# Models on a {'GPU' if is_gpu else 'CPU'}",
        "",
        f"`strop bench models --device {'cuda' if is_gpu else 'cpu'} --page {page}` writes this",
        f"page; there is one of {other}, too. It compiles each",
        "architecture at tiny widths with random weights, and runs it at"
        f" {counted(result['num_shapes'], 'shape')} and batches. A model passes when",
        "",
        "- one graph serves all of them under `strict=True`;",
        f"- at least {WANTED_SHARE:.0%} of its nodes are in generated kernels, where nodes that a",
        "  library runs (matrix products, convolutions, attention, recurrent layers) do not count;",
        "- its results are as accurate as eager's, judged by fp64 ([numerics.md](numerics.md))",
        "  over all shapes and four draws of weights together.",
        "",
        f"{result['num_good']} of {result['num_models']} pass: {found['date'][:10]}, torch"
        f" {found['torch']}, transformers {found['transformers']}, diffusers"
        f" {found['diffusers']}, {found.get('gpu') or _processor(found)}.",
        "",
    ]
    if "times" in result:
        head += [*zoo_times.about(result), ""]
    missing = [("overload", "models", "calls", "for example")]
    missing += [
        (m["overload"], str(len(m["models"])), str(m["calls"]), m["place"])
        for m in result["missing"]
    ]
    return "\n".join(
        [*head, *_pipes(rows_of(result)), "", "## What torch runs", "", *_pipes(missing), ""]
    )


def _pipes(rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(c.replace("|", "/") for c in row) + " |" for row in rows]
    return [lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]]
