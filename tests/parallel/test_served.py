"""Calls are spread over twins that are never stale: here two parts of a CPU stand for two GPUs."""

from __future__ import annotations

import copy
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel
from diffusers.utils.import_utils import is_peft_available
from torch import Tensor, nn

import strop
from strop.bench.pipelines.actions import ACTIONS, DENOISER, UNET
from strop.bench.pipelines.actions_adapters import add_adapter
from strop.dispatch.parallel.served import ParallelDispatcher
from strop.errors import ShapeError
from tests.e2e import tiny

pytestmark = pytest.mark.skipif(not is_peft_available(), reason="LoRA in diffusers needs peft")
SIZE = (2, 8, 8, 7)
TWO_GPUS = pytest.param(
    ["cuda:0", "cuda:1"],
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
    ],
)
PLACES = [pytest.param(["cpu", "cpu"]), TWO_GPUS]


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def spread(unet: UNet2DConditionModel, devices: list[str], mode: str = "cfg", **more: Any) -> Any:
    options = tiny.options(**more)
    unet.to(devices[0])
    return strop.optimize(unet, options=options, parallel=mode, devices=devices)


def served(module: nn.Module) -> ParallelDispatcher:
    found = vars(module)["forward"]
    assert type(found) is ParallelDispatcher
    return found


def call(module: nn.Module, size: tuple[int, ...] = SIZE, **more: Any) -> Tensor:
    place = next(module.parameters()).device
    with torch.no_grad():
        return module(*(a.to(place) for a in tiny.unet_args(*size)), **more).sample


def check(module: nn.Module, plain: nn.Module, **more: Any) -> Tensor:
    found, wanted = call(module, **more), call(plain, **more)
    # fp32 sums in another order; a stale half is off by 1e-2 and more
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-3 * float(wanted.abs().max()))
    own = vars(module).get("forward")
    twins = own.served_twins.values() if isinstance(own, ParallelDispatcher) else ()
    models = (module, *(t.module for t in twins))
    if not found.is_cuda and all(strides(each) == strides(plain) for each in models):
        # Results follow the order of convolutions' weights when a program is compiled. On a GPU it
        # then lays these out channels-last, and a twin keeps the order that its weights had when it
        # was made.
        assert found.stride() == wanted.stride()
    return found


def strides(module: nn.Module) -> list[tuple[int, ...]]:
    return [weight.stride() for weight in module.parameters()]


def in_turn(unet: UNet2DConditionModel, plain: nn.Module, change: Callable[[Any], Any]) -> None:
    with ExitStack() as around:
        for model in (unet, plain):
            told = change(model)
            if isinstance(told, AbstractContextManager):
                around.enter_context(told)
        for _ in range(2):
            check(unet, plain)


def second_half(unet: nn.Module) -> int:
    """Return how many calls the twin has served."""
    return next(iter(served(unet).served_twins.values())).counters.calls


@pytest.mark.parametrize("devices", PLACES)
def test_each_half_is_that_of_the_same_model_at_that_batch(devices: list[str]) -> None:
    unet, alone = spread(tiny.unet(), devices), tiny.unet().to(devices[0])
    strop.optimize(alone, options=tiny.options())
    args = [a.to(devices[0]) for a in tiny.unet_args(4, 8, 8, 7)]
    with torch.no_grad():
        for number in range(3):  # a CUDA graph is captured at the second and replayed at the third
            whole = unet(*args).sample
            halves = [alone(*(a[part] for a in args)).sample for part in (slice(2), slice(2, 4))]
            assert torch.equal(whole, torch.cat(halves))
            assert second_half(unet) == number + 1
    assert served(unet).num_split == 3
    assert not served(unet).alone


def unload_lora(unet: UNet2DConditionModel) -> None:
    unet.unload_lora()


def other_scale(unet: UNet2DConditionModel) -> None:
    unet.set_adapters(["first"], [0.1])


def disable_adapters(unet: UNet2DConditionModel) -> None:
    unet.disable_adapters()


def fuse_adapter(unet: UNet2DConditionModel) -> None:
    unet.fuse_lora()


def delete_adapter(unet: UNet2DConditionModel) -> None:
    unet.delete_adapters("first")


def factors_written(unet: UNet2DConditionModel) -> None:
    for name, weight in unet.named_parameters():
        if "lora_" in name:
            weight.data.mul_(3)


def one_bit(unet: UNet2DConditionModel) -> None:
    """The least that can be written, where nobody counts writes."""
    unet.conv_out.bias.data.view(torch.int32)[1] ^= 1 << 22


