"""Linears whose width is no multiple of 8 get columns that nobody reads."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import strop
from strop import passes
from strop.backend import compile_graph
from strop.codegen.assemble import Signature
from strop.debug.reference import input_values
from strop.dispatch.derived_inputs import PADDED
from strop.ir.dims import const, symbol
from strop.ir.program import CallStep, Program
from strop.kernels.gemm import trimmed
from strop.kernels.kernel import Call
from strop.kernels.library import rows_for
from strop.options import Options
from strop.runtime.run.shape_plan import plan_shape
from strop.testing import assert_as_accurate_as_eager
from tests.e2e import tiny
from tests.frontend.tracing import trace
from tests.gpus import H100
from tests.runtime.test_choices import Kernels

HALF = torch.float16
DEPTH, WORDS = 64, 1003


class Language(nn.Module):
    """Scores by the table that words are looked up in, as of GPT-2."""

    def __init__(self, *, bias: bool = False, words: int = WORDS, depth: int = DEPTH) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(words, depth), nn.Linear(depth, words, bias=bias)
        self.head.weight = self.table.weight

    def hidden(self, words: Tensor) -> Tensor:
        return F.silu(self.table(words))

    def forward(self, words: Tensor) -> Any:
        return self.head(self.hidden(words))


class Likely(Language):
    """A kernel reads the scores."""

    def forward(self, words: Tensor) -> Any:
        return self.head(self.hidden(words)).softmax(-1)


class Both(Likely):
    """One product of two layers of one input."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.value = nn.Linear(DEPTH, 136, bias=self.head.bias is not None)

    def forward(self, words: Tensor) -> Any:
        hidden = self.hidden(words)
        return self.head(hidden).amax(-1) + self.value(hidden).amax(-1)


class Seen(Language):
    """The user gets a view of the scores."""

    def forward(self, words: Tensor) -> Any:
        return self.head(self.hidden(words)).transpose(1, 2)


KINDS = [Language, Likely, Both, Seen]


def program(module: nn.Module, dtype: torch.dtype = HALF, device: str = "cuda") -> Program:
    traced = trace(module.to(dtype), "b s", dtype=torch.int64, b=2, s=24)
    return compile_graph(traced.graph, Signature(traced.returned, ()), device, Options()).program


def products(of: Program) -> list[CallStep]:
    return [step for step in of.call_steps if step.op in ("linear", "trimmed_linear")]


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_results_begin_at_multiples_of_16_bytes(kind: Any, bias: bool) -> None:
    found = program(kind(bias=bias))
    (product,) = products(found)
    columns = 1144 if kind is Both else 1008
    out = found.buffers[product.outputs[0]]
    assert [size.value for size in found.buffers[product.inputs[1].buffer].shape] == [columns, 64]
    is_trimmed = kind in (Language, Seen) and not bias  # the user gets the result
    assert product.op == ("trimmed_linear" if is_trimmed else "linear")
    assert out.shape[-1].value == (WORDS if is_trimmed else columns)
    # one that looks up, and one for each width that reads: else a copy where the user gets it
    assert len(found.kernel_steps) == (3 if kind is Both else 2 - is_trimmed)
    for item in found.returned:
        assert item.tensor is not None
        strides = [str(stride) for stride in item.tensor.strides]
        wanted = {Language: ["1003*s", "1003", "1"], Seen: ["1003*s", "1", "1003"]}
        assert strides == wanted.get(kind, strides)


def test_scores_of_a_large_vocabulary_are_there_once() -> None:
    """Working memory is for some of the rows."""
    kernels: Any = Kernels(H100)
    words = 50257
    found = program(Language(words=words))
    plan = plan_shape(found, {"b": 32, "s": 512}, kernels, None, None, shares=True)
    (result,) = (plan.sizes.bytes_of(number) for number, _ in plan.results)
    assert result == 2 * 32 * 512 * words
    hidden = 2 * 32 * 512 * DEPTH
    assert plan.memory.arena_bytes <= trimmed.MOST_BYTES + 2 * hidden < result / 12


def test_a_kernel_of_ours_may_do_it_then() -> None:
    """None can at the width of the vocabulary itself."""
    aligned, as_it_is = (
        Call("linear", (), ((symbol("b"), const(DEPTH)), (const(words), const(DEPTH))), HALF)
        for words in (1008, WORDS)
    )
    names = [[row.name for row in rows_for(call, H100)] for call in (aligned, as_it_is)]
    assert "wgmma_gemm" in names[0]
    assert "wgmma_gemm" not in names[1]


@pytest.mark.parametrize(
    "module",
    [
        Language(words=1000),
        Language(words=77),  # as few columns as a classifier has
        Language(depth=36),  # a depth that is none either
        Language(depth=8),  # a copy would take longer
    ],
    ids=["aligned", "narrow", "depth", "shallow"],
)
def test_other_linears_stay(module: nn.Module) -> None:
    (product,) = products(found := program(module))
    assert found.buffers[product.inputs[1].buffer].shape == found.inputs[0].shape
    assert not found.inputs[-1].merged


def test_where_it_is_done() -> None:
    def padded(*args: Any) -> bool:
        return bool(program(*args).inputs[-1].merged)

    assert padded(Language())
    assert padded(Language(), torch.bfloat16)
    assert not padded(Language(), torch.float32)
    assert not padded(Language(), HALF, "cpu")
    assert "aligned_linear" in Options().in_training.disable


@pytest.fixture
def _on_a_cpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(passes.ONLY_ON, "aligned_linear")


