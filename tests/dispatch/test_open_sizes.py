"""The first trace of Dynamo's for us serves all sizes, and fails nowhere for that."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters

from strop.debug.compiled import dynamo_lines
from strop.dispatch import dynamo as aot
from strop.dispatch.torch_compile import FRAMES
from tests.dispatch.test_compiled_graphs import Skipped, compiled, graphs, num_captures


@pytest.fixture(autouse=True)
def log(monkeypatch: pytest.MonkeyPatch, fresh_dynamo: None) -> None:
    monkeypatch.setattr(aot, "AOT_LOG", aot.AotLog())
    monkeypatch.setattr(FRAMES, "constant", {})


class Count:
    """Count Dynamo's traces for us from here on."""

    def __init__(self) -> None:
        self._before = FRAMES.clock.num_traces

    @property
    def traces(self) -> int:
        return FRAMES.clock.num_traces - self._before


@torch.no_grad()
def check(fast: Any, eager: Any, *calls: Any) -> None:
    for given in calls:
        found, expected = fast(*given), eager(*given)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def rows(*counts: int) -> list[tuple[Tensor]]:
    return [(torch.randn(count, 4),) for count in counts]


FIRST = {"batch": 2, "height": 8, "width": 8, "tokens": 7}


def picture(batch: int, height: int, width: int, tokens: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 4, height, width), torch.randn(batch, tokens, 8)


@pytest.mark.parametrize(
    "later",
    [{"batch": 3}, {"height": 12}, {"width": 16}, {"tokens": 5}, {"height": 4, "width": 4}, {}],
    ids=str,
)
def test_one_trace_serves_another_size(later: dict[str, int]) -> None:
    """The first picture is square, has as many channels as rows, and nothing of it is tied."""
    eager, count = Skipped().eval(), Count()
    fast = compiled(copy.deepcopy(eager))
    check(fast, eager, picture(**FIRST), picture(**FIRST | later))
    assert (count.traces, num_captures()) == (1, 1)
    assert not FRAMES.constant


def test_a_reset_is_no_reason_for_constants() -> None:
    for _ in range(2):
        torch._dynamo.reset()
        count = Count()
        check(compiled(torch.relu), torch.relu, *rows(3, 5, 7))
        assert count.traces == 1


def test_a_size_of_one_is_a_constant() -> None:
    count = Count()
    check(compiled(torch.relu), torch.relu, *rows(1, 3, 5, 1))
    assert count.traces == 2


def marked(count: int, mark: Callable[..., None]) -> tuple[Tensor]:
    x = torch.randn(count, 4)
    mark(x, 0)
    return (x,)


def test_sizes_marked_static_are_constants() -> None:
    count, mark = Count(), torch._dynamo.mark_static
    check(compiled(torch.relu), torch.relu, *(marked(size, mark) for size in (3, 5, 7)))
    assert count.traces == 3


def test_sizes_beside_one_that_is_marked_static_are_open() -> None:
    count = Count()

    def given(count: int, width: int) -> tuple[Tensor]:
        x = torch.randn(count, width)
        torch._dynamo.mark_static(x, 0)
        return (x,)

    check(compiled(torch.relu), torch.relu, given(3, 4), given(3, 5), given(6, 7))
    assert count.traces == 2


def test_sizes_of_a_user_who_wants_constants() -> None:
    for how in ({"dynamic": False}, {}):
        count = Count()
        with dynamo_config.patch(automatic_dynamic_shapes=False):
            check(compiled(torch.relu, **how), torch.relu, *rows(3, 5, 7))
        assert count.traces == 3
        torch._dynamo.reset()
    check(compiled(torch.relu), torch.relu, *rows(3, 5))  # and then wants them no longer
    assert count.traces == 4


def test_equal_sizes_are_one_symbol_for_those_alone_who_ask_for_it() -> None:
    """``dynamic=True`` opens all sizes in Dynamo, ours each for itself."""
    for dynamic in (None, True):
        count = Count()
        check(compiled(torch.relu, dynamic=dynamic), torch.relu, *rows(4, 5, 6))
        assert count.traces == 1
        torch._dynamo.reset()


def test_other_backends_trace_as_dynamo_does() -> None:
    """Dynamo keeps what it knows of sizes by the code, which is the same for both functions."""
    check(compiled(torch.relu), torch.relu, *rows(4))
    counter = CompileCounter()
    fast = torch.compile(torch.sigmoid, backend=counter)
    check(fast, torch.sigmoid, *rows(4, 5, 6))
    assert counter.frame_count == 2


def test_views_of_larger_tensors() -> None:
    count = Count()
    given = [(torch.randn(9, 3, 4)[:size, size % 2],) for size in (3, 5, 7)]
    check(compiled(torch.relu), torch.relu, *given)
    assert count.traces == 1


