"""A forward that asks how its arguments lie in memory gets the answer of eager."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import strop
from strop.errors import CaptureError, UnsupportedError
from strop.frontend import layout_reads
from strop.options import Options
from tests.frontend.tracing import trace
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

    return {
        "dense": numbers(3, 4),
        "transposed": numbers(4, 3).t(),
        "gaps": numbers(3, 8)[:, ::2],
        "offset": numbers(5, 4)[2:],
        "dense again": numbers(3, 4) + 1,
    }


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
        asks_begin = not name.startswith(("is_contiguous", "stride"))
        assert module.forward.counters.eager_calls == 1 + asks_begin, "with gaps, or an offset"
        (reason,) = module.forward.counters.fallbacks
        assert "how arguments lie in memory" in reason
        assert name.split()[0].removeprefix("torch.") in reason
        assert module.forward.variants.num_captures == 2 * (where == "compiled"), "one an order"
    strop.optimize(module, options=Options(cache_dir=str(tmp_path), strict=True))
    module(arguments()["dense"])
    with pytest.raises(UnsupportedError, match="make it contiguous"):
        module(arguments()["gaps"])


@pytest.mark.parametrize("name", OTHERS)
def test_all_others_serve_any_layout(name: str, tmp_path: Path) -> None:
    function = OTHERS[name]
    module = strop.optimize(
        Function(function).eval(), options=Options(cache_dir=str(tmp_path), strict=True)
    )
    for x in arguments().values():
        assert torch.equal(module(x), function(x))
    assert module.forward.counters.eager_calls == 0


def test_what_is_returned_dense_is_not_the_callers_own(tmp_path: Path) -> None:
    module = strop.optimize(
        Function(lambda x: x.contiguous()).eval(), options=Options(cache_dir=str(tmp_path))
    )
    x = arguments()["transposed"]
    before = x.clone()
    module(x).zero_()
    assert torch.equal(x, before)


@pytest.mark.parametrize("function", [lambda z: z.real * 2, lambda z: z.imag + 1, lambda z: z * z])
def test_conjugated_arguments(function: Callable[[Tensor], Tensor], tmp_path: Path) -> None:
    module = strop.optimize(Function(function).eval(), options=Options(cache_dir=str(tmp_path)))
    z = torch.randn(3, 4, dtype=torch.complex64)
    for argument in (z.conj(), z, z.conj()):
        torch.testing.assert_close(module(argument), function(argument), rtol=1e-6, atol=1e-6)
    assert module.forward.counters.eager_calls == 0


PICTURE = torch.arange(480.0).view(2, 4, 6, 10).contiguous(memory_format=torch.channels_last)
BEHIND: dict[str, Callable[[Tensor], Tensor]] = {
    "convolution": lambda x: F.conv2d(x, torch.ones(4, 4, 3, 3)),
    "transposed convolution": lambda x: F.conv_transpose2d(x, torch.ones(4, 4, 2, 2)),
    "pad": lambda x: F.pad(x, (1, 1, 1, 1)),
    "reflected": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "around": lambda x: F.pad(x, (1, 1, 1, 1), mode="circular"),
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "bilinear": lambda x: F.interpolate(x, scale_factor=1.5, mode="bilinear"),
    "roll": lambda x: torch.roll(x, -1, 0),
    "channel_shuffle": lambda x: F.channel_shuffle(x, 2),
    "group_norm": lambda x: F.group_norm(x, 2),
    "pool": lambda x: F.max_pool2d(x, 2),
    "pointwise": lambda x: x.sin() * 2,
    "chunk": lambda x: (x + 1).chunk(2, 1)[1],
}


def test_what_is_computed_lies_as_in_eager(tmp_path: Path) -> None:
    """Branches of a forward go eager's way, and memory is read as eager has it."""

    def asks(x: Tensor) -> list[Tensor]:
        found = []
        for name, operator in BEHIND.items():
            y = operator(x)
            is_last = y.is_contiguous(memory_format=torch.channels_last)
            found.append(y.amax() * (2 if is_last else 3) + y.stride(1))
            if name == "roll":
                found.append(torch.as_strided(y, (5, 10), (4, 1), 0))
        return found

    module = strop.optimize(
        Function(asks).eval(), options=Options(cache_dir=str(tmp_path), strict=True)
    )
    for x in (PICTURE, PICTURE.contiguous()):
        with torch.no_grad():
            results = module(x)
        for got, want in zip(results, asks(x), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)  # 2 for 3 is no rounding
            assert got.stride() == want.stride()


REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "storage": (lambda x: x * x.untyped_storage().nbytes(), "untyped_storage"),
    "view": (lambda x: x * 2 if x._is_view() else x * 3, "_is_view"),
    "base": (lambda x: x * 2 if x._base is None else x * 3, "_base"),
    "same memory": (lambda x: x * 2 if x.is_set_to(x) else x * 3, "is_set_to"),
    "numpy": (lambda x: x * float(x.numpy().sum()), "numpy"),
    "convolution of a video": (
        lambda x: (
            F.conv3d(x[:, None], torch.ones(1, 1, 1, 1, 1))
            * (2 if F.conv3d(x[:, None], torch.ones(1, 1, 1, 1, 1)).is_contiguous() else 3)
        ),
        "which the library that computes it decides",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_trace_cannot_know_runs_in_eager(name: str, tmp_path: Path) -> None:
    function, reason = REFUSED[name]
    module = strop.optimize(Function(function).eval(), options=Options(cache_dir=str(tmp_path)))
    for x in (PICTURE, PICTURE.contiguous()):
        with torch.no_grad():
            assert torch.equal(module(x), function(x))
    assert module.forward.counters.eager_calls == 2
    assert all(reason in text for text in module.forward.counters.fallbacks)


GAPS = torch.arange(48.0).view(3, 16)[:, ::2]
OF_GAPS: dict[str, Callable[[Tensor], Any]] = {
    "view that fails": lambda x: x.view(-1) * 1,
    "view that splits": lambda x: x.view(3, 2, 4) * 1,
    "unflatten": lambda x: x.unflatten(1, (2, 4)) * 1,
    "view_as": lambda x: x.view_as(torch.ones(3, 8)) * 1,
    "as another type": lambda x: x.view(torch.int32),
    "a row is returned": lambda x: x[1:],
    "turned": lambda x: x.t(),
}


@pytest.mark.parametrize("name", OF_GAPS)
def test_views_of_an_argument_with_gaps(name: str, tmp_path: Path) -> None:
    """They are in the caller's memory, and of a dense copy where eager has no such view."""
    function = OF_GAPS[name]
    module = strop.optimize(Function(function).eval(), options=Options(cache_dir=str(tmp_path)))
    with torch.no_grad():
        try:
            wanted = function(GAPS)
        except RuntimeError:
            wanted = function(GAPS.contiguous())
        found = module(GAPS)
    assert torch.equal(found, wanted)
    assert found.stride() == wanted.stride()
    assert is_own(found, wanted) or not is_own(wanted, GAPS)


@pytest.mark.parametrize("name", ["gaps", "offset", "transposed"])
def test_of_what_is_contiguous_anyway_every_argument_may_ask(name: str, tmp_path: Path) -> None:
    """torch asserts that what it gathers from other processes is contiguous."""

    def projected(x: Tensor) -> Tensor:
        rows = F.linear(x, x)
        if not rows.is_contiguous():
            raise AssertionError
        return rows * rows.view(2, -1).stride(0)

    options = Options(cache_dir=str(tmp_path), strict=True)
    module = strop.optimize(Function(projected).eval(), options=options)
    x = arguments()[name][:2]
    with torch.no_grad():
        assert torch.equal(module(x), projected(x))


@pytest.mark.parametrize("function", [READERS["is_contiguous"], READERS["stride"]])
def test_strides_are_the_same_wherever_memory_begins(
    function: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    options = Options(cache_dir=str(tmp_path), strict=True)
    module = strop.optimize(Function(function).eval(), options=options)
    whole = arguments()["offset"]
    with torch.no_grad():
        for x in (whole, whole[1:], whole[:1], *whole.split(1)):
            assert torch.equal(module(x), function(x))


def test_a_view_that_fails_in_eager_fails(tmp_path: Path) -> None:
    module = strop.optimize(
        Function(lambda x: (x * 2).view(-1)).eval(), options=Options(cache_dir=str(tmp_path))
    )
    x = arguments()["transposed"]
    with torch.no_grad(), pytest.raises(RuntimeError, match="view size is not compatible"):
        module(x)
    with torch.no_grad():
        assert torch.equal(module(x.contiguous()), (x.contiguous() * 2).view(-1))


def _in_own_memory(x: Tensor) -> tuple[Tensor, ...]:
    """Values that do not lie at the beginning of the working memory; an argument that may not."""
    y, z, patch = x.sin(), (x * 3).softmax(-1), x.new_ones(2, 2)
    return (
        y.as_strided((2, 2), (1, 2), 1) + 0,
        z.as_strided((2, 2), (1, 2), 1) + z[:2, :2],
        torch.as_strided_copy(z, (2, 2), (1, 2), 3) * 2,
        torch.as_strided_scatter(y, patch, (2, 2), (1, 2), 1),
        torch.as_strided_scatter(z, patch, (2, 2), (1, 2), 1),
        y + z,
    )


def _in_the_callers(x: Tensor) -> tuple[Tensor, ...]:
    return (torch.as_strided_scatter(x, x.new_ones(2, 2), (2, 2), (1, 2), 1) + x,)


def _of_complex(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.as_strided_copy(x, (2, 2), (1, 2), 1) * 2, torch.as_strided_scatter(
        x, x.new_ones(2, 2), (2, 2), (1, 2), 1
    )


def _with_offsets() -> list[Tensor]:
    return [torch.randn(4, 4), torch.randn(4, 4), torch.randn(8, 4)[4:]]


def _complex_ones() -> list[Tensor]:
    whole = torch.randn(4, 9, dtype=torch.complex64)
    return [whole[:, 1::2], whole.t(), whole]


@pytest.mark.parametrize("way", ["optimize", "compile"])
@pytest.mark.parametrize(
    ("function", "given"),
    [
        (_in_own_memory, _with_offsets),
        (_in_the_callers, _with_offsets),
        (_of_complex, _complex_ones),
    ],
)
def test_memory_is_read_as_eagers_lies(
    function: Callable[[Tensor], tuple[Tensor, ...]],
    given: Callable[[], list[Tensor]],
    way: str,
    tmp_path: Path,
) -> None:
    options = Options(cache_dir=str(tmp_path))
    torch._dynamo.reset()
    ours: Any = (
        strop.optimize(Function(function).eval(), options=options)
        if way == "optimize"
        else torch.compile(function, backend="strop", options=options)
    )
    with torch.no_grad():
        for x in given():
            torch.testing.assert_close([*ours(x)], [*function(x)])


def _heads(x: Tensor) -> Tensor:
    """Return attention's result (B, S, H, D) over rows (B, S, H D)."""
    q = x.unflatten(-1, (4, 8)).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q).transpose(1, 2)


def _of_steps_first(x: Tensor) -> Tensor:
    """Return rows of attention whose queries lie step by step, which cuDNN's result does then."""
    q = x.transpose(0, 1).contiguous().transpose(0, 1).unflatten(-1, (4, 8)).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)


BEHIND_ATTENTION: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "rows": (lambda x: _heads(x).flatten(2), True),
    "rows in another type": (lambda x: _heads(x).flatten(2).double() * 2, True),
    "rows, reshaped": (lambda x: _heads(x).reshape(*x.shape), True),
    "a linear": (lambda x: F.linear(_heads(x), torch.ones(8, 8)), True),
    "a copy": (lambda x: _heads(x).clone(memory_format=torch.contiguous_format) + 1, True),
    "heads": (_heads, False),
    "computed of heads": (lambda x: _heads(x) * 2, False),
    "other rows": (lambda x: _heads(x).flatten(1, 2), False),
    "queries that lie step by step": (_of_steps_first, False),
}


@pytest.mark.parametrize("name", BEHIND_ATTENTION)
def test_what_lies_alike_whatever_library_computes_attention_is_answered(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    behind, is_answered = BEHIND_ATTENTION[name]
    chosen = {torch.ops.strop.attention.default: lambda value: True}
    monkeypatch.setattr(layout_reads, "CHOSEN_BY_LIBRARIES", chosen)

    def by_strides(x: Tensor) -> Tensor:
        y = behind(x)
        return y * y.stride(0)

    if is_answered:
        assert trace(by_strides, "b s 32", b=2, s=6).ops()
    else:
        with pytest.raises(CaptureError, match="asks for stride of what"):
            trace(by_strides, "b s 32", b=2, s=6)
