"""The search for offloading hooks gives diffusers' own answers."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from diffusers.hooks import apply_group_offloading, group_offloading
from torch import nn

import strop
from strop.diffusion.offloading import PLACE, SEARCH, Search, search_quickly
from tests.e2e import tiny


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Any:
    """diffusers' function as published, in its place: earlier tests may have put ours there."""
    spec = importlib.util.find_spec(PLACE)
    assert spec is not None
    assert spec.loader is not None
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    monkeypatch.setattr(group_offloading, SEARCH, getattr(fresh, SEARCH))
    return getattr(fresh, SEARCH)


def offloaded(part: nn.Module) -> None:
    apply_group_offloading(part, onload_device=torch.device("cpu"), offload_type="leaf_level")


def network() -> nn.Sequential:
    shared = nn.Linear(2, 2)
    return nn.Sequential(nn.Sequential(nn.Linear(2, 2), shared), shared, nn.Linear(2, 2))


CASES = {"none": (), "last": ("2",), "shared": ("1",), "two": ("2", "0.1"), "inner": ("0",),
         "all": ("",)}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_same_hook(name: str, own: Any) -> None:
    net = network()
    for path in CASES[name]:
        offloaded(net.get_submodule(path))
    assert search_quickly()
    quick = getattr(group_offloading, SEARCH)
    assert isinstance(quick, Search)
    for part in net.modules():
        assert quick(part) is own(part)
    assert (quick(net) is None) == (name == "none")


def test_it_sleeps_until_a_registry_is_made(own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One made before the search is put in its place, too; registries of other tests are gone."""

    class Fresh(group_offloading.HookRegistry):  # type: ignore[misc]
        pass

    monkeypatch.setattr(group_offloading, "HookRegistry", Fresh)
    assert search_quickly()
    search = getattr(group_offloading, SEARCH)
    assert not search.is_awake
    net = network()
    object.__setattr__(net[2], "_diffusers_hook", Fresh(net[2]))
    assert search.is_awake
    late = Search(search.kind)
    late.sleep_until_made(Fresh)
    assert late.is_awake
    hook = net[2]._diffusers_hook.hooks[search.kind] = object()
    assert search(net) is late(net) is hook
    net[2].__dict__.pop("_diffusers_hook")


def test_a_pipeline_is_where_it_was(own: Any) -> None:
    pipe = tiny.pipeline()
    assert not isinstance(getattr(group_offloading, SEARCH), Search)
    before = pipe._execution_device, pipe.device
    strop.optimize(pipe, options=tiny.options())
    assert isinstance(getattr(group_offloading, SEARCH), Search)
    assert (pipe._execution_device, pipe.device) == before
    offloaded(pipe.vae)
    hook = own(pipe.vae)
    assert group_offloading._get_group_onload_device(pipe.vae) == hook.config.onload_device


def test_another_search_stays(own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def newer(module: nn.Module) -> Any:
        return own(module) or vars(module).get("_other_hook")

    monkeypatch.setattr(group_offloading, SEARCH, newer)
    assert not search_quickly()
    assert getattr(group_offloading, SEARCH) is newer
