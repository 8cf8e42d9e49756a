"""What a change of a pipeline captures: CUDA graphs of what is bound for the first time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler, EulerAncestralDiscreteScheduler
from torch import Tensor

import strop
from strop.bench.pipelines.parts import image_processor
from strop.bench.pipelines.stable import ip_adapter_state
from strop.runtime.run import cuda_graphs, workspace
from tests.diffusion.replayed import replayed_first
from tests.diffusion.test_lora_roads import file
from tests.e2e import tiny
from tests.runtime.host_pages import host_memory

# of diffusers
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")
PROMPT = torch.randn(1, 7, tiny.PROMPT_DIM, generator=torch.Generator().manual_seed(1))
PICTURED = 16  # channels of a picture's embedding
SHOWN = torch.randn(2, 1, PICTURED, generator=torch.Generator().manual_seed(2))


def pipeline(device: str = "cpu") -> Any:
    pipe = tiny.pipeline()
    pipe.scheduler = DDIMScheduler.from_config(pipe.scheduler.config)
    pipe.register_modules(feature_extractor=image_processor())
    return pipe.to(device)


def draw(pipe: Any) -> Tensor:
    embeds = [SHOWN.to(pipe.device)]
    more = {"ip_adapter_image_embeds": embeds} if pipe.unet.encoder_hid_proj else {}
    found: Tensor = pipe(
        prompt_embeds=PROMPT.to(pipe.device),
        negative_prompt_embeds=-PROMPT.to(pipe.device),
        height=16,
        width=16,
        num_inference_steps=3,
        generator=torch.Generator().manual_seed(3),
        output_type="latent",
        **more,
    ).images
    return found


def load_lora(pipe: Any, seed: int) -> None:
    pipe.load_lora_weights(file(4, seed), adapter_name="one")


def load_ip_adapter(pipe: Any) -> None:
    torch.manual_seed(4)
    state = ip_adapter_state(pipe.unet, pictured=PICTURED)
    pipe.load_ip_adapter(state, subfolder="", weight_name="", image_encoder_folder=None)


def to_kind(kind: Any) -> Callable[[Any], None]:
    def act(pipe: Any) -> None:
        pipe.scheduler = kind.from_config(pipe.scheduler.config)

    return act


# Each follows those before it: how many CUDA graphs it has captured, how often programs are bound.
# Timesteps of the other scheduler are of another type.
CHANGES: dict[str, tuple[Callable[[Any], None], int, int]] = {
    "another scheduler": (to_kind(EulerAncestralDiscreteScheduler), 0, 0),
    "the scheduler from before": (to_kind(DDIMScheduler), 0, 0),
    "a LoRA": (lambda pipe: load_lora(pipe, 1), 1, 1),
    "no LoRA": (lambda pipe: pipe.unload_lora_weights(), 0, 0),
    "another LoRA": (lambda pipe: load_lora(pipe, 2), 1, 1),
    "no LoRA again": (lambda pipe: pipe.unload_lora_weights(), 0, 0),
    "an IP-Adapter": (load_ip_adapter, 1, 1),
    "no IP-Adapter": (lambda pipe: pipe.unload_ip_adapter(), 0, 0),
}


def assert_near(found: Tensor, wanted: Tensor, nearness: float, name: str = "") -> None:
    most = nearness * float(wanted.abs().max())
    torch.testing.assert_close(found, wanted, rtol=0, atol=most, msg=lambda text: f"{name}: {text}")


def assert_captures(eager: Any, fast: Any, pool: Any, nearness: float) -> None:
    unet = fast.unet.forward
    assert_near(draw(fast), draw(eager), nearness)
    for name, (change, captures, bindings) in CHANGES.items():
        before = pool.num_captures, unet.counters.rebinds
        for pipe in (eager, fast):
            change(pipe)
        wanted = draw(eager)
        for _ in range(2):
            assert_near(draw(fast), wanted, nearness, name)
        assert pool.num_captures - before[0] == captures, name
        assert unet.counters.rebinds - before[1] == bindings, name
    assert unet.counters.eager_calls == 0
    assert len(pool._graphs) <= 2, "those of weights that are no longer there are dropped"


def test_a_state_that_was_there_before_captures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an IP-Adapter hoists needs more memory, which grows where it is as on a GPU."""
    monkeypatch.setattr(workspace, "_WORKSPACES", {})
    eager, fast = pipeline(), pipeline()
    with host_memory(), replayed_first() as pool:
        strop.optimize(fast, options=tiny.options())
        assert_captures(eager, fast, pool, 2e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_state_that_was_there_before_captures_nothing_on_a_gpu() -> None:
    eager, fast = pipeline("cuda"), pipeline("cuda")
    pool = cuda_graphs.pool_of(torch.device("cuda", 0))
    pool.drop()
    strop.optimize(fast, options=tiny.options())
    assert_captures(eager, fast, pool, 5e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_capture_keeps_the_memory_that_torch_has_for_later() -> None:
    """It is given back only where memory runs out, and all is captured again then."""
    fast = strop.optimize(pipeline("cuda"), options=tiny.options())
    pool = cuda_graphs.pool_of(torch.device("cuda", 0))
    pool.drop()
    spare = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    del spare
    before, captured = torch.cuda.memory_reserved(), pool.num_captures
    expected = draw(fast)
    assert pool.num_captures == captured + 1
    assert torch.cuda.memory_reserved() >= before

    capturing = pool._capturing
    record, failures = capturing._record, [torch.OutOfMemoryError("for this test")]

    def failing(run: Any) -> Any:
        if failures:
            raise failures.pop()
        return record(run)

    pool.drop()
    capturing._record = failing
    try:
        assert_near(draw(fast), expected, 1e-3)
    finally:
        del capturing._record
    assert not failures
    assert pool.num_captures == captured + 2
    assert torch.cuda.memory_reserved() < before
