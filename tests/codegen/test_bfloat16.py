"""fp32 is rounded to bf16, and bf16 widened, two neighbours at once on sm_90 and newer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from strop.backend import compile_graph
from strop.codegen.assemble import Signature
from strop.codegen.triton_lines import Lines
from strop.ir.functions import FUNCTIONS, SM_90
from strop.ir.graph import Ref
from strop.ir.source import KernelSource
from strop.options import Options
from strop.runtime.build.cubin import compile_cubin
from strop.runtime.build.driver import load
from tests.codegen.test_model_kernels import check, model_of
from tests.codegen.test_triton_compile import disassemble
from tests.frontend.tracing import trace

BF16, F32 = torch.bfloat16, torch.float32
PER_PROGRAM = 1024


def rms_norm(x: Tensor, weight: Tensor, gate: Tensor) -> Tensor:
    """As diffusers normalises: what was rounded is multiplied by the weight, and read again."""
    wide = x.float()
    y = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype)
    return y * weight * torch.tanh(gate) + x


def plain_norm(x: Tensor, weight: Tensor, gate: Tensor) -> Tensor:
    """Here the product of two numbers of bf16 is rounded to bf16."""
    wide = x.float()
    y = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype)
    return y * weight


def added(x: Tensor, weight: Tensor, gate: Tensor) -> Tensor:
    return x + weight


def chosen(x: Tensor, weight: Tensor, gate: Tensor) -> Tensor:
    return torch.cat([x[:, :3] + weight, x[:, 3:]], 1)


TWOS: tuple[Callable[..., Tensor], ...] = (rms_norm, plain_norm)
CASTS: tuple[Callable[..., Tensor], ...] = (added, chosen)


def sources(function: Callable[..., Tensor], width: str = "2048") -> list[KernelSource]:
    traced = trace(function, f"b t {width}", width, f"b 1 {width}", dtype=BF16, b=2, t=5)
    made = compile_graph(traced.graph, Signature([Ref(0)], ()), "cuda", Options())
    return [source for source in made.program.sources if source.text.count("tl.load") > 1]


def counted(source: KernelSource, folder: Path, arch: int = 90) -> list[str]:
    return disassemble(compile_cubin(source, arch), folder)


@pytest.mark.parametrize("width", ["2048", "96", "33", "c"])
@pytest.mark.parametrize("function", [*TWOS, *CASTS])
def test_values_in_the_interpreter(function: Callable[..., Tensor], width: str) -> None:
    """By the casts, which is what the interpreter takes."""
    sizes = {"b": 2, "t": 5} | ({"c": 40} if width == "c" else {})
    traced = trace(function, f"b t {width}", width, f"b 1 {width}", dtype=BF16, **sizes)
    model = model_of(compile_graph(traced.graph, Signature([Ref(0)], ()), "cuda", Options()))
    for sample, form in model.samples.values():
        check(sample, model.env, 1, form)


@pytest.mark.parametrize("function", TWOS)
def test_no_number_is_rounded_by_itself(function: Callable[..., Tensor], tmp_path: Path) -> None:
    """Nothing more goes through shared memory or branches, and there are fewer instructions than
    by casts."""
    found = sources(function)
    assert any("rounded_to_bfloat16(" in s.text or "widened(" in s.text for s in found)
    for source in found:
        by_twos = counted(source, tmp_path)
        by_casts = counted(source.with_constants(**{SM_90: 0}), tmp_path)
        assert not [name for name in by_twos if name.startswith("F2F.")]
        for kind in ("LDS", "STS", "BRA"):  # loads that are one behind the other have one choice
            assert _count(by_twos, kind) <= _count(by_casts, kind)
        assert _without_padding(by_twos) < _without_padding(by_casts)


@pytest.mark.parametrize("function", CASTS)
def test_what_the_compiler_does_in_twos_is_left_to_it(
    function: Callable[..., Tensor], tmp_path: Path
) -> None:
    """Sums of bf16 that are rounded again are of bf16, and so is what is chosen."""
    for source in sources(function):
        assert "widened(" not in source.text
        assert SM_90 not in dict(source.constants)
        found = counted(source, tmp_path)
        assert [name for name in found if name.startswith(("HADD2.BF16", "HFMA2"))]


def test_products_of_what_was_rounded_are_of_bf16(tmp_path: Path) -> None:
    """The weight, and what it is multiplied by, are never widened."""
    for source in sources(plain_norm):
        assert "rounded_to_bfloat16(" not in source.text
        found = counted(source, tmp_path)
        assert [name for name in found if name.startswith(("HMUL2.BF16", "HFMA2.MMA.BF16"))]


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("elements", [32, 64, 1024])
def test_tiles_compile_whatever_a_thread_has(elements: int, arch: int, tmp_path: Path) -> None:
    """128 threads have a quarter of a number each, a half, or eight."""
    found = counted(replace(both_ways(), constants=_constants(elements, 1)), tmp_path, arch)
    if arch >= 90:
        assert any(name.startswith("F2FP.BF16") for name in found)
        assert not any(name.startswith("F2F.") for name in found)
    if arch >= 90 and elements == PER_PROGRAM:
        assert not any(name.startswith("PRMT") for name in found)


def both_ways() -> KernelSource:
    text = f"""import triton
