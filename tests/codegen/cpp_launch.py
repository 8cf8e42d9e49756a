"""Runs emitted C++ kernels on torch tensors, for tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from strop.ir.dims import Env
from strop.ir.source import Emitted
from strop.runtime.build.native import NativeFunction
from tests.codegen.kernels import Sample


def launch(
    function: NativeFunction, emitted: Emitted, tensors: Sequence[torch.Tensor], env: Env
) -> None:
    scalars = [expr.eval(env) for expr in emitted.scalars]
    names = {f"s{i}": value for i, value in enumerate(scalars)}
    scratch = [
        torch.full((s.numel.eval(names),), 77, dtype=s.dtype) for s in emitted.source.scratch
    ]
    function.bind([t.data_ptr() for t in (*tensors, *scratch)], scalars)()


def exact_copies(sample: Sample, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors for the interpreter: float outputs in fp64, so that nothing rounds."""
    return [
        tensor.double() if param.is_output and param.dtype.is_floating_point else tensor.clone()
        for param, tensor in zip(sample.kernel.params, tensors, strict=True)
    ]


def rms_ulp(got: torch.Tensor, exact: torch.Tensor) -> float:
    """RMS error in units of the last place of a value as large as the RMS value."""
    info = torch.finfo(got.dtype)
    error = (got.double() - exact).square().mean().sqrt()
    scale = (exact.square().mean().sqrt() * info.eps).clamp_min(info.tiny * info.eps)
    return float(error / scale)
