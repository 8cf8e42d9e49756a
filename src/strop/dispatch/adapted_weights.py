"""Decide for the layers of a module that peft has wrapped what a program reads in their place: one
weight with all adapters in it (``effective_weights``), which takes the memory of the layers twice,
or the layer's own weight and two factors of low rank (``low_rank_weights``), which take little.

The first costs a step nothing. So it is what happens unless the device has no room for it, or
``Options.lora`` says otherwise, or rows of a batch have adapters of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from strop.dispatch.adapter_weights import AdapterWeights
from strop.dispatch.effective_weights import EffectiveWeights
from strop.dispatch.low_rank_weights import LowRankWeights, RowAdapters
from strop.errors import UnsupportedError
from strop.frontend.adapted_layers import may_fold
from strop.frontend.low_rank_layers import has_low_rank
from strop.options import Options
from strop.wording import counted

RESERVE_BYTES = 2 << 30  # of device memory, for what a call needs besides weights


class AdaptedWeights:
    """Hold what stands for the weights of all adapted layers of one module, in both modes."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self.merged = EffectiveWeights()
        self.low_rank = LowRankWeights(options.lora_max_rank)
        self.stay_beside(is_wanted=False)
        self.reason = ""  # for the mode of the layers that have a low-rank part
        self._has_found_memory_short = False
        self._used: tuple[AdapterWeights[Any], ...] = ()  # the modes that serve a layer

    def stay_beside(self, *, is_wanted: bool) -> None:
        """Compute adapters beside the weights wherever they can be, as under a budget, in which a
        second copy has no room, unless the user wants them merged; or decide as ever."""
        is_wanted |= bool(self._options.weights_budget_bytes)
        mode = self._options.lora
        self._mode = "unmerged" if is_wanted and mode == "auto" else mode
        self.low_rank.may_lie_apart = is_wanted

    @property
    def _both(self) -> tuple[AdapterWeights[Any], ...]:
        return self.merged, self.low_rank

    def __len__(self) -> int:
        return sum(map(len, self._both))

    @property
    def size_bytes(self) -> int:
        return sum(weights.size_bytes for weights in self._both)

    @property
    def num_writes(self) -> int:
        return sum(weights.num_writes for weights in self._both)

    @property
    def tables(self) -> Mapping[int, dict[str, Any]]:
        """Return, by the id of a layer that is wrapped, what is read in the place of its Parameters
        or beside them."""
        return {**self.merged.tables, **self.low_rank.tables}

    @property
    def stand_ins(self) -> dict[int, nn.Module]:
        """Return, by the id of a wrapped layer, the plain one that stands for it."""
        return self.merged.stand_ins | self.low_rank.stand_ins

    @property
    def rows(self) -> RowAdapters | None:
        return self.low_rank.rows

    def scan(self, module: nn.Module, parts: Sequence[nn.Module]) -> None:
        """Look for adapted layers among all parts of a module, and decide how each is served."""
        able = _able(module, parts)
        if not able:
            self._has_found_memory_short, self.reason = False, ""
        if self.rows is not None:
            _refuse_others(module, able)
        chosen = able if able and self._wants_low_rank(able) else []
        self.low_rank.scan(chosen)
        self.merged.scan(module, parts, {id(part) for part in chosen})
        self._used = tuple(weights for weights in self._both if len(weights))

    def have_called(self, before_write: Callable[[], object]) -> None:
        """Have this called before anything is written that runs may still read."""
        for weights in self._both:
            weights.before_write = before_write

    def take_rows(self, module: nn.Module, rows: RowAdapters | None) -> None:
        """Have rows of a batch take adapters of their own from the next call on, or no longer.
        Raises UnsupportedError where layers have adapters that cannot be taken so."""
        if rows is not None:
            _refuse_others(module, _able(module, list(module.modules())))
        self.low_rank.rows = rows

    def rows_refusal(self) -> str:
        """Say why rows cannot take adapters of their own though they are to, or nothing."""
        if self.rows is None or len(self.low_rank):
            return ""
        return "no layer has adapters that rows could take, or its model acts on them"

    def begin_look(self) -> None:
        for weights in self._used:
            weights.begin_look()

    def seem_others(self, scale: float) -> bool:
        """Tell quickly, and not surely, whether something is to be written."""
        return any(weights.seem_others(scale) for weights in self._used)

    def needs_refresh(self, scale: float) -> bool:
        """Tell whether something is to be written whether or not anybody has changed adapters."""
        return any(weights.needs_refresh(scale) for weights in self._used)

    def has_other_layers(self) -> bool:
        """Tell whether a layer is to be served in another way."""
        begins = self.rows is not None and not len(self.low_rank)
        return begins or any(weights.has_other_layers() for weights in self._both)

    def refresh(self, scale: float) -> bool:
        """Write anew what has changed, and tell whether something has."""
        written = [weights.refresh(scale) for weights in self._used]
        return any(written)

    def _wants_low_rank(self, able: list[Any]) -> bool:
        if self.rows is not None:
            self.reason = "rows of a batch have adapters of their own"
            return True
        if self._mode != "auto":
            self.reason = f"lora={self._mode!r}"
            return self._mode == "unmerged"
        if self._has_found_memory_short:  # another answer would be another graph
            return True
        needed = self.merged.missing_bytes(able)
        device = able[0].base_layer.weight.device
        free = free_bytes(device) if needed else None
        if free is None:  # what is there stays, or nobody knows
            return False
        self._has_found_memory_short = free < needed + RESERVE_BYTES
        self.reason = (
            f"merged weights of {counted(len(able), 'layer')} need {needed / 1e9:.2f} GB beside"
            f" {RESERVE_BYTES / 1e9:.2f} GB in reserve, and {free / 1e9:.2f} GB were free"
        )
        return self._has_found_memory_short


def _able(module: nn.Module, parts: Sequence[nn.Module]) -> list[Any]:
    """Return the layers of which the low-rank parts can be computed beside the weights."""
    able = [part for part in parts if has_low_rank(part)]
    return able if able and may_fold(module, parts) else []


def _refuse_others(module: nn.Module, able: list[Any]) -> None:
    """Raise UnsupportedError where a layer has adapters which rows cannot take each for itself."""
    known = set(map(id, able))
    for path, part in module.named_modules():
        if hasattr(part, "base_layer") and id(part) not in known:
            raise UnsupportedError(
                f"strop.lora_rows: {path} ({type(part).__name__}) has adapters that are no plain"
                " LoRA of a linear layer or convolution, or a model that acts on them"
            )


def free_bytes(device: torch.device) -> int | None:
    """Return how much memory of a GPU nobody uses, what torch keeps for later among it; None for
    any other device, where nothing is asked."""
    if device.type != "cuda":
        return None
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept
