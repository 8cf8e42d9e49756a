"""Runs functions through ``strop.optimize`` with the symbolic sizes that a test names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from strop.api import optimize_module
from strop.dispatch.adapter import Adapter
from strop.dispatch.dispatcher import Dispatcher
from strop.dispatch.signature import Shapes
from strop.ir.tensor_spec import TensorSpec
from strop.options import Options
from tests.views.cases import Case, sizes_of


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class Named(Adapter):
    """Sizes with names are symbolic, all others are not."""

    def __init__(self, arguments: Sequence[str], hints: Mapping[str, int]) -> None:
        self.arguments, self.hints = arguments, hints

    def shapes(self, tensors: Sequence[Tensor], skeleton: Any = ()) -> Shapes:
        texts = [sizes_of(argument)[1] for argument in self.arguments]
        specs = tuple(
            TensorSpec(sizes, t.dtype, t.device) for sizes, t in zip(texts, tensors, strict=True)
        )
        used = {root for spec in specs for size in spec.sizes for root in size.roots}
        return Shapes(specs, {name: self.hints[name] for name in used})


def optimized(case: Case, hints: Mapping[str, int], folder: str) -> tuple[nn.Module, Dispatcher]:
    module = Function(case.function).eval()
    adapter = Named(case.arguments, hints)
    return module, optimize_module(module, Options(cache_dir=folder), adapter=adapter)


def assert_equal(found: Any, wanted: Any, tolerance: float = 1e-5) -> None:
    """The same structure, shapes, types and, to rounding, values."""
    (found, how), (wanted, expected) = pytree.tree_flatten(found), pytree.tree_flatten(wanted)
    assert how == expected
    for one, other in zip(found, wanted, strict=True):
        if not isinstance(other, Tensor):
            assert type(one) is type(other)
            assert one == other
            continue
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)
