"""Attention by e4m3 codes: its kernel in PTX by the machine for PTX, the one in Triton that makes
the codes by Triton's interpreter, and both as the library launches them."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.fitting import attn_codes as sweep
from strop.codegen.triton_interpreter import interpret
from strop.ir.eight_bit import FORMATS, LEAST, MARK
from strop.ir.source import KernelSource
from strop.kernels import library
from strop.kernels.attention import code_rows
from strop.kernels.attention.codes import (
    CodeLayout,
    code_attention,
    key_at,
)
from strop.kernels.attention.rows import scalars_of
from strop.kernels.attention.times import Rounds
from strop.kernels.attention.to_codes import value_codes
from strop.kernels.attention.wgmma_tiles import WgmmaTile
from strop.kernels.kernel import NEVER, Problem
from strop.kernels.library import select
from strop.kernels.tuned import tuned
from strop.runtime.build.loader import kernel_loader
from tests.codegen.test_triton_compile import TOOLS, compiled, resources
from tests.gpus import H100
from tests.kernels.interpreted import Bound, Interpreted
from tests.kernels.launching import attends, launched, refuse
from tests.kernels.ptx_machine import launch
from tests.kernels.ptx_products import fragment
from tests.kernels.test_ptx_kernels import BF16, F16, heads, survivors

SMALL = WgmmaTile(1, 64, 2, 2)
CASES = (
    (40, WgmmaTile(2, 128, 3), (1, 2, 130, 300), F16),
    (40, WgmmaTile(3, 64, 2), (2, 1, 70, 333), BF16),
    (64, WgmmaTile(4, 64, 4), (1, 1, 300, 257), F16),
    (80, WgmmaTile(1, 64, 3, 2), (2, 1, 1, 65), F16),
    (80, WgmmaTile(2, 128, 2), (1, 2, 70, 129), F16),
    (128, WgmmaTile(2, 128, 2), (1, 1, 100, 128), BF16),  # a single block
)
MOST_OFF = {F16: 2e-3, BF16: 5e-3}  # of the machine from the rule: rounded results, and powers


def memory_of(x: Tensor) -> Tensor:
    """All memory of a tensor from its first number on, as a kernel sees it."""
    left = x.untyped_storage().nbytes() // x.itemsize - x.storage_offset()
    return x.as_strided((left,), (1,), x.storage_offset())


Given = tuple[Tensor, ...]  # queries, keys, codes of values and their scales


def made(q: Tensor, k: Tensor, v: Tensor, block: int) -> Given:
    """Return what attention reads: what the kernel makes of values, in memory that shows what
    nobody wrote."""
    batch, many, keys, head = v.shape
    steps = -(-keys // block)
    codes = torch.full((batch, many, head + 8, steps * block), 0xFF, dtype=torch.uint8)
    scales = torch.full((batch, many, steps), math.nan)
    numbers = [keys, many, *(v.stride(dim) // 8 for dim in range(3)), steps, batch * many]
    source = value_codes(head, block, v.dtype)
    tensors = [memory_of(v), codes.view(-1), scales.view(-1)]
    interpret(source, tensors, {f"s{n}": value for n, value in enumerate(numbers)})
    return q, k, codes, scales


def attended(source: KernelSource, given: Given, tile: WgmmaTile, seed: int) -> Tensor:
    """By the machine."""
    q, k, v, scales = given
    (batch, many, queries, head), keys = q.shape, k.shape[2]
    out = torch.full((batch, queries, many, head), math.nan, dtype=q.dtype).transpose(1, 2)
    views = [(x.shape, x.stride()) for x in (q, k, v, out)]
    scalars = scalars_of(tile, batch, many, queries, keys, H100.sms)
    launch(source, (q, k, v, out, scales), scalars, seed=seed, views=views)
    return out


def places(keys: int) -> Tensor:
    """Return the key at each place of a line of values."""
    at = torch.arange(keys)
    return at // 16 * 16 + torch.tensor([key_at(n) for n in range(16)])[at % 16]


def by_rule(given: Given, tile: WgmmaTile) -> Tensor:
    """Compute attention in fp64 of what codes stand for, but with weights that are codes: relative
    to the greatest score till then, block by block, the last one first."""
    q, k, _, scales = (x.double() for x in given)
    keys, head = k.shape[2:]
    v = given[2].view(torch.float8_e4m3fn).double()
    v[..., places(v.shape[-1])] = v * scales.repeat_interleave(tile.keys, -1)[..., None, :]
    v = v[..., :head, :keys].mT
    scores = (q @ k.mT) * head**-0.5 * math.log2(math.e) * 8
    out, total = q.new_zeros(*q.shape[:3], head), q.new_zeros(*q.shape[:3], 1)
    most = q.new_full((*q.shape[:3], 1), -math.inf)
    for first in reversed(range(0, keys, tile.keys)):
        own = scores[..., first : first + tile.keys]
        higher = torch.maximum(most, own.amax(-1, keepdim=True))
        codes = (own - higher + 126).clamp_min(0).round().to(torch.uint8)
        weights = codes.view(torch.float8_e4m3fn).double()
        by, most = ((most - higher) / 8).exp2(), higher
        out = out * by + weights @ v[..., first : first + tile.keys, :]
        total = total * by + weights.sum(-1, keepdim=True)
    return out / total


def off(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def exact_of(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q.double(), k.double(), v.double())


def judge(source: KernelSource, seed: int, given: Given, tile: WgmmaTile) -> None:
    found = attended(source, given, tile, seed)
    assert off(found, by_rule(given, tile)) < MOST_OFF[found.dtype]


@pytest.mark.parametrize(("head", "tile", "shape", "dtype"), CASES, ids=str)
def test_results(head: int, tile: WgmmaTile, shape: Any, dtype: torch.dtype) -> None:
    """Beside the rule, and so far from exact attention of random numbers as e4m3 is."""
    operands = heads(shape, head, dtype)
    given = made(*operands, tile.keys)
    source = code_attention(head, head**-0.5, tile, dtype)
    for seed in range(2):
        judge(source, seed, given, tile)
    assert off(attended(source, given, tile, 2), exact_of(*operands)) < 0.045


def test_all_that_orders_it_is_needed() -> None:
    """But for registers that change hands, which the assembler judges."""
    tile = WgmmaTile(2, 64, 2)
    given = made(*heads((1, 1, 100, 300), 40, F16), tile.keys)
    call = partial(judge, given=given, tile=tile)
    found = survivors(code_attention(40, 40**-0.5, tile, F16), call)
    assert not [what for what in found if "setmaxnreg" not in what]


def test_scores_may_be_large() -> None:
    """In one row all scores are very negative, in one very positive; in others maxima grow from
    block to block."""
    q, k, v = (x.clone() for x in heads((1, 1, 64, 300), 40, F16))
    k[..., 0], q[:, :, :6] = 20.0, 0.0
    q[:, :, 0, 0], q[:, :, 1, 0] = -2000.0, 2000.0
    k[..., 1] = torch.linspace(30, -30, 300)
    for row, by in enumerate((5.0, 40.0, 150.0, 2000.0), start=2):
        q[:, :, row, 1] = by  # the first block that is weighed is the last one
    given = made(q, k, v, SMALL.keys)
    found = attended(code_attention(40, 40**-0.5, SMALL, F16), given, SMALL, 0)
    assert bool(found.isfinite().all())
    assert off(found, by_rule(given, SMALL)) < MOST_OFF[F16]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite(bad: float) -> None:
    """What softmax makes NaN is NaN; of a value nothing in its head is finite."""
    q, k, v = (x.clone() for x in heads((1, 3, 64, 70), 40, F16))
    q[:, 0, 5, 0], k[:, 1, 30, 0], v[:, 2, 30, 0] = bad, bad, bad
    source, given = code_attention(40, 40**-0.5, SMALL, F16), made(q, k, v, SMALL.keys)
    found = attended(source, given, SMALL, 0).isnan()[0]
    wanted = exact_of(q, k, v).isnan()[0]
    wanted[2] = True
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_codes(dtype: torch.dtype) -> None:
    """Those of the rule for linears, of a block as a row. A block of zeros has codes of zeros, keys
    that there are not as well, and ones stand behind."""
    own, keys, wide = FORMATS["fp8"], 150, 64 * 3
    q, k, v = (x.clone() for x in heads((2, 2, 90, keys), 40, dtype))
    v[0, 1, 64:128] = 0.0
    *_, found, scale = made(q, k, v, 64)
    padded = F.pad(v.float(), (0, 0, 0, wide - keys))
    codes, scales = own.quantised(padded.view(2 * 2 * 3, -1))
    torch.testing.assert_close(scale.view(-1), scales)
    assert float(scale[0, 1, 1]) == pytest.approx(LEAST / own.most)
    wanted = codes.view(torch.uint8).view(2, 2, wide, 40)
    # where a number lies between two codes, a last bit of its scale decides
    apart = (found[:, :, :40].int() - wanted[:, :, places(wide)].mT.int()).abs()
    assert int(apart.max()) <= 1
    assert int(apart.sum()) < apart.numel() // 1000
    assert bool((found[:, :, 40].view(torch.float8_e4m3fn).float() == 1).all())
    assert not found[:, :, 41:].any()


def test_a_fragment_of_codes_lies_as_the_manual_says() -> None:
    """PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk32", of 8-bit types: row and column of
    a lane's n-th code."""
    rows, cols = torch.meshgrid(torch.arange(16), torch.arange(32), indexing="ij")
    codes = ((rows * 32 + cols) % 127).to(torch.uint8)
    raw = torch.zeros(4, 32, dtype=torch.int64)
    for lane in range(32):
        for n in range(16):
            row = lane // 4 + (0 if n < 4 or 8 <= n < 12 else 8)
            col = lane % 4 * 4 + n % 4 + (0 if n < 8 else 16)
            raw[n // 4, lane] |= int(codes[row, col]) << 8 * (n % 4)
    found = fragment(raw.numpy().astype("uint32"), "e4m3")
    assert torch.equal(torch.from_numpy(found), codes.view(torch.float8_e4m3fn).float())


TILES = [(head, tile) for head, tiles in sweep.TILES.items() for tile in tiles]


def test_tiles_to_be_measured_assemble(tmp_path: Path) -> None:
    """Without a spill, within a processor's memory, and with products that do not wait for each
    other."""
    text = tmp_path / "kernel.ptx"
    for head, tile in TILES:
        text.write_text(code_attention(head, head**-0.5, tile, F16).text)
        ptxas = [TOOLS / "ptxas", "-v", "--gpu-name=sm_90a", text, "-o", "/dev/null"]
        done = subprocess.run(ptxas, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (head, tile, done.stderr)
        assert "serialized" not in done.stderr, (head, tile)
        assert "0 bytes spill stores" in done.stderr, (head, tile)
        assert tile.programs * (CodeLayout(head, tile).shared + 1024) <= 227 * 1024


@pytest.mark.parametrize("head", sweep.TILES)
def test_what_makes_codes_compiles(head: int, tmp_path: Path) -> None:
    found = compiled(value_codes(head, 128, F16), 90)
    assert found.early
    assert resources(found, tmp_path)[1] == 0


class OfMachine(Bound):
    def __call__(self) -> None:
        params = zip(self.pointers, self.source.params, strict=True)
        tensors = [self._library.at(pointer, dtype) for pointer, dtype in params]
        self._library.ran.append(self.source.name)
        launch(self.source, tensors, self.scalars, views=self.views)


class Both(Interpreted):
    """Runs kernels in Triton by its interpreter, and those in PTX by the machine."""

    def bind(self, source: KernelSource, *given: Any, views: Any = (), **more: Any) -> Bound:
        if source.language == "ptx":
            return OfMachine(self, source, given[1], views)
        return super().bind(source, *given, views=views, **more)


def marked(problem: Problem, **attrs: Any) -> Problem:
    own = tuple(sorted({**dict(problem.attrs), MARK: "fp8", **attrs}.items()))
    return replace(problem, attrs=own)


@pytest.mark.parametrize(("head", "tile"), [(40, WgmmaTile(2, 128, 3)), (64, SMALL)], ids=str)
def test_both_as_the_library_launches_them(head: int, tile: WgmmaTile) -> None:
    kernels, operands = Both(), heads((2, 2, 150, 150), head, F16)
    for x in operands:
        kernels.known(x)
    found = launched(code_rows.launches_by(tile, marked(attends(*operands)), H100), kernels)
    out = kernels.known(torch.full((2, 150, 2, head), math.nan, dtype=F16)).transpose(1, 2)
    assert found.run(operands, out)
    assert kernels.ran == ["value_codes", "code_attention"]
    assert off(out, by_rule(made(*operands, tile.keys), tile)) < MOST_OFF[F16]


def shaped(tokens: int, head: int, heads: int = 8, **attrs: Any) -> Problem:
    operand = (2, heads, tokens, head)
    found = Problem("attention", (("causal", False), ("scale", None)), (operand,) * 3, F16)
    return marked(found, **attrs)


REFUSED = {
    "asked for by name": shaped(4096, 40, format=""),
    "without a mask": shaped(4096, 40, causal=True),
    "fp16 and bf16": replace(shaped(4096, 40), dtype=torch.float32),
    "a multiple of 8 up to 128, not 160": shaped(4096, 160),
    "no tile that was measured": shaped(4096, 48),
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_it_does_not_compute(said: str) -> None:
    assert said in code_rows.supports(REFUSED[said].call, H100)


def test_codes_run_where_they_were_measured_as_faster() -> None:
    """By attn_codes: 1,425 us for 1,799, and 35 for 28."""
    many, few = (sweep.problem_of(shape) for shape in ((2, 8, 16384, 40), (2, 20, 1024, 64)))
    found = [replace(each, attrs=(*each.attrs, (MARK, "fp8"))) for each in (many, few)]
    names = [library.select(each.call, each, H100).kernel for each in found]
    assert names == ["code_attention", "wgmma_attention"]


@pytest.fixture
def with_tiles(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let tiles be measured that take half of what exact ones do."""
    known = tuned(H100)
    codes = {40: (Rounds(WgmmaTile(2, 128, 3), 8.0, 0.5), Rounds(WgmmaTile(3, 64, 4), 8.0, 0.4))}
    table = replace(known, attention=replace(known.attention, codes=codes))
    caches = (select, library._known, code_rows.fastest)
    for cache in caches:
        cache.cache_clear()
    monkeypatch.setattr(code_rows, "tuned", lambda device: table)
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.mark.usefixtures("with_tiles")
def test_the_fastest_of_all_kernels_runs() -> None:
    """By codes where there are many keys, of those that are marked; exactly where there are few, as
    to make codes costs more than they save."""
    long, short = shaped(16384, 40), shaped(256, 40)
    assert code_rows.supports(long.call, H100) == ""
    choice = select(long.call, long, H100)
    assert choice.kernel == "code_attention"
    assert "wgmma_attention" in dict(choice.beaten)
    assert set(choice.sources) <= set(code_rows.forms(long.call, H100))
    assert select(short.call, short, H100).kernel != "code_attention"
    plain = replace(long, attrs=(("causal", False), ("scale", None)))
    assert select(plain.call, plain, H100).kernel == "wgmma_attention"
    assert code_rows.cost_us(shaped(16384, 64), H100) == NEVER
    assert code_rows.launch(shaped(16384, 64), H100) is None
    assert code_rows.launch(short, H100) is None


def test_the_sweep_fits_what_it_measures() -> None:
    """Times that follow the model give its numbers again."""
    tile = sweep.TILES[40][0]
    rows = []
    for shape in sweep.SHAPES:
        batch, many, tokens, head = shape
        us = {sweep.made_for(each): 5.0 for each in sweep.TILES[head]}
        for each in sweep.TILES[head]:
            us[sweep.name_of(each)] = 5.0 + Rounds(each, 3.25, 0.625).us(
                batch * many, tokens, tokens, H100.sms
            )
        rows.append({"shape": shape, "us": us})
    found = [*sweep.fitted(rows)]
    assert f"40: Rounds({tile}, 3.25, 0.625),  # 0% off at most" in found
    assert len(found) == len(TILES)


needs_a_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="multiplies by WGMMA",
)


@pytest.mark.gpu
@needs_a_gpu
@pytest.mark.parametrize("head", sweep.TILES)
def test_on_a_gpu(head: int) -> None:
    library, shape = kernel_loader("cuda", 0, "", 0), (2, 3, 1000, head)
    library.build(list(dict.fromkeys(sweep.sources(shape))))
    errors = sweep.measure(shape, library)["errors"]
    ours = {name: error for name, error in errors.items() if name.startswith("(")}
    assert len(ours) == len(sweep.TILES[head])
    assert max(ours.values()) < 0.05, errors  # sums of Hopper are short


@pytest.mark.gpu
@needs_a_gpu
@pytest.mark.parametrize(("head", "tile"), TILES, ids=str)
def test_codes_on_a_gpu_are_those_of_the_rule(head: int, tile: WgmmaTile) -> None:
    operands = heads((2, 3, 200, 333), head, F16, "cuda")
    kernels: Any = kernel_loader("cuda", 0, "", 0)
    stream = torch.cuda.current_stream().cuda_stream
    launches = code_rows.launches_by(tile, marked(attends(*operands)), H100)
    call: Callable[..., Tensor] = launched(launches, kernels, stream, device="cuda").allocating(
        refuse
    )
    given = made(*(x.cpu() for x in operands), tile.keys)
    assert off(call(operands).cpu(), by_rule(given, tile)) < 1e-2
