"""Every row of ``cases`` against torch: one graph for odd sizes, and where it runs."""

from __future__ import annotations

import pytest
import torch

import strop
from strop.backend import compile_graph
from strop.codegen.assemble import Signature
from strop.ir.tensor_spec import TensorSpec
from strop.lowering.lower import lower
from strop.options import Options
from tests.codegen.kernels import Sample, numels_of
from tests.codegen.test_model_kernels import check
from tests.frontend.tracing import Function, Traced, trace_specs
from tests.views.cases import CASES, KERNEL, Case, make, sizes_of
from tests.views.running import assert_equal, optimized

ENVS = ({"b": 2, "h": 4, "w": 6}, {"b": 3, "h": 5, "w": 3}, {"b": 1, "h": 7, "w": 4})
# torch's own shape rules fix these sizes, or ask whether a batch is 1
SPECIALISED = {
    "ravel",
    "as_strided_computed",
    "upsample_antialias",
    "fold",
    "unfold_image",
    "take_along_dim",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize("name", CASES)
def test_equals_torch(name: str, folder: str) -> None:
    case = CASES[name]
    module, dispatcher = optimized(case, ENVS[0], f"{folder}/{name}")
    for env in ENVS:
        generator = torch.Generator().manual_seed(len(name))
        arguments = [make(text, env, generator) for text in case.arguments]
        assert_equal(module(*arguments), case.function(*arguments))
    assert not dispatcher.counters.fallbacks
    assert dispatcher.variants.num_captures == 1 or name in SPECIALISED
    calls = [s for v in dispatcher.variants.all for s in v.program.call_steps]
    assert bool(calls) == (case.runs_in != KERNEL), [dict(s.attrs).get("target") for s in calls]


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.uint8], ids=str
)
@pytest.mark.parametrize(
    "name",
    [
        "flip",
        "slice_step",
        "roll",
        "tril",
        "pad_crop",
        "repeat",
        "diagonal",
        "cat",
        "slice_scatter",
    ],
)
def test_types(name: str, dtype: torch.dtype, folder: str) -> None:
    case = CASES[name]
    module, dispatcher = optimized(case, ENVS[0], f"{folder}/{name}-{dtype}")
    generator = torch.Generator().manual_seed(1)
    arguments = [make(text, ENVS[1], generator, dtype).abs() for text in case.arguments]
    wanted = case.function(*arguments)
    assert_equal(module(*arguments), wanted, 1e-2 if wanted.dtype.itemsize < 4 else 1e-6)
    assert not dispatcher.counters.fallbacks


def _traced(case: Case, env: dict[str, int]) -> Traced:
    texts = [sizes_of(argument) for argument in case.arguments]
    dtypes = [torch.int64 if kind.startswith("i") else torch.float32 for kind, _ in texts]
    specs = [
        TensorSpec(sizes, dtype, torch.device("cpu"))
        for (_, sizes), dtype in zip(texts, dtypes, strict=True)
    ]
    module = Function(case.function)
    return trace_specs(module, module, specs, env)


TRITON = (
    "flip_several",
    "slice_step_symbolic",
    "slice_step_of_computed",
    "roll_several",
    "triu",
    "pad_crop",
    "diagonal_offset",
    "linspace_symbolic",
    "eye_symbolic",
    "unfold_step",
    "rot90",
    "repeat_interleave",
    "causal_bool_mask",
    "embedding_norm",
    "gather_last",
    "gather_in_cat",
    "index_broadcast",
    "index_of_reshaped",
    "index_reduced",
    "index_column_reduced",
    "upsample_bilinear_symbolic",
    "upsample_bicubic",
    "max_pool2d_padded",
    "max_pool2d_dilated",
    "max_pool2d_up",
    "avg_pool2d_same",
    "avg_pool2d_up_inside",
    "avg_pool1d_of_any_length",
    "slice_scatter_step_ragged",
    "write_interleaved",
    "write_some_ways",
)


@pytest.mark.parametrize("name", TRITON)
def test_in_triton(name: str) -> None:
    """The same graphs for CUDA, in Triton's interpreter, against loop IR in fp64."""
    case, env = CASES[name], ENVS[1]
    traced = _traced(case, env)
    signature = Signature(traced.returned, traced.captured.guards)
    compiled = compile_graph(traced.graph, signature, "cuda", Options())
    groups = compiled.plan.groups
    stored = {node for group in groups for node in group.stores}
    assert groups
    for group in groups:
        low = lower(group, stored, compiled.graph.hints)
        numels = numels_of(low)
        check(Sample(low.kernel, numels, (env,)), compiled.graph.hints, 1)


NUMBERS = {
    "unfold": lambda x: x.unfold(0, 1, 1) * 2,
    "unfold to nothing": lambda x: x.unfold(0, 0, 1) * 2,
    "flip": lambda x: x.flip(0) * 2,
    "transpose": lambda x: x.transpose(0, -1) * 2,
    "squeeze": lambda x: x.squeeze(0) * 2,
    "squeeze dims": lambda x: x.squeeze((0,)) * 2,
    "gather nothing": lambda x: x.gather(0, torch.zeros(0, dtype=torch.int64)),
    "gather one": lambda x: x.gather(0, torch.zeros(1, dtype=torch.int64)) * 2,
    "gather from a row": lambda x: x[None].gather(0, torch.zeros(2, 0, dtype=torch.int64)),
    "adaptive pooling": lambda x: torch.nn.functional.adaptive_avg_pool1d(x.expand(1, 2, 3), 1),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_may_stand_for_a_tensor_of_one_dim(name: str, folder: str) -> None:
    module = strop.optimize(Function(NUMBERS[name]).eval(), options=Options(cache_dir=folder))
    with torch.no_grad():
        wanted = NUMBERS[name](torch.tensor(3.0))
        assert_equal(module(torch.tensor(3.0)), wanted)
        compiled = torch.compile(NUMBERS[name], backend="strop", options={"cache_dir": folder})
        assert_equal(compiled(torch.tensor(3.0)), wanted)
    assert module.forward.counters.eager_calls == 0


@pytest.mark.parametrize("size", [[], [1], [1, 1, 1]])
def test_sizes_that_eager_refuses_are_refused(size: list[int], folder: str) -> None:
    """A pooling to one element is a mean, but for as many dims as it pools over."""
    pool = torch.nn.functional.adaptive_avg_pool2d
    module = strop.optimize(
        Function(lambda x: pool(x, size)).eval(), options=Options(cache_dir=folder)
    )
    with torch.no_grad(), pytest.raises(RuntimeError, match="output_size must be 2"):
        module(torch.ones(1, 2, 3, 4))
