"""Compute the errors of ours and of eager, both against a run in higher precision."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from strop.bench import peers
from strop.bench.cases import BenchCase
from strop.bench.models import Workload

REFERENCE = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float64,
}
MIN_SIGNAL = 0.1  # of a result's size, by which another input has to change it


class Reference(NamedTuple):
    """Hold what results of one call are judged by: eager's result, the exact one, and its
    ``signal``, the RMS by which other inputs change it, relative to its RMS."""

    eager: Tensor
    exact: Tensor
    signal: float


@contextmanager
def full_precision() -> Iterator[None]:
    """Turn off TF32 in convolutions and matrix products."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, matmul.allow_tf32
    cudnn.allow_tf32 = matmul.allow_tf32 = False
    try:
        yield
    finally:
        cudnn.allow_tf32, matmul.allow_tf32 = before


class Widened(TorchFunctionMode):
    """Compute in a wider type with weights that stay as they are: each operation reads a copy of
    those that it needs. For models of which a GPU holds no second copy."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(self._wide, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _wide(self, value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return self.dtype if value in REFERENCE else value
        is_narrow = isinstance(value, Tensor) and value.dtype in REFERENCE
        return value.to(self.dtype) if is_narrow else value


def run(workload: Workload, given: Mapping[str, Any]) -> Tensor:
    with torch.no_grad():
        return workload.call(workload.target, given).clone()


def references(case: BenchCase, device: torch.device) -> list[Reference]:
    """Return for every shape eager's result, that of the same weights and inputs in higher
    precision, and how far the latter follows the inputs.

    Eager is that of the peers, channels-last: libraries round differently in another layout.
    """
    workload = peers.prepared(peers.peer_named("eager"), case.build(device))
    eager = [run(workload, workload.inputs(*shape)) for shape in case.shapes]
    higher = REFERENCE[case.dtype]
    if not case.is_large:
        workload.target.to(higher)
    given = [_cast(workload.inputs(*shape), higher) for shape in case.shapes]
    with full_precision(), Widened(higher) if case.is_large else nullcontext():
        exact = [run(workload, each) for each in given]
        signals = [
            signal(one, run(workload, _changed(each)))
            for one, each in zip(exact, given, strict=True)
        ]
    return [Reference(*each) for each in zip(eager, exact, signals, strict=True)]


def _cast(value: Any, dtype: torch.dtype) -> Any:
    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return tree_map(cast, value)


def _changed(value: Any) -> Any:
    """Return other inputs that are as legal: each tensor back to front along its last dim."""
    return tree_map(lambda x: x.flip(-1) if isinstance(x, Tensor) and x.dim() else x, value)


def signal(exact: Tensor, other: Tensor) -> float:
    """Return the RMS of what lies between the results for two inputs, relative to that of the
    first; 0 where it is nothing but zeros. Errors say nothing where this is next to nothing: a
    result that does not read its inputs would be as good."""
    return rms_error(other, exact) if exact.any() else 0.0


def has_signal(error: Mapping[str, Any]) -> bool:
    """Tell whether what was judged follows its inputs, as far as that is known."""
    return bool(error.get("signal", MIN_SIGNAL) >= MIN_SIGNAL)


def without_signal(error: Mapping[str, Any]) -> str:
    """Return words for a row whose reference cannot judge."""
    return f"no judge: other inputs change the result by {error['signal']:.1e} of its size"


def judge(
    ours: Tensor, eager: Tensor, exact: Tensor, follows: float | None = None
) -> dict[str, Any]:
    """Apply the rule RMS error <= 1.10 x eager's + 0.5 ulp, maximum <= 2 x eager's + 2 ulp.

    Errors are relative to the RMS of the exact result, and an ulp is the dtype's epsilon at that
    magnitude. ``follows`` is the signal of the exact result; nothing is good by one without.
    """
    ulp = torch.finfo(ours.dtype).eps
    wide = exact.double()
    scale = wide.square().mean().sqrt().item()
    (rms, most), (eager_rms, eager_most) = (_errors(x, wide, scale) for x in (ours, eager))
    is_good = rms <= 1.10 * eager_rms + 0.5 * ulp and most <= 2 * eager_most + 2 * ulp
    found: dict[str, Any] = {
        "rms": rms,
        "rms_eager": eager_rms,
        "max": most,
        "max_eager": eager_most,
    }
    found |= {} if follows is None else {"signal": follows}
    return {**found, "is_good": bool(is_good and math.isfinite(scale) and has_signal(found))}


def worst(
    results: Sequence[Tensor],
    eager: Tensor | None,
    exact: Tensor | None,
    follows: float | None = None,
) -> dict[str, Any] | None:
    """Return the worst error among the results of one call that ran in several ways, such as the
    first call and a replayed CUDA graph; or its PSNR to eager where nothing more exact is known."""
    if eager is not None and exact is not None:
        judged = [judge(found, eager, exact, follows) for found in results]
        return max(judged, key=lambda error: (not error["is_good"], error["rms"]))
    if eager is None:
        return None
    return {"psnr_to_eager_db": min(min(psnr_db(found, eager), 200.0) for found in results)}


def rms_error(found: Tensor, exact: Tensor) -> float:
    """Return the RMS error of a result, relative to the RMS of the exact one; nan if some of it
    is."""
    wide = exact.double()
    return _errors(found, wide, wide.square().mean().sqrt().item())[0]


def _errors(found: Tensor, exact: Tensor, scale: float) -> tuple[float, float]:
    difference = (found.double() - exact).abs() / max(scale, 1e-30)
    return difference.square().mean().sqrt().item(), difference.max().item()


def psnr_db(a: Tensor, b: Tensor) -> float:
    """Return the peak signal-to-noise ratio of pictures whose values lie in 0..1; inf when
    equal."""
    error = (a.double() - b.double()).square().mean().item()
    return math.inf if error == 0 else -10 * math.log10(error)
