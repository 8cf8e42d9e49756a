"""Calls that write into a piece of a larger buffer: values, what is read there, and what it costs.

The pass is one for GPUs: here it runs for a processor, whose libraries write or are copied.
"""

from __future__ import annotations

import copy
import importlib
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import strop
from strop.api import dispatchers_of
from strop.debug.costs import bytes_moved
from strop.dispatch.dispatcher import Dispatcher
from strop.ir import serialize
from strop.ir.contractions import AMONG_COLUMNS
from strop.ir.dims import const
from strop.ir.program import Program
from strop.kernels.attention.wgmma_tiles import WgmmaTile
from strop.kernels.gemm import rows as products
from strop.kernels.gemm.rows import form
from strop.kernels.gemm.tile import GemmTile
from strop.options import Options
from strop.passes import ONLY_ON
from strop.runtime.run.library_calls import CUDA_PLANNED_OUT
from strop.testing import assert_as_accurate_as_eager
from tests.fuzz.interpreted import interpreted
from tests.gpus import H100
from tests.kernels.launching import attends, by_form, by_tile, launched, problem, refuse
from tests.passes.test_joined_calls import Block
from tests.runtime.test_wgmma_gemm import HALF, Machine, error, weights

RULES = importlib.import_module("strop.passes.joined_calls")  # a pass has its module's name


@pytest.fixture
def on_a_cpu() -> Iterator[None]:
    elsewhere = {name: kind for name, kind in ONLY_ON.items() if name != "joined_calls"}
    with (
        patch.dict(ONLY_ON, elsewhere, clear=True),
        patch.object(Options, "on", lambda self, *, has_wgmma: self),
        patch.object(RULES, "LEAST_ROWS", 1),
    ):
        yield


