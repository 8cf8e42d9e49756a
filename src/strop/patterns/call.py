"""Runs a pattern's replacement, and holds it to what its search promised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from strop.errors import PatternError
from strop.patterns import registry
from strop.wording import counted


class Replacement:
    """Call the replacement of a ``pattern`` node at one shape: its attributes are evaluated."""

    def __init__(self, attrs: Mapping[str, Any]) -> None:
        self.name, self.keywords = attrs["name"], dict(attrs["attributes"])
        self.function = registry.find(attrs["key"], self.name).replace
        self.outputs, self.single, self.contiguous = (
            attrs[key] for key in ("outputs", "single", "contiguous")
        )
        self.is_empty = all(0 in shape for shape, _ in self.outputs)
        self.is_new = True

    def __call__(self, inputs: Sequence[Tensor]) -> Any:
        if self.is_empty:  # as with our own kernels: nothing to launch
            return self._given_back(
                [inputs[0].new_empty(shape, dtype=dtype) for shape, dtype in self.outputs]
            )
        given = [x.contiguous() for x in inputs] if self.contiguous else inputs
        versions = _versions(given) if self.is_new else None
        try:
            made = self.function(*given, **self.keywords)
        except Exception as error:
            error.add_note(f"raised by replace of the pattern {self.name!r}, for {_shapes(given)}")
            raise
        results = (made,) if self.single else made
        _check(self.name, results, self.outputs, given)
        if self.is_new and _versions(given) != versions:
            raise PatternError(
                f"pattern {self.name!r}: replace wrote into an argument, which"
                " others read: write into memory of its own"
            )
        self.is_new = False
        return self._given_back([_owned(result, given) for result in results])

    def _given_back(self, results: Sequence[Tensor]) -> Any:
        return results[0] if self.single else results


def _check(name: str, results: Any, outputs: Sequence[Any], given: Sequence[Tensor]) -> None:
    if not isinstance(results, tuple | list) or len(results) != len(outputs):
        is_many = isinstance(results, tuple | list)
        got = counted(len(results), "value") if is_many else type(results)
        raise PatternError(
            f"pattern {name!r}: replace returned {got}, search returns"
            f" {counted(len(outputs), 'tensor')}"
        )
    for number, (result, (shape, dtype)) in enumerate(zip(results, outputs, strict=True)):
        if not isinstance(result, Tensor):
            raise PatternError(
                f"pattern {name!r}: result {number} of replace is a"
                f" {type(result).__name__}, not a tensor"
            )
        device = given[0].device
        if result.shape != shape or result.dtype != dtype or result.device != device:
            raise PatternError(
                f"pattern {name!r}: result {number} of replace is {_type(result)} on"
                f" {result.device}, search gives {_text(dtype, shape)} on {device} for"
                f" {_shapes(given)}: return that from replace"
            )


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    """Return how often torch has written into each; of tensors made in inference mode nobody
    knows."""
    return [0 if x.is_inference() else x._version for x in tensors]


def _owned(result: Tensor, given: Sequence[Tensor]) -> Tensor:
    """Return a result in memory of its own: that of arguments is used again."""
    place = result.untyped_storage().data_ptr()
    shares = any(x.untyped_storage().data_ptr() == place for x in given)
    return result.clone() if shares else result


def _shapes(tensors: Sequence[Tensor]) -> str:
    return f"({', '.join(map(_type, tensors))})"


def _type(x: Tensor) -> str:
    return _text(x.dtype, x.shape)


def _text(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]"
