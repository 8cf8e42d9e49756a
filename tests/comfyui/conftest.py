"""Fixtures: the node pack, imported as ComfyUI does, with a stand-in for ComfyUI beside it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.comfyui import stand_in

PACK = Path(__file__).parents[2] / "integrations" / "comfyui"
NAME = "strop_pack"


@pytest.fixture(scope="session")
def pack(cache_folder: Path) -> Iterator[ModuleType]:
    """The node pack beside the stand-in, with a kernel cache of the tests' own."""
    spec = importlib.util.spec_from_file_location(
        NAME, PACK / "__init__.py", submodule_search_locations=[str(PACK)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        for name, made in stand_in.modules().items():
            patch.setitem(sys.modules, name, made)
        patch.setitem(sys.modules, NAME, module)
        patch.setenv("STROP_CACHE_DIR", str(cache_folder))
        spec.loader.exec_module(module)
        yield module
        for name in [name for name in sys.modules if name.startswith(f"{NAME}.")]:
            del sys.modules[name]
