"""Blocks that hold or are given numbers of their own are traced once, and each reads its own."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import strop
from strop.bench import models
from strop.bench.pipelines.parts import WIDTH
from strop.bench.pipelines.stable import ip_adapter_state

FOLDER = tempfile.TemporaryDirectory()  # of caches: each test traces
X = torch.randn(3, 5, 8)
Code = Callable[[Tensor, "Block"], Tensor]


class Block(nn.Module):
    def __init__(self, code: Code) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(8), nn.Linear(8, 8)
        self.code, self.gain = code, 1.0

    def forward(self, x: Tensor, *more: Any) -> Tensor:
        return x + self.code(self.inner(self.norm(x)), self, *more)


class Stack(nn.Module):
    def __init__(self, code: Callable[..., Tensor], given: Callable[[Stack], Any] = tuple) -> None:
        super().__init__()
        self.blocks, self.given = nn.ModuleList(Block(code) for _ in range(4)), given
        self.enter = nn.Linear(8, 8)  # which says how wide the argument is

    def set_gains(self, *gains: float) -> None:
        for block, gain in zip(self.blocks, gains, strict=True):
            block.gain = gain

    def forward(self, x: Tensor) -> Tensor:
        x, given = self.enter(x), self.given(self)
        for block in self.blocks:
            x = block(x, *given)
        return x


def _times(x: Tensor, block: Block, *more: Any) -> Tensor:
    return x * block.gain


def _times_twice(x: Tensor, block: Block) -> Tensor:
    return x * (block.gain * 2.0)


def _times_more_if_large(x: Tensor, block: Block) -> Tensor:
    return x * block.gain if block.gain > 2.5 else x + block.gain


def _times_given(x: Tensor, block: Block, given: Any) -> Tensor:
    return x * block.gain + given


def _through(x: Tensor, block: Block, function: Callable[[Tensor], Tensor]) -> Tensor:
    return function(x) * block.gain


def _closed_over_the_first(stack: Stack) -> Any:
    gain = stack.blocks[0].gain
    return (lambda x: x + gain,)


KEPT: dict[str, Any] = {}


def _kept(x: Tensor, block: Block) -> Tensor:
    return x * block.gain + KEPT["_gain"]


def _keep_the_first(stack: Stack) -> Any:
    KEPT["_gain"] = stack.blocks[0].gain
    return ()


NONE = 0
# what a block does with its gain, what all are given, and how many are copied
CASES: dict[str, tuple[Callable[..., Tensor], Callable[[Stack], Any], int]] = {
    "a factor": (_times, lambda stack: (), 3),
    "a computed factor": (_times_twice, lambda stack: (), NONE),
    "a question": (_times_more_if_large, lambda stack: (), 2),
    "and another one": (_times_given, lambda stack: (stack.blocks[3].gain,), 2),
    "and one computed of it": (_times_given, lambda stack: (stack.blocks[0].gain * 2.0,), 2),
    "and one in a function": (_through, _closed_over_the_first, NONE),
}


@pytest.fixture(autouse=True)
def _no_gradients():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def _compiled(module: nn.Module) -> nn.Module:
    """Return a copy that is compiled; the module stays as it is."""
    copy, folder = deepcopy(module.eval()), tempfile.mkdtemp(dir=FOLDER.name)
    return strop.optimize(copy, options=strop.Options(cache_dir=folder))


GAINS = ((2.0, 1.5, 0.5, 3.0), (3.5, 0.25, 4.0, 2.25), (0.0, 2.0, -1.0, 9.0))


@pytest.mark.parametrize("name", CASES)
def test_each_block_reads_its_own_number(name: str):
    code, given, copied = CASES[name]
    eager = Stack(code, given)
    compiled: Any = _compiled(eager)
    compiled(X)  # gains are turned once they have been others
    for gains in GAINS:
        eager.set_gains(*gains)
        compiled.set_gains(*gains)
        # gains grow the errors of products, whose sums have another order
        torch.testing.assert_close(compiled(X), eager(X), rtol=1e-5, atol=1e-5)
    report = strop.explain(compiled)
    assert not report.fallbacks
    assert report.graphs[1].num_copied_blocks == copied


def test_numbers_that_are_left_outside_are_refused():
    eager = Stack(_kept, _keep_the_first)
    compiled: Any = _compiled(eager)
    for gains in GAINS:
        eager.set_gains(*gains)
        compiled.set_gains(*gains)
        torch.testing.assert_close(compiled(X), eager(X))


class Given(nn.Module):
    """Blocks that are given numbers among their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(_times_given) for _ in range(4))
        self.enter = nn.Linear(8, 8)

    def forward(self, x: Tensor, numbers: list[float]) -> Tensor:
        x = self.enter(x)
        for block, number in zip(self.blocks, numbers, strict=True):
            x = block(x, number)
        return x


def test_numbers_among_arguments():
    eager = Given()
    compiled: Any = _compiled(eager)
    for numbers in ((1.0, 1.0, 1.0, 1.0), *GAINS):
        torch.testing.assert_close(compiled(X, [*numbers]), eager(X, [*numbers]))
    assert strop.explain(compiled).graphs[-1].num_copied_blocks == 3


def _drawn(unet: Any, **more: Any) -> Tensor:
    torch.manual_seed(1)
    text, ids = torch.randn(2, 32), torch.randn(2, 6)
    given = {"text_embeds": text, "time_ids": ids} | more
    words = torch.randn(2, 7, 64)
    result: Tensor = unet(torch.randn(2, 4, 8, 8), 500.0, words, added_cond_kwargs=given).sample
    return result


@pytest.mark.filterwarnings("ignore")
def test_an_ip_adapter_shares_what_the_unet_shares():
    config = models.TINY_SDXL_UNET | {"transformer_layers_per_block": [1, 4]}
    eager = models.make_unet(config, torch.device("cpu"), torch.float32)
    compiled: Any = _compiled(eager)
    torch.testing.assert_close(_drawn(compiled), _drawn(eager), rtol=1e-4, atol=1e-4)
    scales = [0.7, 0.0, 0.25, 1.0]
    for unet in (eager, compiled):
        unet._load_ip_adapter_weights([ip_adapter_state(unet)], low_cpu_mem_usage=False)
        scaled = [part for part in unet.attn_processors.values() if hasattr(part, "scale")]
        for number, part in enumerate(scaled):
            part.scale = [scales[number % len(scales)]]
    shown = [torch.randn(2, 1, WIDTH)]
    found, wanted = (_drawn(unet, image_embeds=shown) for unet in (compiled, eager))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    report = strop.explain(compiled)
    assert not report.fallbacks
    plain, adapted = (graph.num_copied_blocks for graph in report.graphs)
    assert adapted == plain >= 10
