"""Results that are views of an argument, or of each other, through AOTAutograd.

It makes them anew by strides where sizes are symbols. Of an argument with gaps these had been those
of a dense copy, and the numbers other ones.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor

from strop.api import optimize_module
from strop.dispatch.dynamo import AotLog, compile_dynamo
from strop.options import Options
from tests.views.running import Function

VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "halves": lambda x: x.vsplit(2),
    "slice": lambda x: x[1:],
    "turned": lambda x: x.t(),
    "regrouped": lambda x: x.unflatten(0, (2, -1)),
    "row": lambda x: x.unbind()[2],
    "expanded": lambda x: x[:1].expand(4, -1),
    "diagonal": lambda x: x.diagonal(),
    "windows": lambda x: x.unfold(0, 3, 1),
    "with a product": lambda x: (x[2:], x * 2),
    "of a product": lambda x: (x * 2).vsplit(2),
    "product and its slice": lambda x: (lambda y: (y, y[1:], y.t()))(x * 2),
    "detached": lambda x: (x[1:], x.detach()[1:]),
}


def through_compile(function: Callable[..., Any], folder: str) -> Callable[..., Any]:
    torch._dynamo.reset()

    def backend(gm: Any, inputs: Any) -> Any:
        return compile_dynamo(gm, inputs, record_in=AotLog(), options=Options(cache_dir=folder))

    return torch.compile(function, backend=backend, dynamic=True)


def through_train(function: Callable[..., Any], folder: str) -> Callable[..., Any]:
    module = Function(function)
    optimize_module(module, Options(cache_dir=folder), train=True)
    return module


def all_views(x: Tensor) -> list[Any]:
    return [view(x) for view in VIEWS.values()]


@pytest.mark.parametrize(("dtype", "grad"), [(torch.float32, True), (torch.complex64, False)])
@pytest.mark.parametrize("through", [through_compile, through_train])
def test_views_in_one_graph(through: Any, dtype: torch.dtype, grad: bool, tmp_path: Path) -> None:
    _check(all_views, through, dtype, grad, tmp_path)


@pytest.mark.parametrize("name", ["halves", "of a product", "detached"])
def test_a_graph_of_one_view(name: str, tmp_path: Path) -> None:
    _check(VIEWS[name], through_train, torch.complex64, True, tmp_path)


def _check(
    function: Callable[..., Any], through: Any, dtype: torch.dtype, grad: bool, folder: Path
) -> None:
    compiled = through(function, str(folder))
    for size in (6, 8):
        wide = torch.arange(12.0 * size).reshape(size, 12).to(dtype)
        for x in (wide[:, :5].contiguous(), wide[:, 1::2], wide.t().contiguous().t()):
            x.requires_grad_(grad)
            with torch.set_grad_enabled(grad):
                found, wanted = (pytree.tree_leaves(f(x)) for f in (compiled, function))
            for a, b in zip(found, wanted, strict=True):
                assert torch.equal(a, b)
                assert a.stride() == b.stride()
                assert a.requires_grad == b.requires_grad
                memory = x.untyped_storage()._cdata
                assert (a.untyped_storage()._cdata == memory) == (
                    b.untyped_storage()._cdata == memory
                )


STRIDED: dict[str, Callable[[Tensor], Tensor]] = {
    "as_strided": lambda x: torch.as_strided(x, (2, 2), (1, 2)) * 3,
    "a copy": lambda x: torch.as_strided_copy(x, (2, 2), (1, 2)),
    "of a product": lambda x: torch.as_strided(x * 2, (2, 2), (1, 2)) * 3,
}


@pytest.mark.parametrize("through", [through_compile, through_train])
@pytest.mark.parametrize("name", STRIDED)
def test_memory_of_an_argument_is_the_caller_s(name: str, through: Any, tmp_path: Path) -> None:
    """Behind gaps, or in front of where the argument begins."""
    compiled = through(STRIDED[name], str(tmp_path))
    for x in (
        torch.rand(3, 3),
        torch.rand(3, 7)[:, 1::2],
        torch.rand(3, 3).t(),
        torch.rand(4, 3)[1:],
    ):
        x.requires_grad_()
        assert torch.equal(compiled(x), STRIDED[name](x))