def pair(module: nn.Module, folder: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    eager = module.to(dtype).eval().requires_grad_(False)
    return eager, strop.optimize(copy.deepcopy(eager), options=tiny.options(cache_dir=str(folder)))


def assert_accurate(eager: Any, fast: Any) -> None:
    words = torch.arange(14).reshape(2, 7)
    wanted, found = eager(words), fast(words)
    assert_as_accurate_as_eager(found, wanted, copy.deepcopy(eager).double()(words))
    assert found.stride() == wanted.stride()


@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("_on_a_cpu_too")
def test_values_are_those_of_eager(
    kind: Any, bias: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    eager, fast = pair(kind(bias=bias), tmp_path, dtype)
    assert_accurate(eager, fast)
    assert "_forward" not in fast.state_dict()
    assert fast.table.weight.shape == (WORDS, DEPTH)
    assert fast.table.weight.is_contiguous()
    assert fast.head.weight is fast.table.weight
    for module in (eager, fast):
        module.table.weight.data.mul_(0.5)
    assert_accurate(eager, fast)


class ByData(Language):
    """Two Parameters in one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = nn.Parameter(self.table.weight.detach())


@pytest.mark.usefixtures("_on_a_cpu_too")
def test_layers_that_are_tied_by_their_data_stay_tied(tmp_path: Path) -> None:
    eager, fast = pair(ByData(), tmp_path, HALF)
    eager.head.weight.data = eager.table.weight.data  # which a deep copy has taken apart
    fast.head.weight.data = fast.table.weight.data
    for _ in range(2):
        assert_accurate(eager, fast)
        assert fast.head.weight.data_ptr() == fast.table.weight.data_ptr()
        for module in (eager, fast):
            module.table.weight.mul_(-2)
            module.head.weight.add_(0.01)


@pytest.mark.usefixtures("_on_a_cpu_too")
def test_bytes_are_counted_and_a_checkpoint_has_no_zeros(tmp_path: Path) -> None:
    eager, fast = pair(Language(), tmp_path, HALF)
    assert_accurate(eager, fast)
    (component,) = strop.explain(fast).components
    row = component.derived_of(PADDED)
    assert row is not None
    assert (row.count, row.size_bytes) == (1, 2 * 1008 * DEPTH)
    torch.save(fast.state_dict(), tmp_path / "weights")
    saved = torch.load(tmp_path / "weights")
    assert saved["head.weight"].untyped_storage().nbytes() == 2 * WORDS * DEPTH


def test_the_reference_of_a_checker_has_the_zeros() -> None:
    traced = trace(Language().to(HALF), "b s", dtype=torch.int64, b=2, s=3)
    graph, _ = passes.run(traced.graph, Options(), "cuda")
    values = input_values(graph, {0: torch.ones(WORDS, DEPTH), 1: torch.zeros(2, 3)})
    padded = next(value for node, value in values.items() if node.attrs["merged"])
    assert padded.shape == (1008, DEPTH)
    assert padded.sum() == WORDS * DEPTH


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("kind", KINDS)
def test_values_on_a_gpu(kind: Any, bias: bool, tmp_path: Path) -> None:
    torch.manual_seed(7)  # a product is rounded before its bias: of 65 million one may be unlucky
    eager, fast = pair(kind(bias=bias, words=50257).cuda(), tmp_path, HALF)
    words = torch.arange(1300, device="cuda").reshape(4, 325)  # in two parts, the last one short
    for _ in range(3):  # the last one replays a graph
        wanted = eager(words)
        found = fast(words)
        assert_as_accurate_as_eager(found, wanted, copy.deepcopy(eager).double()(words))
        assert found.stride() == wanted.stride()
        for module in (eager, fast):
            module.table.weight.mul_(0.9)


class Handed(nn.Module):
    """One layer of two is a result."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        return self.q(x), self.k(x).tanh() * self.v(x)


def test_a_product_that_a_user_gets_is_merged_with_none(tmp_path: Path) -> None:
    """It has eager's strides, and memory of its own."""
    eager, fast = pair(Handed(), tmp_path, torch.float32)
    x = torch.randn(3, 5, 16)
    for wanted, found in zip(eager(x), fast(x), strict=True):
        torch.testing.assert_close(found, wanted)
        assert found.stride() == wanted.stride()


@pytest.mark.usefixtures("_on_a_cpu_too")
def test_a_language_model_whose_vocabulary_grows(tmp_path: Path) -> None:
    """As GPT-2 is: scores by the table of words, which users resize, tie and untie."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_embd=64, n_layer=1, n_head=2, n_positions=16, use_cache=False
    )
    eager, fast = pair(transformers.GPT2LMHeadModel(config), tmp_path, torch.bfloat16)
    words = torch.arange(14).reshape(2, 7)

    def judge() -> None:
        exact = copy.deepcopy(eager).double()
        wanted, found, truth = (model(words).logits for model in (eager, fast, exact))
        assert_as_accurate_as_eager(found, wanted, truth)
        assert found.stride() == wanted.stride()
        (component,) = strop.explain(fast).components
        assert component.derived_of(PADDED) is not None

    judge()
    for change in (
        lambda model: model.transformer.wte.weight.mul_(1.5),
        lambda model: model.lm_head.weight.data.mul_(0.5),
        lambda model: setattr(model.lm_head, "weight", nn.Parameter(model.lm_head.weight * 2)),
        lambda model: model.tie_weights(),
        lambda model: model.load_state_dict(model.state_dict()),
        lambda model: model.resize_token_embeddings(1010, mean_resizing=False),
    ):
        for model in (eager, fast):
            torch.manual_seed(1)  # new rows are drawn
            with torch.no_grad():
                change(model)
        judge()
