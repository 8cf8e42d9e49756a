"""Complex numbers become pairs of real ones: the same results, by kernels alone, in one graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import strop
from strop.api import optimize_module
from strop.artefacts.building import CARDS
from strop.artefacts.planning import PlanningDispatcher
from strop.backend import compile_graph
from strop.codegen.assemble import Signature
from strop.ir.tensor_spec import TensorSpec
from strop.lowering.lower import lower
from strop.options import Options
from strop.runtime.build.ahead import AheadLoader
from tests.codegen.kernels import Sample, numels_of
from tests.codegen.test_model_kernels import check
from tests.frontend.tracing import Function, trace_specs
from tests.views.cases import Case
from tests.views.running import optimized

ENVS = ({"b": 2, "h": 4, "w": 6}, {"b": 3, "h": 5, "w": 3}, {"b": 1, "h": 7, "w": 4})


def _rotated(x: Tensor, freqs: Tensor) -> Tensor:
    """Rotate as Qwen-Image does."""
    z = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(z * freqs.unsqueeze(1)).flatten(3).type_as(x)


def _tables(x: Tensor, freqs: Tensor) -> Tensor:
    """Put a table of frequencies together as Qwen-Image does."""
    rows, cols = freqs.split([2, 4], dim=1)
    height, width = x.shape[1], x.shape[2]
    both = torch.cat([rows[-(height - height // 2) :], rows[: height // 2]], dim=0)
    spread = both.view(1, height, 1, -1).expand(1, height, width, -1)
    other = cols[:width].view(1, 1, width, -1).expand(1, height, width, -1)
    made = torch.cat([spread, other], dim=-1).reshape(height * width, -1)
    return torch.view_as_real(made[None] * x.flatten(1)[..., None]).clone()


# "z" before the sizes: complex numbers
CASES: dict[str, Case] = {
    "rotated by an argument": Case(_rotated, ("b h 3 8", "z: h 4")),
    "a table": Case(_tables, ("b h w", "z: 9 6")),
    "polar": Case(lambda x, y: torch.view_as_real(torch.polar(x.abs(), y)).sum(-1), ("b h", "b h")),
    "complex": Case(
        lambda x, y: (torch.complex(x, y) * torch.complex(y, x[:1])).abs(), ("b h", "b h")
    ),
    "conjugated": Case(lambda z: (z.conj() * z).real + z.conj().imag * 2, ("z: b h",)),
    "divided": Case(lambda z, y: (z / y + y / 2.5).angle().cos(), ("z: b h", "z: b h")),
    "by a real one": Case(
        lambda z, x: torch.view_as_real(z * x + 1.5 - z / 3) + 0, ("z: b h", "h")
    ),
    "by a complex number": Case(lambda x: (x * (1 + 2j) - 3j).abs(), ("b h",)),
    "reciprocal": Case(lambda z: torch.view_as_real(z.reciprocal() * z.square()) + 0, ("z: b h",)),
    "views": Case(
        lambda z: (z.transpose(0, 1).flip(1)[1:, :, None].repeat(1, 2, 3)).abs(), ("z: b h",)
    ),
    "indexed": Case(lambda z, i: z[:, i].abs() + z.mean(1, keepdim=True).real, ("z: b 9", "i9: h")),
    "summed": Case(lambda z: z.sum(1).abs() + z.sum().imag, ("z: b h",)),
    "chosen": Case(lambda z: torch.where(z.real > 0, z, z.conj() * 2).imag + 1, ("z: b h",)),
    "written": Case(lambda z: _written(z), ("z: b 6",)),
    "padded": Case(
        lambda z: nn.functional.pad(torch.cat([z, z * 1j], 1), (1, 2)).abs(), ("z: b h",)
    ),
    "to real": Case(lambda z: z.abs().to(z.dtype).real + (z == z).float(), ("z: b h",)),
}


def _written(z: Tensor) -> Tensor:
    out = torch.zeros_like(z)
    out[:, ::2] = z[:, 1::2] * 2j
    out[:, 1] = z[:, 0]
    return torch.view_as_real(out) + 0


def _made(text: str, env: dict[str, int], generator: torch.Generator, wide: bool) -> Tensor:
    kind, _, sizes = text.rpartition(":")
    shape = [env[s] if s in env else int(s) for s in sizes.split()]
    if kind.startswith("i"):
        return torch.randint(0, int(kind[1:]), shape, generator=generator)
    dtype = torch.complex64 if kind == "z" else torch.float32
    value = torch.randn(shape, dtype=dtype, generator=generator)
    return value.to(torch.complex128 if kind == "z" else torch.float64) if wide else value


def _bare(case: Case) -> Case:
    return Case(case.function, tuple(text.rpartition(":")[2].strip() for text in case.arguments))


@pytest.mark.parametrize("name", CASES)
def test_is_no_further_from_fp64_than_eager(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    module, dispatcher = optimized(_bare(case), ENVS[0], str(tmp_path))
    for env in ENVS:
        given, wide = (
            [
                _made(text, env, torch.Generator().manual_seed(n), wide)
                for n, text in enumerate(case.arguments)
            ]
            for wide in (False, True)
        )
        found, eager, exact = module(*given), case.function(*given), case.function(*wide)
        assert (found.dtype, found.shape, found.stride()) == (
            eager.dtype,
            eager.shape,
            eager.stride(),
        )
        floor = torch.finfo(torch.float32).eps * exact.abs().max().item()
        error, allowed = ((x.double() - exact).abs().max().item() for x in (found, eager))
        assert error <= max(2 * allowed, 4 * floor)
    assert not dispatcher.counters.fallbacks
    assert dispatcher.variants.num_captures == 1
    assert not [s for v in dispatcher.variants.all for s in v.program.call_steps]


@pytest.mark.parametrize("name", ["rotated by an argument", "polar", "divided", "written"])
def test_in_triton(name: str) -> None:
    case, env = CASES[name], ENVS[1]
    specs = [
        TensorSpec(
            tuple(text.rpartition(":")[2].split()),
            torch.complex64 if text.startswith("z") else torch.float32,
            torch.device("cpu"),
        )
        for text in case.arguments
    ]
    module = Function(case.function)
    traced = trace_specs(module, module, specs, env)
    signature = Signature(traced.returned, traced.captured.guards)
    compiled = compile_graph(traced.graph, signature, "cuda", Options())
    groups = compiled.plan.groups
    stored = {node for group in groups for node in group.stores}
    assert groups
    for group in groups:
        low = lower(group, stored, compiled.graph.hints)
        numels = numels_of(low)
        check(Sample(low.kernel, numels, (env,)), compiled.graph.hints, 1)


RETURNED: dict[str, Callable[[Tensor], Any]] = {
    "a product": lambda z: z * 2j,
    "a product and its parts": lambda z: (lambda y: (y, y.real, y.imag))(z * 2j),
    "the argument": lambda z: (z, z * 1j),
    "a view of the argument": lambda z: (z.real, z[0], (z * z).imag),
    "an operator without a rule": lambda z: torch.exp(z * 1j).abs(),
}


@pytest.mark.parametrize("name", RETURNED)
def test_what_is_returned_lies_as_in_eager(name: str, tmp_path: Path) -> None:
    function = RETURNED[name]
    module = strop.optimize(Function(function).eval(), options=Options(cache_dir=str(tmp_path)))
    for rows in (3, 5):
        z = torch.randn(rows, 4, dtype=torch.complex64)
        torch.testing.assert_close(module(z), function(z))
        if name == "a product and its parts":
            whole, real, _ = module(z)
            whole.zero_()
            assert not real.any()
    is_in_eager = name in ("a product and its parts", "a view of the argument")
    assert bool(module.forward.counters.eager_calls) == is_in_eager


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(16), 1.0 / 100 ** (torch.arange(4) / 4))
        self.freqs = torch.polar(torch.ones_like(angles), angles)  # no buffer, as in Qwen-Image
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return _rotated(self.linear(x), self.freqs[: x.shape[1]])


def test_a_table_of_the_module_is_read_in_place(tmp_path: Path) -> None:
    plain, module = Rotary().eval(), Rotary().eval()
    module.load_state_dict(plain.state_dict())
    strop.optimize(module, options=Options(cache_dir=str(tmp_path)))
    for length in (4, 7, 16):
        x = torch.randn(2, length, 3, 8)
        with torch.no_grad():
            torch.testing.assert_close(module(x), plain(x))
    for table in (module.freqs, plain.freqs):
        table.mul_(1j)
    with torch.no_grad():
        torch.testing.assert_close(module(x), plain(x))
    for variant in module.forward.variants.all:
        assert {step.op for step in variant.program.call_steps} == {"linear"}
    assert module.forward.counters.eager_calls == 0


@pytest.mark.parametrize("by", ["optimize", "compile"])
def test_gradients(by: str) -> None:
    plain, module = Rotary(), Rotary()
    module.load_state_dict(plain.state_dict())
    ours = (
        strop.optimize(module, train=True)
        if by == "optimize"
        else torch.compile(module, backend="strop")
    )
    for length in (4, 7):
        x = torch.randn(2, length, 3, 8, requires_grad=True)
        found, wanted = (
            torch.autograd.grad(f(x).square().sum() + f(x).sin().sum(), x)[0] for f in (ours, plain)
        )
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


class MadeOnTheHost(nn.Module):
    """Makes its table on the CPU in the first call and moves it, as Z-Image does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(16, device="cpu"), 1.0 / 100 ** (torch.arange(4) / 4))
        table = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)
        return _rotated(self.linear(x), table.to(x.device)[: x.shape[1]])


