"""Keep frozen weights of blocks in memory of the host, and have two blocks at a time on the device.

A block's weights come before its forward pass and again before its backward pass, into one of two
*slots*, which the lanes of inference fill (``runtime/run/weight_stream.py``): on a GPU a stream of
its own copies the block that comes next while this one is computed. Frozen weights do not change,
so nothing is copied back. What autograd saves of a weight is its name: when the backward pass asks
for it, the block is brought again.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from strop.errors import OptionError, UnsupportedError
from strop.runtime.run.pinned_memory import pinned
from strop.runtime.run.weight_layout import aligned
from strop.runtime.run.weight_stream import lane_for
from strop.train.setting import SLOTS
from strop.wording import counted

_LISTS = ("transformer_blocks", "single_transformer_blocks", "resnets")  # whose modules are blocks


def chosen(network: nn.Module, count: int) -> list[nn.Module]:
    """Return so many blocks of a UNet or a transformer, evenly spaced, so that other blocks give
    their copies time. Raises OptionError if it has fewer."""
    blocks = [
        part
        for path, part in network.named_modules()
        if path.rpartition(".")[0].rpartition(".")[2] in _LISTS
    ]
    if count > len(blocks):
        raise OptionError(
            f"blocks_to_swap is {count}: the {type(network).__name__} has "
            f"{counted(len(blocks), 'block')}"
        )
    return [blocks[(2 * place + 1) * len(blocks) // (2 * count)] for place in range(count)]


def move(
    module: nn.Module, device: torch.device, dtype: torch.dtype | None, away: Sequence[nn.Module]
) -> None:
    """Move a module to a device and into a type; weights of the blocks that are ``away`` stay where
    they are."""
    if not away:
        nn.Module.to(module, device, dtype)
        return
    if dtype is not None:
        nn.Module.to(module, dtype)
    inside = {part for block in away for part in block.modules()}
    for part in module.modules():
        if part not in inside:
            part._apply(lambda tensor: tensor.to(device), recurse=False)


@dataclass(frozen=True)
class _Weight:
    """Hold a weight with its places: in the host's memory, and in each slot."""

    parameter: nn.Parameter
    away: Tensor
    here: tuple[Tensor, ...]


@dataclass(frozen=True)
class _Block:
    source: Tensor  # its bytes in the host's memory
    weights: tuple[_Weight, ...]


@dataclass(frozen=True)
class _Saved:
    """Name what autograd has saved of a block: a part of its bytes, from ``start`` on."""

    block: int
    start: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]


@dataclass(frozen=True)
class _Others:
    """Hold what hooks that were there before, such as those of checkpoints, keep of a tensor."""

    kept: Any


