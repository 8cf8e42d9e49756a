"""The node beside InvokeAI's own denoise node, from a checkout that INVOKEAI_DIR names.

Its packages must be there, too. Models, tensors and prompts come from a context of ours, as no
models are installed; node, loop, schedulers, layers and LoRA are InvokeAI's code.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("pydantic")
from tests.invokeai import stand_in

PACK = Path(__file__).parents[2] / "integrations" / "invokeai" / "strop_nodes"
CHECKOUT = os.environ.get("INVOKEAI_DIR", "")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHECKOUT, reason="INVOKEAI_DIR names no checkout of InvokeAI"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def invoke(cache_folder: Path) -> Iterator[SimpleNamespace]:
    """InvokeAI's modules, with our pack loaded as InvokeAI does that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(CHECKOUT)
        patch.setenv("STROP_CACHE_DIR", str(cache_folder))
        from invokeai import invocation_api as api
        from invokeai.app.invocations import denoise_latents
        from invokeai.backend.model_manager.load.model_cache.torch_module_autocast import (
            torch_module_autocast as layers,
        )
        from invokeai.backend.patches import model_patch_raw
        from invokeai.backend.patches.layers import lora_layer

        spec = importlib.util.spec_from_file_location("strop_nodes", PACK / "__init__.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, "strop_nodes", module)
        spec.loader.exec_module(module)
        yield SimpleNamespace(
            own=denoise_latents.DenoiseLatentsInvocation,
            ours=module.StropDenoiseInvocation,
            api=api,
            wrap=layers.apply_custom_layers_to_model,
            Patch=model_patch_raw.ModelPatchRaw,
            Lora=lora_layer.LoRALayer,
        )


class Context:
    """Hold what a node asks InvokeAI for."""

    def __init__(self, api: Any, unet: Any, noise: torch.Tensor, loras: dict[str, Any]) -> None:
        from diffusers import DDIMScheduler

        made = torch.Generator().manual_seed(1)
        text = torch.randn(1, 77, stand_in.TEXT, generator=made)
        prompt = SimpleNamespace(conditionings=[api.BasicConditioningInfo(embeds=text)])
        self.lines: list[str] = []
        self.steps = 0
        self.saved: torch.Tensor | None = None
        models = {"unet": unet, "scheduler": DDIMScheduler(), **loras}
        config = SimpleNamespace(
            base=api.BaseModelType.StableDiffusion1, variant=api.ModelVariantType.Normal
        )
        self.models = SimpleNamespace(
            load=lambda given: _Loaded(models[given.key]), get_config=lambda key: config
        )
        self.tensors = SimpleNamespace(load=lambda name: noise, save=self._save)
        self.conditioning = SimpleNamespace(load=lambda name: prompt)
        self.util = SimpleNamespace(sd_step_callback=self._step, is_canceled=lambda: False)
        self.logger = SimpleNamespace(info=self.lines.append)

    def _step(self, *given: Any) -> None:
        self.steps += 1

    def _save(self, tensor: torch.Tensor) -> str:
        self.saved = tensor.clone()
        return "latents"


class _Loaded:
    def __init__(self, model: Any) -> None:
        self.model = model

    def __enter__(self) -> Any:
        return self.model

    def __exit__(self, *error: Any) -> None: ...

    @contextlib.contextmanager
    def model_on_device(self) -> Iterator[Any]:
        yield None, self.model

    @contextlib.contextmanager
    def model_in_ram(self) -> Iterator[Any]:
        yield self.model


@pytest.fixture(scope="module")
def unet(invoke: SimpleNamespace) -> Any:
    made = stand_in.small_unet(wrapped=False)
    invoke.wrap(made)
    return made


def _lora(invoke: SimpleNamespace) -> Any:
    made = torch.Generator().manual_seed(3)
    shapes = {"to_q": (16, 16), "to_k": (16, stand_in.TEXT)}
    layers = {}
    for name, (wide, given) in shapes.items():
        up, down = torch.randn(wide, 2, generator=made), torch.randn(2, given, generator=made)
        key = f"lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn2_{name}"
        layers[key] = invoke.Lora(up=up, mid=None, down=down, alpha=2.0, bias=None)
    return invoke.Patch(layers=layers)


def _both(
    invoke: SimpleNamespace, unet: Any, size: tuple[int, int], **more: Any
) -> tuple[str, Any]:
    """Draw with both nodes, compare the latents, and return the line of ours, and them."""
    api, saved = invoke.api, []
    noise = torch.randn(1, 4, *size, generator=torch.Generator().manual_seed(size[0]))
    lora = more.pop("lora", None)
    key = {"hash": "x", "name": "x", "base": "sd-1", "type": "main"}
    loras = [api.LoRAField(lora={**key, "key": "lora"}, weight=0.7)] if lora is not None else []
    field = api.UNetField(
        unet={**key, "key": "unet"}, scheduler={**key, "key": "scheduler"}, loras=loras
    )
    prompt = api.ConditioningField(conditioning_name="prompt")
    for kind in (invoke.own, invoke.ours):
        context = Context(api, unet, noise, {"lora": lora})
        node = kind(
            id="1",
            positive_conditioning=prompt,
            negative_conditioning=prompt,
            noise=api.LatentsField(latents_name="noise", seed=1),
            unet=field,
            steps=3,
            **more,
        )
        node.invoke(context)
        assert context.steps == 4
        saved.append(context.saved)
    torch.testing.assert_close(saved[1], saved[0], rtol=1e-4, atol=1e-4)
    (line,) = context.lines
    return line, saved[1]


ALL = "Strop ran 3 of 3 calls compiled"


def _num_graphs(unet: Any) -> int:
    return len(unet._strop_compiled.module.forward.variants.all)


def test_sizes_and_schedulers_are_compiled(invoke: SimpleNamespace, unet: Any) -> None:
    for size in ((8, 8), (8, 16), (16, 8)):
        for scheduler in ("euler", "ddim", "euler_a"):
            line, _ = _both(invoke, unet, size, scheduler=scheduler)
            assert line == ALL
    assert _num_graphs(unet) == 2, "timesteps are whole numbers here, and fractions there"


def test_lora_on_a_cpu_lies_beside_the_layers(invoke: SimpleNamespace, unet: Any) -> None:
    _, plain = _both(invoke, unet, (8, 8))
    line, drawn = _both(invoke, unet, (8, 8), lora=_lora(invoke))
    assert "LoRA is computed in each step" in line
    assert not torch.allclose(plain, drawn, rtol=1e-3)
    line, again = _both(invoke, unet, (8, 8))
    assert line == ALL
    assert torch.equal(plain, again)


def test_lora_in_weights_is_compiled(
    invoke: SimpleNamespace, unet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: weights count as being there."""
    from invokeai.backend.patches.layer_patcher import LayerPatcher

    _, plain = _both(invoke, unet, (8, 8))
    monkeypatch.setattr(LayerPatcher, "_is_any_part_of_layer_on_cpu", staticmethod(lambda _: False))
    before = _num_graphs(unet)
    line, drawn = _both(invoke, unet, (8, 8), lora=_lora(invoke))
    assert line == ALL
    assert not torch.allclose(plain, drawn, rtol=1e-3)
    _, again = _both(invoke, unet, (8, 8))
    assert torch.equal(plain, again)
    assert _num_graphs(unet) == before