class SideBySide(nn.Module):
    """Attention and three linears, one of them by a kernel that adds its bias."""

    def __init__(self, dim: int = 32, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.first, self.last = (nn.Linear(dim, n * dim, bias=False) for n in (2, 1))
        self.biased, self.out = nn.Linear(dim, dim), nn.Linear(5 * dim, dim)

    def attended(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    def joined(self, x: Tensor) -> Tensor:
        y = self.attended(x)
        pieces = [self.first(x.exp()), y, self.biased(x.cos()), self.last(x.sin())]
        return torch.cat(pieces, -1)

    def forward(self, x: Tensor) -> Any:
        return self.out(self.joined(x)).relu() + x


class Returned(SideBySide):
    """The caller gets the cat as well, and a view of it."""

    def forward(self, x: Tensor) -> Any:
        y = self.joined(x)
        return self.out(y), y, y.transpose(1, 2)


def optimized(module: nn.Module, folder: Path, **options: Any) -> tuple[nn.Module, Dispatcher]:
    fast = copy.deepcopy(module)
    strop.optimize(fast, options=Options(cache_dir=str(folder), strict=True, **options))
    (dispatcher,) = dispatchers_of(fast).values()
    return fast, dispatcher


def program_of(dispatcher: Dispatcher) -> Program:
    return dispatcher.variants.all[-1].program


def placed(program: Program) -> list[str]:
    return [step.op for step in program.call_steps if step.place is not None]


@pytest.mark.usefixtures("on_a_cpu")
@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("module", [SideBySide(), Returned()], ids=["read", "returned"])
def test_values(module: nn.Module, check: bool, tmp_path: Path) -> None:
    module = module.bfloat16().eval().requires_grad_(False)
    exact = copy.deepcopy(module).double()
    with interpreted():
        fast, dispatcher = optimized(module, tmp_path, check=check)
        for batch, tokens in ((2, 9), (1, 17), (3, 1), (2, 300), (2, 9)):
            x = torch.randn(batch, tokens, 32).bfloat16()
            found, eager, wanted = (f(x.to(t)) for f, t in runs(fast, module, exact))
            for got, base, true in zip(*map(several, (found, eager, wanted)), strict=True):
                assert got.stride() == base.stride()
                assert_as_accurate_as_eager(got, base, true)
    assert placed(program_of(dispatcher)) == ["attention", "linear", "linear"]
    assert sum(bool(s.parts) for s in program_of(dispatcher).kernel_steps) == 1
    assert not dispatcher.counters.findings
    assert not dispatcher.counters.eager_calls


def runs(fast: nn.Module, eager: nn.Module, exact: nn.Module) -> list[tuple[nn.Module, Any]]:
    return [(fast, torch.bfloat16), (eager, torch.bfloat16), (exact, torch.float64)]


def several(results: Any) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else results


@pytest.mark.usefixtures("on_a_cpu")
def test_a_wrong_piece_is_found(tmp_path: Path) -> None:
    """The judge of steps looks where the piece lies, not at the buffer's first numbers."""
    module = SideBySide().bfloat16().eval().requires_grad_(False)
    x = torch.randn(2, 9, 32).bfloat16()
    with interpreted():
        fast, dispatcher = optimized(module, tmp_path, check=True)
        fast(x)
        assert not dispatcher.counters.findings
        right = torch.mm

        def wrong(x: Tensor, weight: Tensor, *, out: Tensor) -> Tensor:
            return right(x, weight, out=out).add_(out.stride(0) > out.shape[1] == 32)

        fast, dispatcher = optimized(module, tmp_path / "other", check=True)
        with patch.object(torch, "mm", wrong):
            fast(x)
    (finding,) = dispatcher.counters.findings
    assert "linear of last, is inaccurate" in finding


@pytest.mark.usefixtures("on_a_cpu")
def test_a_program_is_kept_with_its_places(tmp_path: Path) -> None:
    module = SideBySide().bfloat16().eval().requires_grad_(False)
    with interpreted():
        fast, dispatcher = optimized(module, tmp_path)
        fast(torch.randn(2, 9, 32).bfloat16())
    program = program_of(dispatcher)
    assert serialize.from_json(serialize.to_json(program)) == program


@pytest.mark.usefixtures("on_a_cpu")
def test_a_call_moves_its_piece_alone(tmp_path: Path) -> None:
    module = SideBySide().bfloat16().eval().requires_grad_(False)
    with interpreted():
        fast, dispatcher = optimized(module, tmp_path)
        fast(torch.randn(2, 9, 32).bfloat16())
    program = program_of(dispatcher)
    sizes = dict(program.hints)
    (last,) = (s for s in program.call_steps if s.place and s.inputs[1].shape[0] == const(32))
    rows = math.prod(size.eval(sizes) for size in last.inputs[0].shape[:-1])
    assert bytes_moved(program, last, sizes) == 2 * (rows * 32 + 32 * 32 + rows * 32)


MOST_PIECES, SEEDS = 4, 40


class Random(nn.Module):
    """Pieces of calls and of kernels along any dim, which calls, kernels or callers read."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.draw = random.Random(seed)
        self.dim = self.draw.choice((-1, -1, -1, 1, 0))
        self.kinds = self.draw.choices(
            ("linear", "attention", "biased", "kernel", "view", "given", "some", "all"),
            weights=(6, 6, 1, 1, 1, 1, 1, 1),
            k=self.draw.randint(1, MOST_PIECES),
        )
        is_wide = [self.dim == -1 and kind != "given" for kind in self.kinds]
        widths = [16 * self.draw.randint(1, 1 + wide) for wide in is_wide]
        self.layers = nn.ModuleList(
            nn.Linear(16, width, bias=kind == "biased")
            for kind, width in zip(self.kinds, widths, strict=True)
        )
        ends = ("linear", "result", "views", "kernel", "piece")
        self.ends = self.draw.choices(ends, weights=(6, 4, 4, 1, 1), k=2)
        width = sum(widths) if self.dim == -1 else 16
        self.out = nn.Linear(width, 8, bias=False)

    def piece(self, number: int, kind: str, x: Tensor) -> Tensor:
        y = self.layers[number](x + number)
        if kind == "kernel":
            return y.sin()
        if kind == "given":
            return x
        if kind == "some":
            return y[:, :, : y.shape[2] // 2].repeat(1, 1, 2)
        if kind == "all":
            return torch.cat([y[:, 1:], y[:, :1]], 1)
        if kind == "view":
            return y.transpose(0, 1).contiguous().transpose(0, 1)
        if kind == "attention":
            heads = y.unflatten(-1, (-1, 8)).transpose(1, 2)
            return F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)
        return y

    def forward(self, x: Tensor) -> Any:
        pieces = [self.piece(n, kind, x) for n, kind in enumerate(self.kinds)]
        y = torch.cat(pieces, self.dim)
        ends = {
            "linear": lambda: self.out(y),
            "kernel": lambda: y.tanh(),
            "result": lambda: y,
            "piece": lambda: self.out(y) + pieces[0].mean(),
            "views": lambda: (self.out(y[:, 1:]), y.flatten(0, 1)),
        }
        return [value for end in self.ends for value in several(ends[end]())]


@pytest.mark.usefixtures("on_a_cpu")
def test_random_cats(tmp_path: Path) -> None:
    count = 0
    for seed in range(SEEDS):
        torch.manual_seed(seed)
        module = Random(seed).bfloat16().eval().requires_grad_(False)
        exact = copy.deepcopy(module).double()
        with interpreted():
            fast, dispatcher = optimized(module, tmp_path / str(seed), check=seed % 2 == 0)
            for batch, tokens in ((2, 9), (1, 4), (3, 7)):
                x = torch.randn(batch, tokens, 16).bfloat16()
                found, eager, wanted = (f(x.to(t)) for f, t in runs(fast, module, exact))
                for got, base, true in zip(found, eager, wanted, strict=True):
                    assert_as_accurate_as_eager(got, base, true)
        count += len(placed(program_of(dispatcher)))
        assert not dispatcher.counters.findings, seed
    assert count > 5


def test_kernels_of_ours_write_among_columns() -> None:
    """Attention and a product with GELU, by the machine for PTX, into one memory."""
    torch.manual_seed(0)
    tokens, head, columns, depth = 70, 64, 160, 64
    whole = torch.full((tokens, 2 * head + columns + 8), math.nan, dtype=HALF)
    attended = whole[:, : 2 * head].unflatten(-1, (2, head)).transpose(0, 1)[None]
    q, k, v = (torch.randn(1, 2, tokens, head).to(HALF) for _ in range(3))
    machine = Machine(q, k, v, attended)
    tile = WgmmaTile(1, 80, 2)
    launched(by_tile(tile, attends(q, k, v)), machine).writing(refuse)((q, k, v), attended)
    hidden = whole[:, 2 * head : -8]
    x, w, bias = torch.randn(tokens, depth).to(HALF), weights(columns, depth), torch.randn(columns)
    inputs = (x, w, bias.to(HALF))
    asked = problem("linear_gelu", *(t.shape for t in inputs), **{AMONG_COLUMNS: True})
    found = form(
        GemmTile(2, 80, 3, keeps_on=True, apart=True),
        products.picture_of(asked),
        products.OPS[asked.op],
        sms=H100.sms,
    )
    machine = Machine(*inputs, hidden)
    launched(by_form(found, asked), machine).writing(refuse)(inputs, hidden)
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    assert error(attended, exact) < 1e-3
    product = F.linear(x.double(), w.double(), inputs[2].double())
    assert error(hidden, F.gelu(product, approximate="tanh")) < 3e-4
    assert whole[:, -8:].isnan().all()


GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


class TestOnAGpu:
    pytestmark = GPU

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    def test_a_block(self, dtype: torch.dtype, tmp_path: Path) -> None:
        eager = Block(dim=512, width=2048, heads=4).to("cuda", dtype).eval().requires_grad_(False)
        exact = copy.deepcopy(eager).double()
        fast = strop.optimize(copy.deepcopy(eager), options=Options(cache_dir=str(tmp_path)))
        for batch, tokens in ((1, 640), (2, 577), (1, 70), (1, 640), (1, 640)):
            x = torch.randn(batch, tokens, 512, device="cuda", dtype=dtype)
            assert_as_accurate_as_eager(fast(x), eager(x), exact(x.double()))
        (dispatcher,) = dispatchers_of(fast).values()
        program = program_of(dispatcher)
        if torch.cuda.get_device_capability()[0] == 9:
            assert sorted(placed(program)) == ["attention", "linear_gelu"]
            assert not any("cat" in source.name for source in program.sources)

    def test_a_library_writes_rows_with_gaps(self) -> None:
        """What is chosen at few rows, and what torch does with a result that has gaps."""
        torch.manual_seed(0)
        x, w, bias = (
            torch.randn(*n, device="cuda").half() for n in ((100, 256), (384, 256), (384,))
        )
        whole = torch.full((100, 640), math.nan, device="cuda", dtype=torch.float16)
        out = whole[:, 128:512]
        CUDA_PLANNED_OUT["linear_gelu"]({AMONG_COLUMNS: True})((x, w, bias), out)
        wanted = F.gelu(F.linear(x.double(), w.double(), bias.double()), approximate="tanh")
        assert error(out, wanted) < 1e-3
        CUDA_PLANNED_OUT["linear"]({})((x, w), out)
        assert error(out, F.linear(x.double(), w.double())) < 1e-3
        assert whole[:, :128].isnan().all()
        assert whole[:, 512:].isnan().all()
