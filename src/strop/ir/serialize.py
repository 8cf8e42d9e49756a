"""Write programs and graphs as JSON and back. Only the classes listed here can be made; nothing is
evaluated."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import torch

from strop.errors import CacheError, ShapeError
from strop.ir import program, source
from strop.ir.dims import Expr, parse
from strop.ir.graph import GeneratorRef, Graph, Node, Ref
from strop.ir.ops import OPS

_CLASSES: dict[str, Any] = {
    cls.__name__: cls
    for cls in (
        program.Program,
        program.InputSpec,
        program.Buffer,
        program.TensorRef,
        program.Copied,
        program.KernelStep,
        program.StepForm,
        program.CallStep,
        program.Returned,
        program.Guard,
        program.HostDraw,
        source.KernelSource,
        source.Scratch,
        source.Split,
        source.Effort,
        Ref,
        GeneratorRef,
    )
}
_FIELDS = {cls: tuple(field.name for field in fields(cls)) for cls in _CLASSES.values()}
_AS_IT_IS = (str, int, bool, type(None))
_DTYPES = {str(v): v for v in vars(torch).values() if isinstance(v, torch.dtype)}
# what decoding may raise; torch.device and too deep a nesting raise RuntimeError
_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, RuntimeError, ShapeError)
_LAYOUTS = {
    str(v): v for v in vars(torch).values() if isinstance(v, torch.layout | torch.memory_format)
}
_SPECIAL_FLOATS = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


def to_json(value: program.Program) -> str:
    return json.dumps(encode(value), separators=(",", ":"), allow_nan=False)


def from_json(text: str) -> program.Program:
    """Raises CacheError when the text is not a program of this version."""
    try:
        value = decode(json.loads(text))
    except _DAMAGE as error:
        raise CacheError(f"the stored program cannot be read: {error!r}") from error
    if not isinstance(value, program.Program):
        raise CacheError(f"expected a stored Program, got {type(value).__name__}")
    return value


def graph_to_json(graph: Graph) -> Any:
    """Write a graph as lists and dictionaries for ``json.dumps``; nodes are numbered by
    position."""
    number = {node: position for position, node in enumerate(graph.nodes)}
    return {
        "nodes": [
            {
                "op": node.op,
                "inputs": [number[i] for i in node.inputs],
                "attrs": encode(tuple(sorted(node.attrs.items()))),
                "shape": [str(size) for size in node.shape],
                "dtype": str(node.dtype),
                "order": node.order,
                "origin": node.origin,
            }
            for node in graph.nodes
        ],
        "inputs": [number[i] for i in graph.inputs],
        "outputs": [number[o] for o in graph.outputs],
        "hints": dict(graph.hints),
    }


def graph_from_json(value: Any) -> Graph:
    """Raises CacheError when ``value`` is not a graph of this version."""
    try:
        nodes: list[Node] = []
        for row in value["nodes"]:
            if row["op"] not in OPS or not all(0 <= i < len(nodes) for i in row["inputs"]):
                raise KeyError(row["op"])
            nodes.append(
                Node(
                    row["op"],
                    tuple(nodes[i] for i in row["inputs"]),
                    dict(decode(row["attrs"])),
                    tuple(parse(size) for size in row["shape"]),
                    _DTYPES[row["dtype"]],
                    row["origin"],
                    None if row["order"] is None else tuple(row["order"]),
                )
            )
        inputs, outputs = (tuple(nodes[i] for i in value[k]) for k in ("inputs", "outputs"))
        return Graph(tuple(nodes), inputs, outputs, dict(value["hints"]))
    except (*_DAMAGE, LookupError) as error:
        raise CacheError(f"the stored graph cannot be read: {error!r}") from error


def encode(value: Any) -> Any:
    kind = type(value)
    if kind in _AS_IT_IS:
        return value
    if kind is Expr:
        return {"$": "Expr", "text": str(value)}
    if kind in _FIELDS:
        return {"$": kind.__name__, **{n: encode(getattr(value, n)) for n in _FIELDS[kind]}}
    if isinstance(value, tuple | list):
        return [encode(v) for v in value]
    if isinstance(value, torch.dtype | torch.device | torch.layout | torch.memory_format):
        return {"$": type(value).__name__, "text": str(value)}
    if isinstance(value, float) and (value != value or abs(value) == float("inf")):
        return {"$": "float", "text": str(value)}
    if isinstance(value, complex):
        return {"$": "complex", "text": str(value)}
    if isinstance(value, str | int | float):
        return value
    raise CacheError(f"a program cannot hold {value!r} ({type(value).__name__})")


def decode(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(decode(v) for v in value)
    if not isinstance(value, dict):
        return value
    kind = value.pop("$")
    if kind in _CLASSES:
        return _CLASSES[kind](**{name: decode(v) for name, v in value.items()})
    return _parse_text(kind, value["text"])


def _parse_text(kind: str, text: str) -> Any:
    if kind == "Expr":
        return parse(text)
    if kind == "dtype":
        return _DTYPES[text]
    if kind == "device":
        return torch.device(text)
    if kind == "float":
        return _SPECIAL_FLOATS[text]
    if kind == "complex":
        return complex(text)
    if kind in ("layout", "memory_format"):
        return _LAYOUTS[text]
    raise KeyError(kind)
