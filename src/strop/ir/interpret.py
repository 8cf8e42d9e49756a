"""Runs loop IR with plain torch in fp64: the judge of both code generators.

Every value is a tensor with one dimension for each axis, rows first; axes that a value does not
vary over have size 1 there. Floats are fp64 throughout and round only where the IR says so (a
``cast``, a store); integers and bools are exact in their own types.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from strop.ir.dims import Env, Expr
from strop.ir.loops import (
    Apply,
    Bag,
    CheckIndex,
    Index,
    Literal,
    Load,
    LoopKernel,
    OfPair,
    Position,
    Reduce,
    Stmt,
    Store,
)
from strop.ir.ops import OPS, of_nothing


def run(kernel: LoopKernel, tensors: Sequence[torch.Tensor], env: Env) -> None:
    """Execute ``kernel`` on raw storages, one tensor a param, writing the outputs in place."""
    buffers = [_flat(tensor) for tensor in tensors]
    axes = kernel.rows + kernel.cols
    state = _State(
        buffers=buffers,
        env=env,
        sizes=tuple(axis.size.eval(env) for axis in axes),
        place={axis.name: i for i, axis in enumerate(axes)},
        reduced=tuple(i for i, axis in enumerate(axes) if axis.reduced),
    )
    for stmt in kernel.body + kernel.tail:
        state.execute(stmt)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """View all that can be reached from the first element on, as the kernel's pointer sees it."""
    room = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
    return tensor.as_strided((room,), (1,))


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype.is_floating_point else dtype


