"""Two processes that divide the tokens of a transformer compute what diffusers computes in them."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from diffusers import ContextParallelConfig
from torch import Tensor, nn

import strop
from strop.api import dispatchers_of
from strop.bench.pipelines.all import PIPELINES
from strop.bench.pipelines.tiny import drawn
from strop.dispatch.parallel.context import Sharding
from strop.errors import OptionError, ShapeError
from strop.ir.exchange import ALL_GATHER, ALL_TO_ALL, exchanged, rehearsed
from strop.testing import assert_as_accurate_as_eager
from tests.e2e import tiny
from tests.train.test_ddp import Ranks

WORLD = 2
two_processes = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo"
)
Made = dict[str, Any]
CONFIGS: dict[str, Made] = {
    "FluxTransformer2DModel": {
        "patch_size": 1,
        "in_channels": 4,
        "num_layers": 1,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 16,
        "pooled_projection_dim": 16,
        "axes_dims_rope": (4, 4, 8),
    },
    "WanTransformer3DModel": {
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": 16,
        "freq_dim": 32,
        "ffn_dim": 32,
        "num_layers": 3,
        "rope_max_seq_len": 32,
    },
    "QwenImageTransformer2DModel": {
        "patch_size": 2,
        "in_channels": 16,
        "out_channels": 4,
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 16,
        "axes_dims_rope": (8, 4, 4),
    },
}


def transformer(kind: str) -> Any:
    torch.manual_seed(0)
    return getattr(diffusers, kind)(**CONFIGS[kind]).eval().requires_grad_(False)


def given(kind: str, side: int, batch: int, dtype: torch.dtype = torch.float32) -> Made:
    """Arguments of a picture of that many tokens a side, the same in each process."""
    generator = torch.Generator().manual_seed(side)

    def drawn_as(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    if kind == "WanTransformer3DModel":
        return {
            "hidden_states": drawn_as(batch, 4, 2, 2 * side, 2 * side),
            "timestep": torch.full((batch,), 7),
            "encoder_hidden_states": drawn_as(batch, 6, 16),
        }
    if kind == "QwenImageTransformer2DModel":  # of prompts of two lengths
        mask = torch.arange(6) < torch.tensor([[6], [4]])
        return {
            "hidden_states": drawn_as(batch, side * side, 16),
            "encoder_hidden_states": drawn_as(batch, 6, 16),
            "encoder_hidden_states_mask": mask[-batch:],
            "timestep": torch.full((batch,), 0.5, dtype=dtype),
            "img_shapes": [(1, side, side)] * batch,
        }
    places = torch.zeros(side * side, 3, dtype=dtype)
    places[:, 1:] = torch.cartesian_prod(*[torch.arange(side)] * 2).to(dtype)
    return {
        "hidden_states": drawn_as(batch, side * side, 4),
        "encoder_hidden_states": drawn_as(batch, 6, 16),
        "pooled_projections": drawn_as(batch, 16),
        "timestep": torch.full((batch,), 0.5, dtype=dtype),
        "img_ids": places,
        "txt_ids": torch.zeros(6, 3, dtype=dtype),
    }


def called(module: nn.Module, arguments: Made) -> Tensor:
    with torch.no_grad():
        found: Tensor = module(**arguments, return_dict=False)[0]
    return found.clone()  # eager's is yet to be waited for


# ---- in the processes --------------------------------------------------------------------------


def settle(**config: Any) -> ContextParallelConfig:
    """diffusers counts GPUs to name one, of which it makes no use here."""
    torch.accelerator.device_count = lambda: WORLD  # type: ignore[assignment]
    logging.getLogger("diffusers").disabled = True
    warnings.simplefilter("ignore")
    return ContextParallelConfig(**({"ulysses_degree": WORLD} | config))


def compiled_and_eager(rank: int, kind: str, sizes: list[tuple[int, int]], early: bool) -> Made:
    """What both give at each size of side and batch, beside the exact values."""
    fast, eager = transformer(kind), transformer(kind)
    exact = copy.deepcopy(eager).double()
    if early:
        strop.optimize(fast, options=tiny.options(strict=True))
    for module in (fast, eager):
        module.enable_parallelism(config=settle())
    if not early:
        strop.optimize(fast, options=tiny.options(strict=True))
    found = []
    for side, batch in sizes:
        own = given(kind, side, batch)
        ways = called(fast, own), called(eager, own)
        found.append((*ways, called(exact, given(kind, side, batch, torch.float64))))
    report = strop.explain(fast)
    programs = [variant.program for variant in dispatchers_of(fast)[kind].variants.all]
    exchanges = [s for p in programs for s in p.call_steps if s.op == "exchange"]
    return {
        "found": found,
        "text": str(report),
        "numbers": [dict(step.attrs)["number"] for step in exchanges],
        "read": [len(step.inputs) for step in exchanges],
        "may_run_twice": any(program.is_pure for program in programs),
    }


def one_in_eager(rank: int) -> Tensor:
    """What a process gives that is compiled if it is the second, and runs in eager if not."""
    module = transformer("FluxTransformer2DModel")
    module.enable_parallelism(config=settle())
    if rank:
        strop.optimize(module, options=tiny.options(strict=True))
    return called(module, given("FluxTransformer2DModel", 4, 1))


def by_torch_compile(rank: int) -> Made:
    kind = "FluxTransformer2DModel"
    module, own = transformer(kind), given(kind, 4, 1)
    module.enable_parallelism(config=settle())
    eager = called(module, own)
    compiled = torch.compile(module, backend="strop")
    return {"eager": eager, "fast": called(compiled, own), "text": str(strop.explain(compiled))}


def taken_back(rank: int, early: bool) -> list[Tensor]:
    """What a module gives in eager, compiled, and after ``restore``."""
    kind = "FluxTransformer2DModel"
    module, own = transformer(kind), given(kind, 4, 1)
    if early:
        strop.optimize(module, options=tiny.options(strict=True))
    module.enable_parallelism(config=settle())
    if not early:
        strop.optimize(module, options=tiny.options(strict=True))
    fast = called(module, own)
    strop.restore(module)
    again = called(module, own)
    return [fast, again, called(one_divided(kind), own)]


def one_divided(kind: str) -> Any:
    module = transformer(kind)
    module.enable_parallelism(config=settle())
    return module


def by_sizes_of_others(rank: int) -> Made:
    """ulysses_anything asks for the sizes of all processes, and rings for a library's kernels."""
    module = transformer("FluxTransformer2DModel")
    module.enable_parallelism(config=settle(ulysses_anything=True))
    own = given("FluxTransformer2DModel", 4, 1)
    before = called(module, own)
    strop.optimize(module, options=tiny.options())
    after, text = called(module, own), str(strop.explain(module))
    ring = transformer("FluxTransformer2DModel")
    ring.enable_parallelism(config=settle(ulysses_degree=1, ring_degree=WORLD))
    strop.optimize(ring, options=tiny.options(strict=True))
    try:
        called(ring, given("FluxTransformer2DModel", 4, 1))
    except strop.errors.UnsupportedError as error:
        text += str(error)
    return {"before": before, "after": after, "text": text}


