"""The node for InvokeAI, beside a stand-in for its own: the same latents, or the reason."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("pydantic")
from tests.invokeai import stand_in

PACK = Path(__file__).parents[2] / "integrations" / "invokeai" / "strop_nodes"


@pytest.fixture(scope="module")
def kind(cache_folder: Path) -> Iterator[Any]:
    """The node's class, loaded as InvokeAI loads a pack."""
    with pytest.MonkeyPatch.context() as patch:
        for name, module in stand_in.modules().items():
            patch.setitem(sys.modules, name, module)
        patch.setenv("STROP_CACHE_DIR", str(cache_folder))
        spec = importlib.util.spec_from_file_location("strop_nodes", PACK / "__init__.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, "strop_nodes", module)
        spec.loader.exec_module(module)
        yield stand_in.NODES["strop_denoise_latents"]
        for name in [name for name in sys.modules if name.startswith("strop_nodes.")]:
            del sys.modules[name]


@pytest.fixture(scope="module")
def unet() -> Any:
    return stand_in.small_unet()


def _inputs(height: int = 8, width: int = 8, batch: int = 1, **more: Any) -> dict[str, Any]:
    made = torch.Generator().manual_seed(height * width + batch)
    noise = torch.randn(batch, 4, height, width, generator=made)
    return {"noise": noise, "text": torch.randn(1, 5, stand_in.TEXT, generator=made), **more}


def _both(kind: Any, unet: Any, **inputs: Any) -> str:
    """Draw with both nodes, compare, and return the line of ours."""
    expected, ours = stand_in.Context(unet), stand_in.Context(unet)
    stand_in.DenoiseLatents(**inputs).invoke(expected)
    kind(**inputs).invoke(ours)
    assert expected.saved is not None
    assert ours.saved is not None
    torch.testing.assert_close(ours.saved, expected.saved, rtol=1e-4, atol=1e-4)
    assert "forward" not in unet.__dict__
    (line,) = ours.lines
    return line


ALL = "Strop ran 3 of 3 calls compiled"


def _lora(unet: Any, seed: int, scale: float) -> list[Any]:
    made = torch.Generator().manual_seed(seed)
    layers = [layer for layer in unet.modules() if isinstance(layer, stand_in.OwnLinear)][2:6]
    return [(one, torch.randn(one.weight.shape, generator=made), scale / 20) for one in layers]


def test_sizes_batches_lora_and_controlnets_are_compiled(kind: Any, unet: Any) -> None:
    """In turns, so that nothing of one picture may be in the next one."""
    for height, width, batch in ((8, 8, 1), (8, 16, 2), (16, 8, 1)):
        assert _both(kind, unet, **_inputs(height, width, batch)) == ALL
        for seed, scale in ((1, 1.0), (2, -0.5)):
            loras = _lora(unet, seed, scale)
            assert _both(kind, unet, **_inputs(height, width, batch, loras=loras)) == ALL
    assert unet._strop_compiled.module.forward.counters.eager_calls == 0
    assert len(unet._strop_compiled.module.forward.variants.all) == 1


def test_each_lora_draws_another_picture(kind: Any, unet: Any) -> None:
    drawn = []
    for loras in ([], _lora(unet, 1, 1.0), _lora(unet, 1, -0.5), _lora(unet, 2, 1.0), []):
        context = stand_in.Context(unet)
        kind(**_inputs(loras=loras)).invoke(context)
        drawn.append(context.saved)
    assert torch.equal(drawn[0], drawn[-1])
    for one, other in itertools.combinations(drawn[:-1], 2):
        assert not torch.allclose(one, other, rtol=0.01)


def test_residuals_of_a_controlnet(kind: Any, unet: Any) -> None:
    shapes = ((16, 8), (16, 8), (16, 4), (32, 4), (32, 4))  # the last one is of the middle
    parts = [torch.randn(1, wide, side, side) for wide, side in shapes]
    assert _both(kind, unet, **_inputs(residuals=parts)) == ALL
    assert _both(kind, unet, **_inputs()) == ALL


@pytest.mark.parametrize(
    ("more", "part"),
    [
        ({"hidiffusion": True}, "HiDiffusion"),
        ({"seamless": True}, "seamless tiling"),
        ({"attention": {"scale": 1.0}}, "an IP-Adapter or prompts of regions"),
    ],
)
def test_what_runs_as_before_is_named(
    more: dict[str, Any], part: str, kind: Any, unet: Any
) -> None:
    line = _both(kind, unet, **_inputs(**more))
    assert line.startswith("Strop ran 0 of 3 calls compiled; 3 ran as before: ")
    assert part in line
    assert _both(kind, unet, **_inputs()) == ALL


def test_layers_that_do_more_than_compute(kind: Any, unet: Any) -> None:
    layer = next(one for one in unet.modules() if isinstance(one, stand_in.OwnLinear))
    layer.patches.append((torch.randn(layer.weight.shape), 0.1))
    assert "LoRA is computed in each step" in _both(kind, unet, **_inputs())
    layer.patches.clear()
    layer.brings_weights = True
    assert "loaded in part" in _both(kind, unet, **_inputs())
    layer.brings_weights = False
    assert _both(kind, unet, **_inputs()) == ALL


def test_the_modular_loop_is_named(kind: Any, unet: Any) -> None:
    assert "USE_MODULAR_DENOISE" in _both(kind, unet, **_inputs(modular=True))


def test_a_cancelled_picture_leaves_nothing_behind(kind: Any, unet: Any) -> None:
    class Cancelled(Exception):
        pass

    def cancel(step: int) -> None:
        if step == 1:
            raise Cancelled

    context = stand_in.Context(unet, on_step=cancel)
    with pytest.raises(Cancelled):
        kind(**_inputs(loras=_lora(unet, 1, 1.0))).invoke(context)
    assert "forward" not in unet.__dict__
    assert context.lines == ["Strop ran 1 of 1 calls compiled"]
    assert _both(kind, unet, **_inputs()) == ALL


def test_a_unet_that_is_let_go_is_freed(kind: Any) -> None:
    own = stand_in.small_unet()
    kind(**_inputs(steps=1)).invoke(stand_in.Context(own))
    gone = weakref.ref(own)
    del own
    gc.collect()
    assert gone() is None
