"""Keep operators that torch runs whole while a module is traced.

torch would take them apart: a recurrent layer into a step for each token, a convolution by the
backend that it would choose for the traced sizes. Here each is one call with a shape rule in
arithmetic, and in the program one call of the same ATen overload.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from strop.frontend.differentiated import define
from strop.frontend.formats import pictures, pictures_on_cpu, suggested
from strop.frontend.recurrences import layers

aten = torch.ops.aten
_library = torch.library.Library("strop", "FRAGMENT")


def _lstm_shape(
    x: Tensor,
    hx: Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    width = hx[0].shape[-1] * (2 if bidirectional else 1)
    state = (h.new_empty(h.shape) for h in hx)
    return x.new_empty((*x.shape[:-1], width)), *state


def _recurrent_shape(x: Tensor, hx: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return _lstm_shape(x, (hx,), *rest)


def check_types(*tensors: Tensor | None) -> None:
    """Check types and devices: libraries take one of each, and eager's own error says so better."""
    kinds = {(t.dtype, t.device) for t in tensors if t is not None}
    torch._check(len(kinds) == 1, lambda: f"operands of several types or devices: {kinds}")


def check_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    torch._check(x.shape[-1] == weight.shape[-1])
    torch._check(bias is None or bias.shape[0] == weight.shape[0])
    check_types(x, weight, bias)


# Pieces are views, though schemas of the calls on the left do not say so: what is written into one
# shows in the whole.
WITH_VIEWS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.unsafe_chunk: torch.chunk,
    Tensor.unsafe_chunk: torch.chunk,
    torch.unsafe_split: torch.split,
    Tensor.unsafe_split: torch.split,
    torch.unsafe_split_with_sizes: torch.split_with_sizes,
    Tensor.unsafe_split_with_sizes: torch.split_with_sizes,
}


def call_multilabel_margin_loss(input: Tensor, target: Tensor, *how: Any, **named: Any) -> Tensor:
    """Give the loss of a single sample as a number. torch's decomposition leaves it a dim."""
    loss = F.multilabel_margin_loss(input, target, *how, **named)
    return loss if input.dim() > 1 else loss.reshape(())


def call_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Call a linear whose bias has a number for each column, or one for all. torch adds others."""
    if bias is not None and bias.dim() > 1:
        return torch._C._nn.linear(input, weight, bias)
    if bias is not None and bias.shape != weight.shape[:1]:
        bias = bias.expand(weight.shape[0]).clone()
    result: Tensor = torch.ops.strop.linear(input, weight, bias)
    return result


def spread_alike(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Repeat pictures and heads of operands that have one where others have several, as torch does
    without a library. Any others are an error."""
    lead = [q.shape[:2], k.shape[:2], v.shape[:2]]
    if lead[0] == lead[1] == lead[2]:
        return q, k, v
    together = torch.broadcast_shapes(*lead)
    return tuple(x.expand(*together, *x.shape[2:]) for x in (q, k, v))


def check_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> None:
    """Check sizes as torch does when it computes: what is known of a mask may have attention do
    without, and then nobody else would find that it has other sizes than scores (B, H, S, K)."""
    torch._check(q.shape[-1] == k.shape[-1] and k.shape[2] == v.shape[2])
    torch._check(q.shape[:2] == k.shape[:2] and q.shape[:2] == v.shape[:2])
    check_types(q, k, v)
    sizes = () if mask is None else tuple(reversed(mask.shape))
    for size, full in zip(sizes, (k.shape[2], *reversed(q.shape[:-1])), strict=False):
        if type(size) is not int or size != 1:  # a symbol beside 1 would be fixed as another
            torch._check(size == full or size == 1)