@dataclass
class _State:
    buffers: list[torch.Tensor]
    env: Env
    sizes: tuple[int, ...]
    place: dict[str, int]
    reduced: tuple[int, ...]
    values: dict[str, torch.Tensor] = field(default_factory=dict)

    def execute(self, stmt: Stmt) -> None:
        if isinstance(stmt, Load):
            self.values[stmt.out] = self._load(stmt)
        elif isinstance(stmt, CheckIndex):
            self.values[stmt.out] = self._place(stmt)
        elif isinstance(stmt, Literal):
            value = stmt.value.eval(self.env) if isinstance(stmt.value, Expr) else stmt.value
            scalar = torch.tensor(value, dtype=_exact(stmt.dtype))
            self.values[stmt.out] = scalar.reshape([1] * len(self.sizes))
        elif isinstance(stmt, Position):
            self.values[stmt.out] = self._elements(stmt.index).to(stmt.dtype)
        elif isinstance(stmt, Apply):
            self.values[stmt.out] = self._apply(stmt)
        elif isinstance(stmt, OfPair):
            self.values[stmt.out] = self.values[stmt.value].narrow(-1, int(stmt.take == "odd"), 1)
        elif isinstance(stmt, Reduce):
            results = self._reduce(stmt)
            for out, result in zip(stmt.outs, results, strict=True):
                self.values[out] = result.to(_exact(stmt.dtype))
        else:
            self._store(stmt)

    def _elements(self, index: Index) -> torch.Tensor:
        """Return the index at every point of the axes that it varies over."""
        total = torch.full([1] * len(self.sizes), index.offset.eval(self.env))
        for axis, stride in index.strides:
            place = self.place[axis]
            shape = [1] * len(self.sizes)
            shape[place] = self.sizes[place]
            total = total + torch.arange(self.sizes[place]).view(shape) * stride.eval(self.env)
        return total

    def _load(self, stmt: Load) -> torch.Tensor:
        if stmt.bag is not None:
            return self._bag(stmt, stmt.bag)
        elements = self._elements(stmt.index)
        for name, stride in stmt.lookups:
            elements = elements + self.values[name].long() * stride.eval(self.env)
        if stmt.guard is None:
            return self.buffers[stmt.param][elements].to(_exact(stmt.dtype))
        guard = self.values[stmt.guard]
        if not self.buffers[stmt.param].numel():  # nothing to load, and the guard never holds
            return torch.zeros(elements.shape, dtype=_exact(self.buffers[stmt.param].dtype))
        found = self.buffers[stmt.param][torch.where(guard, elements, 0)]
        return torch.where(guard, found, torch.zeros_like(found)).to(_exact(stmt.dtype))

    def _bag(self, stmt: Load, bag: Bag) -> torch.Tensor:
        """Take one id of each bag after the other, as long as some bag has one."""
        first, length = (self.values[name].long() for name, _ in stmt.lookups)
        elements, size = self._elements(stmt.index), bag.size.eval(self.env)
        shape = torch.broadcast_shapes(elements.shape, first.shape, length.shape)
        total, is_empty = torch.zeros(shape, dtype=torch.float64), torch.ones(shape).bool()
        for step in range(int(length.max()) if length.numel() else 0):
            at = torch.where(step < length, first + step, 0)
            ids = self.buffers[bag.ids][at + bag.at.eval(self.env)].long()
            is_one = (step < length) & (ids != bag.padding if bag.padding is not None else True)
            if bool((is_one & ((ids < 0) | (ids >= size))).any()):
                raise IndexError(f"an id of {stmt.out} is outside of a dim of size {size}")
            rows = torch.where(is_one, ids, 0) * bag.stride.eval(self.env) + elements
            found = self.buffers[stmt.param][rows].double()
            if bag.weights is not None:
                factors = self.buffers[bag.weights][at + bag.weights_at.eval(self.env)]
                found = found * factors.double()
            total = _with_row(bag.kind, total, found, is_one, is_empty)
            is_empty = is_empty & ~is_one
        return total

    def _place(self, stmt: CheckIndex) -> torch.Tensor:
        place, size = self.values[stmt.value], stmt.size.eval(self.env)
        if stmt.wraps:
            place = torch.where(place < 0, place + size, place)
        outside = (place < 0) | (place >= size)
        wanted = outside if stmt.guard is None else outside & self.values[stmt.guard]
        if bool(wanted.any()):
            raise IndexError(f"{stmt.value} is outside of a dim of size {size}")
        return torch.where(outside, 0, place)

    def _apply(self, stmt: Apply) -> torch.Tensor:
        args = [self.values[arg] for arg in stmt.args]
        if stmt.op == "cast":
            return args[0].to(stmt.dtype).to(_exact(stmt.dtype))
        reference = OPS[stmt.op].reference
        assert reference is not None, stmt.op
        result: torch.Tensor = reference(*args, **dict(stmt.attrs))
        return result.to(_exact(stmt.dtype))

    def _reduce(self, stmt: Reduce) -> tuple[torch.Tensor, ...]:
        arg = self.values[stmt.arg]
        full = [self.sizes[i] if i in self.reduced else n for i, n in enumerate(arg.shape)]
        arg = arg.expand(full)
        if stmt.kind == "moments":
            var, mean = torch.var_mean(arg, self.reduced, correction=0, keepdim=True)
            return mean, var
        if stmt.kind == "sum":
            return (torch.sum(arg, self.reduced, keepdim=True),)
        if stmt.kind == "prod":
            for place in self.reduced:
                arg = torch.prod(arg, place, keepdim=True)
            return (arg,)
        extreme = {"amax": torch.amax, "amin": torch.amin}[stmt.kind]
        if any(arg.shape[i] == 0 for i in self.reduced):
            kept = [1 if i in self.reduced else n for i, n in enumerate(arg.shape)]
            return (torch.full(kept, of_nothing(stmt.kind, arg.dtype), dtype=arg.dtype),)
        return (extreme(arg, self.reduced, keepdim=True),)

    def _store(self, stmt: Store) -> None:
        buffer, value = self.buffers[stmt.param], self.values[stmt.value]
        elements = self._elements(stmt.index)
        shape = [max(pair) for pair in zip(elements.shape, value.shape, strict=True)]
        buffer[elements.expand(shape)] = value.to(buffer.dtype).expand(shape)


def _with_row(
    kind: str, total: torch.Tensor, row: torch.Tensor, is_one: torch.Tensor, is_first: torch.Tensor
) -> torch.Tensor:
    """Add a row to what a bag comes to, where there is one."""
    if kind == "sum":
        return total + torch.where(is_one, row, 0.0)
    return torch.where(is_one & (is_first | (row > total)), row, total)
