"""Attention with short heads: the kernel in the interpreter and the compiler, and its launcher."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from strop.ir.functions import HALVES
from strop.ir.source import KernelSource
from strop.kernels.attention.tma import TmaTile, tma_attention
from strop.kernels.tuned import tuned
from strop.runtime.build.loader import kernel_loader
from strop.runtime.run.launched_calls import Launched
from strop.testing import assert_as_accurate_as_eager
from tests.codegen.test_triton_compile import compiled, disassemble, resources
from tests.gpus import H100
from tests.kernels.interpreted import Interpreted
from tests.kernels.launching import attends, by_tile, launched, refuse

pytest.importorskip("triton")
from triton.tools.tensor_descriptor import TensorDescriptor

from strop.codegen.triton_interpreter import interpret

WITH_QUERIES = TmaTile(64, 64, 3, 4, blocks=0, with_queries=True)
TILES = {  # few keys, and else
    40: (TmaTile(128, 32, 4, 4, parts=1, blocks=0), TmaTile(128, 64, 3, 8, parts=1)),
    64: (TmaTile(64, 32, 4, 4, blocks=0), TmaTile(64, 64, 3, 4)),
    80: (WITH_QUERIES, TmaTile(64, 64, 3, 4)),
    160: (WITH_QUERIES, WITH_QUERIES),
}
HEADS = tuple(TILES)
FEW_KEYS = tuned(H100).attention.few_keys
IN_USE = [
    (head, tile)
    for head in HEADS
    for tile in tuned(H100).attention.tiles(head)
    if isinstance(tile, TmaTile)
]


def described(source: KernelSource, tensors: Sequence[Tensor]) -> list[TensorDescriptor]:
    return [
        TensorDescriptor(t, list(t.shape), list(t.stride()), list(box))
        for t, box in zip(tensors, source.boxes, strict=True)
    ]


def bound(kernels: Any, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Launched:
    """Where the library is faster, too."""
    tile = TILES[q.shape[-1]][k.shape[2] > FEW_KEYS]
    return launched(by_tile(tile, attends(q, k, v, scale)), kernels)


def run(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    kernels: Any = Interpreted()
    found = bound(kernels, q, k, v, scale).allocating(refuse)((q, k, v))
    assert kernels.ran == ["tma_attention"]
    return found


def of_tile(tile: TmaTile, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """By this tile, in memory full of NaN."""
    (batch, heads, queries, head), keys = q.shape, k.shape[2]
    source = tma_attention(head, head**-0.5, tile, q.dtype)
    out = q.new_full((batch, queries, heads, head), float("nan")).transpose(1, 2)
    tensors = (q, k, v, out) * (len(source.params) // 4)
    sizes = {"s0": queries, "s1": keys, "s2": heads, "s3": batch * heads}
    interpret(source, described(source, tensors), sizes)
    return out


def operands(head: int, queries: int, keys: int, heads: int = 2) -> tuple[Tensor, ...]:
    """Of two pictures, slices of one product: (B, H, S, D). In fp16: Triton's interpreter
    multiplies bf16 as if it were integers."""
    torch.manual_seed(0)
    longest = max(queries, keys)
    merged = torch.randn(2, longest, 3, heads, head, dtype=torch.float16)
    q, k, v = merged.permute(2, 0, 3, 1, 4)
    return q[:, :, :queries], k[:, :, :keys], v[:, :, :keys]


def judge(found: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> None:
    eager = F.scaled_dot_product_attention(q, k, v, scale=scale)
    exact = F.scaled_dot_product_attention(*(t.double() for t in (q, k, v)), scale=scale)
    assert_as_accurate_as_eager(found, eager, exact)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize(("queries", "keys"), [(150, 77), (150, 150), (64, 256), (3, 1)])
def test_as_accurate_as_torch(head: int, queries: int, keys: int) -> None:
    given = operands(head, queries, keys)
    judge(run(*given), *given)


@pytest.mark.parametrize(("head", "tile"), IN_USE, ids=str)
def test_tiles_in_use(head: int, tile: TmaTile) -> None:
    given = operands(head, tile.queries + 9, 2 * tile.keys + 7, heads=1)
    judge(of_tile(tile, *given), *given)


@pytest.mark.parametrize(
    "tile",
    [
        TmaTile(64, 32, 3, 4),
        TmaTile(64, 32, 3, 4, parts=1),
        TmaTile(64, 32, 3, 4, blocks=0),
        TmaTile(64, 32, 3, 4, blocks=0, with_queries=True),
        TmaTile(64, 32, 3, 4, blocks=2),
    ],
    ids=str,
)
@pytest.mark.parametrize("head", [40, 64, 160])
def test_what_tiles_can_say(head: int, tile: TmaTile) -> None:
    given = operands(head, 70, 141, heads=1)
    judge(of_tile(tile, *given), *given)


def test_another_scale() -> None:
    given = operands(40, 33, 50)
    judge(run(*given, scale=0.3), *given, scale=0.3)


def test_scores_may_be_large() -> None:
    """In one row all are very negative, in one very positive, and in one a single key counts."""
    q, k, v = (t.clone() for t in operands(64, 64, 77, heads=1))
    k[..., 0], q[:, :, :3] = 20.0, 0.0
    q[:, :, 0, 0], q[:, :, 1, 0] = -2000.0, 2000.0
    q[:, :, 2] = k[:, :, 76] * 100
    found = of_tile(TmaTile(64, 32, 3, 4), q, k, v)
    assert bool(found.isfinite().all())
    judge(found, q, k, v)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_softmax_makes_nan_is_nan(bad: float) -> None:
    q, k, v = (t.clone() for t in operands(40, 64, 77, heads=1))
    q[:, :, 5, 0], k[0, :, 30, 0] = bad, bad
    found = of_tile(TmaTile(64, 32, 3, 4), q, k, v)
    exact = (q.double() @ k.double().mT * 40**-0.5).softmax(-1) @ v.double()
    assert torch.equal(found.isnan(), exact.isnan())
    assert not exact.isnan().all()
    assert exact.isnan().any()


def test_nothing_of_a_neighbour() -> None:
    """What lies behind a head, or behind the last key, has no share, be it NaN."""
    given = operands(40, 70, 77)
    around = torch.full((3, 2, 99, 4, 48), float("nan"), dtype=torch.float16)
    inner = around.transpose(2, 3)[:, :, 1:3, 3:80, :40]
    for target, source in zip(inner, given, strict=True):
        target[:, :, : source.shape[2]].copy_(source)
    assert torch.equal(run(inner[0][:, :, :70], *inner[1:]), run(*given))
    kernels: Any = Interpreted()
    memory = torch.full((2, 80, 2, 40), 7.0, dtype=torch.float16)
    bound(kernels, *given).allocating(refuse)(given)
    (kernel,) = kernels.bound
    for place in range(3, len(kernel.pointers), 4):
        kernel.set_pointer(place, memory.data_ptr())
    kernel()
    assert bool((memory.flatten()[2 * 70 * 2 * 40 :] == 7.0).all())


def test_a_kernel_is_bound_once_for_each_way_to_lie() -> None:
    kernels: Any = Interpreted()
    given = [torch.randn(1, 20, 2, 40).half().transpose(1, 2) for _ in range(3)]
    call = bound(kernels, *given).allocating(refuse)
    merged = torch.randn(1, 20, 2, 80).half().transpose(1, 2)[..., :40]
    for q in (given[0], given[1], merged, given[0]):
        judge(call((q, *given[1:])), q, *given[1:])
    assert len(kernels.bound) == 2
    assert len(kernels.ran) == 4


def test_dims_of_size_1_may_have_any_stride() -> None:
    q, k, v = (torch.randn(1, 1, 20, 40).half() for _ in range(3))
    odd = k.as_strided(k.shape, (3, 5, 40, 1))
    judge(run(q, odd, v), q, k, v)


def misplaced(tensor: Tensor) -> Tensor:
    memory = tensor.new_empty(tensor.numel() + 1)
    return memory[1:].as_strided(tensor.shape, tensor.stride()).copy_(tensor)


Q = torch.randn(2, 2, 20, 40).half()
OTHER = {  # sizes
    "keys of another count of heads": (Q, Q[:, :1], Q[:, :1]),
    "another count of values": (Q, Q, Q[:, :, :7]),
    "another width": (Q, Q[..., :32], Q[..., :32]),
    "values of another width": (Q, Q, Q[..., :32]),
    "no query": (Q[:, :, :0], Q, Q),
    "no key": (Q, Q[:, :, :0], Q[:, :, :0]),
    "too many heads": (torch.empty(1, 1, 1, 40).half().expand(1, 2**16, 1, 40),) * 3,
}
ODD = {  # places in memory
    "keys of one head for all": (Q, *[Q[:, :1].expand(-1, 2, -1, -1)] * 2),
    "an odd stride": (Q, torch.randn(2, 2, 20, 44).half()[..., :40], Q),
    "numbers apart": (Q, Q.mT.contiguous().mT, Q),
    "an odd address": (misplaced(Q), Q, Q),
}


@pytest.mark.parametrize("name", OTHER)
def test_no_tile_takes_other_sizes(name: str) -> None:
    for tile in dict.fromkeys(tile for tiles in TILES.values() for tile in tiles):
        assert by_tile(tile, attends(*OTHER[name])) is None


@pytest.mark.parametrize("name", ODD)
def test_the_library_does_what_does_not_lie_right(name: str) -> None:
    kernels: Any = Interpreted()
    answer = torch.zeros(1)
    call = bound(kernels, *ODD[name]).allocating(lambda inputs: answer)
    for _ in range(2):
        assert call(ODD[name]) is answer
    assert not kernels.bound


def test_tensors_of_2_to_the_31_elements_are_for_the_library() -> None:
    huge = torch.empty(1, 2, 2**31 // 80 + 1, 40, device="meta", dtype=torch.float16)
    half = huge[:, :, : 2**29 // 80]
    for given, is_ours in ((huge, False), (half, True)):
        assert (by_tile(TILES[40][1], attends(given, given, given)) is not None) == is_ours


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("head", "tile"), IN_USE, ids=str)
def test_compiles(head: int, tile: TmaTile, dtype: torch.dtype, tmp_path: Path) -> None:
    """Two programs at least fit a multiprocessor; of heads of 160 there are never that many."""
    cubin = compiled(tma_attention(head, head**-0.5, tile, dtype), 90)
    registers, stack = resources(cubin, tmp_path)
    assert stack == 0  # nothing spilled
    assert 2 * registers * 32 * tile.num_warps <= 2**16
    assert (1 if head == 160 else 2) * (cubin.shared + 1024) <= 227 * 1024
    order = disassemble(cubin, tmp_path)
    assert any(op.startswith("HGMMA") for op in order)
    assert any(op.startswith("UTMALDG") for op in order)
    assert any(op.startswith("UTMASTG") for op in order)
    assert not any(re.match(r"(LDG|STG|LDL|STL)\b", op) for op in order)
    assert cubin.early
    assert order.index("ACQBULK") < min(n for n, op in enumerate(order) if op.startswith("UTMALDG"))


def test_the_loop_is_what_it_should_be(tmp_path: Path) -> None:
    """Scaling and subtracting are one instruction, an exponential is another one, the weights stay
    in registers, and nothing waits between two products of one block."""
    tile = TmaTile(128, 64, 3, 8, parts=1)
    order = disassemble(compiled(tma_attention(40, 0.2, tile, torch.float16), 90), tmp_path)
    first = next(n for n, op in enumerate(order) if op.startswith("HGMMA"))
    loop = order[first : next(n for n, op in enumerate(order) if n > first and op == "BRA")]
    scores = tile.keys // 2  # of a thread
    assert sum(op == "MUFU.EX2" for op in loop) == scores + 2
    assert sum(op == "FFMA" for op in loop) == scores
    assert sum(op == "FADD" for op in loop) <= 2
    assert sum(op.startswith("HMMA") for op in loop) == tile.keys // 16
    assert sum(op.startswith("WARPGROUP") for op in loop) <= 4
    assert not any(re.match(r"(LDS|STS|FSEL)", op) for op in loop)


SHAPES = (
    (2, 8, 4096, 4096, 40),
    (2, 8, 4096, 77, 40),
    (2, 8, 1024, 1024, 80),
    (2, 8, 1024, 77, 80),
    (2, 10, 4096, 4096, 64),
    (2, 20, 1024, 1024, 64),
    (2, 20, 1000, 77, 64),
    (2, 8, 256, 256, 160),
    (2, 8, 64, 64, 160),
    (2, 8, 64, 77, 160),
    (3, 5, 777, 1001, 40),
    (1, 1, 1, 1, 80),
)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
    reason="needs an NVIDIA GPU with a tensor memory accelerator",
)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_on_a_gpu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    batch, heads, queries, keys, head = shape
    torch.manual_seed(0)
    longest = max(queries, keys)
    kernels, stream = kernel_loader("cuda", 0, "", 0), torch.cuda.Stream()
    shapes = ((batch, heads, size, head) for size in (queries, keys, keys))
    like = [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]
    tile = TILES[head][keys > FEW_KEYS]
    found = launched(by_tile(tile, attends(*like)), kernels, stream.cuda_stream)
    call = found.allocating(refuse)
    with torch.cuda.stream(stream), torch.no_grad():
        for _ in range(2):  # other addresses the second time
            merged = torch.randn(batch, longest, 3, heads, head, device="cuda").to(dtype)
            q, k, v = merged.permute(2, 0, 3, 1, 4)
            given = q[:, :, :queries], k[:, :, :keys], v[:, :, :keys]
            judge(call(given), *given)
        graph, before = torch.cuda.CUDAGraph(), call(given)
        with torch.cuda.graph(graph, stream=stream):
            captured = call(given)
        captured.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, before)