def shaping(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Return the operands whose memory format the result of a convolution takes. On a GPU Strop
    itself lays out the weights. That of a video's depends on the library: contiguous here."""
    if x.dim() == 3:  # a row of pixels, of which eager reads the weights as they lie
        return (weight.unsqueeze(2),)
    return (x, weight) if x.device.type == "cpu" else (x,)


def _convolution_shape(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    rows = zip(
        x.shape[2:], weight.shape[2:], stride, padding, dilation, output_padding, strict=True
    )
    torch._check(x.shape[1] == weight.shape[0 if transposed else 1] * (1 if transposed else groups))
    check_types(x, weight, bias)
    outs = weight.shape[1] * groups if transposed else weight.shape[0]
    torch._check(bias is None or bias.shape == (outs,))
    if transposed:
        sides = [
            (size - 1) * step - 2 * pad + gap * (kernel - 1) + more + 1
            for size, kernel, step, pad, gap, more in rows
        ]
        return _convolved(x, weight, (x.shape[0], outs, *sides))
    sides = [
        (size + 2 * pad - gap * (kernel - 1) - 1) // step + 1
        for size, kernel, step, pad, gap, _ in rows
    ]
    return _convolved(x, weight, (x.shape[0], weight.shape[0], *sides))


def _convolved(x: Tensor, weight: Tensor, shape: Sequence[Any]) -> Tensor:
    if x.dim() == 4:
        return pictures(x, shape, by=shaping(x, weight))
    if x.dim() == 3 and suggested(*shaping(x, weight)) != torch.contiguous_format:
        n, channels, length = shape
        return x.new_empty((n, length, channels)).transpose(1, 2)
    return x.new_empty(shape)


def _padded_shape(x: Tensor, padding: Sequence[int]) -> Tensor:
    sides = list(x.shape)
    for dim in range(len(padding) // 2):
        sides[-1 - dim] = sides[-1 - dim] + padding[2 * dim] + padding[2 * dim + 1]
    return pictures_on_cpu(x, sides)


def _resized_gradient_shape(
    grad: Tensor, size: Sequence[int], shape: Sequence[int], *rest: Any
) -> Tensor:
    return pictures(grad, shape)


def _shuffled_shape(x: Tensor, groups: int) -> Tensor:
    """Give back pictures as they lie, as eager does, where torch's own rules say contiguous."""
    return pictures_on_cpu(x, x.shape)


def _rolled_shape(x: Tensor, shifts: Any, dims: Sequence[int] = ()) -> Tensor:
    """Do the same, except for one that is rolled as a row of elements."""
    torch._check(len(shifts) == (len(dims) or 1), lambda: "roll: shifts and dims must align")
    return pictures_on_cpu(x, x.shape) if dims else x.new_empty(x.shape)


# of F.pad's modes
_PADDINGS = {
    (mode, rank): f"{kind}_pad{rank}d"
    for mode, kind in (("reflect", "reflection"), ("replicate", "replication"))
    for rank in (1, 2, 3)
}
_MOVES = ("roll", "channel_shuffle", "native_channel_shuffle")
_ROWS: tuple[tuple[str, Any, Callable[..., Any]], ...] = (
    ("lstm", aten.lstm.input, _lstm_shape),
    ("gru", aten.gru.input, _recurrent_shape),
    ("rnn_tanh", aten.rnn_tanh.input, _recurrent_shape),
    ("rnn_relu", aten.rnn_relu.input, _recurrent_shape),
    ("convolution", aten.convolution.default, _convolution_shape),
    (
        "_upsample_bicubic2d_aa_backward",
        aten._upsample_bicubic2d_aa_backward.default,
        _resized_gradient_shape,
    ),
    *((name, getattr(aten, name).default, _padded_shape) for name in _PADDINGS.values()),
    ("roll", aten.roll.default, _rolled_shape),
    ("channel_shuffle", aten.channel_shuffle.default, _shuffled_shape),
    ("native_channel_shuffle", aten.native_channel_shuffle.default, _shuffled_shape),
)

# what is traced -> what the program calls
IN_TORCH: dict[Any, Any] = {}
for _name, _overload, _rule in _ROWS:
    _arguments = str(_overload._schema).partition("(")[2]
    _library.define(f"{_name}({_arguments}")
    define(_library, _name, _overload, _rule)
    IN_TORCH[getattr(torch.ops.strop, _name).default] = _overload


# what AOTAutograd and make_fx shall trace for torch's own
MOVES: dict[Any, Callable[..., Any]] = {
    getattr(aten, name).default: getattr(torch.ops.strop, name).default for name in _MOVES
}


def _recurrent(name: str) -> Callable[..., Any]:
    """Return a call of a layer over padded sequences; packed ones have another list of
    arguments."""
    packed, own = getattr(torch, name), getattr(torch.ops.strop, name)

    def call(*args: Any) -> Any:
        if not isinstance(args[3], bool):  # whether there are biases; packed ones have weights here
            return packed(*args)
        x, states, *rest = args
        found = layers(name, x, states if isinstance(states, list | tuple) else [states], *rest)
        return own(*args) if found is None else found

    return call


def _convolution(rank: int, transposed: bool) -> Callable[..., Any]:
    def ready(value: int | Sequence[int]) -> list[int]:
        return [value] * rank if isinstance(value, int) else list(value)

    def is_plain(input: Tensor) -> bool:  # torch takes complex ones apart, into three of real ones
        return input.dim() == rank + 2 and not input.is_complex()

    def plain(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Any:
        if isinstance(padding, str) or not is_plain(input):
            return usual(input, weight, bias, stride, padding, dilation, groups)
        return torch.ops.strop.convolution(
            input,
            weight,
            bias,
            ready(stride),
            ready(padding),
            ready(dilation),
            False,
            [0] * rank,
            groups,
        )

    def upwards(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Any:
        if not is_plain(input):
            return usual(input, weight, bias, stride, padding, output_padding, groups, dilation)
        return torch.ops.strop.convolution(
            input,
            weight,
            bias,
            ready(stride),
            ready(padding),
            ready(dilation),
            True,
            ready(output_padding),
            groups,
        )

    usual = getattr(torch, f"conv_transpose{rank}d" if transposed else f"conv{rank}d")
    return upwards if transposed else plain


def call_mirrored_pad(x: Tensor, pad: Sequence[int], mode: str) -> Tensor:
    rank = len(pad) // 2
    if (mode, rank) not in _PADDINGS or x.dim() != rank + 2:
        return F.pad(x, pad, mode)
    for n, width in enumerate(pad if mode == "reflect" else ()):
        torch._check(width < x.shape[-1 - n // 2])  # there is only so much to reflect
    result: Tensor = getattr(torch.ops.strop, _PADDINGS[mode, rank])(x, pad)
    return result


CALLS: dict[Callable[..., Any], Callable[..., Any]] = {
    **{getattr(torch, name): _recurrent(name) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
    torch.conv3d: _convolution(3, transposed=False),
    **{
        getattr(torch, f"conv_transpose{rank}d"): _convolution(rank, transposed=True)
        for rank in (1, 2, 3)
    },
}
