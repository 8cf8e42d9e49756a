"""A block that repeats is traced once; what tells two blocks apart keeps them apart."""

from __future__ import annotations

import functools
import itertools
import operator
import tempfile
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import strop
from strop.frontend import block_look, repeated_blocks
from strop.frontend.repeated_blocks import RepeatedBlocks
from strop.frontend.repeated_gradients import RepeatedGradients
from tests.frontend.tracing import trace

FOLDER = tempfile.TemporaryDirectory()  # of caches: each test traces


class Act:
    """A setting in an object, as attention processors are."""

    def __init__(self, gain: float = 1.0) -> None:
        self.gain = gain


class Block(nn.Module):
    def __init__(self, width: int = 8, gain: float = 1.0) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.outer, self.act = nn.Linear(2 * width, width), Act(gain)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        hidden = torch.nn.functional.gelu(self.inner(self.norm(x))) * self.act.gain
        return x + scale * self.outer(hidden)


class Stack(nn.Module):
    def __init__(self, blocks: list[nn.Module], call: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.blocks, self.call, self.enter = nn.ModuleList(blocks), call, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)  # which says how wide it is
        for number, block in enumerate(self.blocks):
            x = self.call(number, block, x) if self.call else block(x)
        return x


def num_copied(module: nn.Module, *args: Tensor) -> int:
    """Compile, compare with eager at two sizes, and count the blocks that were copied."""
    copied: list[int] = []
    own = RepeatedBlocks.run_like

    def counted(*args: Any) -> Any:
        copied.append(1)
        return own(*args)

    module.eval()
    wanted = [module(*args), module(*(a[:1] for a in args))]
    with mock.patch.object(RepeatedBlocks, "run_like", counted):
        strop.optimize(module, options=strop.Options(cache_dir=tempfile.mkdtemp(dir=FOLDER.name)))
        found = [module(*args), module(*(a[:1] for a in args))]
    assert not strop.explain(module).fallbacks
    for result, value in zip(found, wanted, strict=True):
        torch.testing.assert_close(result, value, rtol=1e-5, atol=1e-5)  # squares of sums grow
    return len(copied)


@pytest.fixture(autouse=True)
def _no_gradients():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


X = torch.randn(3, 5, 8)


def test_equal_blocks_are_traced_once():
    assert num_copied(Stack([Block() for _ in range(5)]), X) == 4


def test_the_graph_is_that_of_a_whole_trace():
    module = Stack([Block(gain=0.5) for _ in range(3)]).eval()
    shared = trace(module, "b n 8", b=2, n=5)
    with mock.patch.object(repeated_blocks, "repeated", return_value=()):
        whole = trace(module, "b n 8", b=2, n=5)
    assert shared.ops() == whole.ops()
    nodes = [list(t.captured.gm.graph.nodes) for t in (shared, whole)]
    assert [n.target for n in nodes[0]] == [n.target for n in nodes[1]]
    paths = [
        [t.captured.origins.get(n.name) for n in g]
        for t, g in zip((shared, whole), nodes, strict=True)
    ]
    assert paths[0] == paths[1]


def _with_other(change: Callable[[Block], object]) -> Stack:
    blocks = [Block(), Block()]
    change(blocks[1])
    return Stack(list(blocks))


def _set_gain(block: Block) -> None:
    block.act.gain = 2.0


def _set_eps(block: Block) -> None:
    block.norm.eps = 0.5


def _drop_bias(block: Block) -> None:
    block.outer = nn.Linear(16, 8, bias=False)


def _tie(block: Block) -> None:
    block.norm.bias = block.norm.weight


@pytest.mark.parametrize("change", [_set_gain, _set_eps, _drop_bias, _tie])
def test_a_block_that_differs_is_traced(change):
    assert num_copied(_with_other(change), X) == 0