QUICK = ("data_copy", "new_parameter", "load_lora")
LORA_CHANGES = [unload_lora, other_scale, disable_adapters, fuse_adapter, delete_adapter]
LORA_CHANGES += [factors_written]
CHANGES = [
    pytest.param(
        action.do,
        id=action.name,
        marks=[] if action.name in QUICK else [pytest.mark.nightly],
    )
    for action in ACTIONS
    if action.on in (DENOISER, UNET) and action.name != "layerwise_casting"
]


@pytest.mark.parametrize("devices", PLACES)
@pytest.mark.parametrize("change", [*CHANGES, one_bit])
def test_the_next_call_of_a_twin_sees_it(change: Callable[[Any], Any], devices: list[str]) -> None:
    unet = spread(tiny.unet(), devices)
    plain = copy.deepcopy(unet)
    check(unet, plain)
    in_turn(unet, plain, change)


@pytest.mark.parametrize("devices", PLACES)
def test_a_twin_has_the_adapters_of_its_model(devices: list[str]) -> None:
    for change in LORA_CHANGES:
        unet = tiny.unet()
        add_adapter(unet)
        unet = spread(unet, devices)
        plain = copy.deepcopy(unet)
        before = check(unet, plain)
        in_turn(unet, plain, change)
        assert served(unet).num_split == 3, change
        assert change is fuse_adapter or not torch.equal(call(unet), before), change