def odd_inside(rank: int) -> str:
    """Tokens that the model makes itself: nine of one frame."""
    settle()
    module = transformer("WanTransformer3DModel")
    strop.optimize(module, options=tiny.options(), parallel="context")
    own = given("WanTransformer3DModel", 3, 1)
    try:
        called(module, own | {"hidden_states": own["hidden_states"][:, :, :1]})
    except ShapeError as error:
        return str(error)
    return ""


def training(rank: int) -> str:
    module = transformer("FluxTransformer2DModel").requires_grad_(True)
    module.enable_parallelism(config=settle())
    strop.optimize(module, options=tiny.options(), train=True)
    own = given("FluxTransformer2DModel", 4, 1)
    module(**own, return_dict=False)[0].square().mean().backward()
    return str(strop.explain(module))


def by_one_line(rank: int, name: str) -> Made:
    """What a pipeline draws with and without, and whether it is then as it was."""
    settle()
    case = next(case for case in PIPELINES if case.name == name)
    pipe, eager = case.made(), case.made()
    before = [dict(vars(part)) for part in pipe.transformer.modules()]
    strop.optimize(pipe, options=tiny.options(strict=True), parallel="context")
    fast, wanted = drawn(case, pipe), drawn(case, eager)
    text, counters = str(strop.explain(pipe)), dispatchers_of(pipe)["transformer"].counters
    others = [drawn(case, each, prompt="two blue dogs") for each in (pipe, eager)]
    refused = []
    for arguments in ({"height": 12, "width": 12}, {"max_sequence_length": 7}):
        try:
            drawn(case, pipe, **arguments)
        except ShapeError as error:
            refused.append(str(error))
    strop.restore(pipe)
    after = [dict(vars(part)) for part in pipe.transformer.modules()]
    again = [*drawn(case, pipe), *drawn(case, pipe, prompt="two blue dogs")]
    return {
        "fast": [*fast, *others[0]],
        "wanted": [*wanted, *others[1]],
        "reuses": counters.hoisted.num_reuses,
        "again": again,
        "is_as_before": all(a.keys() == b.keys() for a, b in zip(before, after, strict=True)),
        "text": text,
        "refused": refused,
    }


