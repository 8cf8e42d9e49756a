"""Know what libraries of quantised weights call.

Operators that they define and write in Python themselves are traced as what they are made of. A
product of int8 that gives int32 is one operator here, on any device and at any sizes: cuBLAS wants
more than 16 rows, and the others in eights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._higher_order_ops.out_dtype import out_dtype
from torch.fx import Node as FxNode
from torch.nn import functional as F

from strop.frontend.differentiated import define
from strop.ir.mixed_product import mixed_product

# Operators that are opened, and whether what they have for one device is Python, too. Else they are
# what they have for all devices: code for one is compiled, and would read fake tensors' addresses.
_OPENED = {
    "quanto::unpack": False,
    "quanto::qbytes_mm": True,
    "bitsandbytes::gemm_4bit": False,
}
_KEYS = {"cpu": DispatchKey.CPU, "cuda": DispatchKey.CUDA}

_LEAST_ROWS = 17  # of cuBLAS
_library = torch.library.Library("strop", "FRAGMENT")
_library.define("int_mm(Tensor x, Tensor y) -> Tensor")
_library.define(
    "mixed_product(Tensor sums, Tensor most, Tensor x, Tensor columns, Tensor codes, Tensor scales,"
    " Tensor? bias) -> Tensor"
)


def int_mm(x: Tensor, y: Tensor) -> Tensor:
    """Multiply int8 matrices to int32, whatever their sizes."""
    if x.device.type != "cuda":
        return torch._int_mm(x, y)
    (rows, inner), columns = x.shape, y.shape[1]
    more = max(_LEAST_ROWS, rows) - rows, -inner % 8, -columns % 8
    if not any(more):
        return torch._int_mm(x, y)
    wide = _padded(x, more[0], more[1]), _padded(y, more[1], more[2])
    return torch._int_mm(*wide)[:rows, :columns]


def _padded(x: Tensor, rows: int, columns: int) -> Tensor:
    """Put zeros behind rows and columns. ``F.pad`` copies where there is nothing to add, too."""
    return F.pad(x, (0, columns, 0, rows)) if rows or columns else x


def _int_mm_shape(x: Tensor, y: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], y.shape[1]), dtype=torch.int32)


define(_library, "int_mm", int_mm, _int_mm_shape)


def _mixed_shape(sums: Tensor, most: Tensor, x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(sums.shape)


define(_library, "mixed_product", mixed_product, _mixed_shape)
INT_MM, MIXED_PRODUCT = torch.ops.strop.int_mm.default, torch.ops.strop.mixed_product.default


def int_product(fx: FxNode) -> tuple[Any, ...] | None:
    """Return the operands of a call that gives an int32 product of int8 matrices, or None."""
    if fx.target is not out_dtype or fx.args[:2] != (torch.ops.aten.mm.default, torch.int32):
        return None
    operands = [x.meta["val"] for x in fx.all_input_nodes]
    are_codes = all(isinstance(x, Tensor) and x.dtype is torch.int8 for x in operands)
    return fx.args[2:] if are_codes else None


def opened() -> Iterator[tuple[Any, Callable[..., Any]]]:
    """Yield those that are defined, each with a function that calls its kernel."""
    for name in filter(torch._C._dispatch_has_kernel, _OPENED):
        space, _, operator = name.partition("::")
        operator = getattr(getattr(torch.ops, space), operator).default
        yield operator, _calling(name, operator, _KEYS if _OPENED[name] else {})


def _calling(name: str, operator: Any, keys: Mapping[str, DispatchKey]) -> Callable[..., Any]:
    def call(first: Tensor, *rest: Any, **named: Any) -> Any:
        key = keys.get(first.device.type, DispatchKey.CompositeExplicitAutograd)
        if not torch._C._dispatch_has_kernel_for_dispatch_key(name, key.name):
            key = DispatchKey.CompositeExplicitAutograd
        return operator._op_dk(key, first, *rest, **named)

    return call
