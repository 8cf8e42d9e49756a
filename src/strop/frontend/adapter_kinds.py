"""Say of each kind of adapter what it adds to the weight of the layer that peft has wrapped.

A layer that computes what a plain one with another weight does is *folded*: that weight stands for
the layer's own and all adapters.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Factors = tuple[Tensor, Tensor]  # (rows, rank) and (rank, columns): their product is added


@dataclass(frozen=True, slots=True)
class Term:
    """This is one adapter's part of a weight: ``scale`` times the product of ``factors``, or where
    there are none, times ``delta``, which is computed in at least fp32. Rows of the weight are then
    multiplied, so that those of W0 and this part alone would have these ``lengths``, if any."""

    scale: float
    factors: Factors | None
    delta: Callable[[], Tensor]
    lengths: Tensor | None = None


def _no(layer: Any, name: str) -> None:
    return None


@dataclass(frozen=True, slots=True)
class AdapterKind:
    """This says of a class of wrapped layers: the class of the plain ones in them, which attributes
    hold tensors by the name of an adapter, whether a layer can be folded, and what an adapter of
    scale 1 adds, in some shape of as many elements. ``factors`` gives None where that is no product
    of two matrices, ``lengths`` where rows keep theirs, ``bias`` where it adds nothing to the
    layer's bias."""

    base: type[nn.Module]
    tables: tuple[str, ...]
    is_exact: Callable[[Any], bool]
    delta: Callable[[Any, str], Tensor]
    factors: Callable[[Any, str], Factors | None] = _no
    lengths: Callable[[Any, str], Tensor | None] = _no
    bias: Callable[[Any, str], Tensor | None] = _no

    def places(self, layer: nn.Module) -> list[tuple[dict[str, Any], str]]:
        """Return where the tensors of all adapters are held, of inactive ones too."""
        found: list[tuple[dict[str, Any], str]] = []
        for table in self._tables(layer):
            for owner in (table, *table._modules.values()):
                if owner is not None and (own := owner._parameters):
                    found += [(own, key) for key in own]
        return found

    def tensors(self, layer: nn.Module) -> list[Tensor]:
        """Return the tensors of all adapters, of inactive ones too."""
        found = [table[key] for table, key in self.places(layer)]
        return [tensor for tensor in found if tensor is not None]

    def has(self, layer: nn.Module, name: str) -> bool:
        """Tell whether a layer has an adapter of this name."""
        tables = self._tables(layer)
        return any(name in table._modules or name in table._parameters for table in tables)

    def _tables(self, layer: nn.Module) -> list[nn.Module]:
        found = map(layer._modules.get, self.tables)
        return [table for table in found if table is not None]

    def term(self, layer: Any, name: str, scale: float) -> Term:
        """Return what an adapter adds; ``scale`` multiplies its own."""
        own = float(layer.scaling[name]) * scale
        delta = partial(self.delta, layer, name)
        return Term(own, self.factors(layer, name), delta, self.lengths(layer, name))

    def bias_term(self, layer: Any, name: str, scale: float) -> Term | None:
        """Return what an adapter adds to the bias, or None."""
        found = self.bias(layer, name)
        if found is None:
            return None
        return Term(float(layer.scaling[name]) * scale, None, partial(_wide, found))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


# LoRA (https://arxiv.org/abs/2106.09685) and DoRA (https://arxiv.org/abs/2402.09353)


def _lora_factors(layer: Any, name: str) -> Factors | None:
    if name in layer.lora_variant:
        return None  # the sum is multiplied
    parts = layer._modules  # thousands of reads, for which peft and torch call functions
    first, second = (parts[n]._modules[name]._parameters["weight"] for n in ("lora_A", "lora_B"))
    return _flat(second), _flat(first)


def _flat(factor: Tensor) -> Tensor:
    return factor if factor.dim() == 2 else factor.flatten(1)


def _lora_delta(layer: Any, name: str) -> Tensor:
    first, second = layer.lora_A[name].weight, layer.lora_B[name].weight
    return _wide(_flat(second)) @ _wide(_flat(first))


def _dora_lengths(layer: Any, name: str) -> Tensor | None:
    if name not in layer.lora_variant:
        return None
    lengths: Tensor = layer.lora_magnitude_vector[name].weight
    return lengths


_DORA = frozenset(f"Dora{kind}Variant" for kind in ("Linear", "Conv1d", "Conv2d", "Conv3d"))


def _lora_bias(layer: Any, name: str) -> Tensor | None:
    found: Tensor | None = layer.lora_B[name].bias
    return found


def _is_plain_lora(layer: Any) -> bool:
    has_bias = any(layer.lora_bias.values())
    if has_bias and (layer.lora_variant or layer.base_layer.bias is None):
        return False
    if getattr(layer, "fan_in_fan_out", False):
        return False
    return not layer.lora_variant or _is_dora(layer.lora_variant.values())


