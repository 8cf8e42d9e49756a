"""Gradients of what computes: reductions, scans, norms, losses, products, casts.

Tables as in ``test_compiled_operators``, a module a family: each judged against eager and fp64, and
in fp64 against differences.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import strop
from tests.e2e.tiny import DEVICES
from tests.train.compiled import options
from tests.train.test_compiled_operators import Case, channels_last, gradcheck, judge_gradients

pytestmark = pytest.mark.usefixtures("fresh")


def _range(x: Tensor, start: int, count: int) -> Tensor:
    return torch.arange(start, start + count, dtype=x.dtype, device=x.device)


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """fp64 is for the judge, who rounds nothing."""
    return x if x.dtype == torch.float64 else x.to(dtype)


def _has_gradient(function: Callable[[Tensor], Tensor]) -> bool:
    """torch before 2.13 has none of aminmax."""
    try:
        function(torch.ones(2, 2, requires_grad=True)).sum().backward()
    except (RuntimeError, NotImplementedError) as error:
        if "is not implemented" not in str(error):
            raise
        return False
    return True


def _spread(x: Tensor) -> Tensor:
    return sum(torch.aminmax(x, dim=1))  # type: ignore[return-value]


REDUCTIONS: dict[str, Case] = {
    "sum": (lambda x: x.sum(), ("b h 4",)),
    "sum over dims": (lambda x: x.sum((0, 2)), ("b h 4",)),
    "prod": (lambda x: x.prod(1), ("b 4",)),
    "prod of all": (lambda x: x.prod(), ("4 3",)),
    "mean": (lambda x: x.mean(), ("b h 4",)),
    "mean over dims": (lambda x: x.mean((0, 2), keepdim=True), ("b h 4",)),
    "var": (lambda x: x.var((0, 2), correction=0), ("b h 4",)),
    "std": (lambda x: x.std(1), ("b h 4",)),
    "var_mean": (lambda x: sum(torch.var_mean(x, 1)), ("b h 4",)),
    "std_mean": (lambda x: sum(torch.std_mean(x, -1)), ("b h 4",)),
    "amax": (lambda x: x.amax((0, 2)), ("b h 4",)),
    "amin": (lambda x: x.amin((0, 2)), ("b h 4",)),
    "max of all": (lambda x: x.max(), ("b h 4",)),
    "min of all": (lambda x: x.min(), ("b h 4",)),
    "max": (lambda x: x.max(1).values, ("b h 4",)),
    "min": (lambda x: x.min(-1).values, ("b h 4",)),
    **({"aminmax": (_spread, ("b h",))} if _has_gradient(_spread) else {}),
    "norm of order 1": (lambda x: torch.linalg.vector_norm(x, 1, dim=(0, 1)), ("b h 4",)),
    "norm of order inf": (lambda x: torch.linalg.vector_norm(x, float("inf"), dim=1), ("b h 4",)),
    "normalize": (lambda x: F.normalize(x, dim=1), ("b h 4",)),
    "cosine_similarity": (F.cosine_similarity, ("b h", "b h")),
    "cdist": (
        lambda x, y: torch.cdist(x, y, compute_mode="use_mm_for_euclid_dist"),
        ("b h 4", "b 3 4"),
    ),
}

SCANS: dict[str, Case] = {
    "cumsum": (lambda x: x.cumsum(1), ("b h 4",)),
    "cumprod": (lambda x: x.cumprod(1), ("b 5",)),
    "cummax": (lambda x: x.cummax(1).values, ("b h",)),
    "cummin": (lambda x: x.cummin(1).values, ("b h",)),
    "logcumsumexp": (lambda x: x.logcumsumexp(1), ("b h",)),
    "sort": (lambda x: x.sort(1).values, ("b h",)),
    "topk": (lambda x: x.topk(2, 1).values, ("b h",)),
    "kthvalue": (lambda x: x.kthvalue(2, 1).values, ("b h",)),
    "median": (lambda x: x.median(1).values, ("b h",)),
    "nanmedian": (lambda x: x.nanmedian(1).values, ("b h",)),
    "mode": (lambda x: x.mode(1).values, ("b h",)),
}

LOSSES: dict[str, Case] = {
    "nll_loss": (F.nll_loss, ("b 7", "b < 7")),
    "kl_div": (
        lambda x, y: F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"),
        ("b h", "b h"),
    ),
    "poisson_nll": (lambda x, y: F.poisson_nll_loss(x, y.abs()), ("b h", "b h")),
    "triplet": (F.triplet_margin_loss, ("b h", "b h", "b h")),
    "hinge": (lambda x: F.hinge_embedding_loss(x, torch.ones_like(x)), ("b h",)),
    "margin_ranking": (lambda x, y: F.margin_ranking_loss(x, y, torch.ones_like(x)), ("b", "b")),
    "cross_entropy of shares": (lambda x, y: F.cross_entropy(x, y.softmax(1)), ("b 7", "b 7")),
}

PRODUCTS: dict[str, Case] = {
    "mm": (torch.mm, ("b 6", "6 h")),
    "matmul": (torch.matmul, ("b 2 h 6", "b 2 6 3")),
    "matmul, broadcast": (torch.matmul, ("b 2 h 6", "1 6 3")),
    "addmm": (torch.addmm, ("4", "b 6", "6 4")),
    "addmm, scaled": (
        lambda c, x, y: torch.addmm(c, x, y, beta=0.5, alpha=2.0),
        ("b 4", "b 6", "6 4"),
    ),
    "baddbmm": (
        lambda c, x, y: torch.baddbmm(c, x, y, beta=0.5, alpha=2.0),
        ("b h 4", "b h 6", "b 6 4"),
    ),
    "einsum": (lambda x, y: torch.einsum("bhi,bji->bhj", x, y), ("b h 6", "b 4 6")),
    "conv1d": (lambda x, w, b: F.conv1d(x, w, b, 2, 1), ("b 4 h", "6 4 3", "6")),
    "conv1d in groups": (lambda x, w: F.conv1d(x, w, padding=1, groups=2), ("b 4 h", "6 2 3")),
    "conv2d, dilated": (
        channels_last(lambda x, w, b: F.conv2d(x, w, b, padding=2, dilation=2)),
        ("b 4 h 5", "6 4 3 3", "6"),
    ),
    "conv2d by channel": (
        channels_last(lambda x, w: F.conv2d(x, w, padding=1, groups=4)),
        ("b 4 h 5", "4 1 3 3"),
    ),
    "conv3d": (lambda x, w, b: F.conv3d(x, w, b, padding=1), ("b 2 h 3 4", "3 2 3 3 3", "3")),
    "conv_transpose1d": (lambda x, w, b: F.conv_transpose1d(x, w, b, 2), ("b 4 h", "4 6 3", "6")),
    "conv_transpose2d": (
        channels_last(lambda x, w, b: F.conv_transpose2d(x, w, b, 2, 1, 1)),
        ("b 4 h 5", "4 6 3 3", "6"),
    ),
    "conv_transpose2d in groups": (
        channels_last(lambda x, w: F.conv_transpose2d(x, w, groups=2)),
        ("b 4 h 5", "4 3 3 3"),
    ),
    "conv_transpose3d": (F.conv_transpose3d, ("b 2 h 3 4", "2 3 3 3 3")),
    "weight_norm": (lambda v, g: torch._weight_norm(v, g, 0), ("6 4 3", "6 1 1")),
    "attention, causal": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        ("b 2 h 8", "b 2 h 8", "b 2 h 8"),
    ),
    "attention, masked": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m > 0),
        ("b 2 h 8", "b 2 5 8", "b 2 5 8", "h 5 < 4"),
    ),
    "attention, scaled": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.3),
        ("b 2 h 8", "b 2 5 8", "b 2 5 8"),
    ),
    "attention, grouped": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        ("b 4 h 8", "b 2 5 8", "b 2 5 8"),
    ),
}

ELEMENTS: dict[str, Case] = {
    "half": (lambda x: (_rounded(x, torch.float16) * 3).to(x.dtype), ("b h",)),
    "bfloat16": (lambda x: F.silu(_rounded(x, torch.bfloat16)).to(x.dtype), ("b h",)),
    "double": (lambda x: x.double().sin().to(x.dtype), ("b h",)),
    "norm in half": (
        lambda x: F.layer_norm(_rounded(x, torch.float16), (4,)).to(x.dtype),
        ("b h 4",),
    ),
    "batch_norm in eval mode": (
        lambda x, w, b: F.batch_norm(x, _range(x, 0, 4), _range(x, 1, 4), w, b),
        ("b 4 h 3", "4", "4"),
    ),
    "batch_norm in eval mode, in half": (
        lambda x, w: F.batch_norm(
            _rounded(x, torch.bfloat16), _range(w, 0, 4), _range(w, 1, 4), w
        ).to(x.dtype),
        ("b 4 h", "4"),
    ),
    "batch_norm in eval mode, frozen": (
        lambda x: F.batch_norm(x, _range(x, 0, 4), _range(x, 1, 4)),
        ("b 4",),
    ),
    "where": (lambda x, y: torch.where(x > y, x, y * 2), ("b h", "h")),
    "masked_fill": (lambda x, v: x.masked_fill(x > 1, v), ("b h", "")),
    "clamp": (lambda x, low, high: torch.clamp(x, low - 1, high + 1), ("b h", "h", "h")),
    "clamp from below": (lambda x, low: torch.clamp(x, min=low), ("b h", "h")),
    "pow": (lambda x, y: x.exp() ** y, ("b h", "h")),
    "square": (lambda x: x**2, ("b h",)),
    "rsub": (lambda x, y: torch.rsub(x, y, alpha=2), ("b h", "h")),
    "rsub by number": (lambda x: torch.rsub(x, 3), ("b h",)),
    "xlog1py": (lambda x, y: torch.special.xlog1py(x, y.abs()), ("b h", "b h")),
    "entr": (lambda x: torch.special.entr(x.sigmoid()), ("b h",)),
    "prelu": (F.prelu, ("b 4 h", "4")),
    "glu": (F.glu, ("b h 6",)),
    "fill": (torch.fill, ("b h", "")),
    "fill by number": (lambda x: torch.fill(x, 2.0) + x, ("b h",)),
    "elu in place": (lambda x: F.elu(x * 2, inplace=True), ("b h",)),
}

NORMS: dict[str, Case] = {
    "batch_norm of the batch": (
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
        ("b 4 h 3", "4", "4"),
    ),
    "instance_norm": (lambda x, w, b: F.instance_norm(x, weight=w, bias=b), ("b 4 h 3", "4", "4")),
}

FAMILIES = {
    "reductions": REDUCTIONS,
    "scans": SCANS,
    "losses": LOSSES,
    "products": PRODUCTS,
    "elements": ELEMENTS,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients(family: str) -> None:
    judge_gradients(FAMILIES[family])


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_gradcheck(family: str) -> None:
    gradcheck(FAMILIES[family])


def test_gradients_of_batch_norms() -> None:
    judge_gradients(NORMS)
    gradcheck(NORMS)


def test_batch_norms_of_cudnn() -> None:
    """Of a GPU; torch traces them as any other, without what cuDNN keeps for its backward."""

    class Norm(nn.Module):
        def forward(self, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
            return torch.cudnn_batch_norm(x, w, b, None, None, True, 0.1, 1e-5)[0]

    def plain(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, w, b, training=True)

    ours = strop.optimize(Norm(), train=True, options=options())
    for rows in (3, 5):
        given = [torch.randn(*shape, requires_grad=True) for shape in ((rows, 4, 6, 5), (4,), (4,))]
        found, expected = (
            torch.autograd.grad(y.square().sum() + y.sin().sum(), given)
            for y in (ours(*given), plain(*given))
        )
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert not ours.forward.traced_by_torch
    assert not any(r.compiled.program.foreign_calls for r in ours.forward.log.records)


# in torch: no kernel reads complex numbers
SPECTRA: dict[str, Callable[[Tensor], Tensor]] = {
    "there and back": lambda x: torch.fft.irfft2(torch.fft.rfft2(x) * 0.5, s=x.shape[-2:]),
    "its size": lambda x: torch.fft.rfft2(x, norm="ortho").abs(),
    "rotary": lambda x: torch.view_as_real(
        torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.polar(x.exp(), x)[..., ::2]
    ),
}


@pytest.mark.parametrize("by", ["optimize", "compile"])
@pytest.mark.parametrize("name", SPECTRA)
def test_gradients_through_complex_numbers(name: str, by: str) -> None:
    class Spectrum(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return SPECTRA[name](x.sin() * 2)

    ours = (
        strop.optimize(Spectrum(), train=True, options=options(strict=False))
        if by == "optimize"
        else torch.compile(Spectrum(), backend="strop")
    )
    for shape in ((2, 3, 8, 6), (3, 3, 8, 10), (2, 3, 8, 6)):
        x = torch.randn(shape, requires_grad=True)
        found, expected = (
            torch.autograd.grad(f(x).square().sum(), x)[0] for f in (ours, Spectrum())
        )
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    if by == "optimize":
        assert not ours.forward.log.fallbacks
        assert ours.forward.log.records


HALVES = (torch.bfloat16, torch.float16)
# Of pairs whose gradient goes where an element equals the result: in half types a kernel that
# computes the elements again has more digits than the result that is read.
EXTREMES: dict[str, Callable[[Tensor], Tensor]] = {
    "amax": lambda y: y.amax(1),
    "amin": lambda y: y.amin((0, 1)),
    "max of all": lambda y: y.max(),
    "min of all": lambda y: y.min(),
    "max": lambda y: y.max(1).values,
    **({"aminmax": _spread} if _has_gradient(_spread) else {}),
    "norm of order inf": lambda y: torch.linalg.vector_norm(y, float("inf"), dim=1),
    "amax of rows": lambda y: y.transpose(1, 2).flatten(1).amax(1),
}


class Extremes(nn.Module):
    """Of what is cheaper computed again than kept."""

    def forward(self, x: Tensor, w: Tensor) -> list[Tensor]:
        y = x * w * 1.37 + 0.3 * w
        return [f(y) for f in EXTREMES.values()]


@pytest.mark.parametrize(
    ("device", "dtype", "budget"),
    [
        *itertools.product(["cpu"], HALVES, [1.0, 0.3, 0.0]),
        # each compiles for minutes where the other processes do so, too
        *(
            pytest.param("cuda", dtype, budget, marks=DEVICES[1].marks)
            for dtype, budget in zip(HALVES, (1.0, 0.0), strict=True)
        ),
    ],
    ids=str,
)
def test_gradients_of_extremes(device: str, dtype: torch.dtype, budget: float) -> None:
    """All of it arrives: at one element, or shared by those that round alike."""
    module = strop.optimize(Extremes(), train=True, options=options(memory_budget=budget))
    for rows in (40, 7):
        x, w = torch.randn(3, rows, 64), torch.ones(64)
        x, w = (t.to(device, dtype).requires_grad_() for t in (x, w))
        for name, result in zip(EXTREMES, module(x, w), strict=True):
            (grad,) = torch.autograd.grad(result.float().sum(), x, retain_graph=True)
            given = 1.37 * result.numel() * (2 if name == "aminmax" else 1)
            assert float(grad.double().abs().sum()) == pytest.approx(given, rel=0.01), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("dim", [0, 1, None])
def test_places_of_extremes(dim: int | None, dtype: torch.dtype, device: str) -> None:
    """Without gradients, too, an extreme is among the elements that it was taken of."""

    class Places(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            y = x * 1.37 + 0.3
            top = y.amax() if dim is None else y.amax(dim, keepdim=True)
            return y.argmax(dim), (y == top).sum(), top

    module = strop.optimize(Places().eval(), options=options())
    x = torch.randn(400, 500).to(device, dtype)
    place, count, top = module(x)
    y = (x.double() * 1.37 + 0.3).to(dtype)
    exact = y.amax() if dim is None else y.amax(dim, keepdim=True)
    assert torch.equal(top, exact)
    assert count == (y == exact).sum()
    assert torch.equal(place, y.argmax(dim))
