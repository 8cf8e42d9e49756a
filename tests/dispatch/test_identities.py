"""Which results are the very tensors that the caller has, which are others in the same memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import strop
from strop.options import Options
from strop.runtime.run.graph_copies import copies_of, shared_by
from tests.views.running import Function

OF_ARGUMENT: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda x: x,
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "alias": lambda x: torch.ops.aten.alias(x),
    "contiguous": lambda x: x.contiguous(),
    "to the same type": lambda x: x.to(torch.float32),
    "to the same format": lambda x: x.to(memory_format=torch.contiguous_format),
    "float": lambda x: x.float(),
    "cpu": lambda x: x.cpu(),
    "type_as": lambda x: x.type_as(x),
    "dropout": lambda x: F.dropout(x, 0.5, False),
    "identity": nn.Identity(),
    "view": lambda x: x.view(x.shape),
    "reshape": lambda x: x.reshape(x.shape),
    "flatten": lambda x: x.flatten(1),
    "expand": lambda x: x.expand(x.shape),
    "squeeze": lambda x: x.squeeze(),
    "all of it": lambda x: x[:],
    "ellipsis": lambda x: x[...],
    "permute": lambda x: x.permute(0, 1),
    "split": lambda x: x.split(3)[0],
    "clone": lambda x: x.clone(),
    "pad by nothing": lambda x: F.pad(x, (0, 0)),
    "plus": lambda x: +x,
    "transposed": lambda x: x.t(),
    "row": lambda x: x[1:],
}
OF_RESULT: dict[str, Callable[[Tensor], Any]] = {
    name: OF_ARGUMENT[name]
    for name in ("itself", "detach", "contiguous", "view", "all of it", "clone", "transposed")
}


def identities(found: list[Tensor], given: Tensor) -> list[tuple[int, int]]:
    """For each tensor the first that it is, and the first whose memory it shares."""
    every = [given, *found]
    return [
        (
            next(n for n, other in enumerate(every) if other is x),
            next(
                n
                for n, other in enumerate(every)
                if other.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
            ),
        )
        for x in found
    ]


def everything(x: Tensor) -> list[Tensor]:
    y = x * 2
    return [*(f(x) for f in OF_ARGUMENT.values()), *(f(y) for f in OF_RESULT.values())]


@pytest.mark.parametrize("way", ["compiled", "from disk", "torch.compile"])
def test_identities(way: str, tmp_path: Path) -> None:
    x, options = torch.randn(3, 4), Options(cache_dir=str(tmp_path), strict=True)
    torch._dynamo.reset()
    function: Any = strop.optimize(Function(everything).eval(), options=options)
    with torch.no_grad():
        if way == "from disk":
            function(x)
            function = strop.optimize(Function(everything).eval(), options=options)
        if way == "torch.compile":
            function = torch.compile(everything, backend="strop", options=options)
        wanted = identities(everything(x), x)
        for _ in range(3):
            found = identities(function(x), x)
            names = [*OF_ARGUMENT, *(f"{name} of a result" for name in OF_RESULT)]
            differs = {n for n, a, b in zip(names, found, wanted, strict=True) if a != b}
            # AOTAutograd hands Strop a value of its own for it, in the same memory
            assert differs <= ({"contiguous of a result"} if way == "torch.compile" else set())


AS_ANOTHER_TYPE: dict[str, Callable[[Tensor], Any]] = {
    "integers": lambda x: x.view(torch.int32),
    "narrower ones": lambda x: x.view(torch.int16),
    "complex": lambda x: torch.view_as_complex(x.unflatten(1, (-1, 2))),
    "real part": lambda x: torch.view_as_complex(x.unflatten(1, (-1, 2))).real,
    "of a result": lambda x: (lambda y: (y, y.view(torch.int32)))(x * 2),
    "of a part": lambda x: (lambda y: (y, y[1:].view(torch.int32)))(x * 2),
    "conjugated": lambda x: torch.view_as_complex(x.unflatten(1, (-1, 2))).conj(),
    "a conjugated result": lambda x: (lambda y: (y, y.conj()))(torch.fft.fft(x)),
    "of what is not given": lambda x: (x * 2).view(torch.int32),
    "conjugated, of what is not given": lambda x: torch.fft.ifft(x),
    "imaginary part, conjugated": lambda x: torch.fft.fft(x).conj().imag,
}


@pytest.mark.parametrize("way", ["optimize", "compile"])
@pytest.mark.parametrize("name", AS_ANOTHER_TYPE)
def test_a_view_as_another_type_shares_memory(name: str, way: str, tmp_path: Path) -> None:
    function, x, options = (
        AS_ANOTHER_TYPE[name],
        torch.randn(3, 4),
        Options(cache_dir=str(tmp_path)),
    )
    torch._dynamo.reset()
    ours: Any = (
        strop.optimize(Function(function).eval(), options=options)
        if way == "optimize"
        else torch.compile(function, backend="strop", options=options)
    )
    with torch.no_grad():
        found, wanted = (
            [result] if isinstance(result, Tensor) else [*result]
            for result in (ours(x), function(x))
        )
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.resolve_conj(), b.resolve_conj())
    assert identities(found, x) == identities(wanted, x)
    if way == "optimize" and "what is not given" in name:
        assert not ours.forward.counters.eager_calls


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("kept", torch.ones(4))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x + self.weight, self.weight, self.kept, self.weight.detach(), self.weight[1:]


def test_weights_are_returned_themselves(tmp_path: Path) -> None:
    module = strop.optimize(Weights().eval(), options=Options(cache_dir=str(tmp_path)))
    for _ in range(2):
        with torch.no_grad():
            _, weight, kept, detached, row = module(torch.randn(3, 4))
        assert weight is module.weight
        assert kept is module.kept
        assert detached is not weight
        assert detached.data_ptr() == weight.data_ptr()
        assert row.data_ptr() == weight.data_ptr() + weight.element_size()


def test_copies_of_results_that_share_memory_share_it() -> None:
    """A CUDA graph's results are copied for the caller."""
    y, z = torch.randn(4, 5), torch.randn(3)
    results = (y[1:], 3, z, y.t()[2:], z.clone())
    found = copies_of(results, shared_by(results))
    for got, want in zip(found, results, strict=True):
        if isinstance(want, Tensor):
            assert torch.equal(got, want)
            assert got.stride() == want.stride()
            assert got.untyped_storage().data_ptr() != want.untyped_storage().data_ptr()
        else:
            assert got == want
    assert found[0].untyped_storage().data_ptr() == found[3].untyped_storage().data_ptr()
    assert found[2].untyped_storage().data_ptr() != found[4].untyped_storage().data_ptr()
