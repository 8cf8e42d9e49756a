"""A fake tensor that is remembered is the one that torch's rules give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from strop.frontend import step
from strop.frontend.functional import memory_of
from strop.frontend.known_results import RememberingMode
from strop.ir.tensor_spec import TensorSpec

aten = torch.ops.aten
Operation = Callable[..., Any]
OPERATIONS: dict[str, Operation] = {
    "sum": lambda x: x + x,
    "broadcast": lambda x: x * x[:1],
    "product": lambda x: x @ x.transpose(1, 2),
    "view": lambda x: x.view(-1, x.shape[2]),
    "transposed": lambda x: x.transpose(0, 1).contiguous(),
    "expanded": lambda x: x.unsqueeze(0).expand(3, -1, -1, -1),
    "halves": lambda x: x.chunk(2, dim=2),
    "extremes": lambda x: x.max(dim=1),
    "halved": lambda x: x.to(torch.float16),
    "same": lambda x: aten.expand.default(x, list(x.shape)),
    "channels last": lambda x: x[..., None].contiguous(memory_format=torch.channels_last) + 1,
    "integers": lambda x: (x > 0) * 2,
    "sized": lambda x: x.new_zeros(x.shape[0] * 2, x.shape[1] + 1),
}


def fakes(mode: FakeTensorMode, count: int = 2) -> list[Tensor]:
    """Return tensors with the same sizes, which are symbols."""
    first = mode.from_tensor(torch.randn(6, 5, 8))
    with mode:
        return [first, *(torch.empty_like(first) for _ in range(count - 1))]


def remembering() -> RememberingMode:
    mode = RememberingMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    mode.cache_enabled = False
    return mode


def tensors_of(found: Any) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else list(found)


def looks(found: Any) -> list[Any]:
    return [
        (t.dtype, t.device, str(t.shape), str(t.stride()), str(t.storage_offset()))
        for t in tensors_of(found)
    ]


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_is_remembered_is_what_torch_gives(name: str) -> None:
    mode = remembering()
    first, second = fakes(mode)
    with mode:
        made = [OPERATIONS[name](x) for x in (first, second)]
        with mock.patch.object(RememberingMode, "_is_simple", return_value=False):
            torchs = OPERATIONS[name](second)
    assert looks(made[0]) == looks(made[1]) == looks(torchs)
    is_in_operand = [
        [memory_of(t) == memory_of(x) for t in tensors_of(found)]
        for x, found in ((first, made[0]), (second, made[1]), (second, torchs))
    ]
    assert is_in_operand[0] == is_in_operand[1] == is_in_operand[2]


def answered(mode: RememberingMode, *calls: Callable[[], object]) -> int:
    """Return how many calls of operators torch's rules answer."""
    own, count = FakeTensorMode.dispatch, [0]

    def dispatch(*args: Any) -> Any:
        count[0] += 1
        return own(*args)

    with mock.patch.object(FakeTensorMode, "dispatch", dispatch), mode:
        for call in calls:
            call()
    return count[0]


def test_an_equal_call_does_not_ask_torch() -> None:
    mode = remembering()
    x, y = fakes(mode)
    assert answered(mode, lambda: aten.add.Tensor(x, x)) > 0
    assert answered(mode, lambda: aten.add.Tensor(y, y)) == 0


def test_numbers_of_other_types_are_other_calls() -> None:
    mode = remembering()
    with mode:
        x = torch.ones(3, dtype=torch.int64)
        found = [aten.mul.Tensor(x, 1).dtype, aten.mul.Tensor(x, 1.0).dtype]
    assert found == [torch.int64, torch.float32]


def test_results_have_memory_of_their_own() -> None:
    mode = remembering()
    x, y = fakes(mode)
    with mode:
        found = [x + 1, y + 1, y + 1]
    assert len({memory_of(t) for t in (x, y, *found)}) == 5


def test_sizes_are_those_of_the_call() -> None:
    mode = remembering()
    x, y = (mode.from_tensor(torch.randn(6, 5)) for _ in range(2))
    with mode:
        z = y.new_empty(x.shape)
        made = [t + 1 for t in (x, z)]
    assert made[1].shape[0].node is z.shape[0].node


def test_what_asks_without_guards_is_not_remembered() -> None:
    mode = remembering()
    x, _ = fakes(mode)
    env = mode.shape_env

    def asked() -> None:
        aten.view.default(x, [6, 40])

    with env.suppress_guards():
        answered(mode, asked)
    before = len(env.guards)
    answered(mode, asked)
    assert len(env.guards) > before


class Layers(nn.Module):
    """Has norms, convolutions and views with equal sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(2, 8) for _ in range(3))
        self.convolutions = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        self.weights = nn.ParameterList(torch.randn(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for norm, convolution, weight in zip(
            self.norms, self.convolutions, self.weights, strict=True
        ):
            x = x + convolution(torch.nn.functional.silu(norm(x)))
            rows = x.flatten(2).transpose(1, 2) @ weight
            x = rows.softmax(-1).transpose(1, 2).unflatten(2, x.shape[2:])
        return x


def traced(module: nn.Module, specs: Sequence[TensorSpec], hints: dict[str, int]) -> Any:
    wants = [True for _ in module.parameters()] + [True for _ in specs]
    return step.capture_step(module, module, specs, hints, wants)


def test_a_step_is_the_one_of_a_plain_trace() -> None:
    module = Layers()
    specs = [TensorSpec(("b", "8", "h", "w"), torch.float32, torch.device("cpu"))]
    hints = {"b": 3, "h": 6, "w": 10}
    found = traced(module, specs, hints)
    with mock.patch.object(step, "RememberingMode", FakeTensorMode):
        plain = traced(module, specs, hints)
    assert found.sizes.guards == plain.sizes.guards
    nodes = [
        [(n.target, *looks(n.meta["val"])) for n in graph.graph.nodes if is_computed(n)]
        for graph in (found.graph, plain.graph)
    ]
    assert nodes[0] == nodes[1]


def is_computed(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and isinstance(node.meta.get("val"), Tensor)
