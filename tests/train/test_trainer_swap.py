"""Blocks whose frozen weights lie in memory of the host: two at a time are on the device, and
results have the bits of those without."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strop.errors import OptionError, UnsupportedError
from strop.runtime.run.weight_stream import Copy
from strop.train import block_swap, recording, step_runs
from strop.train.block_swap import BlockSwap
from strop.train.objective import Objective
from strop.train.session import Session
from tests.train import trainer
from tests.train.controls import awake
from tests.train.pair import Pair, train

pytest.importorskip("diffusers")
pytestmark = pytest.mark.filterwarnings("ignore")

NAMES, SWAPPED = ("sd", "sd3", "flux"), 3
Found = tuple[list[float], dict[str, Tensor | None]]


@pytest.fixture
def models(tiny_model: Path, deep: dict[str, Path]) -> dict[str, Path]:
    """A UNet with six blocks, and transformers with three and with five."""
    return {"sd": tiny_model, **deep}


def session(task: str, model: Path, data: Path, out: Path, **more: Any) -> Session:
    given = {"model": model, "train_data_dir": data, "output_dir": out, "threads": 1}
    made = trainer.session(task, **given, **more)
    if task == "controlnet":
        awake(made.model.denoisers[1])
    if not made.settings.blocks_to_swap:  # products have other bits where weights lie unaligned
        for block in block_swap.chosen(made.model.unet, SWAPPED):
            for weight in frozen(block):
                weight.data = weight.data.clone()
    made.learner.train()
    return made


def passes(made: Session, count: int = 3) -> Found:
    """The losses of some batches, and the gradients of all of them together."""
    objective = Objective(made.settings, made.model, made.unet)
    losses = []
    for number in range(count):
        loss = objective(made.source.batch(number), number)
        loss.backward()
        losses.append(loss.item())
    return losses, {name: weight.grad for name, weight in made.learner.named.items()}


def assert_equal(ours: Found, theirs: Found) -> None:
    assert ours[0] == theirs[0]
    assert ours[1].keys() == theirs[1].keys()
    for name, grad in theirs[1].items():
        own = ours[1][name]
        assert (grad is None) == (own is None), name
        assert grad is None or torch.equal(own, grad), name
    assert any(grad is not None and bool(grad.any()) for grad in theirs[1].values())


def frozen(block: nn.Module) -> list[nn.Parameter]:
    return [weight for weight in block.parameters() if not weight.requires_grad]


def lies_in(weight: Tensor, room: Tensor) -> bool:
    begin = room.data_ptr()
    return begin <= weight.data_ptr() < begin + room.numel() * room.element_size()


# ---- the same bits -----------------------------------------------------------------------------

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "recomputed": {"gradient_checkpointing": True},
    "half": {"mixed_precision": "bf16"},
    "half recomputed": {"mixed_precision": "bf16", "gradient_checkpointing": True},
    "dora": {"use_dora": True, "lora_dropout": 0.2},
    "lokr": {"adapter": "lokr"},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_adapters(
    name: str, way: str, models: dict[str, Path], pictures: Path, tmp_path: Path
) -> None:
    made = partial(session, "lora", models[name], pictures, tmp_path, **WAYS[way])
    assert_equal(passes(made(blocks_to_swap=3)), passes(made()))


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_controlnets(
    name: str, recomputed: bool, models: dict[str, Path], controlled: Path, tmp_path: Path
) -> None:
    more = {"gradient_checkpointing": recomputed}
    made = partial(session, "controlnet", models[name], controlled, tmp_path, **more)
    assert_equal(passes(made(blocks_to_swap=3)), passes(made()))


class LastMoment:
    """A lane that copies as late as a GPU may, and leaves nothing where a copy may already be."""

    def __init__(self, slots: Tensor) -> None:
        self.slots, self.size = slots, slots.numel() // 2
        self.pending: dict[int, Sequence[Copy]] = {}

    def begin(self) -> None:
        self.give_up(0)
        self.give_up(1)

    def copy(self, slot: int, copies: Sequence[Copy]) -> None:
        self.pending[slot] = copies

    def wait(self, slot: int) -> None:
        for place, source in self.pending.pop(slot):
            place.copy_(source)

    def give_up(self, slot: int) -> None:
        self.slots[slot * self.size :][: self.size].fill_(255)  # a NaN in every type

    def end(self) -> None:
        raise AssertionError("no run ends")


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_read_before_its_copy_or_behind_the_next(
    name: str,
    recomputed: bool,
    models: dict[str, Path],
    pictures: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    more = {"gradient_checkpointing": recomputed, "mixed_precision": "bf16"}
    made = partial(session, "lora", models[name], pictures, tmp_path, **more)
    expected = passes(made())
    monkeypatch.setattr(block_swap, "lane_for", LastMoment)
    assert_equal(passes(made(blocks_to_swap=3)), expected)


def test_a_leak_would_be_seen(
    models: dict[str, Path], pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If autograd saved weights themselves, it would read those of another block."""
    made = partial(session, "lora", models["flux"], pictures, tmp_path)
    expected = passes(made(), 1)
    monkeypatch.setattr(BlockSwap, "_naming_weights", lambda _: nullcontext())
    losses, wrong = passes(made(blocks_to_swap=4), 1)
    assert losses == expected[0], "the forward pass is right"
    assert any(
        grad is not None and not torch.equal(grad, expected[1][name])  # type: ignore[arg-type]
        for name, grad in wrong.items()
    )


