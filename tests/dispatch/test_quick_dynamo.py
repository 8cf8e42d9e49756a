"""What Dynamo leaves out while it traces for us changes nothing that somebody reads."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch._dynamo import symbolic_convert
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from strop.dispatch.quick_dynamo import (
    fixed_sizes_as_they_are,
    print_each_size_once,
    without_function_names,
)
from tests.dispatch.test_compiled_graphs import Skipped, check_two_sizes, compiled


def test_dynamo_keeps_the_sizes_of_nodes(
    monkeypatch: pytest.MonkeyPatch, fresh_dynamo: None
) -> None:
    """What is printed once for each size is what Dynamo prints of each node."""
    found: list[Any] = []

    def noted(output: Any) -> None:
        print_each_size_once(output)
        expected = type(output).get_graph_sizes_structured(output)
        found.append((output.get_graph_sizes_structured(), expected))

    monkeypatch.setattr("strop.dispatch.traced_frames.print_each_size_once", noted)
    eager = Skipped().eval()
    check_two_sizes(compiled(copy.deepcopy(eager)), eager)
    assert len(found) == 1
    assert all(sizes == expected for sizes, expected in found)
    assert any("//" in str(size) for sizes in found[0][0].values() for size in sizes)


def test_logs_of_a_trace_name_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody listens, no file is taken apart for them."""
    own, reader = symbolic_convert.get_funcname, symbolic_convert.trace_source_log
    with without_function_names():
        assert symbolic_convert.get_funcname(__file__, 1) is None
    monkeypatch.setattr(reader, "isEnabledFor", lambda level: True)
    with without_function_names():
        assert symbolic_convert.get_funcname is own


@contextmanager
def counted_symbols(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    found: list[Any] = []
    own = ShapeEnv.create_symbol

    def noted(self: ShapeEnv, *given: Any, **named: Any) -> Any:
        found.append(given)
        return own(self, *given, **named)

    with monkeypatch.context() as patched:
        patched.setattr(ShapeEnv, "create_symbol", noted)
        yield found


def fake_of(tensor: torch.Tensor, dims: list[DimDynamic]) -> tuple[Any, list[str]]:
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    context: Any = StatelessSymbolicContext(dynamic_sizes=dims)
    fake = mode.from_tensor(tensor, symbolic_context=context)
    sizes = tuple(map(str, (*fake.shape, *fake.stride(), fake.storage_offset())))
    return sizes, [str(guard.expr) for guard in env.guards]


@pytest.mark.parametrize("dim", [DimDynamic.STATIC, DimDynamic.DYNAMIC, DimDynamic.DUCK], ids=str)
def test_sizes_are_what_torch_makes_of_them(
    dim: DimDynamic, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = torch.randn(6, 4, 5)
    tensors = (whole, whole[1:, ::2].mT, torch.randn(1, 3), torch.randn(0, 2), torch.tensor(2.0))
    for tensor in (*tensors, torch.randn(1, 3).expand(4, 3)):
        for dims in ([dim] * tensor.dim(), [DimDynamic.STATIC, *[dim] * tensor.dim()][:-1]):
            dims = dims[: tensor.dim()]
            found = []
            for settings in (nullcontext(), fixed_sizes_as_they_are()):
                with settings:
                    found.append(fake_of(tensor, dims))
            assert found[0] == found[1]
            if tensor._base is not None:
                continue  # Dynamo says how its base is to be traced
            is_fixed = all(each is DimDynamic.STATIC for each in dims)
            with fixed_sizes_as_they_are(), counted_symbols(monkeypatch) as made:
                fake_of(tensor, dims)
            assert bool(made) != is_fixed