def test_another_number_is_another_block():
    def call(number: int, block: nn.Module, x: Tensor) -> Tensor:
        found: Tensor = block(x, float(number // 2))
        return found

    assert num_copied(Stack([Block() for _ in range(4)], call), X) == 2


def test_another_size_is_another_block():
    stack = Stack(
        [Block() for _ in range(4)],
        lambda number, block, x: block(x if number % 2 else torch.cat([x, x], 1)),
    )
    # the first two get twice the caller's rows, the others four times
    assert num_copied(stack, X) == 2


class Counting(Block):
    """A block whose forward leaves something behind for the next one, and takes it away."""

    last = 1.0

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        Counting.last = -Counting.last
        return super().forward(x, scale) * Counting.last


def test_what_a_block_leaves_behind_is_no_secret():
    module = Stack([Counting() for _ in range(4)]).eval()
    wanted = module(X)
    strop.optimize(module, options=strop.Options(cache_dir=tempfile.mkdtemp(dir=FOLDER.name)))
    torch.testing.assert_close(module(X), wanted)


class Toggled(Block):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x, FLAGS["scale"])


FLAGS = {"scale": 1.0}


def _toggle(number: int, block: nn.Module, x: Tensor) -> Tensor:
    FLAGS["scale"] = float(number)
    try:
        found: Tensor = block(x)
        return found
    finally:
        FLAGS["scale"] = 1.0


def test_a_global_that_changes_between_blocks():
    module = Stack([Toggled() for _ in range(3)], _toggle).eval()
    wanted = module(X)
    strop.optimize(module, options=strop.Options(cache_dir=tempfile.mkdtemp(dir=FOLDER.name)))
    torch.testing.assert_close(module(X), wanted)


class Reading(Block):
    """A block that reads what is neither an argument nor its own."""

    def __init__(self, others: dict[str, Tensor]) -> None:
        super().__init__()
        self._others = others

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        found = super().forward(x, scale) + self._others.get("x", torch.zeros(()))
        self._others["x"] = x
        return found


def test_tensors_that_blocks_pass_beside_their_arguments():
    others: dict[str, Tensor] = {}
    module = Stack([Reading(others) for _ in range(3)]).eval()
    others.clear()
    wanted = module(X)
    others.clear()
    strop.optimize(module, options=strop.Options(cache_dir=tempfile.mkdtemp(dir=FOLDER.name)))
    torch.testing.assert_close(module(X), wanted)


class Writing(Block):
    """A block that writes in place: into its own tensors, and into what it was given."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        if self.place == "argument":
            x.mul_(2)
            return super().forward(x)
        out = torch.empty_like(x)
        y = super().forward(x)
        out[..., 0::2] = y[..., 1::2]
        out[..., 1::2] = -y[..., 0::2]
        return out


def test_writes_into_own_tensors_are_copied():
    assert num_copied(Stack([Writing("own") for _ in range(3)]), X) == 2


def test_writes_into_an_argument_are_traced():
    stack = Stack(
        [Writing("argument") for _ in range(3)], lambda number, block, x: block(x + number)
    )
    assert num_copied(stack, X) == 0


class Adding(Block):
    """A block that adds a weight to its own product in place."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        y = torch.mm(x.flatten(0, -2), self.inner.weight.T)
        y += self.inner.bias
        return x + self.outer(y).view_as(x)


def test_what_is_read_in_place_may_be_given():
    assert num_copied(Stack([Adding() for _ in range(3)]), X) == 2


class Writ(Block):
    """A block with numbers that its code writes out as a tensor."""

    def __init__(self, first: float, *, writes: bool = False) -> None:
        super().__init__()
        self.first, self.writes = first, writes

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        numbers = torch.tensor([self.first, 4.0])
        if self.writes:
            numbers += x.mean()
        return super().forward(x) * numbers.repeat(4)


def test_numbers_that_code_writes_out_as_a_tensor():
    assert num_copied(Stack([Writ(2.0) for _ in range(4)]), X) == 3


def test_other_numbers_that_code_writes_out():
    assert num_copied(Stack([Writ(2.0), Writ(3.0), Writ(2.0)]), X) == 1


def test_numbers_that_code_writes_out_and_writes_into():
    num_copied(Stack([Writ(2.0, writes=True) for _ in range(4)]), X)  # right, copied or not


class Named(Block):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


def test_names_that_a_library_gives_its_layers(monkeypatch: pytest.MonkeyPatch):
    def stack() -> nn.Module:
        return Stack([Named(f"blocks.{number}") for number in range(3)])

    assert num_copied(stack(), X) == 0, "a forward may ask for its name"
    own = Named.__module__, Named.__qualname__
    monkeypatch.setitem(block_look._NOT_READ_OF, own, ("name",))
    assert num_copied(stack(), X) == 2


OUTSIDE = torch.tensor([2.0, 4.0])


class Outer(Block):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x) * OUTSIDE.clone().repeat(4)


