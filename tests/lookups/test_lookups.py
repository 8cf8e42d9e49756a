"""Lookups inside kernels: how they fuse, how exact resizing is, and indices out of range."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import strop
from strop.api import optimize_module
from strop.dispatch.dispatcher import Dispatcher
from strop.options import Options
from strop.testing import assert_as_accurate_as_eager


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


class Calls(nn.Module):
    """A function inside a module with a name."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.inner = Function(function)

    def forward(self, *args: Tensor) -> Any:
        return self.inner(*args)


class Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Any:
        return self.function(*args)


def optimized(module: nn.Module, folder: str) -> tuple[nn.Module, Dispatcher]:
    return module.eval(), optimize_module(module.eval(), Options(cache_dir=folder, strict=True))


class Embeddings(nn.Module):
    """BERT's: words, positions and segments, and their norm."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(99, 48), nn.Embedding(32, 48)
        self.segments, self.norm = nn.Embedding(2, 48), nn.LayerNorm(48)

    def forward(self, ids: Tensor, segments: Tensor) -> Tensor:
        place = torch.arange(ids.shape[1], device=ids.device)[None]
        found: Tensor = self.norm(self.words(ids) + self.positions(place) + self.segments(segments))
        return found


def bilinear_mix(x: Tensor, y: Tensor) -> Tensor:
    return F.silu(F.interpolate(x, y.shape[2:], mode="bilinear", align_corners=False)) + y


FUSED: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "gather_where": (
        lambda x, i: torch.where(i > 2, x.gather(1, i) * 2, 0),
        (torch.randn(3, 9), "i9: 3 9"),
    ),
    "index_of_index": (lambda x, i, j: F.gelu(x[i[j]]), (torch.randn(9, 4), "i9: 9", "i9: 5")),
    "bilinear": (bilinear_mix, (torch.randn(2, 3, 4, 5), torch.randn(2, 3, 9, 7))),
    "bicubic": (lambda x: F.interpolate(x, (9, 7), mode="bicubic") * 2, (torch.randn(2, 3, 4, 5),)),
    "one_hot": (lambda i: F.one_hot(i, 9).float() * 2, ("i9: 3 4",)),
}


def values(arguments: tuple[Any, ...]) -> list[Tensor]:
    """Tensors as they are, "i9: 3 4" as indices below 9."""
    return [
        a
        if isinstance(a, Tensor)
        else torch.randint(0, int(a[1 : a.index(":")]), [int(n) for n in a.split()[1:]])
        for a in arguments
    ]


def launches(dispatcher: Dispatcher) -> tuple[int, int]:
    (variant,) = dispatcher.variants.all
    return len(variant.program.kernel_steps), len(variant.program.call_steps)


@pytest.mark.parametrize("name", FUSED)
def test_lookups_fuse(name: str, folder: str) -> None:
    """One kernel from the indices to the result."""
    function, arguments = FUSED[name]
    module, dispatcher = optimized(Calls(function), f"{folder}/{name}")
    inputs = values(arguments)
    torch.testing.assert_close(module(*inputs), function(*inputs))
    assert launches(dispatcher) == (1, 0)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_embeddings_are_one_launch(dtype: torch.dtype, folder: str) -> None:
    model, exact = Embeddings(), Embeddings().double()
    exact.load_state_dict(model.state_dict())
    shapes = ((2, 7), (1, 32), (5, 1))
    inputs = [[torch.randint(0, n, shape, dtype=dtype) for n in (99, 2)] for shape in shapes]
    with torch.no_grad():
        wanted = [(model(*given), exact(*given)) for given in inputs]
        module, dispatcher = optimized(model, f"{folder}/{dtype}")
        for given, (eager, reference) in zip(inputs, wanted, strict=True):
            assert_as_accurate_as_eager(module(*given), eager, reference)
    assert launches(dispatcher) == (1, 0)


def test_a_source_of_the_same_kernel_is_stored_first(folder: str) -> None:
    """Other programs of the kernel would still be computing what this one looks up."""

    def function(x: Tensor, i: Tensor) -> Tensor:
        y = x.exp()
        return y + y.gather(1, i) + y[:, i[0]]

    module, dispatcher = optimized(Calls(function), folder)
    x, i = torch.randn(40, 40), torch.randint(0, 40, (40, 40))
    torch.testing.assert_close(module(x, i), function(x, i))
    assert launches(dispatcher) == (2, 0)


BOUNDS_CHECK: dict[str, tuple[Callable[..., Any], int, int]] = {  # with a good and a bad index
    "embedding": (lambda x, i: F.embedding(i, x), 3, 4),
    "embedding_negative": (lambda x, i: F.embedding(i, x), 0, -1),
    "gather": (lambda x, i: x.gather(1, i[:, None]), 4, 5),
    "gather_negative": (lambda x, i: x.gather(1, i[:, None]), 0, -1),
    "index_select": (lambda x, i: x.index_select(0, i), 3, 4),
    "index": (lambda x, i: x[i], 3, 4),
    "index_negative": (lambda x, i: x[:, i], -5, -6),
    "index_second": (lambda x, i: x[i.clamp(0, 3), i], 4, 5),
    "take": (lambda x, i: x.take(i), -20, 20),
    "far_away": (lambda x, i: x[i], 1, 2**62),
    "in_a_sum": (lambda x, i: x[i].sum(0), 3, 4),
    "in_a_row": (lambda x, i: x[i].softmax(-1), 3, -7),
}


class Lookups(nn.Module):
    """All of BOUNDS_CHECK, each in a module of its name."""

    def __init__(self) -> None:
        super().__init__()
        self.of = nn.ModuleDict({name: Function(row[0]) for name, row in BOUNDS_CHECK.items()})

    def forward(self, x: Tensor, *indices: Tensor) -> list[Tensor]:
        return [f(x, i) for f, i in zip(self.of.values(), indices, strict=True)]


@pytest.fixture(scope="module")
def lookups(folder: str) -> nn.Module:
    return optimized(Lookups(), f"{folder}/faults")[0]


@pytest.mark.parametrize("name", BOUNDS_CHECK)
def test_out_of_range_raises(name: str, lookups: nn.Module) -> None:
    """Where eager raises, with the module's path; the next call is as if nothing had been."""
    x = torch.randn(4, 5)
    indices = {other: torch.full((3,), row[1]) for other, row in BOUNDS_CHECK.items()}
    function, good, bad = BOUNDS_CHECK[name]
    wanted = [row[0](x, indices[other]) for other, row in BOUNDS_CHECK.items()]
    for place in (0, 2):
        indices[name][place] = bad
        with pytest.raises((IndexError, RuntimeError)) as eager:
            function(x, indices[name])
        with pytest.raises(IndexError, match=rf"in .*\bof\.{name}\b") as found:
            lookups(x, *indices.values())
        assert isinstance(found.value, eager.type), "code that catches eager's misses ours"
        indices[name][place] = good
        torch.testing.assert_close(lookups(x, *indices.values()), wanted)


