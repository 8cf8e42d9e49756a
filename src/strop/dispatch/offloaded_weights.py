"""Keep the weights of a model on the host between its calls, as pinned copies that are made once.

The host's copy is the truth: to offload is to let go of the GPU's. That one has to be copied back
only where somebody has written to it, which sums over all of its bits tell: torch counts no writes
to what ``.data`` gives. All weights lie in one flat piece, so that one copy takes them to the GPU;
on a GPU that can, that piece has the same addresses each time, and programs and CUDA graphs that
are bound to them serve as before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol
from weakref import WeakSet

import torch
from torch import Tensor, nn

from strop.dispatch.moved_weights import lie_in
from strop.dispatch.placed_weights import note_wholes, wholes_among
from strop.frontend.composed_tensors import is_composed
from strop.runtime.run.flat_copy import ROW_BYTES, FlatCopy, FlatSums
from strop.runtime.run.growing_memory import GrowingMemory, memory_on
from strop.runtime.run.pinned_memory import pinned
from strop.runtime.run.weight_layout import WeightLayout, layout_of

SPARE = 0.05  # of the larger of two models, which both may take more while one follows the other


class WeightReader(Protocol):
    """Programs of a reader are bound to the weights."""

    def forget_weights(self) -> None:
        """Keep nothing that refers to the weights where they are now."""


class OffloadedWeights:
    """This moves the weights of one module between the host and a GPU."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.module, self.device = module, device
        self.readers = WeakSet[WeightReader]()
        self.num_copied_back = 0  # how often all weights were copied to pinned memory
        self._layout: WeightLayout | None = None
        self._host = torch.empty(0, dtype=torch.uint8)
        self._on_host: list[Tensor] = []  # all of the layout, as views of it
        self._on_gpu: list[Tensor] = []  # the same, where they lie each time that they are there
        self._memory: GrowingMemory | None = None
        self._flat: Tensor | None = None  # on the GPU, while the weights are there
        self._wholes: list[Tensor] = []  # pieces that weights are parts of, where these are
        self._sums: FlatSums | None = None  # of it, as it came
        self._begun: FlatCopy | None = None  # to the GPU, while the model before is still there

    @property
    def size_bytes(self) -> int:
        """Return the memory of the host, and while the model runs of the GPU, that weights
        take."""
        return self._host.numel()

    def __str__(self) -> str:
        size = f"{self.size_bytes / 1e6:.2f} MB"
        return (
            f"weights: {size} on the host between calls, on {self.device} as long while it runs;"
            f" copied to the host {self.num_copied_back}x"
        )

    def is_larger_than(self, before: OffloadedWeights | None) -> bool:
        """Tell whether this takes more memory than a model ``before``, whose working memory must
        then not lie beside these weights: the peak would be higher than in eager."""
        return before is None or self._bytes() > before._bytes()

    def _bytes(self) -> int:
        """Return what the weights take, also before they have been to the host."""
        return self.size_bytes or sum(weight.nbytes for weight in weights_of(self.module))

    def begin(self, before: OffloadedWeights) -> None:
        """Queue copies of weights to the GPU while a model that was there ``before`` may still run:
        as much as both have room for in what the larger one takes, and ``SPARE`` of that."""
        memory = self._memory
        if memory is None or not memory.stays or before._flat is None or self._is_loaded():
            return
        room = int((1 + SPARE) * max(self.size_bytes, before.size_bytes)) - before.size_bytes
        with torch.inference_mode(False), torch.no_grad():
            if self._is_here(movable(self.module), self._host):
                self._begun = FlatCopy(self._host, memory)
                self._begun.go_on(room)

    def load(self) -> bool:
        """Take the weights to the GPU. False: that is to be done in another way, as they are not
        those that were offloaded: so it is the first time, when programs are yet to say how they
        want weights to lie, and where somebody has put others in their place since."""
        if self._is_loaded():
            return True
        with torch.inference_mode(False), torch.no_grad():
            tensors = movable(self.module)
            if not tensors or not self._is_here(tensors, self._host):
                self._stop()
                return False
            self._load(tensors)
        return True

    def offload(self) -> bool:
        """Let go of the GPU's copies, and have the module's weights be those of the host. False:
        that is to be done in another way, since a weight is none of torch's own tensors, or has a
        gradient, or they lie on several devices. No program is then bound to them any more."""
        with torch.inference_mode(False), torch.no_grad():
            tensors = movable(self.module)
            if tensors and self._is_here(tensors, self._host):
                return True
            if not tensors or len({t.device for t in tensors}) > 1:
                self._forget_programs()
                return False
            flat = self._flat
            is_taken = flat is None or not self._is_here(tensors, flat)
            if is_taken or flat is None:
                self._take(tensors)
                self._put(tensors, self._host)
            else:
                now = FlatSums.of(flat)
                self._put(tensors, self._host)  # while the GPU is still at work
                if self._sums is None or not now.equal(self._sums):
                    self._host.copy_(flat)
                    self.num_copied_back += 1
            self._release()
            if is_taken and self.device.type == "cuda":
                torch.cuda.empty_cache()  # the memory that they have left is not theirs next time
        return True

    def is_on_host(self) -> bool:
        """Tell from the first weight whether the weights lie in their copy on the host."""
        first = next(self.module.parameters(), None)
        start = self._host.data_ptr()
        return first is not None and start <= first.data_ptr() < start + self._host.numel()

    def _is_loaded(self) -> bool:
        """Tell, as accelerate does from the first weight, whether the weights are on the GPU."""
        first = next(self.module.parameters(), None)
        if first is None or first.device.type != self.device.type:
            return False
        return self.device.type != "cpu" or (self._flat is not None and not self.is_on_host())

    def _is_here(self, tensors: Sequence[Tensor], flat: Tensor) -> bool:
        layout = self._layout
        is_whole = layout is not None and len(layout.tensors) >= len(tensors)
        return is_whole and layout is not None and layout.holds(tensors, flat)

    def _take(self, tensors: Sequence[Tensor]) -> None:
        """Copy weights to memory of the host, from wherever they are. What is one piece stays
        so."""
        items = [*tensors, *wholes_among(tensors)]
        layout = layout_of(items)
        size = -(-layout.size_bytes // ROW_BYTES) * ROW_BYTES
        host = pinned(size, for_gpu=self.device.type == "cuda")
        for placed, item in zip(layout.tensors, items, strict=True):
            if placed.size_bytes:
                placed.at(host).copy_(item)
        self._layout, self._host, self._on_host = layout, host, layout.all_at(host)
        self._on_gpu = []
        self.num_copied_back += 1
        self._forget_programs()

    def _load(self, tensors: Sequence[Tensor]) -> None:
        memory = self._memory = self._memory or memory_on(self.device)
        copy = self._begun or FlatCopy(self._host, memory)
        self._begun = None
        self._flat, self._sums = copy.finish()
        self._put(tensors, self._flat)

    def _stop(self) -> None:
        """Leave a copy that was begun."""
        if self._begun is not None:
            self._begun.memory.rest()
            self._begun = None

    def _put(self, tensors: Sequence[Tensor], flat: Tensor) -> None:
        assert self._layout is not None
        placed = self._on_host if flat is self._host else self._views_at(flat)
        for tensor, new in zip(tensors, placed, strict=False):
            lie_in(tensor, new)
        self._wholes = placed[len(tensors) :]
        note_wholes(self._wholes, tensors)

    def _views_at(self, flat: Tensor) -> list[Tensor]:
        """Return all of the layout on the GPU. To make these takes some 20 us each, so they are
        kept where memory stays, which has nothing behind its addresses while it rests."""
        assert self._layout is not None
        found = self._on_gpu or self._layout.all_at(flat)
        self._on_gpu = found if self._memory is not None and self._memory.stays else []
        return found

    def _release(self) -> None:
        """Give the GPU its memory back. Who is bound to it stays so if it will be there again."""
        self._flat = self._sums = None
        if self._memory is not None:
            if not self._memory.stays:
                self._forget_programs()
            self._memory.rest()

    def _forget_programs(self) -> None:
        for reader in list(self.readers):
            reader.forget_weights()


def weights_of(module: nn.Module) -> list[Tensor]:
    """Return all tensors that ``module.to`` moves, each once."""
    parts = list(module.modules())
    held = (t for part in parts for t in (*part._parameters.values(), *part._buffers.values()))
    return list({id(t): t for t in held if t is not None}.values())


def movable(module: nn.Module) -> list[Tensor]:
    """Return these tensors, or none if one of them is more than a piece of memory."""
    tensors = weights_of(module)
    return tensors if all(map(_is_plain, tensors)) else []


def _is_plain(tensor: Tensor) -> bool:
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and not is_composed(tensor)
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and tensor.grad is None
    )