@pytest.mark.parametrize("name", ["sd", "flux"])
def test_a_training_ends_with_the_same_bytes(
    name: str, models: dict[str, Path], pictures: Path, tmp_path: Path
) -> None:
    """With validation pictures between the steps; and resumed with other blocks in the host's
    memory."""
    given = {
        "model": models[name],
        "train_data_dir": pictures,
        "max_train_steps": 4,
        "checkpointing_steps": 2,
        "gradient_accumulation_steps": 2,
        "lr_warmup_steps": 0,
        "use_ema": True,
        "validation_prompt": ["a ring"],
        "validation_steps": 1,
        "validation_inference_steps": 1,
        "num_validation_images": 1,
        "threads": 1,
    }
    ends = []
    for place, steps, count, resume in (
        ("plain", 4, 0, ""),
        ("swapped", 2, 5, ""),
        ("swapped", 4, 3, "latest"),
    ):
        more = {"blocks_to_swap": count, "resume_from_checkpoint": resume}
        out = tmp_path / place
        trainer.train("lora", output_dir=out, **{**given, **more, "max_train_steps": steps})
        ends.append(out)
    files = [trainer.checkpoint_sums(out / "checkpoint-4") for out in ends]
    assert files[0]
    assert files[0] == files[2]
    for file in ("pytorch_lora_weights.safetensors", "validation/step-000004.png"):
        assert (ends[0] / file).read_bytes() == (ends[2] / file).read_bytes()


def test_two_ranks_swap_their_own(
    pair: Pair, models: dict[str, Path], pictures: Path, tmp_path: Path
) -> None:
    found = []
    for count in (0, 3):
        out = tmp_path / str(count)
        given = {
            "model": str(models["flux"]),
            "train_data_dir": str(pictures),
            "output_dir": str(out),
            "max_train_steps": 2,
            "checkpointing_steps": 2,
            "lr_warmup_steps": 0,
            "threads": 1,
            "blocks_to_swap": count,
        }
        for one in pair.run(partial(train, task="lora", given=given, change=None)):
            if isinstance(one, Exception):
                raise one
        found.append(trainer.checkpoint_sums(out / "checkpoint-2"))
    assert found[0]
    assert found[0] == found[1]


# ---- what is where -----------------------------------------------------------------------------


