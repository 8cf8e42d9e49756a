"""An anchor or an opaque node runs one of these library calls: each operator has a row.

A row takes the evaluated attributes and returns a function of the input tensors. Rows in
PLANNED_OUT write into memory of ours; the others allocate, and their result is copied if it does
not lie in memory as the plan says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from strop.ir.code_conv import code_conv2d, scaled_conv2d
from strop.ir.contractions import (
    AMONG_COLUMNS,
    GELU,
    GELU_TANH,
    NORMED,
    SILU,
    ColumnNorm,
    Gate,
)
from strop.ir.device import Device
from strop.ir.e4m3 import as_e4m3
from strop.ir.exchange import exchanged
from strop.ir.linear_scan import linear_scan
from strop.ir.mixed_product import mixed_product
from strop.ir.normed_linear import normed_linear
from strop.ir.recurrence import recurrence_of
from strop.kernels.conv.folded_taps import SHARES
from strop.patterns.call import Replacement
from strop.runtime.run import attention_calls, scaled_calls
from strop.runtime.run.library_settings import convolves_in_tf32, wants_same_bits
from strop.runtime.run.operator_calls import Call, aten, aten_on_cpu, overload, with_arguments

# This is torch's own, whatever a user has put in its place in torch.nn.functional.
_torchs_attention = torch._C._nn.scaled_dot_product_attention


OutCall = Callable[[Sequence[Tensor], Tensor], Any]


def _linear(attrs: Mapping[str, Any]) -> OutCall:
    def call(inputs: Sequence[Tensor], out: Tensor) -> None:
        x, weight, *bias = inputs
        if bias:
            torch.addmm(bias[0], x, weight.t(), out=out)
        else:
            torch.mm(x, weight.t(), out=out)

    return call


def _trimmed_linear(attrs: Mapping[str, Any]) -> OutCall:
    return lambda inputs, out: out.copy_(F.linear(*inputs)[..., : attrs["columns"]])


def _linear_gelu(attrs: Mapping[str, Any]) -> OutCall:
    """Run the tanh form in the epilogue of cuBLASLt, which torch has on a GPU alone. Where rows of
    the result have gaps torch would leave that library, and take longer than a copy does."""

    def call(inputs: Sequence[Tensor], out: Tensor) -> None:
        x, weight, bias = inputs
        torch._addmm_activation(bias, x, weight.t(), use_gelu=True, out=out)

    if attrs.get(AMONG_COLUMNS):
        return copying(
            lambda inputs: torch._addmm_activation(
                inputs[2], inputs[0], inputs[1].t(), use_gelu=True
            )
        )
    return call


def _linear_add(attrs: Mapping[str, Any]) -> OutCall:
    def call(inputs: Sequence[Tensor], out: Tensor) -> None:
        x, weight, addend, *bias = inputs
        if bias:
            torch.add(torch.addmm(bias[0], x, weight.t()), addend, out=out)
        elif addend.data_ptr() == out.data_ptr():
            out.addmm_(x, weight.t())
        else:  # torch copies the addend first
            torch.addmm(addend, x, weight.t(), out=out)

    return call


def _paired_linear(attrs: Mapping[str, Any]) -> OutCall:
    """The second product is added to the first, which has been rounded, in fp32."""
    linear = _linear(attrs)

    def call(inputs: Sequence[Tensor], out: Tensor) -> None:
        x, weight, low, up, *bias = inputs
        linear((x, weight, *bias), out)
        out.addmm_(low, up.t())

    return call


def _paired_linear_add(attrs: Mapping[str, Any]) -> OutCall:
    linear_add, paired = _linear_add(attrs), _paired_linear(attrs)

    def call(inputs: Sequence[Tensor], out: Tensor) -> None:
        x, weight, low, up, addend, *bias = inputs
        if bias:
            layer = torch.empty_like(out)
            paired((x, weight, low, up, *bias), layer)
            torch.add(layer, addend, out=out)
        else:
            linear_add((x, weight, addend), out)
            out.addmm_(low, up.t())

    return call


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    GELU: F.gelu,
    GELU_TANH: partial(F.gelu, approximate="tanh"),
    SILU: F.silu,
}


def _gated(attrs: Mapping[str, Any], columns: Tensor, out: Tensor) -> None:
    gate = Gate.of(attrs)
    value, gates = columns.chunk(2, -1)[:: -1 if gate.is_first else 1]
    torch.mul(value, ACTIVATIONS[gate.activation](gates), out=out)


def _geglu(attrs: Mapping[str, Any]) -> OutCall:
    return lambda inputs, out: _gated(attrs, F.linear(*inputs), out)


def _paired_geglu(attrs: Mapping[str, Any]) -> OutCall:
    paired = _paired_linear(attrs)

    def call(inputs: Sequence[Tensor], out: Tensor) -> None:
        both = out.new_empty(out.shape[0], inputs[1].shape[0])
        paired(inputs, both)
        _gated(attrs, both, out)

    return call


def _scaled_geglu(attrs: Mapping[str, Any]) -> OutCall:
    multiply = scaled_calls.on_gpu(attrs)

    def call(inputs: Sequence[Tensor], out: Tensor) -> None:
        both = out.new_empty(out.shape[0], inputs[1].shape[0])
        multiply(inputs, both)
        _gated(attrs, both, out)

    return call


def _normed(op: str, attrs: Mapping[str, Any]) -> OutCall:
    norm = ColumnNorm.of(op, attrs)
    return lambda inputs, out: out.copy_(normed_linear(inputs, norm))


def _matmul(attrs: Mapping[str, Any]) -> OutCall:
    return lambda inputs, out: torch.matmul(inputs[0], inputs[1], out=out)


def _mixed_product(attrs: Mapping[str, Any]) -> OutCall:
    return lambda inputs, out: out.copy_(mixed_product(*inputs))


def _linear_scan(attrs: Mapping[str, Any]) -> OutCall:
    return lambda inputs, out: out.copy_(linear_scan(inputs[0], inputs[1]))


def _recurrence(attrs: Mapping[str, Any]) -> OutCall:
    return lambda inputs, out: out.copy_(recurrence_of(inputs, attrs))


def _conv2d(attrs: Mapping[str, Any]) -> Call:
    stride, padding, dilation = (list(attrs[k]) for k in ("stride", "padding", "dilation"))
    groups = attrs["groups"]

    def call(inputs: Sequence[Tensor]) -> Tensor:
        x, weight, *bias = inputs
        return torch.conv2d(x, weight, bias[0] if bias else None, stride, padding, dilation, groups)

    return call


def _folded_taps(attrs: Mapping[str, Any]) -> OutCall:
    return lambda inputs, out: out.copy_(fold_taps(inputs[0].float()))


def fold_taps(weight: Tensor) -> Tensor:
    """Turn taps (O, C, 3, 3) into four windows of 2x2 (4 O, C, 2, 2), for ``upsampled``."""
    windows = [[_shared(_shared(weight, 2, down), 3, right) for right in (0, 1)] for down in (0, 1)]
    return torch.cat([*windows[0], *windows[1]])


def _shared(taps: Tensor, dim: int, odd: int) -> Tensor:
    parts = [sum(taps.narrow(dim, n, 1) for n in numbers) for numbers in SHARES[odd]]
    return torch.cat(parts, dim)  # type: ignore[arg-type]


def upsampled(x: Tensor, taps: Tensor) -> Tensor:
    """Convolve (N, C, H, W) by taps (4 O, C, 2, 2) to (N, O, 2 H, 2 W), all windows at all
    places."""
    outs, (height, width) = taps.shape[0] // 4, x.shape[2:]
    every = torch.conv2d(x, taps, padding=1).unflatten(1, (2, 2, outs))
    found = x.new_empty(x.shape[0], outs, height, 2, width, 2)
    for down in (0, 1):
        for right in (0, 1):
            window = every[:, down, right, :, down : down + height, right : right + width]
            found[:, :, :, down, :, right] = window
    return found.reshape(x.shape[0], outs, 2 * height, 2 * width)


def _upsampled_conv2d(attrs: Mapping[str, Any]) -> OutCall:
    return lambda inputs, out: out.copy_(upsampled(*inputs))


def _attention(attrs: Mapping[str, Any]) -> Call:
    causal, scale = attrs["causal"], attrs["scale"]

    def call(inputs: Sequence[Tensor]) -> Tensor:
        q, k, v, *mask = inputs
        # heads of keys that serve several heads of queries each
        more = {"enable_gqa": True} if q.dim() == k.dim() == 4 and q.shape[1] > k.shape[1] else {}
        return _torchs_attention(
            q, k, v, mask[0] if mask else None, 0.0, causal, scale=scale, **more
        )

    return call


def _aligned(x: Tensor) -> Tensor:
    """Return rows that begin at multiples of 16 bytes, as torch's kernels of attention read them:
    they raise for others, or choose another way where the last dim is odd. A slice of a wider
    product may begin anywhere."""
    if attention_calls.lies_in_vectors(x):
        return x
    whole = torch.contiguous_format
    return x.clone(memory_format=whole) if x.data_ptr() % 16 else x.contiguous()


def _exchange(attrs: Mapping[str, Any]) -> Call:
    how, group, size = attrs["how"], attrs["group"], attrs["size"]
    return lambda inputs: exchanged(inputs[0], how, group, size)


def _write(attrs: Mapping[str, Any]) -> Call:
    """Write the second input over the first, or call an operator that changes a part of it."""
    if "target" in attrs:
        return with_arguments(overload(attrs["target"]), attrs)
    return lambda inputs: inputs[0].copy_(inputs[1])


def _cudnn_conv2d(attrs: Mapping[str, Any]) -> OutCall:
    """cuDNN writes channels-last results where they are wanted; ``torch.conv2d`` would allocate.
    It takes the order of all three tensors from the strides of the pictures."""
    padding, stride, dilation = (list(attrs[k]) for k in ("padding", "stride", "dilation"))
    groups, out_variant = attrs["groups"], torch.ops.aten.cudnn_convolution.out
    usual = _conv2d(attrs)

    def call(inputs: Sequence[Tensor], out: Tensor) -> None:
        if not torch.backends.cudnn.enabled:
            out.copy_(usual(inputs))
            return
        out_variant(
            channels_last(inputs[0]),
            inputs[1],
            padding,
            stride,
            dilation,
            groups,
            False,  # benchmark
            wants_same_bits(),
            convolves_in_tf32(),
            out=out,
        )
        for bias in inputs[2:]:
            out.add_(bias.view(-1, 1, 1))

    return call


def channels_last(x: Tensor) -> Tensor:
    """Return pictures that lie channels-last with the strides that say so. Where a size is 1, as of
    pictures of one channel, others say the same of memory, and torch reads NCHW from them."""
    if not x.is_contiguous(memory_format=torch.channels_last):
        return x  # cuDNN gets a copy
    _, channels, height, width = x.shape
    strides = (channels * height * width, 1, channels * width, channels)
    return x if x.stride() == strides else x.as_strided(x.shape, strides)


def _cuda_attention(attrs: Mapping[str, Any], most: int = 128) -> Call:
    """Call cuDNN's kernels where they apply: they are faster than flash at head dims 40, 80 and 64
    (log). ``most`` is the largest head dim that they take."""
    causal, scale = attrs["causal"], attrs["scale"]
    usual, cudnn = _attention(attrs), torch.ops.aten._scaled_dot_product_cudnn_attention

    def call(inputs: Sequence[Tensor]) -> Tensor:
        inputs = (*map(_aligned, inputs[:3]), *inputs[3:])
        q, k, v, *mask = inputs
        if mask or q.shape[1] != k.shape[1] or not _fits_cudnn_attention(q, v, most):
            return usual(attention_calls.for_a_fused_kernel(inputs, causal, scale))  # type: ignore[no-any-return]
        result: Tensor = cudnn(q, k, v, None, False, 0.0, causal, False, scale=scale)[0]
        return result

    return call


def _fits_cudnn_attention(q: Tensor, v: Tensor, most: int) -> bool:
    dims = (q.shape[-1], v.shape[-1])
    is_allowed = torch.backends.cuda.cudnn_sdp_enabled()
    half = q.dtype in (torch.float16, torch.bfloat16)
    return is_allowed and half and all(d % 8 == 0 and d <= most for d in dims)


def _code_sums(attrs: Mapping[str, Any]) -> OutCall:
    """Multiply codes, and take off what zero points have added: exact where oneDNN is, which is
    asked where there is VNNI."""
    zero = attrs.get("zero", 0)

    def call(inputs: Sequence[Tensor], out: Tensor) -> None:
        x, weight, *zeros = inputs
        torch._int_mm(x, weight.t(), out=out)
        if zero:
            out.sub_(weight.sum(1, dtype=torch.int32), alpha=zero)
        if zeros:
            each = x.sum(1, keepdim=True, dtype=torch.int32) - zero * x.shape[1]
            out.sub_(each * zeros[0].to(torch.int32))

    return call


def _code_conv2d(attrs: Mapping[str, Any]) -> OutCall:
    return lambda inputs, out: out.copy_(code_conv2d(*inputs, **attrs))


def _scaled_conv2d(attrs: Mapping[str, Any]) -> OutCall:
    return lambda inputs, out: out.copy_(scaled_conv2d(*inputs, **attrs))


def _cuda_scaled_conv2d(attrs: Mapping[str, Any]) -> OutCall:
    """Convolve what codes stand for in the type of the result: no library convolves e4m3 with a
    scale for each pixel. To round to bf16 loses a sixteenth of what the codes lost."""

    def call(inputs: Sequence[Tensor], out: Tensor) -> None:
        x, weight, pixels, columns = inputs
        # by scales in fp32: those of weights are subnormal in fp16
        values = (as_e4m3(x).to(out.dtype) * pixels).to(out.dtype)
        own = (as_e4m3(weight).to(out.dtype) * columns[:, None, None, None]).to(out.dtype)
        out.copy_(torch.conv2d(values, own, **attrs))

    return call


_LEAST_ROWS = 17  # of cuBLAS


def _cuda_code_sums(attrs: Mapping[str, Any]) -> OutCall:
    """Put rows of zeros behind few rows, which cuBLAS refuses. Depth and columns are multiples of 8
    here (``passes.eight_bit_rules``)."""

    def call(inputs: Sequence[Tensor], out: Tensor) -> None:
        codes, weight = inputs[0], inputs[1].t()
        missing = _LEAST_ROWS - len(codes)
        if missing <= 0:
            torch._int_mm(codes, weight, out=out)
        else:
            wide = torch.nn.functional.pad(codes, (0, 0, 0, missing))
            out.copy_(torch._int_mm(wide, weight)[: len(codes)])

    return call


PLANNED_OUT: dict[str, Callable[[Mapping[str, Any]], OutCall]] = {
    "linear": _linear,
    "trimmed_linear": _trimmed_linear,
    "linear_add": _linear_add,
    "paired_linear": _paired_linear,
    "paired_linear_add": _paired_linear_add,
    "matmul": _matmul,
    "mixed_product": _mixed_product,
    "linear_scan": _linear_scan,
    "recurrence": _recurrence,
    "code_sums": _code_sums,
    "scaled_product": scaled_calls.on_cpu,
    "code_conv2d": _code_conv2d,
    "scaled_conv2d": _scaled_conv2d,
}
CUDA_PLANNED_OUT: dict[str, Callable[[Mapping[str, Any]], OutCall]] = {
    **PLANNED_OUT,
    "code_sums": _cuda_code_sums,
    "scaled_product": scaled_calls.on_gpu,
    "scaled_conv2d": _cuda_scaled_conv2d,
    "conv2d": _cudnn_conv2d,
    "linear_gelu": _linear_gelu,
    **{op: partial(_normed, op) for op in NORMED},
    "geglu": _geglu,
    "scaled_geglu": _scaled_geglu,
    "paired_geglu": _paired_geglu,
    "folded_taps": _folded_taps,
    "upsampled_conv2d": _upsampled_conv2d,
}
ALLOCATING: dict[str, Callable[[Mapping[str, Any]], Call]] = {
    "conv2d": _conv2d,
    "attention": _attention,
    "exchange": _exchange,
    "write": _write,
    "aten": aten_on_cpu,
    "pattern": Replacement,
}
CUDA_ALLOCATING = {**ALLOCATING, "attention": _cuda_attention, "aten": aten}


def widest_of_cudnn(device: Device) -> int:
    """Return the largest head that cuDNN's attention takes."""
    return 256 if device.arch >= 90 else 128


def allocating_on(
    device: Device, kernel: str = ""
) -> Mapping[str, Callable[[Mapping[str, Any]], Call]]:
    """Return the calls that make their results on this device. ``kernel``: the row of the kernel
    library that was chosen, which may be one library among several."""
    if not device.arch:
        return ALLOCATING
    attention = partial(_cuda_attention, most=widest_of_cudnn(device))
    if kernel in attention_calls.LIBRARIES:
        attention = partial(_chosen_attention, kernel, widest_of_cudnn(device), attention)
    return {**CUDA_ALLOCATING, "attention": attention}


def _chosen_attention(
    kernel: str, widest: int, usual: Callable[[Mapping[str, Any]], Call], attrs: Mapping[str, Any]
) -> Call:
    return attention_calls.call_of(kernel, attrs, widest, usual(attrs))


def copying(call: Call) -> OutCall:
    """Return a call that writes where it is told, by a copy of what it allocates."""
    return lambda inputs, out: out.copy_(call(inputs))


def planned_on(device: Device) -> Mapping[str, Callable[[Mapping[str, Any]], OutCall]]:
    """Return the calls that write where they are told on this device."""
    return CUDA_PLANNED_OUT if device.arch else PLANNED_OUT