class BlockSwap:
    """Has the weights of each of these blocks on the device while it is computed.

    Results have the bits of those without: weights are copied, and nothing is computed otherwise.
    """

    def __init__(self, blocks: Sequence[nn.Module], device: torch.device) -> None:
        """Take over the frozen weights of ``blocks``; all else of them moves to ``device``. Raises
        UnsupportedError for weights that are no plain tensors."""
        layouts = [_laid_out(block) for block in blocks]
        sizes = [sum(aligned(_bytes_of(p)) for p in layout) for layout in layouts]
        self._store = pinned(sum(sizes), for_gpu=device.type == "cuda")
        self._size = max(sizes)
        self._slots = torch.empty(SLOTS * self._size, dtype=torch.uint8, device=device)
        self._address = self._slots.untyped_storage().data_ptr()
        self._lane = lane_for(self._slots)
        self._lane.begin()
        self._blocks: list[_Block] = []
        start = 0
        for layout, size in zip(layouts, sizes, strict=True):
            self._blocks.append(self._taken(layout, self._store[start : start + size]))
            start += size
        self.inside: list[int | None] = [None] * SLOTS  # the block that each slot has
        self.copies = self.late = 0  # of blocks; those that were waited for at once
        self._coming: set[int] = set()  # slots whose copy nothing has waited for
        self._used = 0  # the slot of the block that was used last
        self._followers: dict[tuple[bool, int], int] = {}
        self._last: tuple[bool, int] | None = None
        for number, block in enumerate(blocks):
            for part in block.modules():
                for weight in part.parameters(recurse=False):
                    if weight.requires_grad:
                        weight.data = weight.data.to(device)
                for name, buffer in part.named_buffers(recurse=False):
                    setattr(part, name, buffer.to(device))
            block.forward = self._brought(number, block.forward)

    @property
    def host_bytes(self) -> int:
        """Return the bytes of weights that lie in the host's memory."""
        return self._store.numel()

    @property
    def device_bytes(self) -> int:
        """Return the bytes of the slots."""
        return self._slots.numel()

    @torch.no_grad()
    def _taken(self, layout: Sequence[nn.Parameter], source: Tensor) -> _Block:
        """Copy weights into the host's store, which is where they lie from now on."""
        weights, start = [], 0
        for parameter in layout:
            strides = torch.empty_like(parameter, device="meta").stride()
            size, dtype = parameter.shape, parameter.dtype
            away = _view(source, start, dtype, size, strides)
            away.copy_(parameter)
            here = tuple(
                _view(self._slots, slot * self._size + start, dtype, size, strides)
                for slot in range(SLOTS)
            )
            parameter.data = away
            weights.append(_Weight(parameter, away, here))
            start += aligned(_bytes_of(parameter))
        return _Block(source, tuple(weights))

    # ---- what comes and goes -------------------------------------------------------------------

    def bring(self, number: int) -> int:
        """Have a block on the device, and the one that followed it last time on its way. Return its
        slot."""
        now = (torch._C._current_graph_task_id() != -1, number)  # whether in a backward pass
        is_new = now != self._last
        if is_new and self._last is not None:
            self._followers[self._last] = number
        self._last = now
        if number not in self.inside:
            self._copy(number, self._free_slot())
            self.late += 1
        slot = self.inside.index(number)
        self._used = slot
        if slot in self._coming:
            self._lane.wait(slot)
            self._coming.discard(slot)
            for weight in self._blocks[number].weights:
                weight.parameter.data = weight.here[slot]
        following = self._followers.get(now) if is_new else None
        if following is not None and following not in self.inside:
            self._copy(following, 1 - slot)
        return slot

    def _free_slot(self) -> int:
        """Return an empty slot, or the one that does not have the block that was used last."""
        if None in self.inside:
            return self.inside.index(None)
        return 1 - self._used

    def _copy(self, number: int, slot: int) -> None:
        before = self.inside[slot]
        if before is not None:
            for weight in self._blocks[before].weights:
                weight.parameter.data = weight.away
        self._lane.give_up(slot)
        block = self._blocks[number]
        place = self._slots[slot * self._size :][: block.source.numel()]
        self._lane.copy(slot, [(place, block.source)])
        self.inside[slot] = number
        self._coming.add(slot)
        self.copies += 1

    # ---- what autograd saves -------------------------------------------------------------------

    def _brought(self, number: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def run(*args: Any, **given: Any) -> Any:
            self.bring(number)
            if not torch.is_grad_enabled():
                return forward(*args, **given)
            with self._naming_weights():
                return forward(*args, **given)

        return run

    @contextmanager
    def _naming_weights(self) -> Iterator[None]:
        """Have autograd save names of weights. All else is saved as the hooks around this want it,
        since of hooks inside of each other torch calls the inner ones alone."""
        around = torch._C._autograd._top_saved_tensors_default_hooks(False)

        def pack(tensor: Tensor) -> Any:
            named = self._named(tensor)
            if named is not None or around is None:
                return tensor if named is None else named
            return _Others(around[0](tensor))

        def unpack(kept: Any) -> Tensor:
            if isinstance(kept, _Saved):
                return self._again(kept)
            found: Tensor = around[1](kept.kept) if isinstance(kept, _Others) else kept
            return found

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    def _named(self, tensor: Tensor) -> _Saved | None:
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided:
            return None
        if tensor.untyped_storage().data_ptr() != self._address:
            return None
        slot, start = divmod(int(tensor.storage_offset()) * tensor.element_size(), self._size)
        number = self.inside[slot]
        assert number is not None
        return _Saved(number, start, tensor.dtype, tensor.shape, tensor.stride())

    def _again(self, saved: _Saved) -> Tensor:
        start = self.bring(saved.block) * self._size + saved.start
        return _view(self._slots, start, saved.dtype, saved.size, saved.stride)


def install(network: nn.Module, count: int, device: torch.device) -> BlockSwap:
    """Swap so many blocks of a network whose other parts lie on the device. Raises
    UnsupportedError for weights that several parts share, or that are no plain tensors."""
    blocks = chosen(network, count)
    inside = [set(block.modules()) for block in blocks]
    inside.append({*network.modules()}.difference(*inside))
    owners = Counter(
        weight
        for parts in inside
        for weight in {one for part in parts for one in part.parameters(recurse=False)}
    )
    if max(owners.values()) > 1:
        raise UnsupportedError(
            "blocks_to_swap: blocks share a weight with each other or with the rest of the model, "
            "which is not moved; leave it out"
        )
    return BlockSwap(blocks, device)


def _laid_out(block: nn.Module) -> list[nn.Parameter]:
    """Return the weights of a block that are not trained."""
    frozen = [weight for weight in block.parameters() if not weight.requires_grad]
    for weight in frozen:
        if type(weight) is not nn.Parameter or type(weight.data) is not Tensor:
            raise UnsupportedError(
                f"blocks_to_swap: a weight is a {type(weight.data).__name__}, which is not moved; "
                "leave --base_weights or --blocks_to_swap out"
            )
    return frozen


def _bytes_of(weight: Tensor) -> int:
    return weight.numel() * weight.element_size()


def _view(
    flat: Tensor, start: int, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int]
) -> Tensor:
    """Return a tensor that lies in these bytes from ``start`` on."""
    origin = flat.storage_offset() + start
    return flat.new_empty(0, dtype=dtype).set_(
        flat.untyped_storage(), origin // dtype.itemsize, tuple(size), tuple(stride)
    )