def test_a_tensor_of_the_code_around_is_not_written_out():
    module = Stack([Outer() for _ in range(3)]).eval()
    strop.optimize(module, options=strop.Options(cache_dir=tempfile.mkdtemp(dir=FOLDER.name)))
    torch.testing.assert_close(module(X), Stack.forward(module, X))
    OUTSIDE.mul_(2)
    torch.testing.assert_close(module(X), Stack.forward(module, X))


class Returning(Block):
    """A block that returns what it was given, a view of it, and a view of what it has made."""

    def forward(self, x: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
        made = super().forward(x)
        return x, x.transpose(0, 1) if self.training else made[:, 1:], made.transpose(0, 1)


def test_results_that_are_arguments_or_views():
    def call(number: int, block: nn.Module, x: Tensor) -> Tensor:
        same, part, turned = block(x)
        turned.add_(1)  # a view of what the block has made
        return same + turned.transpose(0, 1) + part.sum(1, keepdim=True)

    assert num_copied(Stack([Returning() for _ in range(3)], call), X) == 2


class Drawing(Block):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x) * torch.rand_like(x)


def test_random_numbers_are_drawn_by_each():
    module = Stack([Drawing() for _ in range(2)]).eval()
    torch.manual_seed(1)
    wanted = module(X)
    strop.optimize(module, options=strop.Options(cache_dir=tempfile.mkdtemp(dir=FOLDER.name)))
    torch.manual_seed(1)
    torch.testing.assert_close(module(X), wanted)


def test_one_tensor_given_twice():
    class Pair(Block):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x) * y

    def call(number: int, block: nn.Module, x: Tensor) -> Tensor:
        return block(x, x if number % 2 else x + 1)

    assert num_copied(Stack([Pair() for _ in range(4)], call), X) == 2


class Listing(Block):
    """A block that leaves tensors in a list among its arguments, as video autoencoders do."""

    def forward(self, x: Tensor, kept: list[Any]) -> Tensor:  # type: ignore[override]
        found = super().forward(x)
        before, kept[0] = kept[0], found
        return found if before is None else found * before


class Listed(Stack):
    def forward(self, x: Tensor) -> Tensor:
        kept: list[Any] = [None]
        x = self.enter(x)
        for block in self.blocks:
            x = block(x, kept)
        return x + kept[0]


def test_a_list_that_blocks_write_into():
    assert num_copied(Listed([Listing() for _ in range(4)]), X) == 0


class Notes(dict[str, Any]):
    """A dictionary of a class that torch does not know."""


class Pages(list[Any]):
    pass


class Held:
    def __init__(self) -> None:
        self.last: Any = None
        self.items: list[Any] = [None]


def _note(put: Callable[[Any, Tensor], object]) -> type[Block]:
    class Noting(Block):
        def forward(self, x: Tensor, notes: Any) -> Tensor:  # type: ignore[override]
            y = super().forward(x)
            put(notes, y)
            return y * 0.5

    return Noting