@pytest.mark.parametrize("devices", PLACES)
def test_a_denoise_loop_looks_once(devices: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    unet = spread(tiny.unet(), devices)
    plain, own = copy.deepcopy(unet), served(unet)
    looks = list[int]()
    differs = own._sums.differs
    monkeypatch.setattr(own._sums, "differs", lambda *a: looks.append(1) or differs(*a))
    for _ in range(2):
        own.loop.begin(has_user_code=False)
        for _ in range(3):
            check(unet, plain)
        own.loop.end()
        for model in (unet, plain):
            model.conv_in.weight.data.mul_(1.5)
    assert len(looks) == 1  # of the second loop: in the first one all was copied just now
    own.loop.begin(has_user_code=True)
    for factor in (0.5, 2.0):
        for model in (unet, plain):
            model.conv_in.weight.data.mul_(factor)
        check(unet, plain)
    own.loop.end()
    assert len(looks) == 3


def test_calls_that_cannot_be_split_run_alone_and_say_why(caplog: Any) -> None:
    unet = spread(tiny.unet(), ["cpu", "cpu"])
    plain = copy.deepcopy(unet)
    for size in ((1, 8, 8, 7), (3, 8, 8, 7)):
        for _ in range(2):
            torch.testing.assert_close(call(unet, size), call(plain, size), rtol=0, atol=1e-4)
    unet.train()
    plain.train()
    check(unet, plain)
    unet.eval()
    plain.eval()
    check(unet, plain, cross_attention_kwargs={"scale": 1.0})
    text = str(strop.explain(unet))
    assert "parallel='cfg' on cpu, cpu: 1 call split" in text
    for said in ("2x: the call has one row", "2x: 3 rows are not two halves", "1x: the module, or"):
        assert f"on cpu alone {said}" in text
    assert sum("alone: " in record.message for record in caplog.records) == 3  # each reason once


class Mixing(nn.Module):
    """It looks at the other half of a batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0, keepdim=True)


class Averaged:
    """A function of attention over all rows."""

    def __call__(self, attn: Any, hidden_states: Tensor, *args: Any, **more: Any) -> Tensor:
        return hidden_states.mean(0, keepdim=True).expand_as(hidden_states)


def mixing_part(unet: Any) -> None:
    unet.conv_act = Mixing()


def mixing_attention(unet: Any) -> None:
    unet.set_attn_processor(Averaged())


def mixing_code(unet: Any) -> None:
    kind = type(unet.conv_act)
    unet.conv_act.__class__ = type(kind.__name__, (kind,), {"forward": Mixing.forward})


@pytest.mark.parametrize("change", [mixing_part, mixing_attention, mixing_code])
def test_a_model_whose_rows_see_each_other_is_not_split(change: Callable[[Any], None]) -> None:
    unet = spread(tiny.unet(), ["cpu", "cpu"])
    plain = copy.deepcopy(unet)
    check(unet, plain)
    in_turn(unet, plain, change)
    assert served(unet).num_split == 1
    assert "may look at several rows" in next(iter(served(unet).alone))


def test_rows_with_adapters_of_their_own_run_alone() -> None:
    unet = tiny.unet()
    add_adapter(unet)
    unet = spread(unet, ["cpu", "cpu"])
    both = call(unet)
    with strop.lora_rows(unet, ["first", None]):
        rows = call(unet)
    torch.testing.assert_close(rows[:1], both[:1], rtol=0, atol=1e-5)
    assert (rows[1] - both[1]).abs().max() > 1e-3
    assert "strop.lora_rows" in next(iter(served(unet).alone))
    assert torch.equal(call(unet), both)


@pytest.mark.parametrize("devices", PLACES)
def test_restore_gives_the_copies_back(devices: list[str]) -> None:
    unet = spread(tiny.unet(), devices)
    before = {name: weight.clone() for name, weight in unet.state_dict().items()}
    call(unet)
    twin = served(unet).twins[0].twin
    assert twin.size_bytes >= sum(weight.nbytes for weight in before.values())
    kept = [weakref.ref(weight) for weight in twin.module.parameters()]
    kept += [weakref.ref(twin.module)]  # type: ignore[list-item]
    del twin
    strop.restore(unet)
    assert not any(found() for found in kept)
    assert "forward" not in vars(unet)
    assert all(torch.equal(before[name], weight) for name, weight in unet.state_dict().items())


def test_weights_that_are_moved_away_are_not_split() -> None:
    unet = spread(tiny.unet(), ["cpu", "cpu"])
    unet.to("meta")
    with torch.no_grad():
        for place, said in (("meta", "sample lies on meta"), ("cpu", "its weights do not all lie")):
            assert said in served(unet)._not_able(torch.empty(2, 4, 8, 8, device=place), {})


def test_a_module_that_cannot_be_copied_runs_alone() -> None:
    unet = tiny.unet()
    plain = copy.deepcopy(unet)
    unet.guard = threading.Lock()
    unet = spread(unet, ["cpu", "cpu"])
    for _ in range(2):
        check(unet, plain)
    assert [*served(unet).alone.values()] == [2]
    assert not served(unet).twins
    del unet.guard
    for _ in range(2):  # the first one finds that the module is another
        check(unet, plain)
    assert served(unet).num_split


def test_errors_of_a_call_are_those_of_the_model() -> None:
    unet = spread(tiny.unet(), ["cpu", "cpu"])
    sample, timestep, prompt = tiny.unet_args(*SIZE)
    with pytest.raises(TypeError, match="encoder_hidden_states"), torch.no_grad():
        unet(sample, timestep)
    with pytest.raises((RuntimeError, ShapeError)), torch.no_grad():
        unet(sample, timestep, prompt[..., :-1])
    check(unet, tiny.unet())


@pytest.fixture
def writing() -> Iterator[list[threading.Thread]]:
    made: list[threading.Thread] = []
    yield made
    for thread in made:
        thread.join()


def test_a_change_takes_no_lock_of_a_copy() -> None:
    """The dispatcher takes it behind its own, and would wait for good for one that came the other
    way."""
    unet = spread(tiny.unet(), ["cpu", "cpu"])
    call(unet, SIZE)
    own, (twin,) = served(unet), served(unet).twins
    with strop.changing(unet):
        assert own.is_busy
        assert not twin.dispatcher.is_busy
    assert "cpu" in str(strop.explain(unet))


def test_threads_see_a_change_as_a_whole(writing: list[threading.Thread]) -> None:
    """Under ``strop.changing`` no call has one half from before it and the other from after it."""
    unet = spread(tiny.unet(), ["cpu", "cpu"])
    sample, _, prompt = tiny.unet_args(*SIZE)
    row = (sample[:1].expand(2, -1, -1, -1).clone(), 1, prompt[:1].expand(2, -1, -1).clone())
    with torch.no_grad():
        unet(*row)
    is_over = threading.Event()

    def write() -> None:
        while not is_over.is_set():
            with strop.changing(unet), torch.no_grad():
                for weight in (unet.conv_in.weight, unet.conv_out.weight):
                    weight.neg_()

    writing.append(threading.Thread(target=write))
    writing[0].start()
    try:
        for _ in range(20):
            with torch.no_grad():
                one, other = unet(*row).sample
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    finally:
        is_over.set()


def test_logs_name_the_device(caplog: Any) -> None:
    with caplog.at_level(logging.INFO, logger="strop"):
        unet = spread(tiny.unet(), ["cpu", "cpu", "cpu"], mode="batch")
        call(unet, (5, 8, 8, 7))
    assert len(served(unet).twins) == 2
    assert any("on cpu: " in record.message for record in caplog.records)