def test_a_table_that_is_made_on_the_host_moves_to_a_gpu_in_parts(tmp_path: Path) -> None:
    """Planned for a GPU, where the table's two halves move one by one."""
    module, options = MadeOnTheHost().eval(), Options(cache_dir=str(tmp_path), strict=True)
    loader = AheadLoader("sm_90", CARDS["sm_90"], options)
    kind = partial(PlanningDispatcher, loader=loader, place=torch.device("cuda", 0))
    optimize_module(module, options, kind=kind)
    with torch.no_grad():
        module(torch.randn(2, 4, 3, 8))
    (variant,) = module.forward.variants.all
    assert {step.op for step in variant.program.call_steps} == {"linear"}


@pytest.mark.gpu
def test_a_table_that_is_made_on_the_host_on_a_gpu(tmp_path: Path) -> None:
    plain = MadeOnTheHost().eval().cuda()
    module = MadeOnTheHost().eval().cuda()
    module.load_state_dict(plain.state_dict())
    strop.optimize(module, options=Options(cache_dir=str(tmp_path), strict=True))
    for length in (4, 7, 7, 7):
        x = torch.randn(2, length, 3, 8, device="cuda")
        with torch.no_grad():
            torch.testing.assert_close(module(x), plain(x), rtol=1e-4, atol=1e-4)
    assert not module.forward.counters.fallbacks


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_rotation_on_a_gpu(tmp_path: Path) -> None:
    plain, module = Rotary().eval().cuda(), Rotary().eval().cuda()
    plain.freqs, module.freqs = plain.freqs.cuda(), module.freqs.cuda()
    module.load_state_dict(plain.state_dict())
    strop.optimize(module, options=Options(cache_dir=str(tmp_path)))
    for length in (4, 7, 7, 7):  # the last ones from a CUDA graph
        x = torch.randn(2, length, 3, 8, device="cuda")
        with torch.no_grad():
            torch.testing.assert_close(module(x), plain(x), rtol=1e-4, atol=1e-4)
    assert not module.forward.counters.fallbacks
