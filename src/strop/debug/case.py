"""Keep a graph as the compiler got it: as JSON, made again, compiled, run and judged.

Nothing of a user's model is in it but the graph: inputs and weights are drawn from a seed at the
traced sizes, unless they are given.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import strop
from strop.backend import Compiled, compile_graph
from strop.codegen.assemble import Signature
from strop.dispatch.placed_weights import place
from strop.errors import CacheError, OptionError
from strop.ir.graph import Graph, Node
from strop.ir.program import Program
from strop.ir.serialize import decode, encode, graph_from_json, graph_to_json
from strop.options import Options
from strop.runtime.build.loader import kernel_loader
from strop.runtime.run.executor import Bound
from strop.runtime.run.workspace import Workspace
from strop.testing import assert_as_accurate_as_eager

FILE = "graph.json"
_FORMAT = 1
_GROSS = 10.0  # times the error of eager and the last place


@dataclass(frozen=True, slots=True)
class Case:
    """Hold what ``backend.compile_graph`` was given."""

    graph: Graph
    signature: Signature
    device: str
    options: Options
    name: str = "graph"
    sizes: Mapping[str, int] = field(default_factory=dict)  # to run at; empty: the traced ones

    @property
    def env(self) -> Mapping[str, int]:
        return self.sizes or self.graph.hints

    def compile(self, **changes: Any) -> Compiled:
        options = replace(self.options, **changes)
        return compile_graph(self.graph, self.signature, self.device, options)


def without(options: Options, name: str) -> Options:
    """Return ``options`` with one more pass disabled."""
    return replace(options, disable=(*options.disable, name))


def to_json(case: Case) -> str:
    return json.dumps(
        {
            "format": _FORMAT,
            "strop": strop.__version__,
            "name": case.name,
            "device": case.device,
            "arch": case.options.arch,
            "disable": list(case.options.disable),
            "sizes": dict(case.sizes),
            "graph": graph_to_json(case.graph),
            "returned": encode(tuple(case.signature.returned)),
            "guards": encode(case.signature.guards),
            "generic": case.signature.generic,
        },
        indent=1,
    )


def from_json(text: str) -> Case:
    """Raises CacheError when ``text`` is no case of this version."""
    try:
        value = json.loads(text)
        if value["format"] != _FORMAT:
            raise CacheError(f"format {value['format']}; this strop reads {_FORMAT}")
        signature = Signature(
            decode(value["returned"]), decode(value["guards"]), bool(value["generic"])
        )
        arch = {"arch": int(value["arch"])} if value.get("arch") else {}
        options = Options.from_environment(disable=tuple(value["disable"]), dump="", **arch)
        return Case(
            graph_from_json(value["graph"]),
            signature,
            str(value["device"]),
            options,
            str(value["name"]),
            dict(value["sizes"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CacheError(f"this is no graph that strop has dumped: {error!r}") from error


def load(path: Path, device: str = "") -> Case:
    """Return a case from a dump's folder or its graph.json; ``device`` compiles it for another.

    Raises OptionError where there is none, CacheError for a damaged one, with its file.
    """
    file = path / FILE if path.is_dir() else path
    if not path.exists():
        raise OptionError(f"there is no {path}; STROP_DUMP=folder makes dumps, one folder a graph")
    if not file.is_file():
        dumps = sorted(str(p.parent) for p in path.glob(f"*/{FILE}"))
        hint = f"it holds several: {', '.join(dumps)}" if dumps else f"it has no {FILE}"
        raise OptionError(f"{path} is not the dump of one graph: {hint}")
    try:
        case = from_json(file.read_text(encoding="utf-8"))
    except (CacheError, UnicodeDecodeError) as error:
        raise CacheError(f"{file}: {error}; dump it again with STROP_DUMP") from error
    return replace(case, device=device) if device else case


def save(case: Case, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / FILE
    file.write_text(to_json(case), encoding="utf-8")
    return file


def torch_device(case: Case) -> torch.device:
    if case.device == "cuda" and not torch.cuda.is_available():
        raise OptionError(
            f"{case.name} was compiled for CUDA and there is no GPU here; give --device cpu to"
            " compile it for the CPU"
        )
    return torch.device(case.device)


def random_inputs(case: Case, seed: int = 0) -> dict[int, Tensor]:
    """Draw arguments by index, with weights small enough that values neither vanish nor explode."""
    generator = torch.Generator().manual_seed(seed)
    device = torch_device(case)
    return {
        node.attrs["index"]: _drawn(node, case.env, generator).to(device)
        for node in case.graph.inputs
    }


def _drawn(node: Node, env: Mapping[str, int], generator: torch.Generator) -> Tensor:
    shape = [size.eval(env) for size in node.shape]
    if not node.dtype.is_floating_point:  # 0 or 1: an index that every table has
        return torch.randint(0, 2, shape, generator=generator).to(node.dtype)
    if node.attrs["state"] and len(shape) < 2:  # scales, and variances, which are positive
        value = torch.rand(shape, generator=generator) + 0.5
    else:
        value = torch.randn(shape, generator=generator)
    if node.attrs["state"] and len(shape) > 1:
        value = value / max(value[0].numel(), 1) ** 0.5
    return laid_out(node, value, env)


def laid_out(node: Node, value: Tensor, env: Mapping[str, int]) -> Tensor:
    """Return ``value`` in the dtype and memory order that the graph was traced with."""
    strides = [stride.eval(env) for stride in node.strides]
    return torch.empty_strided(value.shape, strides, dtype=node.dtype).copy_(value)


def bind(
    case: Case, program: Program, arguments: Mapping[int, Tensor]
) -> tuple[Bound, list[Tensor]]:
    """Return the program at the traced sizes, and what its ``run`` takes."""
    device = torch_device(case)
    options = case.options
    library = kernel_loader(
        device.type,
        0,
        options.cache_dir,
        options.build_workers,
        options.arch,
        options.target,
    )
    given = [arguments[n].clone() for n in range(len(arguments))]
    placed = place(program, given)
    state = [x if spec.is_state else None for x, spec in zip(placed, program.inputs, strict=True)]
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    workspace = Workspace(device, grows=False)
    bound = Bound(program, case.env, state, library, workspace, stream, in_place=False)
    return bound, bound.in_layout([*given, *[None] * (len(state) - len(given))])


def run(case: Case, compiled: Compiled, arguments: Mapping[int, Tensor]) -> list[Any]:
    bound, inputs = bind(case, compiled.program, arguments)
    return bound.run(inputs)


def is_gross(actual: Tensor, eager: Tensor, exact: Tensor) -> bool:
    """Tell whether the error is no matter of rounding."""
    if actual.shape != eager.shape or not actual.is_floating_point():
        return True
    finite = torch.isfinite(eager)
    if not torch.equal(torch.isfinite(actual), finite):
        return True
    own, base, scale = (x[finite].double() for x in (actual - exact, eager - exact, exact))
    ulp = torch.finfo(actual.dtype).eps * scale.norm()
    return bool(own.norm() > _GROSS * (base.norm() + ulp))


def inaccuracy(actual: Tensor, eager: Tensor, exact: Tensor) -> str:
    """Return why ``actual`` breaks the rule of docs/numerics.md, or nothing."""
    try:
        assert_as_accurate_as_eager(actual, eager, exact.double())
    except AssertionError as error:
        return str(error)
    return ""
