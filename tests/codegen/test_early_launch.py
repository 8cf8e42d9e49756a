"""Which kernels are compiled to be launched before the one before them has ended."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from strop.backend import compile_graph
from strop.codegen.assemble import Signature
from strop.codegen.triton import emit
from strop.ir.program import CallStep, KernelStep
from strop.ir.source import KernelSource
from strop.options import Options
from strop.runtime import kernels
from strop.runtime.cache import DiskCache
from strop.runtime.executor import Bound
from tests.codegen.kernels import SAMPLES
from tests.frontend.tracing import trace


def norms(x: Tensor) -> tuple[Tensor, Tensor]:
    """A stitched GroupNorm, a row kernel and a pointwise one."""
    x = torch.nn.functional.silu(torch.nn.functional.group_norm(x, 4))
    return x, torch.softmax(x.flatten(1), 1)


@pytest.mark.parametrize("wanted", [True, False])
def test_the_option_decides_for_all_kernels_also_those_begun_before(wanted: bool) -> None:
    traced = trace(norms, "b 32 h w", b=2, h=8, w=8)
    begun: list[KernelSource] = []

    def begin(sources: Sequence[KernelSource]) -> None:
        begun.extend(sources)

    signature = Signature(traced.returned, traced.captured.guards)
    options = Options(early_launch=wanted)
    program = compile_graph(traced.graph, signature, "cuda", options, begin).program
    assert begun
    assert set(begun) <= set(program.sources)
    assert {dict(s.constants)["EARLY"] for s in program.sources} == {int(wanted)}


@pytest.mark.parametrize(("numel", "has_few"), [(1000, True), (10_000_000, False)])
@pytest.mark.parametrize("follows", [False, True])
@pytest.mark.parametrize("leads", [False, True])
def test_a_launch_says_whether_it_waits_and_whether_it_leads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, numel: int, has_few: bool, follows: bool,
    leads: bool,
) -> None:  # fmt: skip
    """Both cost time, the more the more programs there are."""
    source = emit(SAMPLES["silu_flat"](torch.float32).kernel).source
    function = Mock()
    monkeypatch.setattr(kernels.driver, "load", lambda cubin: function)
    library = kernels.CudaKernels(DiskCache(tmp_path), 1, 90, 132)
    library._cubins[source] = Mock()
    library.bind(source, [0, 0], [numel], 0, early=follows, leads=leads)
    (_, scalars, _, _), how = function.bind.call_args
    assert scalars == [numel, (follows + 2 * leads) * has_few]
    assert how["early"] == (follows and has_few)


def test_neighbours_among_the_steps() -> None:
    """Calls of libraries start nobody early; what another step does is no launch."""
    kernel, call = Mock(spec=KernelStep), Mock(spec=CallStep)
    bound = SimpleNamespace(steps=(kernel, None, kernel, call, kernel, None))
    found = [(Bound._is_kernel(bound, n, -1), Bound._is_kernel(bound, n, 1))  # type: ignore[arg-type]
             for n in (0, 2, 4)]  # fmt: skip
    assert found == [(True, True), (True, False), (False, True)]
