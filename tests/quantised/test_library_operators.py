"""Operators of a library that are written in Python are traced as what they are made of."""

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.out_dtype import out_dtype

import strop
from strop.frontend import library_operators
from strop.options import Options
from tests.frontend.tracing import Function

NAMES = {"strop_tests::unpack": False, "strop_tests::product": True}


@pytest.fixture(scope="module")
def operators():
    library = torch.library.Library("strop_tests", "DEF")
    library.define("unpack(Tensor codes, int bits) -> Tensor")
    library.define("product(Tensor x, Tensor weight) -> Tensor")

    def unpack(codes: Tensor, bits: int) -> Tensor:
        return torch.cat([(codes >> at) & (2**bits - 1) for at in range(0, 8, bits)])

    def by_rows(x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight.to(x.dtype).t()

    def compiled(codes: Tensor, bits: int) -> Tensor:
        codes.data_ptr()
        assert type(codes) is Tensor, "a kernel of a library was given a fake tensor"
        return unpack(codes, bits)

    library.impl("unpack", unpack, "CompositeExplicitAutograd")
    library.impl("unpack", compiled, "CPU")
    library.impl("unpack", unpack, "Meta")
    library.impl("product", by_rows, "CPU")
    library.impl("product", by_rows, "Meta")
    yield torch.ops.strop_tests
    library._destroy()


def computed(codes: Tensor, x: Tensor) -> Tensor:
    return torch.ops.strop_tests.product(x, torch.ops.strop_tests.unpack(codes, 4))


@pytest.mark.parametrize("names", [NAMES, {}], ids=["opened", "unknown"])
def test_they_are_looked_into(names, operators, tmp_path, monkeypatch):
    monkeypatch.setattr(library_operators, "_OPENED", names)
    module = Function(computed).eval()
    strop.optimize(module, options=Options(cache_dir=str(tmp_path)))
    codes = torch.arange(64).reshape(8, 8).to(torch.uint8)
    for rows in (3, 5):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(module(codes, x), computed(codes, x))
    calls, fallbacks = strop.explain(module).calls, module.forward.counters.fallbacks
    assert calls == ({"linear": 1} if names else dict.fromkeys(map(_overload, NAMES), 1))
    assert bool(fallbacks) == (not names)


def _overload(name: str) -> str:
    return f"{name.replace('::', '.')}.default"


def product(x: Tensor, y: Tensor) -> Tensor:
    """Multiply as torchao does on a GPU."""
    return out_dtype(torch.ops.aten.mm.default, torch.int32, x, y.t()) * 2


DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
        ],
    ),
]


@pytest.mark.parametrize("device", DEVICES)
def test_products_of_integers_have_any_sizes(device, tmp_path):
    module = Function(product).eval()
    strop.optimize(module, options=Options(cache_dir=str(tmp_path), strict=True))
    for rows, inner, columns in ((32, 64, 16), (3, 64, 16), (17, 20, 9), (1, 8, 8)):
        x = torch.randint(-128, 128, (rows, inner), dtype=torch.int8, device=device)
        y = torch.randint(-128, 128, (columns, inner), dtype=torch.int8, device=device)
        expected = (x.cpu().long() @ y.cpu().long().t()).to(torch.int32) * 2
        assert torch.equal(module(x, y).cpu(), expected)
    name = "code_sums" if device == "cpu" else "strop.int_mm.default"
    assert strop.explain(module).calls == {name: 1}
    assert module.forward.counters.eager_calls == 0


def test_other_products_of_two_types_run_in_eager_with_a_reason(tmp_path):
    def mixed(x: Tensor, y: Tensor) -> Tensor:
        return out_dtype(torch.ops.aten.mm.default, torch.int32, x, y)

    module = Function(mixed).eval()
    strop.optimize(module, options=Options(cache_dir=str(tmp_path)))
    x = torch.ones(4, 4)
    assert torch.equal(module(x, x), mixed(x, x))
    (reason,) = module.forward.counters.fallbacks
    assert "runs other operators" in reason