def test_a_stored_plan_reports_faults(folder: str) -> None:
    for captures in (1, 0):
        module, dispatcher = optimized(Calls(lambda x, i: x[i] * 3), f"{folder}/stored")
        with pytest.raises(IndexError, match=r"in inner$"):
            module(torch.randn(4, 5), torch.tensor([0, 4]))
        assert dispatcher.variants.num_captures == captures


def test_many_threads_report_one_fault(folder: str) -> None:
    table, index = torch.randn(50, 64), torch.randint(0, 50, (3000,))
    module, _ = optimized(Calls(lambda x, i: F.embedding(i, x) * 2), f"{folder}/many")
    torch.testing.assert_close(module(table, index), table[index] * 2)
    index[::7] = 50
    with pytest.raises(IndexError):
        module(table, index)


def test_places_that_nobody_reads_are_no_faults(folder: str) -> None:
    """A piece of a cat is computed at its own places only."""

    def function(x: Tensor, i: Tensor) -> Tensor:
        return torch.cat([x.gather(1, i), x], 1) * 2

    module, _ = optimized(Calls(function), f"{folder}/cat")
    x, i = torch.randn(3, 4), torch.full((3, 2), 3)
    torch.testing.assert_close(module(x, i), function(x, i))


def test_nothing_to_look_into(folder: str) -> None:
    module, _ = optimized(Calls(lambda x, i: x[:, 1:][:, i] * 2), f"{folder}/empty")
    for width, count in ((3, 2), (2, 5), (1, 0), (1, 2)):
        x, i = torch.randn(2, width), torch.zeros(count, dtype=torch.int64)
        if width > 1 or not count:
            torch.testing.assert_close(module(x, i), x[:, 1:][:, i] * 2)
            continue
        with pytest.raises(IndexError):
            module(x, i)


