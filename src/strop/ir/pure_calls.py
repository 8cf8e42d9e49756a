"""Tell which operators of torch leave nothing behind but their results, and draw no numbers.

A run of such calls may be taken back: its results are forgotten. So an operator must not end the
process either, as torch's do on a GPU where an index is out of range, or an assertion fails. The
families here read no index. Schemas and tags say whether one of them writes or draws, but not
everything: a batch norm that trains writes its statistics, an LSTM that trains draws what it drops.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch

from strop.ir.overloads import overload_of

# how names begin, behind underscores
_FAMILIES = (
    *("convolution", "conv_", "cudnn_convolution", "lstm", "gru", "rnn_", "thnn_fused"),
    *("avg_pool", "max_pool", "adaptive_", "fractional_max_pool", "grid_sampler", "upsample_"),
    *("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "sort", "topk", "kthvalue"),
    *("native_batch_norm", "native_group_norm", "native_layer_norm", "cudnn_batch_norm"),
    *("mm", "addmm", "bmm", "baddbmm", "int_mm", "scaled_mm", "weight_int", "cdist", "fft_"),
    *("scaled_dot_product", "im2col", "col2im", "reflection_pad", "replication_pad", "view"),
)
# arguments by which an operator draws numbers, or writes statistics
_TRAINING = ("train", "training", "use_input_stats", "dropout_p")


def is_pure_call(attrs: Mapping[str, Any]) -> bool:
    """Say so of a call by its target and its arguments."""
    target = attrs.get("target")
    if not isinstance(target, str) or not _is_functional(target):
        return False
    names = _names(target)
    given = {**dict(zip(names, attrs["args"], strict=False)), **dict(attrs["kwargs"])}
    return not any(given.get(name, name in names) for name in _TRAINING)


@lru_cache(maxsize=1024)
def _is_functional(target: str) -> bool:
    space, _, name = target.partition(".")
    if space != "aten" or not name.lstrip("_").startswith(_FAMILIES):
        return False
    found = overload_of(target)
    if found is None:
        return False
    may_draw = torch.Tag.nondeterministic_seeded in found.tags
    decides = any(argument.name in _TRAINING for argument in found._schema.arguments)
    return not found._schema.is_mutable and (decides or not may_draw)


@lru_cache(maxsize=1024)
def _names(target: str) -> tuple[str, ...]:
    return tuple(argument.name for argument in overload_of(target)._schema.arguments)
