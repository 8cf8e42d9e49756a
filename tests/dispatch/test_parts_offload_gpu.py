"""On a GPU what libraries offload by parts is streamed, in no more memory than they take themselves
and two slots."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import remove_hook_from_module
from diffusers.hooks import HookRegistry, apply_group_offloading
from torch import Tensor, nn

import strop
from strop.runtime.run.growing_memory import held_bytes
from tests.diffusion.test_lora_roads import file
from tests.dispatch.test_weights_budget_gpu import SPARE, check_on_streams, inputs, model, size_of
from tests.e2e import tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
CLOSE = {"rtol": 2e-2, "atol": 2e-2}  # fp16, ten blocks


class Net(nn.Module):
    """Blocks in a list, with a layer before them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = model()
        torch.manual_seed(2)
        self.first = nn.Linear(2048, 2048).half()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = block(x)
        return x


def plain() -> Any:
    return Net().eval().requires_grad_(False)


def groups(**how: Any) -> Callable[[Any], None]:
    return lambda net: apply_group_offloading(net, torch.device("cuda"), **how)


MOVING = ("group_offloading", "lazy_prefetch_group_offloading", "layer_execution_tracker")
BLOCKS = {"offload_type": "block_level", "num_blocks_per_group": 1}
WAYS: dict[str, Callable[[Any], None]] = {
    "blocks": groups(offload_type="block_level", num_blocks_per_group=2),
    "blocks, with a stream": groups(**BLOCKS, use_stream=True),
    "blocks, recorded": groups(**BLOCKS, use_stream=True, record_stream=True),
    "blocks, little host memory": groups(**BLOCKS, use_stream=True, low_cpu_mem_usage=True),
    "leaves": groups(offload_type="leaf_level"),
    "leaves, with a stream": groups(offload_type="leaf_level", use_stream=True),
    "sequential": lambda net: cpu_offload(net, "cuda:0"),
}


def dispatcher_in(net: Any) -> Any:
    (dispatcher,) = strop.api.dispatchers_of(net).values()
    return dispatcher


