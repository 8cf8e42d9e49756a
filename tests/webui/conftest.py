"""Fixtures: the extension, loaded as the web UIs do, beside a stand-in for each of them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.webui import stand_in

EXTENSION = Path(__file__).parents[2] / "integrations" / "webui"


def loaded(name: str) -> Any:
    """Load a script of the extension by its path, with the extension's folder in sys.path."""
    path = EXTENSION / "scripts" / "strop_optimize.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(EXTENSION))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(EXTENSION))
    return module


def _started(ui: stand_in.WebUi, cache_folder: Path) -> Iterator[stand_in.WebUi]:
    with pytest.MonkeyPatch.context() as patch:
        for name, module in ui.modules.items():
            patch.setitem(sys.modules, name, module)
        if not ui.is_forge:
            for name, kind in stand_in.KINDS.items():
                forward = getattr(ui.networks, f"network_{name}_forward")
                patch.setattr(kind, "forward", forward)
            asks = stand_in.asks_first(stand_in.A1111UNet.forward, ui.sd_unet)
            patch.setattr(stand_in.A1111UNet, "forward", asks)
        patch.setenv("STROP_CACHE_DIR", str(cache_folder))
        ui.extension = loaded("strop_optimize")
        ui.script = ui.extension.StropScript()
        ui.load(0)
        yield ui
        for name in [name for name in sys.modules if name.split(".")[0] == "strop_webui"]:
            del sys.modules[name]


@pytest.fixture
def a1111(cache_folder: Path) -> Iterator[stand_in.WebUi]:
    yield from _started(stand_in.WebUi(is_forge=False), cache_folder)


@pytest.fixture
def forge(cache_folder: Path) -> Iterator[stand_in.WebUi]:
    yield from _started(stand_in.WebUi(is_forge=True), cache_folder)


@pytest.fixture(params=[False, True], ids=["a1111", "forge"])
def ui(request: pytest.FixtureRequest, cache_folder: Path) -> Iterator[stand_in.WebUi]:
    """Each of the two web UIs."""
    yield from _started(stand_in.WebUi(is_forge=request.param), cache_folder)