@pytest.mark.parametrize("recomputed", [False, True])
def test_two_blocks_at_a_time_are_on_the_device(
    recomputed: bool,
    models: dict[str, Path],
    pictures: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each is there when it is computed, in both passes. From the second step on all copies are
    ahead of what reads them."""
    more = {"gradient_checkpointing": recomputed, "blocks_to_swap": 4}
    made = session("lora", models["flux"], pictures, tmp_path, **more)
    swap = made.swap
    assert swap is not None
    blocks = block_swap.chosen(made.model.unet, 4)
    bring, seen = swap.bring, []

    def watched(number: int) -> int:
        slot = bring(number)
        here = [
            place
            for place, block in enumerate(blocks)
            if any(lies_in(weight, swap._slots) for weight in frozen(block))
        ]
        assert number in here
        assert len(here) <= 2
        assert all(lies_in(weight, swap._slots) for weight in frozen(blocks[number]))
        others = [
            weight for n, block in enumerate(blocks) if n not in here for weight in frozen(block)
        ]
        assert all(lies_in(weight, swap._store) for weight in others)
        seen.append((torch._C._current_graph_task_id() != -1, number))
        return slot

    monkeypatch.setattr(swap, "bring", watched)
    counts = []
    for _ in range(3):
        passes(made, 1)
        counts.append((swap.copies, swap.late))
    forward, backward = ([n for is_back, n in seen if is_back == back] for back in (False, True))
    assert forward == [0, 1, 2, 3] * 3
    assert [n for i, n in enumerate(backward) if not i or backward[i - 1] != n] == [3, 2, 1, 0] * 3
    steps = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(counts)]
    assert steps == [(4, 0), (4, 0)], "all but two in each pass, and none late"
    assert swap.device_bytes == 2 * max(block.source.numel() for block in swap._blocks)
    assert swap.host_bytes >= sum(w.numel() * 4 for block in blocks for w in frozen(block))


def test_weights_keep_their_values(models: dict[str, Path], pictures: Path, tmp_path: Path) -> None:
    made = session("lora", models["sd"], pictures, tmp_path, blocks_to_swap=4)
    before = session("lora", models["sd"], pictures, tmp_path).model.unet.state_dict()
    passes(made, 1)
    after = made.model.unet.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_weights_in_another_order_of_memory() -> None:
    """As those of convolutions on a GPU."""
    conv = nn.Conv2d(3, 8, 3).requires_grad_(False).to(memory_format=torch.channels_last)
    network = nn.ModuleDict({"resnets": nn.ModuleList([conv, nn.Conv2d(8, 8, 1), nn.Identity()])})
    network.requires_grad_(False)
    weight = conv.weight.clone()
    swap = block_swap.install(network, 2, torch.device("cpu"))
    for number in (0, 1, 0):
        swap.bring(number)
        assert conv.weight.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(conv.weight, weight)


def test_the_rest_moves_and_they_stay() -> None:
    net = nn.ModuleDict(
        {
            "transformer_blocks": nn.ModuleList([nn.BatchNorm1d(2) for _ in range(4)]),
            "last": nn.Linear(2, 2),
        }
    )
    away = block_swap.chosen(net, 2)
    blocks = net["transformer_blocks"]
    assert [n for n, block in enumerate(blocks) if block in away] == [1, 3]  # type: ignore[arg-type]
    block_swap.move(net, torch.device("meta"), torch.float64, away)
    for part in (*net["transformer_blocks"], net["last"]):  # type: ignore[misc]
        kinds = {(weight.device.type, weight.dtype) for weight in part.parameters()}
        assert kinds == {("cpu" if part in away else "meta", torch.float64)}


def test_shared_weights_are_refused() -> None:
    blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)]).requires_grad_(False)
    net = nn.ModuleDict({"transformer_blocks": blocks, "last": nn.Linear(4, 4)})
    net["last"].weight = blocks[3].weight  # type: ignore[union-attr]
    with pytest.raises(UnsupportedError, match="share a weight"):
        block_swap.install(net, 3, torch.device("cpu"))


# ---- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "more", "message"),
    [
        ("text-to-image", {"blocks_to_swap": 3}, "text-to-image trains them all: take strop train"),
        ("lora", {"blocks_to_swap": 2}, "blocks_to_swap is 2, which saves nothing"),
        ("lora", {"blocks_to_swap": -1}, "blocks_to_swap is -1: it must be at least 0"),
        ("lora", {"blocks_to_swap": 9}, "blocks_to_swap is 9: the FluxTransformer2DModel has 5 bl"),
        ("lora", {"blocks_to_swap": 3, "compile_unet": True}, "compile_unet makes passes that"),
        ("lora", {"blocks_to_swap": 3, "base_weights": "int8"}, "base_weights are quantised"),
    ],
)
def test_what_cannot_be(
    task: str,
    more: dict[str, Any],
    message: str,
    models: dict[str, Path],
    pictures: Path,
    tmp_path: Path,
) -> None:
    with pytest.raises(OptionError, match=message):
        session(task, models["flux"], pictures, tmp_path, **more)


def test_steps_are_run_without_a_graph(
    models: dict[str, Path], pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the user is told once; not if no graph was wanted."""
    monkeypatch.setattr(recording, "can_record", lambda device: True)
    for wants, told in ((True, 1), (False, 0)):
        more = {"blocks_to_swap": 3, "step_graph": wants}
        made = session("lora", models["flux"], pictures, tmp_path, **more)
        objective, said = Objective(made.settings, made.model, made.unet), list[str]()
        runs = step_runs.make_runs(made.settings, objective, made.learner, made.ranks, said.append)
        assert isinstance(runs, step_runs.PlainRuns)
        assert len([text for text in said if "without a CUDA graph" in text]) == told


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu(name: str, models: dict[str, Path], pictures: Path, tmp_path: Path) -> None:
    """Gradients are those without, for the same adapters, and weights of blocks take the memory of
    two."""
    more = {"device": "cuda", "mixed_precision": "bf16"}
    made = partial(session, "lora", models[name], pictures, tmp_path, **more)
    swapped, plain = made(blocks_to_swap=3), made()
    with torch.no_grad():
        for path, weight in swapped.learner.named.items():
            weight.copy_(plain.learner.named[path])
    assert all(weight.is_cuda for weight in swapped.learner.parameters)
    swap = swapped.swap
    assert swap is not None
    assert swap._store.is_pinned()
    with swapped.model.attention(is_compiled=False):
        (losses, ours), (exact, theirs) = passes(swapped), passes(plain)
    assert losses == pytest.approx(exact, rel=1e-5)
    for path, grad in theirs.items():
        if grad is not None:
            torch.testing.assert_close(ours[path], grad, rtol=1e-2, atol=1e-6)
    blocks = block_swap.chosen(swapped.model.unet, 3)
    here = [any(weight.is_cuda for weight in frozen(block)) for block in blocks]
    assert sum(here) <= 2