MODES: dict[str, dict[str, Any]] = {
    "nearest_size": {"size": (11, 6)},
    "nearest_factor": {"scale_factor": 1.7},
    "nearest_exact": {"size": (11, 6), "mode": "nearest-exact"},
    "bilinear": {"size": (17, 6), "mode": "bilinear"},
    "bilinear_aligned": {"size": (17, 6), "mode": "bilinear", "align_corners": True},
    "bilinear_factor": {"scale_factor": (2.3, 0.6), "mode": "bilinear"},
    "bilinear_recomputed": {
        "scale_factor": (2.3, 0.6),
        "mode": "bilinear",
        "recompute_scale_factor": True,
    },
    "bicubic": {"size": (17, 6), "mode": "bicubic"},
    "bicubic_aligned": {"scale_factor": 2.5, "mode": "bicubic", "align_corners": True},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_resizing_is_as_accurate_as_eager(dtype: torch.dtype, folder: str) -> None:
    """Every mode, dense and channels-last, one graph and one kernel each."""

    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        return [F.interpolate(z, **mode) for z in (x, y) for mode in MODES.values()]

    module, dispatcher = optimized(Calls(function), f"{folder}/{dtype}")
    for height, width in ((9, 7), (4, 13)):
        x = torch.randn(2, 3, height, width, dtype=dtype)
        y = torch.randn(1, 8, height, width, dtype=dtype).to(memory_format=torch.channels_last)
        found, eager = module(x, y), function(x, y)
        names = [*MODES, *MODES]
        for name, one, other, exact in zip(names, found, eager, _exact(x, y), strict=True):
            try:
                assert_as_accurate_as_eager(one, other, exact)
            except AssertionError as error:
                raise AssertionError(f"{name} of {height}x{width}: {error}") from error
    assert not any(v.program.call_steps for v in dispatcher.variants.all)


def _exact(*images: Tensor) -> list[Tensor]:
    """In fp64; a nearest pixel is chosen in fp32 by eager, whatever its type."""
    return [F.interpolate(z.double(), **mode) for z in images for mode in MODES.values()]


@pytest.mark.parametrize("name", ["linear", "trilinear", "nearest"])
def test_resizing_other_ranks(name: str, folder: str) -> None:
    rank = {"linear": 1, "trilinear": 3, "nearest": 1}[name]
    module, _ = optimized(Calls(lambda x: F.interpolate(x, [5] * rank, mode=name)), folder)
    for sizes in ([4, 6, 3], [9, 2, 7]):
        x = torch.randn(2, 3, *sizes[:rank])
        torch.testing.assert_close(module(x), F.interpolate(x, [5] * rank, mode=name))


@pytest.mark.parametrize(("mode", "calls"), [("nearest", 0), ("bilinear", 1)])
def test_pixels_of_integers(mode: str, calls: int, folder: str) -> None:
    """Nearest copies them; between them torch rounds by rules of its own."""
    module, dispatcher = optimized(Calls(lambda x: F.interpolate(x, (5, 3), mode=mode)), folder)
    x = torch.randint(0, 200, (1, 2, 4, 4), dtype=torch.uint8)
    assert torch.equal(module(x), F.interpolate(x, (5, 3), mode=mode))
    assert launches(dispatcher)[1] == calls


def test_a_report_counts_what_is_looked_up(folder: str) -> None:
    """Not the whole table."""
    module, _ = optimized(Calls(lambda x, i: F.embedding(i, x) * 2), f"{folder}/report")
    module(torch.randn(10_000, 8), torch.zeros(3, dtype=torch.int64))
    (graph,) = strop.explain(module).graphs
    assert graph.kernels[0].bytes_moved == 3 * 8 + 2 * 3 * 8 * 4


def test_resizing_between_convolutions_stays_channels_last(folder: str) -> None:
    """The argument and the result change their order, nothing between them does."""

    class Up(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 3, 3)

        def forward(self, x: Tensor) -> Tensor:
            wide = F.interpolate(self.first(x), scale_factor=1.5, mode="bilinear")
            found: Tensor = self.second(F.silu(wide))
            return found

    model = Up().eval()
    x = torch.randn(2, 3, 12, 10)
    with torch.no_grad():
        wanted = model(x)
        module, dispatcher = optimized(model, f"{folder}/up")
        torch.testing.assert_close(module(x), wanted)
    (variant,) = dispatcher.variants.all
    ops = [step.ops for step in variant.program.kernel_steps]
    assert sum("take" in step for step in ops) == 1
    assert sum("copy" in step for step in ops) == 2