def peak_of(run: Callable[[], object]) -> int:
    """Return the bytes of the GPU that calls have at most, beside what is there before."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("order", ["optimize first", "offload first"])
@pytest.mark.parametrize("way", WAYS)
def test_values_are_those_of_a_resident_model(way: str, order: str) -> None:
    x = inputs(64)
    options = tiny.options(strict=True, cuda_graphs=False)
    resident = strop.optimize(plain().to("cuda"), options=options)
    expected = [resident(x + n) for n in range(6)]
    strop.restore(resident)
    del resident
    net = plain()
    if order == "optimize first":
        net = strop.optimize(net.to("cuda"), options=tiny.options(strict=True))
        for n in range(4):  # from CUDA graphs in the end
            net(x + n)
        WAYS[way](net.to("cpu") if way == "sequential" else net)
    else:
        WAYS[way](net)
        strop.optimize(net, options=tiny.options(strict=True))
    results = [net(x + n) for n in range(6)]  # nobody waits between them
    assert all(map(torch.equal, results, expected)), "bit for bit"
    assert dispatcher_in(net).counters.eager_calls == 0
    assert dispatcher_in(net).budget._plan.blocks
    assert "are streamed there in each call" in str(strop.explain(net))
    strop.restore(net)
    torch.testing.assert_close(net(x), expected[0], **CLOSE)
    kinds = {w.device.type for w in net.parameters()}
    assert kinds == ({"meta"} if way == "sequential" else {"cpu"})


@pytest.mark.parametrize("way", WAYS)
def test_no_more_memory_than_the_library_and_two_slots(way: str) -> None:
    x, nets = inputs(64), [plain(), plain()]
    for net in nets:
        WAYS[way](net)
    alone = peak_of(lambda: nets[0](x))
    net = nets[1]
    nets.clear()
    strop.optimize(net, options=tiny.options(strict=True))
    net(x)
    held = held_bytes(x.device)
    dispatcher = dispatcher_in(net)
    peak = peak_of(lambda: net(x)) + dispatcher.budget.held_bytes
    slots = 2 * dispatcher.budget._plan.slot_bytes
    print(f"{way}: alone {alone / 1e6:.1f} MB, ours {peak / 1e6:.1f} with slots {slots / 1e6:.1f}")
    print(strop.explain(net))
    assert dispatcher.budget.held_bytes <= alone + slots
    assert peak <= alone + slots + SPARE
    assert held <= SPARE
    assert dispatcher.budget.held_bytes < size_of(net) / 2
    strop.restore(net)


@pytest.mark.parametrize("way", ["blocks", "leaves, with a stream", "sequential"])
def test_writes_parts_and_eager_calls(way: str) -> None:
    net, twin, x = plain(), plain().to("cuda"), inputs(64)
    WAYS[way](net)
    strop.optimize(net, options=tiny.options())
    for number in range(6):
        torch.testing.assert_close(net(x), twin(x), **CLOSE)
        for each in (net, twin):
            each.blocks[number].q.weight.data.mul_(0.25)  # at once, beside what the GPU does
            each.blocks[-1 - number].out.weight.mul_(-0.5)
    torch.testing.assert_close(net.blocks[2](x), twin.blocks[2](x), **CLOSE)
    torch.testing.assert_close(net(x), twin(x), **CLOSE)
    assert dispatcher_in(net).counters.eager_calls == 0
    for each in (net, twin):
        each.requires_grad_(True)
    torch.testing.assert_close(net(x), twin(x), **CLOSE)
    for each in (net, twin):
        each.requires_grad_(False)
        if way != "sequential":  # behind a call in eager accelerate leaves nothing to write to
            each.first.weight.mul_(0.5)
    torch.testing.assert_close(net(x), twin(x), **CLOSE)
    assert dispatcher_in(net).counters.eager_calls == 1
    strop.restore(net)
    torch.testing.assert_close(net(x), twin(x), **CLOSE)


@pytest.mark.parametrize("way", WAYS)
def test_arguments_on_the_host(way: str) -> None:
    net, x = plain(), inputs(64)
    WAYS[way](net)
    expected = net(x.cpu())
    strop.optimize(net, options=tiny.options(strict=True))
    for _ in range(2):
        result = net(x.cpu())
        assert result.device == expected.device
        torch.testing.assert_close(result, expected, **CLOSE)
        torch.testing.assert_close(net(x), expected.to(x.device), **CLOSE)
    assert dispatcher_in(net).counters.eager_calls == 0


def test_working_memory_of_others_makes_room() -> None:
    """What another model has worked in does not lie beside weights that come."""
    x, large = inputs(64), inputs(65536)
    other = strop.optimize(model().cuda().eval(), options=tiny.options(strict=True))
    net = plain()
    WAYS["blocks, with a stream"](net)
    strop.optimize(net, options=tiny.options(strict=True))
    with torch.no_grad():
        expected = [other(large).clone(), net(x).clone()]
        for _ in range(2):
            dispatcher_in(net).rest()
            assert torch.equal(other(large), expected[0])
            assert held_bytes(x.device) > 2 * SPARE
            assert torch.equal(net(x), expected[1])
            assert held_bytes(x.device) <= SPARE


def test_streams_of_the_user_take_turns() -> None:
    net, x = plain(), inputs(64)
    WAYS["blocks, with a stream"](net)
    strop.optimize(net, options=tiny.options(strict=True))
    check_on_streams(net, x)


def picture(pipe: Any) -> Tensor:
    prompt = torch.randn(1, 7, tiny.PROMPT_DIM, generator=torch.manual_seed(0)).to("cuda")
    found: Tensor = pipe(
        prompt_embeds=prompt,
        negative_prompt_embeds=prompt * 0,
        num_inference_steps=3,
        height=16,
        width=16,
        generator=torch.manual_seed(0),
        output_type="pt",
    ).images
    return found.cpu()


@pytest.mark.parametrize("way", ["block", "leaf", "leaf with a stream", "sequential"])
def test_pictures(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    wanted, pipe = tiny.pipeline().to("cuda"), tiny.pipeline()
    strop.optimize(pipe, options=tiny.options(strict=True))
    if way == "sequential":
        pipe.enable_sequential_cpu_offload()
    elif way == "block":
        pipe.enable_group_offload(torch.device("cuda"), num_blocks_per_group=1)
    else:
        pipe.enable_group_offload(
            torch.device("cuda"), offload_type="leaf_level", use_stream="stream" in way
        )
    for _ in range(3):
        torch.testing.assert_close(picture(pipe), picture(wanted), rtol=1e-3, atol=1e-3)
    for each in (pipe, wanted):
        each.load_lora_weights(file(4, 1), adapter_name="one")
    for _ in range(2):
        torch.testing.assert_close(picture(pipe), picture(wanted), rtol=1e-3, atol=1e-3)
    served = strop.api.dispatchers_of(pipe)
    assert {d.counters.eager_calls for d in served.values()} == {0}
    holders = [n for n, d in served.items() if d.budget is not None and d.budget.held_bytes]
    assert holders == ["vae.decoder"], "one model at a time has memory"
    strop.restore(pipe)
    torch.testing.assert_close(picture(pipe), picture(wanted), rtol=1e-3, atol=1e-3)


@pytest.mark.alone
def test_no_slower_than_the_library() -> None:
    x, times = inputs(4096), {}
    for name in ("diffusers", "strop"):
        net = plain()
        WAYS["blocks, with a stream"](net)
        if name == "strop":
            strop.optimize(net, options=tiny.options(strict=True))
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(3):
            net(x)
        torch.cuda.synchronize()
        begin.record()
        for _ in range(5):
            net(x)
        end.record()
        torch.cuda.synchronize()
        times[name] = begin.elapsed_time(end) / 5
    print(", ".join(f"{name} {ms:.2f} ms" for name, ms in times.items()))
    assert times["strop"] < times["diffusers"]


@pytest.mark.parametrize("way", WAYS)
def test_a_model_that_is_moved_when_the_hooks_are_gone(way: str) -> None:
    net, x = plain(), inputs(64)
    WAYS[way](net)
    strop.optimize(net, options=tiny.options(strict=True))
    expected = net(x)
    if way == "sequential":
        remove_hook_from_module(net, recurse=True)
    else:
        registry = HookRegistry.check_if_exists_or_initialize(net)
        for name in MOVING:
            registry.remove_hook(name, recurse=True)
    net.to("cuda")
    for _ in range(3):
        torch.testing.assert_close(net(x), expected, **CLOSE)
    assert {w.device.type for w in net.parameters()} == {"cuda"}
    assert dispatcher_in(net).budget is None
    assert dispatcher_in(net).counters.eager_calls == 0
    strop.restore(net)
    torch.testing.assert_close(net(x), expected, **CLOSE)
