"""What others put around a forward behind ``optimize`` is seen, named and undone."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload_with_hook, disk_offload
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from diffusers import FirstBlockCacheConfig, FluxTransformer2DModel
from diffusers.hooks import apply_group_offloading
from torch import Tensor, nn

import strop
from strop.dispatch.dispatcher import Dispatcher
from tests.e2e import tiny

CLOSE = {"rtol": 1e-5, "atol": 1e-5}  # fp32 sums of eight in another order
X = torch.randn(3, 8, generator=torch.manual_seed(0))


class Net(nn.Module):
    """Three linears that become one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.q, self.k, self.v = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.q(x) * self.k(x) + self.v(x)


def optimized() -> Any:
    net = strop.optimize(Net().eval().requires_grad_(False), options=tiny.options())
    check(net)
    return net


def check(net: nn.Module) -> None:
    torch.testing.assert_close(net(X), Net()(X).detach(), **CLOSE)


# what a user does behind optimize, how it ends, and the reason that explain gives
AROUND: dict[str, tuple[Callable[[Any, str], Any], Callable[[Any], Any], str]] = {
    "offloading to disk": (
        lambda net, path: disk_offload(net, path, "cpu"),
        lambda net: remove_hook_from_module(net, recurse=True),
        "offloading by accelerate has weights on disk",
    ),
    "group offloading to disk": (
        lambda net, path: apply_group_offloading(
            net, torch.device("cpu"), offload_type="leaf_level", offload_to_disk_path=path
        ),
        None,
        "group offloading is on, with groups on disk",
    ),
}


@pytest.mark.parametrize("name", AROUND)
def test_a_feature_around_it_is_named_and_undone(name: str, tmp_path: Path) -> None:
    begin, end, reason = AROUND[name]
    net = optimized()
    dispatcher = net.forward
    begin(net, str(tmp_path))
    check(net)
    assert strop.api.dispatchers_of(net) == {"Net": dispatcher}, "explain still shows it"
    (found,) = dispatcher.counters.fallbacks
    assert found.startswith(reason)
    assert dispatcher.counters.eager_calls == 1
    if end is not None:  # it is compiled again
        end(net)
        check(net)
        assert net.forward is dispatcher
        assert dispatcher.counters.eager_calls == 1
        begin(net, str(tmp_path))
    strop.restore(net)
    assert not strop.api.dispatchers_of(net)
    if end is not None:
        end(net)
        assert getattr(net.forward, "__func__", None) is Net.forward
        check(net)
    assert not [value for value in vars(net).values() if isinstance(value, Dispatcher)]


def test_offloading_before_optimize_is_compiled() -> None:
    net = Net().eval().requires_grad_(False)
    cpu_offload_with_hook(net, "cpu")
    strop.optimize(net, options=tiny.options(strict=True))
    check(net)
    assert not strop.api.dispatchers_of(net)["Net"].counters.eager_calls
    strop.restore(net)
    remove_hook_from_module(net)
    assert getattr(net.forward, "__func__", None) is Net.forward
    check(net)


def test_a_hook_that_moves_nothing_stays_around_compiled_code() -> None:
    class Doubles(ModelHook):
        def post_forward(self, module: nn.Module, output: Tensor) -> Tensor:
            return output * 2

    net = optimized()
    dispatcher = net.forward
    add_hook_to_module(net, Doubles())
    torch.testing.assert_close(net(X), 2 * Net()(X).detach(), **CLOSE)
    assert not dispatcher.counters.eager_calls
    strop.restore(net)
    torch.testing.assert_close(net(X), 2 * Net()(X).detach(), **CLOSE)
    remove_hook_from_module(net)
    check(net)


def test_whoever_keeps_the_dispatcher_gets_eager_after_restore() -> None:
    net = optimized()
    kept = net.forward
    net.forward = lambda x: kept(x) * 3
    assert strop.api.dispatchers_of(net) == {"Net": kept}
    calls = kept.counters.calls
    torch.testing.assert_close(net(X), 3 * Net()(X).detach(), **CLOSE)
    strop.restore(net)
    torch.testing.assert_close(net(X), 3 * Net()(X).detach(), rtol=0, atol=0)
    assert kept.counters.calls <= calls + 1


