"""Plans on disk: a hit traces and compiles nothing, a damaged one is dropped and built again."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.configuration_utils import FrozenDict
from torch import Tensor, nn

import strop
from strop.bench import models
from strop.dispatch import stored_variants, variants
from strop.dispatch.module_state import ModuleState
from strop.dispatch.signature import Shapes
from strop.options import Options
from strop.runtime.build import loader as kernels
from strop.runtime.build.cache import DiskCache
from strop.runtime.build.native import NativeKernels
from tests.e2e import tiny

X = torch.randn(3, 8, generator=torch.manual_seed(0))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin = nn.Linear(8, 8)

    def forward(self, x: Tensor, factor: float = 1.0) -> dict[str, Tensor]:
        return {"a": self.lin(x).sigmoid() * factor, "b": x}


@pytest.fixture(autouse=True)
def fresh_process():
    """No kernel of an earlier test is in memory."""
    kernels.kernel_loader.cache_clear()
    yield
    kernels.kernel_loader.cache_clear()


def run(folder: Path, *args: Any) -> Any:
    module = strop.optimize(Net().eval(), options=Options(cache_dir=str(folder), strict=True))
    with torch.no_grad():
        result, expected = module(X, *args), module.forward.eager(X, *args)
    # fp32 results of one small sum in another order
    torch.testing.assert_close(result["a"], expected["a"], rtol=1e-5, atol=1e-6)
    assert torch.equal(result["b"], expected["b"])
    return module.forward


def forbidden(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a disk hit must not trace or compile")


def test_a_hit_neither_traces_nor_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert not run(tmp_path).variants.all[0].from_disk
    kernels.kernel_loader.cache_clear()
    monkeypatch.setattr(variants, "capture", forbidden)
    monkeypatch.setattr(NativeKernels, "_compile", forbidden)
    dispatcher = run(tmp_path)
    assert dispatcher.variants.num_captures == 0
    assert dispatcher.variants.all[0].from_disk


@pytest.mark.parametrize("change", ["argument", "options", "weights"])
def test_what_belongs_to_the_key(tmp_path: Path, change: str):
    run(tmp_path)
    if change == "argument":
        assert run(tmp_path, 2.0).variants.num_captures == 1
    elif change == "options":
        module = strop.optimize(
            Net().eval(), options=Options(cache_dir=str(tmp_path), disable=("dot_merge",))
        )
        with torch.no_grad():
            module(X)
        assert module.forward.variants.num_captures == 1
    else:  # values are no part of it
        module = Net().eval()
        module.lin.weight.data.mul_(2)
        strop.optimize(module, options=Options(cache_dir=str(tmp_path)))
        with torch.no_grad():
            module(X)
        assert module.forward.variants.num_captures == 0


def warnings_of(caplog: Any) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name.startswith("strop")]


def entry_of(folder: Path) -> tuple[DiskCache, str, dict[str, Any]]:
    store = DiskCache(folder)
    (path,) = (folder / "plan").iterdir()
    data = store.read("plan", path.name)
    assert data is not None
    return store, path.name, json.loads(data)


def damage_nothing_left(entry: dict[str, Any]) -> Any:
    return {}


def damage_a_list(entry: dict[str, Any]) -> Any:
    return []


def damage_program(entry: dict[str, Any]) -> Any:
    return entry | {"program": entry["program"][:100]}


def damage_specs(entry: dict[str, Any]) -> Any:
    return entry | {"specs": [[["b", "8"], "float33", "cpu"]]}


def damage_device(entry: dict[str, Any]) -> Any:
    return entry | {"specs": [[["b", "8"], "float32", "toaster"]]}


def damage_out_spec(entry: dict[str, Any]) -> Any:
    return entry | {"out_spec": "[1]"}


@pytest.mark.parametrize(
    "damage",
    [
        damage_nothing_left,
        damage_a_list,
        damage_program,
        damage_specs,
        damage_device,
        damage_out_spec,
    ],
    ids=lambda f: f.__name__,
)
def test_a_damaged_plan_is_built_again(tmp_path: Path, damage: Any, caplog: Any):
    run(tmp_path)
    store, key, entry = entry_of(tmp_path)
    store.write("plan", key, json.dumps(damage(entry)).encode())
    with caplog.at_level(logging.WARNING, "strop"):
        assert run(tmp_path).variants.num_captures == 1
    (line,) = warnings_of(caplog)
    assert "dropped" in line
    caplog.clear()
    assert run(tmp_path).variants.num_captures == 0
    assert not warnings_of(caplog)


def test_flipped_bytes_are_found(tmp_path: Path, caplog: Any):
    run(tmp_path)
    (path,) = (tmp_path / "plan").iterdir()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING, "strop"):
        assert run(tmp_path).variants.num_captures == 1
    (line,) = warnings_of(caplog)
    assert "damaged" in line


@pytest.mark.parametrize("device", tiny.DEVICES)
def test_ragged_sizes_run_in_eager_until_their_graph_is_built(device: str, monkeypatch: Any):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    module = strop.optimize(tiny.unet().to(device), options=tiny.options())
    dispatcher = module.forward
    even, ragged, other = (
        [a.to(device) for a in tiny.unet_args(*size)]
        for size in [(2, 8, 8, 7), (2, 7, 9, 5), (1, 11, 6, 3)]
    )
    with torch.no_grad():
        module(*even)
        expected = dispatcher.eager(*ragged).sample
        assert torch.equal(module(*ragged).sample, expected)
        assert dispatcher.counters.eager_calls == 1
        (reason,) = dispatcher.counters.fallbacks
        assert "background" in reason
        dispatcher.variants.wait()
        actual = module(*ragged).sample
        assert dispatcher.counters.eager_calls == 1
        # fp32 sums in another order
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
        module(*other)
        dispatcher.variants.wait()
        for _ in range(3):  # CUDA: without a graph, captured, replayed
            torch.testing.assert_close(
                module(*other).sample, dispatcher.eager(*other).sample, rtol=1e-4, atol=1e-5
            )
    assert sum(v.is_ragged for v in dispatcher.variants.all) == 1
    assert dispatcher.counters.eager_calls == 1


def test_the_order_in_which_diffusers_lists_defaults_is_no_part_of_the_key(tmp_path: Path) -> None:
    """It differs from process to process: every start would trace anew."""
    keys = []
    for order in (1, -1):
        unet = models.make_unet(models.TINY_UNET, torch.device("cpu"), torch.float32)
        for part in unet.modules():
            config = vars(part).get("_internal_dict")
            if config is not None:
                listed = sorted(config["_use_default_values"])[::order]
                part._internal_dict = FrozenDict({**config, "_use_default_values": listed})
        shapes, options = Shapes((), {}), Options(cache_dir=str(tmp_path))
        keys.append(stored_variants.key_of(unet, ModuleState(unet), (), shapes, options))
    assert keys[0] == keys[1]


def test_where_a_model_was_read_from_is_no_part_of_the_key(tmp_path: Path) -> None:
    class Named(nn.Module):
        """A user's own, whose forward may go by any of its names."""

        name_or_path = "a"

        def forward(self, x: Tensor) -> Tensor:
            return x + 1 if self.name_or_path == "a" else x - 1

    shapes, options = Shapes((), {}), Options(cache_dir=str(tmp_path))
    keys = []
    for place in "ab":
        text_encoder, own = tiny.clip(), Named()
        text_encoder.name_or_path = text_encoder.config._name_or_path = own.name_or_path = place
        keys.append(
            [
                stored_variants.key_of(module, ModuleState(module), (), shapes, options)
                for module in (text_encoder, own)
            ]
        )
    assert keys[0][0] == keys[1][0]
    assert keys[0][1] != keys[1][1]


@pytest.mark.parametrize("orders", [(False, True), (True, False)])
def test_results_lie_as_eagers_do_for_the_order_of_weights(
    orders: tuple[bool, bool], tmp_path: Path
) -> None:
    """Channels-last weights of convolutions give channels-last results on a CPU, also where a plan
    of the other order is on disk, and once a user has changed the order."""
    x = torch.randn(2, 4, 6, 5)
    for is_last in orders:
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Conv2d(4, 8, 3), nn.SiLU(), nn.Conv2d(8, 4, 3)).eval()
        if is_last:
            plain.to(memory_format=torch.channels_last)
        fast = strop.optimize(copy.deepcopy(plain), options=Options(cache_dir=str(tmp_path)))
        for _ in range(2):
            with torch.no_grad():
                found, wanted = fast(x), plain(x)
            assert found.stride() == wanted.stride()
            torch.testing.assert_close(found, wanted)
            for model in (fast, plain):
                model.to(memory_format=torch.channels_last)
        assert fast.forward.counters.eager_calls == 0