class Table(nn.Module):
    """It keeps a table that is neither a weight nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.randn(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table[: x.shape[0]] * self.table.shape[0]


def test_what_a_module_keeps_has_constant_sizes() -> None:
    count, eager = Count(), Table()
    check(compiled(eager), eager, *rows(3, 5, 7))
    assert count.traces == 1
    (graph,) = graphs()
    assert sorted(graph._traced.shapes) == [("9", "4"), ("d0", "4")]


def asks_whether_square(x: Tensor) -> Tensor:
    return x @ x if x.shape[0] == x.shape[1] else x + 1


def test_code_that_asks_has_a_trace_for_each_answer() -> None:
    count = Count()
    sizes = [(3, 3), (3, 4), (5, 5), (6, 7)]
    check(compiled(asks_whether_square), asks_whether_square, *[(torch.randn(s),) for s in sizes])
    assert count.traces == 2


def unrolled(x: Tensor) -> Tensor:
    return torch.stack([x[place] * place for place in range(x.shape[0])]).sum(0)


def test_code_that_fixes_its_sizes_has_a_trace_for_each() -> None:
    count = Count()
    check(compiled(unrolled), unrolled, *rows(3, 5, 7, 3))
    assert count.traces == 3


def named(x: Tensor) -> Tensor:
    """Ask a function for its size that Dynamo knows for numbers alone."""
    y = x.relu() + 1
    return y * len(chr(x.shape[0])) * 2


@pytest.mark.parametrize("is_full", [False, True])
def test_a_graph_that_open_sizes_would_break_is_whole(is_full: bool) -> None:
    """``explain`` says so, and what Dynamo does later is up to Dynamo."""
    counters.clear()
    fast = compiled(named, fullgraph=is_full)
    check(fast, named, *rows(3, 3))
    assert len(graphs()) == 1
    (reason,) = FRAMES.constant.values()
    assert "builtin" in reason
    line = dynamo_lines()[-1]
    assert line.startswith("Dynamo takes the sizes of named's arguments for constants")
    assert reason in line
    if not is_full:
        check(fast, named, *rows(5, 7))


def breaking(x: Tensor) -> Tensor:
    y = x.relu()
    print(end="")
    return y * 2


def test_a_graph_that_breaks_anyhow_is_open_in_its_pieces() -> None:
    count = Count()
    check(compiled(breaking), breaking, *rows(3, 5, 7))
    assert (count.traces, len(graphs())) == (2, 2)
    assert not FRAMES.constant


def breaking_later(x: Tensor) -> Tensor:
    y = x.relu() * len(chr(x.shape[0]))
    print(end="")
    return y * 2


def test_a_graph_that_open_sizes_break_earlier() -> None:
    fast = compiled(breaking_later)
    check(fast, breaking_later, *rows(3))
    assert len(graphs()) == 2
    assert list(FRAMES.constant) == ["breaking_later"]


def looping(x: Tensor) -> Tensor:
    for _ in range(2):
        x = x.relu() * 2
        torch._dynamo.graph_break()
    return x


def test_a_frame_that_dynamo_skips_runs() -> None:
    check(compiled(looping), looping, *rows(3, 5, 7))
    assert not FRAMES.constant


@torch.library.custom_op("strop_tests::numbered", mutates_args=())
def numbered(x: Tensor) -> Tensor:
    return x * 3


@numbered.register_fake
def _(x: Tensor) -> Tensor:
    if type(x.shape[0]) is not int:
        raise TypeError("a number of rows is wanted")
    return torch.empty_like(x)


@pytest.mark.parametrize("is_full", [False, True])
def test_an_operator_that_knows_no_symbols_has_constants(is_full: bool) -> None:
    fast = compiled(lambda x: numbered(x.relu()), fullgraph=is_full, options={"strict": False})
    check(fast, lambda x: numbered(x.relu()), *rows(3, 3))
    assert len(FRAMES.constant) == 1


def squared(x: Tensor) -> Tensor:
    return x @ x


def test_a_call_that_is_wrong_fails_as_ever() -> None:
    """It says nothing of the calls that follow."""
    fast, count = compiled(squared), Count()
    with pytest.raises(RuntimeError):
        fast(torch.randn(3, 4))
    check(fast, squared, *[(torch.randn(size, size),) for size in (3, 5, 7)])
    assert count.traces == 1
    assert not FRAMES.constant


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
def test_tensors_of_other_layouts_are_left_to_dynamo() -> None:
    """A nested one is refused by Dynamo, and a sparse one is no matter of sizes."""
    doubled = compiled(lambda x: x * 2, options={"strict": False})
    parts = [torch.randn(2, 3), torch.randn(4, 3)]
    nested = torch.nested.nested_tensor(parts)
    for found, part in zip(doubled(nested).unbind(), parts, strict=True):
        torch.testing.assert_close(found, part * 2)
    sparse = torch.eye(3).to_sparse()
    torch.testing.assert_close(doubled(sparse).to_dense(), 2 * torch.eye(3))


def test_each_training_step_is_one_trace() -> None:
    eager, count = nn.Linear(4, 4), Count()
    ours = copy.deepcopy(eager)
    fast = compiled(ours)
    for (x,) in rows(4, 5, 6):
        fast(x).square().sum().backward()
        eager(x).square().sum().backward()
    assert count.traces == 1
    torch.testing.assert_close(ours.weight.grad, eager.weight.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")
def test_states_of_an_optimizer_have_constant_sizes() -> None:
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(3, 5))]
    copies = copy.deepcopy(weights)
    steps = []
    for some in (weights, copies):
        optimizer = torch.optim.Adam(some, lr=1e-2)
        for weight in some:
            weight.grad = torch.ones_like(weight)
        steps.append(optimizer.step)
    fast, count = torch.compile(steps[0], backend="strop"), Count()
    for _ in range(3):
        fast()
        steps[1]()
    assert count.traces == 1
    inputs = aot.AOT_LOG.records[-1].compiled.program.inputs
    assert not any(size.roots for given in inputs for size in given.shape)
    torch.testing.assert_close(weights, copies)