def test_a_cache_of_diffusers_is_named_and_undone() -> None:
    torch.manual_seed(0)
    model: Any = FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=2,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    ).eval()
    args = {
        "hidden_states": torch.randn(1, 4, 4),
        "encoder_hidden_states": torch.randn(1, 3, 32),
        "pooled_projections": torch.randn(1, 32),
        "timestep": torch.ones(1),
        "img_ids": torch.zeros(4, 3),
        "txt_ids": torch.zeros(3, 3),
    }
    with torch.no_grad():
        expected = model(**args).sample
        strop.optimize(model, options=tiny.options())
        model.enable_cache(FirstBlockCacheConfig(threshold=0.0))
        with model.cache_context("cond"):
            found = model(**args).sample
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)  # fp32, eager's code
        (reason,) = strop.api.dispatchers_of(model)["FluxTransformer2DModel"].counters.fallbacks
        assert ": First Block Cache is on: disable_cache()" in reason
        model.disable_cache()
        torch.testing.assert_close(model(**args).sample, expected, rtol=0, atol=1e-4)  # fp32 sums
    assert not strop.api.dispatchers_of(model)["FluxTransformer2DModel"].counters.eager_calls


def test_a_partial_that_is_bound_as_a_method() -> None:
    """As torchao leaves ``extra_repr`` of layers that it has changed."""
    net = Net().eval().requires_grad_(False)
    net.q.extra_repr = types.MethodType(functools.partial(lambda tag, part: tag, "int8"), net.q)
    net.other = types.MethodType(functools.partial(torch.mul, other=2), X)
    check(strop.optimize(net, options=tiny.options(strict=True)))


# weights in one piece


def _saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def test_files_hold_what_eager_writes() -> None:
    net, plain = optimized(), Net().eval()
    addresses = sorted(w.data_ptr() for w in net.parameters())
    assert addresses[2] - addresses[0] == 2 * 8 * 8 * 4, "they lie in one piece"
    assert len(_saved(net.q.state_dict())) == len(_saved(plain.q.state_dict()))
    assert len(_saved(net.state_dict())) == len(_saved(plain.state_dict()))
    assert len({w.untyped_storage().data_ptr() for w in net.parameters()}) == 3
    assert all(w.untyped_storage().nbytes() == w.nbytes for w in net.parameters())
    file = io.BytesIO(_saved(net.state_dict()))
    loaded = torch.load(file)
    assert all(torch.equal(loaded[name], w) for name, w in plain.state_dict().items())


def test_a_piece_outlives_the_model() -> None:
    net = optimized()
    weight, expected = net.k.weight.detach(), net.k.weight.clone()
    del net
    junk = [torch.randn(8, 8) for _ in range(64)]
    assert torch.equal(weight, expected), len(junk)


def test_merged_weights_stay_so_when_settings_change() -> None:
    net = optimized()
    before = [w.data_ptr() for w in net.parameters()]
    net.setting = 2.0
    check(net)
    assert net.forward.counters.rebinds == 1
    assert [w.data_ptr() for w in net.parameters()] == before


@pytest.mark.parametrize(
    "copied",
    [
        lambda value: pickle.loads(pickle.dumps(value)),
        lambda value: torch.load(io.BytesIO(_saved(value)), weights_only=False),
        copy.deepcopy,
    ],
    ids=["pickle", "torch.save", "deepcopy"],
)
def test_copies_of_a_pipeline_are_plain(copied: Callable[[Any], Any]) -> None:
    pipe = tiny.pipeline()
    prompt = torch.randn(1, 7, tiny.PROMPT_DIM, generator=torch.manual_seed(0))
    arguments = {
        "prompt_embeds": prompt,
        "negative_prompt_embeds": prompt * 0,
        "num_inference_steps": 2,
        "height": 16,
        "width": 16,
        "output_type": "np",
    }

    def picture(of: Any) -> Tensor:
        return torch.from_numpy(of(**arguments, generator=torch.manual_seed(0)).images)

    expected = picture(pipe)
    strop.optimize(pipe, options=tiny.options())
    torch.testing.assert_close(picture(pipe), expected, rtol=0, atol=1e-4)  # fp32 sums
    copy_of_it = copied(pipe)
    assert not strop.api.dispatchers_of(copy_of_it)
    torch.testing.assert_close(picture(copy_of_it), expected, rtol=0, atol=0)
    torch.testing.assert_close(picture(pipe), expected, rtol=0, atol=1e-4)
    assert strop.api.dispatchers_of(pipe)["unet"].counters.eager_calls == 0