def _is_dora(variants: Iterable[Any]) -> bool:
    """Tell whether all variants are DoRA, and peft keeps no lengths that may be of old factors."""
    own = sys.modules["peft.tuners.lora.variants"]
    kinds = {v if isinstance(v, type) else type(v) for v in variants}
    known = {vars(own).get(name) for name in _DORA}
    return kinds <= known and not sys.modules["peft.tuners.lora.dora"].ENABLE_DORA_CACHING


# What the first of two convolutions has to have in common with the layer's own.
_WINDOW = ("stride", "padding", "dilation", "padding_mode", "groups")


def _is_plain_convolution(layer: Any) -> bool:
    """Tell whether each first factor moves over pictures as the layer does, whose groups and
    dilation peft does not pass on."""
    base = layer.base_layer
    firsts = layer.lora_A.values()
    same = (getattr(base, n) == getattr(first, n) for first in firsts for n in _WINDOW)
    return base.groups == 1 and _is_plain_lora(layer) and all(same)


def _table_factors(layer: Any, name: str) -> Factors:
    """Return the factors of a table, whose rows peft has as columns."""
    first, second = (layer._modules[f"lora_embedding_{n}"]._parameters[name] for n in ("A", "B"))
    return first.t(), second.t()


def _table_delta(layer: Any, name: str) -> Tensor:
    rows, columns = _table_factors(layer, name)
    return _wide(rows) @ _wide(columns)


def _is_plain_table(layer: Any) -> bool:
    """Tell whether rows are looked up as they are: torch writes to those that exceed a norm."""
    return layer.base_layer.max_norm is None and not layer.lora_variant


# LoHa (https://arxiv.org/abs/2108.06098) and LoKr (https://arxiv.org/abs/2309.14859)


def _pads_with_zeros(layer: Any) -> bool:
    """Tell whether the layer pads as the convolution does that peft adds to it."""
    return bool(layer.base_layer.padding_mode == "zeros")


def _always(layer: Any) -> bool:
    return True


def _loha_delta(layer: Any, name: str) -> Tensor:
    one, two = (_product(layer, f"hada_w{n}", f"hada_t{n}", name) for n in (1, 2))
    return one * two


def _lokr_delta(layer: Any, name: str) -> Tensor:
    one, two = (_part(layer, f"lokr_w{n}", f"lokr_t{n}", name) for n in (1, 2))
    if two.dim() == 4:
        one = one[:, :, None, None]
    return torch.kron(one, two.contiguous())


def _part(layer: Any, start: str, core: str, name: str) -> Tensor:
    whole = layer._modules[start]
    return _wide(whole[name]) if name in whole else _product(layer, start, core, name)


def _product(layer: Any, start: str, core: str, name: str) -> Tensor:
    """Return the product of two factors, or of a core (rank, rank, height, width) and both."""
    left, right = (_wide(layer._modules[f"{start}_{n}"][name]) for n in ("a", "b"))
    cores = layer._modules.get(core)
    if cores is None or name not in cores:
        return left @ right
    return torch.einsum("ijkl,ip,jr->prkl", _wide(cores[name]), left, right)


_LORA = ("lora_A", "lora_B", "lora_magnitude_vector")
_TABLE = ("lora_embedding_A", "lora_embedding_B")
_LOHA = tuple(f"hada_{n}" for n in ("w1_a", "w1_b", "w2_a", "w2_b", "t1", "t2"))
_LOKR = tuple(f"lokr_{n}" for n in ("w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b", "t2"))
_LORA_FUNCTIONS = (_lora_delta, _lora_factors, _dora_lengths, _lora_bias)
# By the module and the name of the wrapped layer's class.
FOLDED: Mapping[tuple[str, str], AdapterKind] = {
    ("peft.tuners.lora.layer", "Linear"): AdapterKind(
        nn.Linear, _LORA, _is_plain_lora, *_LORA_FUNCTIONS
    ),
    **{
        ("peft.tuners.lora.layer", base.__name__): AdapterKind(
            base, _LORA, _is_plain_convolution, *_LORA_FUNCTIONS
        )
        for base in (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    },
    ("peft.tuners.lora.layer", "Embedding"): AdapterKind(
        nn.Embedding, _TABLE, _is_plain_table, _table_delta, _table_factors
    ),
    ("peft.tuners.loha.layer", "Linear"): AdapterKind(nn.Linear, _LOHA, _always, _loha_delta),
    ("peft.tuners.loha.layer", "Conv2d"): AdapterKind(
        nn.Conv2d, _LOHA, _pads_with_zeros, _loha_delta
    ),
    ("peft.tuners.lokr.layer", "Linear"): AdapterKind(nn.Linear, _LOKR, _always, _lokr_delta),
    ("peft.tuners.lokr.layer", "Conv2d"): AdapterKind(
        nn.Conv2d, _LOKR, _pads_with_zeros, _lokr_delta
    ),
}


def name_of(layer: nn.Module) -> tuple[str, str]:
    return type(layer).__module__, type(layer).__name__


def kind_of(layer: nn.Module) -> AdapterKind:
    return FOLDED[name_of(layer)]