def on_two_gpus(rank: int, meeting: str) -> None:
    """A process of its own: runs step by step, then captures, then replays."""
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{meeting}", rank=rank, world_size=WORLD
    )
    kind, device = "FluxTransformer2DModel", torch.device("cuda", rank)
    fast, eager = (transformer(kind).to(device, torch.bfloat16) for _ in range(2))
    exact = transformer(kind).to(device, torch.bfloat16).double()
    sharding = Sharding(eager, WORLD)
    strop.optimize(fast, options=tiny.options(strict=True), parallel="context")
    for _ in range(3):
        for side, batch in ((16, 1), (8, 2)):
            own = moved(given(kind, side, batch, torch.bfloat16), device)
            wide = moved(own, torch.float64)
            assert_as_accurate_as_eager(called(fast, own), called(eager, own), called(exact, wide))
    (row,) = strop.explain(fast).components
    assert (row.num_calls, row.num_eager_calls, row.num_replays) == (6, 0, 4)
    dist.destroy_process_group()  # with the graphs there: NCCL would wait for them
    strop.restore(fast)
    sharding.undo()


def moved(arguments: Made, where: torch.device | torch.dtype) -> Made:
    return {
        name: value.to(where) if value.is_floating_point() or where is not torch.float64 else value
        for name, value in arguments.items()
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    found = Ranks(tmp_path_factory.mktemp("meetings"))
    assert found.run(int) == list(range(WORLD))
    yield found
    found.stop()


# ---- two processes -----------------------------------------------------------------------------


@two_processes
@pytest.mark.parametrize(
    ("kind", "early", "exchanges"),
    [
        # three blocks of four exchanges, and the result
        ("FluxTransformer2DModel", True, (12, 1)),
        ("WanTransformer3DModel", False, (12, 1)),
    ],
)
def test_one_graph_serves_all_sizes_no_further_from_the_truth_than_eager(
    kind: str, early: bool, exchanges: tuple[int, int], ranks: Ranks
) -> None:
    sizes = [(4, 1), (6, 1), (2, 2)]
    both = ranks.run(partial(compiled_and_eager, kind=kind, sizes=sizes, early=early))
    for of_rank in both:
        for fast, eager, exact in of_rank["found"]:
            assert_as_accurate_as_eager(fast, eager, exact)
        to_all, gathered = exchanges
        said = f"to other processes a call: {to_all} {ALL_TO_ALL}, {gathered} {ALL_GATHER}"
        assert said in of_rank["text"]
        assert "3 calls (0 eager, 0 replays), 1 graph, 0 recompiles" in of_rank["text"]
        assert of_rank["numbers"] == list(range(sum(exchanges)))
        assert of_rank["read"] == [1, *[2] * (sum(exchanges) - 1)]  # the one before it, too
        assert not of_rank["may_run_twice"]
    for first, second in zip(*(of_rank["found"] for of_rank in both), strict=True):
        assert torch.equal(first[0], second[0])  # each process has the whole result


@two_processes
def test_a_compiled_process_and_one_in_eager_exchange_the_same(ranks: Ranks) -> None:
    first, second = ranks.run(one_in_eager)
    assert torch.equal(first, second)


@two_processes
@pytest.mark.parametrize("early", [False, True])
def test_restore_leaves_what_diffusers_does(early: bool, ranks: Ranks) -> None:
    for fast, again, eager in ranks.run(partial(taken_back, early=early)):
        assert torch.equal(again, eager)
        torch.testing.assert_close(fast, eager, rtol=0, atol=1e-5)


@two_processes
def test_torch_compile_does_the_same(ranks: Ranks) -> None:
    for found in ranks.run(by_torch_compile):
        torch.testing.assert_close(found["fast"], found["eager"], rtol=0, atol=1e-5)
        assert f"12 {ALL_TO_ALL}, 1 {ALL_GATHER}" in found["text"]
        assert "1 call (0 eager, 0 replays), 1 graph" in found["text"]


@two_processes
def test_what_is_not_compiled_is_named(ranks: Ranks) -> None:
    for found in ranks.run(by_sizes_of_others):
        assert torch.equal(found["before"], found["after"])
        assert "ulysses_anything=True asks the other processes for their sizes" in found["text"]
        assert "by rings (ring_degree=2) is not compiled" in found["text"]


@two_processes
def test_masks_are_gathered_in_the_graph(ranks: Ranks) -> None:
    kind = "QwenImageTransformer2DModel"
    work = partial(compiled_and_eager, kind=kind, sizes=[(4, 2)], early=True)
    for of_rank in ranks.run(work):
        for fast, eager, exact in of_rank["found"]:
            assert_as_accurate_as_eager(fast, eager, exact)
        # a mask for each of two blocks, and the result
        assert f"8 {ALL_TO_ALL}, 3 {ALL_GATHER}" in of_rank["text"]
        assert "1 call (0 eager, 0 replays), 1 graph" in of_rank["text"]


@two_processes
def test_tokens_that_the_model_makes_are_checked_too(ranks: Ranks) -> None:
    for text in ranks.run(odd_inside):
        assert text.startswith("WanTransformer3DModel has tokens which 2 processes cannot divide")


@two_processes
def test_training_steps_run_in_eager(ranks: Ranks) -> None:
    for text in ranks.run(training):
        assert "tokens are divided among processes (context parallelism)" in text


@two_processes
def test_a_pipeline_takes_one_line_and_gets_everything_back(ranks: Ranks) -> None:
    for found in ranks.run(partial(by_one_line, name="flux")):
        for fast, wanted, again in zip(found["fast"], found["wanted"], found["again"], strict=True):
            torch.testing.assert_close(fast, wanted, rtol=0, atol=1e-4)
            assert torch.equal(again, wanted)
        assert found["is_as_before"]
        assert found["reuses"] == 3  # what comes of the prompt: of steps behind the first ones
        assert "parallel='context': tokens of 2 processes" in found["text"]
        assert [text.split(", which")[0] for text in found["refused"]] == [
            "hidden_states has 9 tokens",
            "encoder_hidden_states has 7 tokens",
        ]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < WORLD, reason="needs two GPUs")
