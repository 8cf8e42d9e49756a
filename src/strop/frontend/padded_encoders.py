"""Trace torch's transformers where their own code decides by the values of a mask.

``nn.TransformerEncoder`` and ``nn.TransformerDecoder`` compare a mask with the causal one, and tell
attention of it; traced, attention reads the mask that it is given. Without gradients, and where a
padding mask leaves the first tokens of each sequence, the encoder packs these, and its last layer's
results are zero elsewhere. A trace has no size that values decide: all tokens are computed, and
zeros written where eager has them.

Source: torch/nn/modules/transformer.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import transformer

from strop.frontend.quick import replaced_here

_Run = Callable[..., Any]


@contextmanager
def padded_encoders() -> Iterator[None]:
    """Ask no mask for its values within the body, in this thread."""
    with (
        replaced_here(nn.TransformerEncoder, "forward", _encoded),
        replaced_here(transformer, "_detect_is_causal_mask", _told),
    ):
        yield


def _encoded(
    usual: _Run,
    encoder: nn.TransformerEncoder,
    src: Tensor,
    mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool | None = None,
) -> Any:
    padding = src_key_padding_mask
    if mask is None and padding is not None and _may_pack(encoder, src):
        return _as_packed(encoder, src, padding)
    return usual(encoder, src, mask, padding, is_causal)


def _told(usual: _Run, mask: Any, is_causal: bool | None = None, size: Any = None) -> bool:
    return is_causal is True


def _may_pack(encoder: nn.TransformerEncoder, src: Tensor) -> bool:
    """Tell whether the encoder would pack tokens where a mask leaves the first ones. Programs for
    inference run without gradients."""
    return (
        torch.backends.mha.get_fastpath_enabled()
        and bool(getattr(encoder, "use_nested_tensor", False))
        and not encoder.layers[0].training
        and src.dim() == 3
        and not torch.is_autocast_enabled(src.device.type)
    )


def _as_packed(encoder: nn.TransformerEncoder, src: Tensor, padding: Tensor) -> Tensor:
    added = F._canonical_mask(padding, "src_key_padding_mask", None, "mask", src.dtype)
    assert added is not None
    kept = added.logical_not()
    if getattr(encoder, "mask_check", True):
        is_packed = ~(kept[:, 1:] & ~kept[:, :-1]).any()
    else:  # as many of the first tokens as the mask leaves of all
        kept = torch.arange(src.shape[1], device=src.device) < kept.sum(1, keepdim=True)
        is_packed = torch.ones((), dtype=torch.bool, device=src.device)
    left_out = ~kept & is_packed
    added = torch.where(is_packed, torch.zeros_like(added), added)
    added = added.masked_fill(left_out, float("-inf"))
    output = src
    for layer in encoder.layers:
        output = layer(output, src_mask=None, is_causal=False, src_key_padding_mask=added)
    output = output.masked_fill(left_out[:, :, None], 0)
    return output if encoder.norm is None else encoder.norm(output)
