"""Cut the arguments of a call into pieces of its rows, each on a device, and join their results.

A tensor is copied as PyTorch copies between GPUs: in the order of the streams that are current on
both, by the bus between them, and no host waits. What goes through a denoise loop unchanged is
copied once in it, so that what a device keeps of it holds too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from strop.dispatch.parallel.rules import ARGUMENTS, ITEMS, ROWS, Kind
from strop.dispatch.signature import is_foreign
from strop.runtime.derived.sources import versions_of
from strop.runtime.loop.denoise_loop import DenoiseLoop, place_among
from strop.wording import counted

_SCALARS = (bool, int, float, str, torch.dtype, type(None))
Path = tuple[str, ...]
Call = dict[str, Any]  # arguments by their names


class NotSplitError(Exception):
    """A call cannot be split; the message says why."""


@dataclass(frozen=True, slots=True)
class _Copied:
    """The pieces of a tensor as it was in one denoise loop."""

    loop: int
    tensor: Tensor
    versions: tuple[int, ...] | None
    pieces: Sequence[Tensor]


class Splitter:
    """Cut calls of one module for these devices, the first of which holds their arguments."""

    def __init__(self, devices: Sequence[torch.device], loop: DenoiseLoop) -> None:
        self._devices, self._loop = devices, loop
        self._copied: dict[Path, _Copied] = {}
        self._timesteps: dict[torch.device, tuple[int, Tensor]] = {}

    def pieces(self, call: Call, sizes: Sequence[int]) -> list[Call]:
        """Return the calls of so many rows each. Raises NotSplitError for an argument of which
        nobody knows its rows."""
        cut = _Cut(self, sizes)
        found = {name: _pieces(cut, (name,), given, _kind(name)) for name, given in call.items()}
        return [{name: of[number] for name, of in found.items()} for number in range(len(sizes))]

    def forget(self) -> None:
        """Keep no copies."""
        self._copied.clear()
        self._timesteps.clear()

    def timesteps_on(self, device: torch.device) -> Tensor | None:
        """Return the timesteps of the loop that runs, as they are on a device."""
        timesteps, number = self._loop.timesteps, self._loop.number
        if timesteps is None or device == timesteps.device:
            return timesteps
        known = self._timesteps.get(device)
        if known is None or known[0] != number:
            known = self._timesteps[device] = number, timesteps.to(device, non_blocking=True)
        return known[1]

    def of_tensor(
        self, path: Path, tensor: Tensor, sizes: Sequence[int], *, has_rows: bool
    ) -> Sequence[Tensor]:
        """Return the pieces of a tensor, which are those of the last call if it is of the same loop
        with the same tensor, to which nobody has written since."""
        known, versions = self._copied.get(path), versions_of([tensor])
        is_same = known is not None and known.tensor is tensor and known.versions == versions
        if known is not None and is_same and versions is not None and self._is_now(known, sizes):
            return known.pieces
        rows = tensor.split([*sizes]) if has_rows else [tensor] * len(sizes)
        devices = self._devices[: len(sizes)]
        pieces = [self._moved(part, at) for part, at in zip(rows, devices, strict=True)]
        if self._loop.is_running:
            self._copied[path] = _Copied(self._loop.number, tensor, versions, pieces)
        return pieces

    def _is_now(self, known: _Copied, sizes: Sequence[int]) -> bool:
        is_running = self._loop.is_running and known.loop == self._loop.number
        return is_running and len(known.pieces) == len(sizes)

    def _moved(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Return a tensor on a device. What lies beside the model, such as timesteps on the host,
        stays there. A timestep is a place among those of the loop on any device."""
        if device == self._devices[0] or tensor.device != self._devices[0]:
            return tensor
        timesteps = self._loop.timesteps
        place = None if timesteps is None else place_among(timesteps, tensor)
        is_one = tensor.dim() == 0 or (
            tensor.dim() == 1 and not tensor.stride(0) * (len(tensor) - 1)
        )
        if place is not None and is_one:
            own = self.timesteps_on(device)
            assert own is not None
            return own.as_strided(tensor.shape, tensor.stride(), own.storage_offset() + place)
        return tensor.to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class _Cut:
    splitter: Splitter
    sizes: Sequence[int]

    @property
    def num_rows(self) -> int:
        return sum(self.sizes)

    @property
    def rows(self) -> str:
        return counted(self.num_rows, "row")


def _kind(name: str) -> Kind | None:
    return ARGUMENTS.get(name)