def test_exchanges_are_part_of_a_cuda_graph(tmp_path: Path) -> None:
    meeting = str(tmp_path / "meeting")
    torch.multiprocessing.spawn(on_two_gpus, args=(meeting,), nprocs=WORLD)


# ---- one process -------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_divided_is_refused_before_anything_is_compiled() -> None:
    flux = transformer("FluxTransformer2DModel")
    with pytest.raises(OptionError, match=r"torchrun --nproc-per-node 2[\s\S]*init_process_group"):
        strop.optimize(flux, parallel="context")
    with pytest.raises(OptionError, match="each process has one, where its model lies"):
        strop.optimize(flux, parallel="context", devices=["cpu", "cpu"])
    with pytest.raises(OptionError, match=r"UNet2DConditionModel: diffusers has no plan"):
        strop.optimize(tiny.unet(), parallel="context")
    by_name = {case.name: case for case in PIPELINES}
    for name, said in (
        ("sd3", r"has transformer \(SD3Transformer2DModel\): diffusers has no plan"),
        ("flux-controlnet", r"has controlnet \(FluxControlNetModel\): diffusers has no plan"),
    ):
        with pytest.raises(OptionError, match=said):
            strop.optimize(by_name[name].made(), parallel="context")
    with pytest.raises(OptionError, match="several GPUs train by 'strop train"):
        strop.optimize(flux, parallel="context", train=True)
    assert "forward" not in vars(flux)


def test_a_rehearsal_tells_nobody() -> None:
    x = torch.ones(4, dtype=torch.bfloat16)
    with rehearsed():
        to_all = exchanged(x, ALL_TO_ALL, "nobody's", 2)
        gathered = exchanged(x, ALL_GATHER, "nobody's", 2)
    assert torch.equal(to_all, torch.zeros_like(x))
    assert gathered.shape == (8,)
    with pytest.raises(RuntimeError, match="nobody's"):
        exchanged(x, ALL_TO_ALL, "nobody's", 2)
