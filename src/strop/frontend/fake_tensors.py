"""Make what stands for tensors in a trace: tensors without memory, alike in all else.

torch's own way asks each weight two dozen questions, whose answers are known of a plain one that
has its memory for itself. A transformer has two thousand weights. And it takes each view and each
result through its modes, which takes five times as long as to make them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import SymInt, Tensor, nn
from torch._dispatch.python import no_python_dispatcher
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
    unset_fake_temporarily,
)

from strop.frontend.functional import memory_of

Size = int | SymInt


def fake_weights(
    mode: FakeTensorMode, state: Mapping[str, Tensor], device: torch.device | None = None
) -> dict[str, Tensor]:
    """Return what stands for each tensor of a module. Those that share memory do so here too, but
    where all are to be on another ``device``. One of inference mode has no gradients, whatever it
    says of them, and torch refuses to be told so outside of that mode."""
    plain = {name: memory_of(t) for name, t in state.items() if _is_plain(t)}
    sharing = Counter(memory_of(t) for t in state.values() if _has_memory(t))
    found = {}
    for name, t in state.items():
        if device is not None or sharing.get(plain.get(name, -1)) == 1:
            meta = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
            fake: Tensor = FakeTensor(mode, meta, device or t.device)
        else:
            fake = mode.from_tensor(t.detach(), static_shapes=True)
        found[name] = fake if fake.is_inference() else fake.requires_grad_(t.requires_grad)
    return found


def _has_memory(t: Tensor) -> bool:
    return type(t) in (Tensor, nn.Parameter) and t.layout is torch.strided


def _is_plain(t: Tensor) -> bool:
    """Tell whether sizes, strides, type and device say all of a tensor that fills its memory."""
    return (
        _has_memory(t)
        and t.device.type != "meta"
        and not (t.is_quantized or t.is_conj() or t.is_neg() or t.is_inference())
        and t.storage_offset() == 0
        and t.untyped_storage().nbytes() == t.nbytes
    )


def fake_empty(
    mode: FakeTensorMode,
    sizes: Sequence[Size],
    strides: Sequence[Size],
    dtype: torch.dtype,
    device: torch.device,
) -> FakeTensor:
    """Return a fake tensor with memory of its own."""
    with unset_fake_temporarily():
        meta = torch.empty_strided(sizes, strides, dtype=dtype, device="meta")
    return FakeTensor(mode, meta, device)


def fake_memory(mode: FakeTensorMode, sizes: Sequence[Size], dtype: torch.dtype) -> Tensor:
    """Return memory for a dense tensor of these sizes, for ``fake_view`` to look at. That each size
    is no less than 0 is known of a tensor; of their product torch would note it as a guard."""
    with in_kernel_invocation_manager(mode):
        return torch.empty(sizes, dtype=dtype, device="meta")


def fake_view(
    like: FakeTensor, base: Tensor, sizes: Sequence[Size], strides: Sequence[Size], offset: Size
) -> FakeTensor:
    """Return what looks at the memory of ``base``, in the type and on the device of another."""
    with no_python_dispatcher(), in_kernel_invocation_manager(like.fake_mode):
        base = base if base.dtype == like.dtype else base.view(like.dtype)
        meta = torch.ops.aten.as_strided.default(base, sizes, strides, offset)
    return FakeTensor(like.fake_mode, meta, like.fake_device)
