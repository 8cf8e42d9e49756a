"""Runs a pattern's replacement, and holds it to what its search promised."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from strop.errors import PatternError
from strop.patterns import registry


def replacement(attrs: Mapping[str, Any]) -> Callable[[Sequence[Tensor]], Any]:
    """The call of a ``pattern`` node, its sizes evaluated."""
    name, keywords = attrs["name"], dict(attrs["attributes"])
    function, outputs, single = (
        registry.find(attrs["key"], name).replace,
        attrs["outputs"],
        attrs["single"],
    )
    contiguous, is_empty = attrs["contiguous"], all(0 in shape for shape, _ in outputs)

    def call(inputs: Sequence[Tensor]) -> Any:
        if is_empty:  # as with our own kernels: nothing to launch
            made = tuple(inputs[0].new_empty(shape, dtype=dtype) for shape, dtype in outputs)
            return made[0] if single else made
        given = [x.contiguous() for x in inputs] if contiguous else inputs
        versions = _versions(given)
        try:
            made = function(*given, **keywords)
        except Exception as error:
            error.add_note(f"raised by replace of the pattern {name!r}, for {_shapes(given)}")
            raise
        results = (made,) if single else made
        _check(name, results, outputs, given)
        if _versions(given) != versions:
            raise PatternError(f"pattern {name!r}: replace wrote into an argument, which others"
                               " read: write into memory of its own")  # fmt: skip
        owned = tuple(_owned(result, given) for result in results)
        return owned[0] if single else owned

    return call


def _check(name: str, results: Any, outputs: Sequence[Any], given: Sequence[Tensor]) -> None:
    if not isinstance(results, tuple | list) or len(results) != len(outputs):
        got = f"{len(results)} values" if isinstance(results, tuple | list) else type(results)
        raise PatternError(f"pattern {name!r}: replace returned {got}, search returns"
                           f" {len(outputs)} tensors")  # fmt: skip
    for number, (result, (shape, dtype)) in enumerate(zip(results, outputs, strict=True)):
        if not isinstance(result, Tensor):
            raise PatternError(f"pattern {name!r}: result {number} of replace is a"
                               f" {type(result).__name__}, not a tensor")  # fmt: skip
        device = given[0].device
        if (tuple(result.shape), result.dtype, result.device) != (tuple(shape), dtype, device):
            raise PatternError(
                f"pattern {name!r}: result {number} of replace is {_type(result)} on"
                f" {result.device}, search gives {_text(dtype, shape)} on {device} for"
                f" {_shapes(given)}: return that from replace"
            )


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    """How often torch has written into each; of tensors made in inference mode nobody knows."""
    return [0 if x.is_inference() else x._version for x in tensors]


def _owned(result: Tensor, given: Sequence[Tensor]) -> Tensor:
    """A result in memory of its own: that of arguments is used again."""
    place = result.untyped_storage().data_ptr()
    shares = any(x.untyped_storage().data_ptr() == place for x in given)
    return result.clone() if shares else result


def _shapes(tensors: Sequence[Tensor]) -> str:
    return f"({', '.join(map(_type, tensors))})"


def _type(x: Tensor) -> str:
    return _text(x.dtype, x.shape)


def _text(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]"
