"""What diffusers asks of a pipeline's modules before a picture has diffusers' own answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.hooks import apply_group_offloading, apply_layerwise_casting, group_offloading
from diffusers.models import modeling_utils
from diffusers.pipelines.stable_diffusion_xl import pipeline_stable_diffusion_xl
from diffusers.utils import torch_utils
from torch import nn

from strop.diffusion.changes import Changes
from strop.diffusion.offloading import (
    DEVICE,
    DTYPE,
    QUICK,
    SEARCH,
    Quick,
    Registries,
    Search,
    search_quickly,
)
from tests.e2e import tiny

PLACES = {SEARCH: group_offloading, DEVICE: torch_utils, DTYPE: modeling_utils}
Own = dict[tuple[str, str], FunctionType]


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Own:
    """diffusers' functions as published, in their places, as in a process in which no pipeline is
    optimised. Every module belongs to one that will be."""
    found: Own = {}
    for (where, name), place in PLACES.items():
        there = getattr(place, name)
        found[where, name] = there.own if isinstance(there, Quick) else there
        monkeypatch.setattr(place, name, found[where, name])
    monkeypatch.setattr(pipeline_stable_diffusion_xl, DEVICE[1], found[DEVICE])
    monkeypatch.setattr("strop.diffusion.offloading.belongs", lambda module: True)
    return found


@pytest.fixture
def changes(own: Own) -> Iterator[Changes]:
    made = Changes()
    yield made
    made.undo()


def quick(which: tuple[str, str]) -> Any:
    return getattr(PLACES[which], which[1])


def offloaded(part: nn.Module) -> None:
    apply_group_offloading(part, onload_device=torch.device("cpu"), offload_type="leaf_level")


def network() -> nn.Sequential:
    shared = nn.Linear(2, 2)
    return nn.Sequential(nn.Sequential(nn.Linear(2, 2), shared), shared, nn.Linear(2, 2))


CASES = {
    "none": (),
    "last": ("2",),
    "shared": ("1",),
    "two": ("2", "0.1"),
    "inner": ("0",),
    "all": ("",),
}


@pytest.mark.parametrize("name", CASES)
def test_the_same_hook(name: str, own: Own, changes: Changes) -> None:
    net = network()
    for path in CASES[name]:
        offloaded(net.get_submodule(path))
    assert len(search_quickly(changes)) == len(QUICK)
    assert isinstance(quick(SEARCH), Search)
    for part in net.modules():
        assert quick(SEARCH)(part) is own[SEARCH](part)
    assert (quick(SEARCH)(net) is None) == (name == "none")


def _cast(net: Any) -> None:
    kinds = {"storage_dtype": torch.float8_e4m3fn, "compute_dtype": torch.bfloat16}
    apply_layerwise_casting(net[2], **kinds)


def _hooked(net: nn.Module) -> None:
    """As accelerate leaves a module whose weights are elsewhere."""
    part: Any = net.get_submodule("0.1")
    part._hf_hook = SimpleNamespace(execution_device="meta")


def _keeps_one(net: Any) -> None:
    net.half()
    net[0][0].float()
    net._keep_in_fp32_modules = ["0.0"]


def _with_a_place(net: Any) -> None:
    net.device = "meta"


def _without_fractions(net: Any) -> None:
    for part in net.modules():
        for name in list(part._parameters):
            part._parameters[name] = nn.Parameter(torch.zeros(2).int(), requires_grad=False)
    net.register_buffer("numbers", torch.zeros(2).half())


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "nothing": lambda net: None,
    "half": lambda net: net.half(),
    "offloaded": offloaded,
    "cast": _cast,
    "hooked": _hooked,
    "keeps one": _keeps_one,
    "with a place": _with_a_place,
    "without fractions": _without_fractions,
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_same_place_and_type(name: str, own: Own, changes: Changes) -> None:
    """What it was before a registry is made, and behind it."""
    assert len(search_quickly(changes)) == len(QUICK)
    net = network()
    for change in (CHANGES["nothing"], CHANGES[name]):
        change(net)
        for which in (DEVICE, DTYPE):
            assert isinstance(quick(which), Quick)
            assert quick(which)(net) == own[which](net)
    expected = {
        "cast": torch.bfloat16,
        "half": torch.half,
        "keeps one": torch.half,
        "without fractions": torch.half,
    }
    assert quick(DTYPE)(net) == expected.get(name, torch.float32)
    assert quick(DEVICE)(net).type == ("meta" if name in ("hooked", "with a place") else "cpu")


def test_nothing_is_walked_through_for_what_is_known(
    changes: Changes, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = Registries("")
    monkeypatch.setattr("strop.diffusion.offloading.Registries", lambda kind: fresh)
    search_quickly(changes)
    fresh.may_exist = False

    class Net(nn.Linear):
        device = torch.device("cpu")

        def named_modules(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError

    net = Net(2, 2).half()
    for which, answer in ((SEARCH, None), (DEVICE, net.device), (DTYPE, torch.half)):
        PLACES[which].__dict__[which[1]].own = None
        monkeypatch.setattr(nn.Module, "parameters", lambda self: iter([self.weight]))
        assert quick(which)(net) == answer


def test_it_is_wherever_diffusers_has_imported_it(own: Own, changes: Changes) -> None:
    assert vars(pipeline_stable_diffusion_xl)[DEVICE[1]] is own[DEVICE]
    search_quickly(changes)
    assert vars(pipeline_stable_diffusion_xl)[DEVICE[1]] is quick(DEVICE)
    assert quick(DEVICE).own is own[DEVICE]


def test_it_sleeps_until_a_registry_is_made(
    own: Own, changes: Changes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One made before the search is put in its place, too; registries of other tests are gone."""

    class Fresh(group_offloading.HookRegistry):  # type: ignore[misc]
        pass

    monkeypatch.setattr(group_offloading, "HookRegistry", Fresh)
    search_quickly(changes)
    search = quick(SEARCH)
    assert not search.registries.may_exist
    net = network()
    object.__setattr__(net[2], "_diffusers_hook", Fresh(net[2]))
    assert search.registries.may_exist
    late = Registries(search.registries.kind)
    late.watch(Fresh, changes)
    assert late.may_exist
    hook = net[2]._diffusers_hook.hooks[late.kind] = object()
    assert search(net) is Search(own[SEARCH], late).answer(net) is hook
    net[2].__dict__.pop("_diffusers_hook")


def test_a_pipeline_is_where_it_was(own: Own, changes: Changes) -> None:
    pipe = tiny.pipeline()
    assert not isinstance(quick(SEARCH), Search)
    before = pipe._execution_device, pipe.device, pipe.unet.dtype
    search_quickly(changes)
    assert isinstance(quick(SEARCH), Search)
    assert (pipe._execution_device, pipe.device, pipe.unet.dtype) == before
    offloaded(pipe.vae)
    hook: Any = own[SEARCH](pipe.vae)
    assert group_offloading._get_group_onload_device(pipe.vae) == hook.config.onload_device


@pytest.mark.parametrize("which", QUICK)
def test_another_function_stays(
    which: tuple[str, str], own: Own, changes: Changes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def newer(module: nn.Module) -> Any:
        return own[which](module) or vars(module).get("_other_hook")

    monkeypatch.setattr(PLACES[which], which[1], newer)
    assert search_quickly(changes) == [name for where, name in QUICK if (where, name) != which]
    assert quick(which) is newer
