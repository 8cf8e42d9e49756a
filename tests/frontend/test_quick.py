"""Nothing is worked out while tracing that nobody reads; whoever listens still gets it."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch._functorch._aot_autograd import graph_compile
from torch.fx.experimental import proxy_tensor

from strop.dispatch.dynamo import AOT_LOG, compile_dynamo
from strop.frontend import quick
from strop.frontend.quick import without_tensor_meta

LOGS = (graph_compile.aot_joint_log, graph_compile.aot_graphs_log)


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Graphs that were printed as a step was compiled. Nobody reads AOTAutograd's, though pytest
    listens to all loggers; Dynamo has printed its own."""
    found: list[str] = []
    usual = torch.fx.GraphModule.print_readable

    def count(self: torch.fx.GraphModule, *args: object, **kwargs: object) -> str:
        found.append(type(self).__name__)
        return usual(self, *args, **kwargs)

    monkeypatch.setattr(torch.fx.GraphModule, "print_readable", count)
    monkeypatch.setattr(quick, "trace_log", logging.Logger("nobody"))
    for listener in LOGS:
        monkeypatch.setattr(listener, "isEnabledFor", lambda level: False)
    torch._dynamo.reset()
    yield found
    torch._dynamo.reset()


def train_once() -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU()).train()
    known = len(AOT_LOG.records)
    torch.compile(module, backend=compile_dynamo)(torch.randn(3, 4)).sum().backward()
    assert {record.role for record in AOT_LOG.records[known:]} == {"forward", "backward"}


def test_no_graph_is_printed(printed: list[str]) -> None:
    train_once()
    assert len(printed) <= 1


def test_who_listens_gets_them(printed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LOGS[1], "isEnabledFor", lambda level: True)
    train_once()
    assert len(printed) >= 3  # joint, forward, backward


def test_torch_is_as_it_was() -> None:
    def fail() -> None:
        with without_tensor_meta():
            assert proxy_tensor._extract_tensor_metadata is not before[0]
            raise ZeroDivisionError

    before = proxy_tensor._extract_tensor_metadata, graph_compile._log_joint_graph
    with pytest.raises(ZeroDivisionError):
        fail()
    train_once()
    assert before == (proxy_tensor._extract_tensor_metadata, graph_compile._log_joint_graph)
