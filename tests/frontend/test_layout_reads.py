"""A forward that asks how its arguments lie in memory gets the answer of eager."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import strop
from strop.errors import UnsupportedError
from strop.options import Options
from tests.views.running import Function

READERS: dict[str, Callable[[Tensor], Any]] = {
    "contiguous": lambda x: x.contiguous(),
    "is_contiguous": lambda x: x * 2 if x.is_contiguous() else x * 3,
    "stride": lambda x: x * x.stride(0),
    "stride of a view": lambda x: x * x[1:].stride(0),
    "stride of a result": lambda x: x * (x + 1).stride(0),
    "storage_offset": lambda x: x + x.storage_offset(),
    "as_strided": lambda x: x.as_strided((2, 2), (1, 2)) * 2,
    "torch.as_strided": lambda x: torch.as_strided(x, (2, 2), (1, 2)) * 2,
}
OTHERS: dict[str, Callable[[Tensor], Any]] = {
    "contiguous for itself": lambda x: x.contiguous() * 2,
    "contiguous results": lambda x: (x * 2).contiguous(),
    "reshape": lambda x: x.reshape(-1) + 1,
}


def arguments() -> dict[str, Tensor]:
    def numbers(*shape: int) -> Tensor:
        return torch.arange(float(torch.Size(shape).numel())).view(shape)

    return {"dense": numbers(3, 4), "transposed": numbers(4, 3).t(), "gaps": numbers(3, 8)[:, ::2],
            "offset": numbers(5, 4)[2:], "dense again": numbers(3, 4) + 1}  # fmt: skip


def is_own(result: Tensor, argument: Tensor) -> bool:
    return result.data_ptr() == argument.data_ptr()


@pytest.mark.parametrize("name", READERS)
def test_readers(name: str, tmp_path: Path) -> None:
    function, module = READERS[name], Function(READERS[name]).eval()
    for where in ("compiled", "loaded from disk"):
        strop.optimize(module, options=Options(cache_dir=str(tmp_path)))
        for x in arguments().values():
            result, wanted = module(x), function(x)
            assert torch.equal(result, wanted)
            assert result.stride() == wanted.stride()
            assert is_own(result, x) is is_own(wanted, x)
        assert module.forward.counters.eager_calls == 3, "all but the dense ones"
        (reason,) = module.forward.counters.fallbacks
        assert "how arguments lie in memory" in reason
        assert name.split()[0].removeprefix("torch.") in reason
        assert module.forward.variants.num_captures == (where == "compiled")
    strop.optimize(module, options=Options(cache_dir=str(tmp_path), strict=True))
    module(arguments()["dense"])
    with pytest.raises(UnsupportedError, match="make it contiguous"):
        module(arguments()["transposed"])


@pytest.mark.parametrize("name", OTHERS)
def test_all_others_serve_any_layout(name: str, tmp_path: Path) -> None:
    function = OTHERS[name]
    module = strop.optimize(Function(function).eval(),
                            options=Options(cache_dir=str(tmp_path), strict=True))  # fmt: skip
    for x in arguments().values():
        assert torch.equal(module(x), function(x))
    assert module.forward.counters.eager_calls == 0


def test_what_is_returned_dense_is_not_the_callers_own(tmp_path: Path) -> None:
    module = strop.optimize(Function(lambda x: x.contiguous()).eval(),
                            options=Options(cache_dir=str(tmp_path)))  # fmt: skip
    x = arguments()["transposed"]
    before = x.clone()
    module(x).zero_()
    assert torch.equal(x, before)


@pytest.mark.parametrize("function", [lambda z: z.real * 2, lambda z: z.imag + 1, lambda z: z * z])
def test_conjugated_arguments(function: Callable[[Tensor], Tensor], tmp_path: Path) -> None:
    module = strop.optimize(Function(function).eval(), options=Options(cache_dir=str(tmp_path)))
    z = torch.randn(3, 4, dtype=torch.complex64)
    for argument in (z.conj(), z, z.conj()):
        assert torch.equal(module(argument), function(argument))
    assert module.forward.counters.eager_calls == 0
