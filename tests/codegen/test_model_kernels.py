"""The kernels that models generate: their values in Triton's interpreter, and their machine code.

Every distinct kernel of the tiny models runs, none is left out: sizes are small and odd, so that
tiles are ragged. The judge is the loop IR in fp64, as for the samples in test_triton.py. Full
models are compiled by benchmarks/kernel_matrix.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strop.backend import Compiled, compile_graph
from strop.codegen.assemble import Signature
from strop.codegen.triton import emit, stitched
from strop.diffusion.components import adapter_for
from strop.frontend.capture import capture
from strop.frontend.importer import import_graph
from strop.fusion.stitch import stitches
from strop.ir import interpret as judge
from strop.ir.device import GpuTarget
from strop.ir.dims import Env
from strop.ir.loops import Schedule
from strop.ir.source import Emitted, KernelForm, KernelSource
from strop.lowering.lower import Lowered, lower
from strop.options import Options
from strop.runtime.build import compilers as builds
from tests.codegen.kernels import Sample, numels_of
from tests.codegen.test_triton import TOLERANCE, run
from tests.codegen.test_triton_compile import SHARED_LIMIT, resources
from tests.e2e import tiny

F16, F32 = torch.float16, torch.float32
SLOW_PATH_STACK = 32  # bytes: the table of digits in the slow path of sin and cos


@dataclass(frozen=True)
class Model:
    """The distinct kernels of one program with the form of each, and the sizes it was traced at."""

    samples: dict[KernelSource, tuple[Sample, Emitted | KernelForm]]
    env: Env


def _unet(dtype: torch.dtype) -> tuple[nn.Module, Callable[..., Any], tuple[Tensor, ...]]:
    module = tiny.unet().to(dtype)
    args = tiny.unet_args(2, 6, 4, 5, dtype)
    return module, lambda x, t, text: module(x, t, text, return_dict=False), args


def _vae_decoder(dtype: torch.dtype) -> tuple[nn.Module, Callable[..., Any], tuple[Tensor, ...]]:
    module = tiny.vae().decoder.to(dtype)
    return module, module, (torch.empty(2, 4, 3, 5, dtype=dtype),)


def _clip(dtype: torch.dtype) -> tuple[nn.Module, Callable[..., Any], tuple[Tensor, ...]]:
    module = tiny.clip().to(dtype)
    return module, lambda ids: module(ids)[0], (torch.zeros(3, 7, dtype=torch.int64),)


def _t5(dtype: torch.dtype) -> tuple[nn.Module, Callable[..., Any], tuple[Tensor, ...]]:
    """In fp16 a flag of a whole tensor decides where its elements are clamped."""
    from transformers import T5Config, T5EncoderModel

    torch.manual_seed(0)
    config = T5Config(vocab_size=50, d_model=24, d_kv=8, d_ff=40, num_layers=2, num_heads=2)
    module = T5EncoderModel(config).eval().to(dtype)
    ids = torch.zeros(3, 7, dtype=torch.int64)
    return module, lambda ids: module(ids)[0], (ids,)


BUILDERS = {"unet": _unet, "vae_decoder": _vae_decoder, "clip": _clip, "t5": _t5}


@cache
def kernels_of(name: str, dtype: torch.dtype) -> Model:
    """As ``strop.optimize`` gets them, but for CUDA without a GPU."""
    module, call, args = BUILDERS[name](dtype)
    shapes = adapter_for(module).shapes(args)
    captured = capture(module, call, shapes.specs, shapes.hints)
    imported = import_graph(
        captured.gm, captured.symbols, captured.hints, captured.origins, len(captured.state_names)
    )
    signature = Signature(imported.returned, captured.guards)
    return model_of(compile_graph(imported.graph, signature, "cuda", Options()))


def model_of(compiled: Compiled) -> Model:
    env, groups = compiled.graph.hints, compiled.plan.groups
    stored = {node for group in groups for node in group.stores}
    samples: dict[KernelSource, tuple[Sample, Emitted | KernelForm]] = {}
    for group in groups:
        sample = _sample(lower(group, stored, env), env)
        emitted = emit(sample.kernel)
        for form in (emitted, *emitted.variants):
            samples.setdefault(form.source, (sample, form))
    for stitch in stitches(compiled.graph, compiled.plan):
        inside = set(stitch.whole.nodes) - set(stitch.whole.stores)
        sample = _sample(lower(stitch.whole, stored - inside, env), env)
        for form in stitched(sample.kernel):
            samples.setdefault(form.source, (sample, form))
    assert samples.keys() == set(compiled.program.sources)
    return Model(samples, env)


def _sample(low: Lowered, env: Env) -> Sample:
    return Sample(low.kernel, numels_of(low), (env,))


def check(sample: Sample, env: Env, splits: int, form: Emitted | KernelForm | None = None) -> None:
    if isinstance(form, KernelForm):
        size = form.size.eval(env)
        if size > form.most or size % form.multiple:
            return  # it is for other sizes
    kernel = sample.kernel
    tensors = sample.tensors(env)
    expected = [tensor.clone() for tensor in tensors]
    judge.run(kernel, expected, env)
    run(sample, tensors, env, splits, form)
    tolerance = max(TOLERANCE.get(param.dtype, 0.0) for param in kernel.params)
    for number, param in enumerate(kernel.params):
        found, wanted = tensors[number], expected[number]
        if param.is_output:
            where = f"{kernel.name}, param {number} of {len(kernel.params)}, splits {splits}: "
            assert wanted.isfinite().all(), where + "the judge's values are not finite"
            torch.testing.assert_close(
                found, wanted, rtol=tolerance, atol=tolerance, msg=lambda m, at=where: at + m
            )


@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
@pytest.mark.parametrize("name", BUILDERS)
def test_values(name: str, dtype: torch.dtype):
    model = kernels_of(name, dtype)
    assert model.samples
    for sample, form in model.samples.values():
        for splits in (1, 2) if sample.kernel.schedule is Schedule.COLUMN else (1,):
            check(sample, model.env, splits, form)


def test_models_have_every_schedule():
    schedules = {
        sample.kernel.schedule
        for name in BUILDERS
        for sample, _ in kernels_of(name, F16).samples.values()
    }
    assert schedules == set(Schedule)


class NoCache:
    """Nothing is known, so everything is compiled."""

    def get(self, key: str) -> bytes | None:
        return None

    def put(self, key: str, data: bytes) -> None:
        pass


# Bytes that the assembler for sm_120 keeps in memory for one kernel of the UNet, a row in pieces.
SPILLED = {120: 8}


@pytest.mark.parametrize("arch", [80, 86, 89, 90, 100, 120])
def test_unet_compiles(arch: int, tmp_path: Path):
    sources = kernels_of("unet", F16).samples
    cubins = builds.build(sources, GpuTarget(arch), NoCache(), workers=2)
    assert cubins.keys() == sources.keys()
    for source, compiled in cubins.items():
        assert compiled.shared <= SHARED_LIMIT, source.name
        _, stack = resources(compiled, tmp_path)
        has_angles = re.search(r"\b(sin|cos)\(", source.text)
        most = SLOW_PATH_STACK if has_angles else SPILLED.get(arch, 0)
        assert stack <= most, source.name