class Noted(Stack):
    """Give each block the same object, and read what the last one has left in it."""

    def __init__(self, name: str) -> None:
        self.make, put, self.read = NOTES[name]
        kind = _note(put)
        super().__init__([kind() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        notes, x = self.make(), self.enter(x)
        for block in self.blocks:
            x = block(x, notes)
        last: Tensor = self.read(notes)
        return x + 3 * last


NOTES: dict[str, tuple[Any, Any, Any]] = {
    "attribute": (Held, lambda n, y: setattr(n, "last", y), lambda n: n.last),
    "list_in_an_object": (Held, lambda n, y: operator.setitem(n.items, 0, y), lambda n: n.items[0]),
    "dictionary": (Notes, lambda n, y: operator.setitem(n, "last", y), lambda n: n["last"]),
    "list": (lambda: Pages([None]), lambda n, y: operator.setitem(n, 0, y), lambda n: n[0]),
    "object_in_a_list": (
        lambda: [Held()],
        lambda n, y: setattr(n[0], "last", y),
        lambda n: n[0].last,
    ),
    "dictionary_in_a_list": (
        lambda: [Notes()],
        lambda n, y: operator.setitem(n[0], "last", y),
        lambda n: n[0]["last"],
    ),
}


@pytest.mark.parametrize("name", NOTES)
def test_an_object_that_blocks_write_into(name: str):
    """A copy of a block would leave there what the first one has."""
    assert num_copied(Noted(name), X) == 0


class Read(Block):
    def forward(self, x: Tensor, notes: Any) -> Tensor:  # type: ignore[override]
        return super().forward(x) * notes.gain


class WithGain(Stack):
    """Give each block the same object, with a number of its own where ``gains`` differ."""

    def __init__(self, *gains: float) -> None:
        super().__init__([Read() for _ in range(4)])
        self.gains = gains

    def forward(self, x: Tensor) -> Tensor:
        notes: Any = Held()
        x = self.enter(x)
        for block, gain in zip(self.blocks, itertools.cycle(self.gains)):
            notes.gain = gain
            x = block(x, notes)
        return x


def test_an_object_that_blocks_read():
    assert num_copied(WithGain(0.5), X) == 3
    assert num_copied(WithGain(0.5, 0.25), X) == 2


class Sized(Block):
    def forward(self, x: Tensor, notes: Any) -> Tensor:  # type: ignore[override]
        return super().forward(x) * (notes["shape"][0] * notes["place"].gain)


class WithSizes(Stack):
    """Give each block the same dictionary, with a size of the call in it, or of parts of it."""

    def __init__(self, *shares: int) -> None:
        super().__init__([Sized() for _ in range(4)])
        self.shares = shares

    def forward(self, x: Tensor) -> Tensor:
        notes, x = Notes(place=Act(0.5)), self.enter(x)
        for block, share in zip(self.blocks, itertools.cycle(self.shares)):
            notes["shape"] = [x.shape[0] * share, 8]
            x = block(x, notes)
        return x


def test_sizes_in_an_object():
    assert num_copied(WithSizes(1), X) == 3
    assert num_copied(WithSizes(1, 2), X) == 2


def test_a_block_that_comes_twice():
    block = Block()
    assert num_copied(Stack([block, Block(), block]), X) == 2


def _gradients(module: nn.Module, x: Tensor) -> list[Tensor]:
    module.zero_grad()
    given = x.clone().requires_grad_()
    result = module(given)
    (result * torch.linspace(0.5, 2, result.numel()).view(result.shape)).sum().backward()
    assert given.grad is not None
    return [
        result.detach(),
        given.grad,
        *(p.grad for p in module.parameters() if p.grad is not None),
    ]


class Both(Block):
    """A block with two results, of which the second one is an argument of the next one."""

    def forward(self, x: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        found = super().forward(x)
        return found, found * x


def _both(number: int, block: nn.Module, x: Tensor) -> Tensor:
    first, second = block(x)
    return first + second if number else first


TRAINED: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "plain": (lambda: Stack([Block() for _ in range(4)]), 3),
    # autograd writes gradients of parts into others by their places in memory; it is traced thrice
    "writes": (lambda: Stack([Writing("own") for _ in range(3)]), 6),
    "a list": (lambda: Listed([Listing() for _ in range(3)]), 0),
    **{f"an object: {name}": (functools.partial(Noted, name), 0) for name in NOTES},
    "an object that is read": (lambda: WithGain(0.5), 0),
    "two results": (lambda: Stack([Both() for _ in range(3)], _both), 2),
    "one block twice": (lambda: Stack([block := Block(), Block(), block]), 2),
    "within blocks": (lambda: Stack([Stack([Block() for _ in range(3)]) for _ in range(3)]), 4),
}


@pytest.mark.parametrize("name", TRAINED)
def test_gradients_are_those_of_eager(name: str):
    build, times = TRAINED[name]
    module, x, copied = build().double().train(), X.double(), []
    own = RepeatedGradients.run_like

    def counted(*args: Any) -> Any:
        copied.append(1)
        return own(*args)

    with torch.enable_grad():
        wanted = [_gradients(module, x), _gradients(module, x[:1])]
        with mock.patch.object(RepeatedGradients, "run_like", counted):
            folder = tempfile.mkdtemp(dir=FOLDER.name)
            strop.optimize(module, train=True, options=strop.Options(cache_dir=folder))
            found = [_gradients(module, x), _gradients(module, x[:1])]
    assert not strop.explain(module).fallbacks
    assert len(copied) == times
    for results, values in zip(found, wanted, strict=True):
        for result, value in zip(results, values, strict=True):
            torch.testing.assert_close(result, value, rtol=1e-5, atol=1e-5)  # squares of sums grow


# what explain says


def _explained(module: nn.Module, *args: Tensor) -> tuple[int, list[str], str]:
    """Compile, and return how many blocks were copied, why others were not, and the line of it."""
    num_copied(module, *args)
    report = strop.explain(module)
    graph = report.graphs[0]
    lines = [
        line for line in str(report).splitlines() if "traced again" in line or "copied" in line
    ]
    assert len(lines) == 1
    return graph.num_copied_blocks, list(graph.traced_blocks), lines[0].strip()


def test_explain_counts_copies():
    copied, again, line = _explained(Stack([Block() for _ in range(4)]), X)
    assert (copied, again) == (3, [])
    assert line == "3 repeated blocks copied"


OTHERWISE = {
    "its plain arguments": lambda n, block, x: block(x, scale=1.0 + n % 2),
    "sizes, types or layouts of its tensors": lambda n, block, x: (
        block(x.contiguous()) if n % 2 else block(x.transpose(0, 1)).transpose(0, 1)
    ),
    "how its arguments lie within each other": lambda n, block, x: (
        block(x) if n % 2 else block(x=x)
    ),
}


@pytest.mark.parametrize("reason", OTHERWISE)
def test_explain_says_how_calls_differ(reason: str):
    stack = Stack([Block() for _ in range(4)], OTHERWISE[reason])
    copied, again, line = _explained(stack, X)
    assert copied == 2
    assert len(again) == 1
    assert again[0].startswith("1 Block: ")
    assert reason in again[0]
    assert line == f"2 repeated blocks copied; traced again: {again[0]}"


def test_explain_names_other_settings():
    stack = Stack([Block(), Block(), Block(gain=2.0)])
    assert _explained(stack, X)[:2] == (1, ["1 Block: its modules or their settings (act)"])


def test_explain_says_what_cannot_be_copied():
    stack = Stack([Writing("argument") for _ in range(3)], lambda n, block, x: block(x + n))
    reason = "it reads or writes what it was not given, or draws random numbers"
    assert _explained(stack, X)[:2] == (0, [f"2 Writing: {reason}"])
