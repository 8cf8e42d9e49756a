"""Programs as JSON and back. Only the classes listed here can be made; nothing is evaluated."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from strop.errors import CacheError, ShapeError
from strop.ir import program, source
from strop.ir.dims import Expr, parse
from strop.ir.graph import Ref

_CLASSES: dict[str, Any] = {
    cls.__name__: cls
    for cls in (
        program.Program, program.InputSpec, program.Buffer, program.TensorRef,
        program.KernelStep, program.CallStep, program.Returned, program.Guard,
        source.KernelSource, source.Scratch, source.Split, Ref,
    )
}  # fmt: skip
_DTYPES = {str(v): v for v in vars(torch).values() if isinstance(v, torch.dtype)}
# what decoding may raise; torch.device and too deep a nesting raise RuntimeError
_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, RuntimeError, ShapeError)
_LAYOUTS = {str(v): v for v in vars(torch).values()
            if isinstance(v, torch.layout | torch.memory_format)}  # fmt: skip
_SPECIAL_FLOATS = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


def to_json(value: program.Program) -> str:
    return json.dumps(_encode(value), separators=(",", ":"), allow_nan=False)


def from_json(text: str) -> program.Program:
    """Raises CacheError when the text is not a program of this version."""
    try:
        value = _decode(json.loads(text))
    except _DAMAGE as error:
        raise CacheError(f"the stored program cannot be read: {error!r}") from error
    if not isinstance(value, program.Program):
        raise CacheError(f"expected a stored Program, got {type(value).__name__}")
    return value


def _encode(value: Any) -> Any:
    if isinstance(value, Expr):
        return {"$": "Expr", "text": str(value)}
    if is_dataclass(value) and type(value).__name__ in _CLASSES:
        names = [f.name for f in fields(value)]
        return {"$": type(value).__name__, **{n: _encode(getattr(value, n)) for n in names}}
    if isinstance(value, tuple | list):
        return [_encode(v) for v in value]
    if isinstance(value, torch.dtype | torch.device | torch.layout | torch.memory_format):
        return {"$": type(value).__name__, "text": str(value)}
    if isinstance(value, float) and (value != value or abs(value) == float("inf")):
        return {"$": "float", "text": str(value)}
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise CacheError(f"a program cannot hold {value!r} ({type(value).__name__})")


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_decode(v) for v in value)
    if not isinstance(value, dict):
        return value
    kind = value.pop("$")
    if kind in _CLASSES:
        return _CLASSES[kind](**{name: _decode(v) for name, v in value.items()})
    return _decode_text(kind, value["text"])


def _decode_text(kind: str, text: str) -> Any:
    if kind == "Expr":
        return parse(text)
    if kind == "dtype":
        return _DTYPES[text]
    if kind == "device":
        return torch.device(text)
    if kind == "float":
        return _SPECIAL_FLOATS[text]
    if kind in ("layout", "memory_format"):
        return _LAYOUTS[text]
    raise KeyError(kind)