import triton.language as tl


@triton.jit
{FUNCTIONS["rounded_to_bfloat16"]}


@triton.jit
{FUNCTIONS["widened"]}


@triton.jit
def both_ways(p0, p1, p2, p3, N: tl.constexpr, {SM_90}: tl.constexpr, EARLY: tl.constexpr):
    place = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(p1 + place, rounded_to_bfloat16(tl.load(p0 + place), {SM_90}))
    tl.store(p3 + place, widened(tl.load(p2 + place), {SM_90}))
"""
    types = (F32, F32, BF16, F32)
    return KernelSource(
        "both_ways", "triton", text, types, (), constants=_constants(PER_PROGRAM, 1)
    )


def _constants(elements: int, sm_90: int) -> tuple[tuple[str, int], ...]:
    return (("N", elements), (SM_90, sm_90), ("EARLY", 0))


def _count(names: list[str], start: str) -> int:
    return sum(name.startswith(start) for name in names)


def _without_padding(names: list[str]) -> int:
    return len(names) - _count(names, "NOP")


def every_number() -> tuple[Tensor, Tensor]:
    """Return fp32 with every upper half and those lower halves at which rounding changes, NaN,
    infinities, subnormals and both zeros among them; and every number of bf16, as often."""
    upper = torch.arange(65536, dtype=torch.int64)[:, None] << 16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xC000, 0xFFFE, 0xFFFF])
    bits = (upper | lower).flatten().to(torch.uint32)
    narrow = torch.arange(65536, dtype=torch.int32).to(torch.int16).repeat(8)
    return bits.view(torch.int32).view(F32), narrow.view(BF16)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_bits_on_a_gpu() -> None:
    """Both functions give the bits of the casts, NaN's among them; numbers are torch's."""
    major, minor = torch.cuda.get_device_capability()
    wide, narrow_ones = (tensor.cuda() for tensor in every_number())
    found = []
    for sm_90 in (0, int(major >= 9)):
        outs = [torch.full_like(wide, 7.0) for _ in range(2)]
        tensors = [wide, outs[0], narrow_ones, outs[1]]
        source = replace(both_ways(), constants=_constants(PER_PROGRAM, sm_90))
        function = load(compile_cubin(source, 10 * major + minor))
        grid = [wide.numel() // PER_PROGRAM]
        pointers = [tensor.data_ptr() for tensor in tensors]
        function.bind(pointers, [], grid, torch.cuda.current_stream().cuda_stream)()
        torch.cuda.synchronize()
        found.append([out.view(torch.int32).cpu() for out in outs])
    for by_casts, by_twos in zip(*found, strict=True):
        assert torch.equal(by_casts, by_twos)
    for bits, wanted in zip(found[1], (wide.to(BF16).float(), narrow_ones.float()), strict=True):
        finite = ~wanted.isnan().cpu()
        assert torch.equal(bits[finite], wanted.view(torch.int32).cpu()[finite])
        assert bits.view(F32)[~finite].isnan().all()


def test_a_line_waits_until_it_is_needed() -> None:
    """And never enters a loop, where it would widen what is wide."""
    lines = Lines()
    lines.add_later("v1", "v1 = f(v1)")
    lines.add_later("v12", "v12 = f(v12)")
    with lines.choice("if fills:"):
        lines.add("v2 = 0")
    lines.add("v3 = v12 + 1")
    with lines.block("for first in range(9):"):
        lines.add_later("v4", "v4 = f(v4)")
    lines.add("v5 = v4")
    assert [line.strip() for line in lines.lines] == [
        "if fills:",
        "v2 = 0",
        "v12 = f(v12)",
        "v3 = v12 + 1",
        "v1 = f(v1)",
        "for first in range(9):",
        "v4 = f(v4)",
        "v5 = v4",
    ]
    assert lines.lines[6].startswith(" " * 8)