def _pieces(cut: _Cut, path: Path, given: Any, kind: Kind | None) -> Sequence[Any]:
    """Return a piece of an argument for each device."""
    count = len(cut.sizes)
    if isinstance(given, _SCALARS):
        return [given] * count
    if kind is None:
        raise NotSplitError(
            f"nothing says whether {'.'.join(path)} has a row for each picture"
            f" (it is a {type(given).__name__})"
        )
    if isinstance(kind, Mapping):
        return _of_mapping(cut, path, given, kind)
    if kind == ITEMS:
        return _of_items(cut, path, given)
    if isinstance(given, Tensor):
        return _of_tensor(cut, path, given, has_rows=kind == ROWS)
    parts = _parts(given)
    if parts is None:
        raise NotSplitError(f"{'.'.join(path)} is a {type(given).__name__}")
    names, make = parts
    found = [_pieces(cut, (*path, name), part, kind) for name, part in names]
    return [make([of[number] for of in found]) for number in range(count)]


def _of_mapping(
    cut: _Cut, path: Path, given: Any, kinds: Mapping[str, Kind]
) -> Sequence[dict[Any, Any]]:
    if type(given) is not dict:
        raise NotSplitError(f"{'.'.join(path)} is a {type(given).__name__}")
    found = {k: _pieces(cut, (*path, str(k)), part, kinds.get(k)) for k, part in given.items()}
    return [{k: of[number] for k, of in found.items()} for number in range(len(cut.sizes))]


def _of_items(cut: _Cut, path: Path, given: Any) -> Sequence[Any]:
    """Cut a list with an item for each picture, which is a list again: a list of sizes is that of
    one picture."""
    if type(given) is not list or not all(type(item) is list for item in given):
        raise NotSplitError(f"{'.'.join(path)} is no list with a list for each row")
    if len(given) == 1:
        return [given] * len(cut.sizes)
    if len(given) != cut.num_rows:
        raise NotSplitError(f"{'.'.join(path)} has {counted(len(given), 'item')} for {cut.rows}")
    ends = [sum(cut.sizes[: place + 1]) for place in range(len(cut.sizes))]
    return [given[end - size : end] for end, size in zip(ends, cut.sizes, strict=True)]


def _of_tensor(cut: _Cut, path: Path, given: Tensor, *, has_rows: bool) -> Sequence[Tensor]:
    if is_foreign(given) or type(given) not in (Tensor, torch.nn.Parameter):
        raise NotSplitError(f"{'.'.join(path)} is a tensor of a class or layout of its own")
    if not has_rows or not given.dim() or given.shape[0] == 1:  # one for all
        return cut.splitter.of_tensor(path, given, cut.sizes, has_rows=False)
    if given.shape[0] != cut.num_rows:
        raise NotSplitError(f"{'.'.join(path)} is {tuple(given.shape)} for {cut.rows}")
    return cut.splitter.of_tensor(path, given, cut.sizes, has_rows=True)


def _parts(
    value: Any,
) -> tuple[Sequence[tuple[str, Any]], Callable[[Sequence[Any]], Any]] | None:
    """Return what a container holds, by names, and a function that makes one like it; None for
    anything else."""
    kind = type(value)
    if kind in (tuple, list):
        return [(str(number), part) for number, part in enumerate(value)], kind
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return [*zip(kind._fields, value, strict=True)], lambda parts: kind(*parts)
    if kind is dict:
        keys = [*value]
        return [(str(key), part) for key, part in value.items()], (
            lambda parts: dict(zip(keys, parts, strict=True))
        )
    if is_dataclass(kind):  # as diffusers' results are
        names = [f.name for f in fields(kind)]
        return [(name, getattr(value, name)) for name in names], (
            lambda parts: kind(**dict(zip(names, parts, strict=True)))
        )
    return None


def joined(results: Sequence[Any], sizes: Sequence[int], device: torch.device) -> Any:
    """Return one result for all rows, on ``device``. Raises NotSplitError where a piece has not the
    rows that it was given."""
    first = results[0]
    if isinstance(first, Tensor):
        rows = [tuple(result.shape[:1]) for result in results]
        if rows != [(size,) for size in sizes]:
            raise NotSplitError(f"its result has other rows than its arguments: {rows}")
        return torch.cat([result.to(device, non_blocking=True) for result in results])
    if isinstance(first, _SCALARS):
        if any(result != first for result in results):
            raise NotSplitError(f"its result has a {type(first).__name__} of its own for each part")
        return first
    parts = [_parts(result) for result in results]
    if any(part is None or len(part[0]) != len(parts[0][0]) for part in parts):  # type: ignore[index]
        raise NotSplitError(f"its result is a {type(first).__name__}")
    held = [[value for _, value in part[0]] for part in parts if part is not None]
    assert parts[0] is not None
    return parts[0][1]([joined(values, sizes, device) for values in zip(*held, strict=True)])
