"""Stand in for what InvokeAI promises to nodes: a node to derive from, layers, LoRA, a context.

It is written from InvokeAI's interface for invocations and is no copy; its names are theirs, since
the node asks for them. Where InvokeAI does something that compiled code could miss, it does so too:
layers are of classes of its own, LoRA replaces the data of weights and puts the old ones back,
seamless tiling leaves a function in each convolution, and steps run in inference mode.
"""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from diffusers import DDIMScheduler, UNet2DConditionModel
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

NODES: dict[str, type[BaseModel]] = {}
TEXT = 16


class OwnLayer:
    """A layer of InvokeAI's: its weights may be elsewhere, and patches may lie beside it."""

    patches: list[tuple[Tensor, float]]
    brings_weights: bool

    def is_device_autocasting_enabled(self) -> bool:
        return self.brings_weights

    def get_num_patches(self) -> int:
        return len(self.patches)


class OwnLinear(OwnLayer, nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        for residual, scale in self.patches:
            out = out + scale * nn.functional.linear(x, residual)
        return out


class OwnConv2d(OwnLayer, nn.Conv2d):
    pass


def wrap_layers(model: nn.Module) -> None:
    """Give layers classes of InvokeAI's, as its cache of models does."""
    for layer in model.modules():
        for own, kind in ((OwnLinear, nn.Linear), (OwnConv2d, nn.Conv2d)):
            if type(layer) is kind:
                layer.__class__ = own
                layer.patches, layer.brings_weights = [], False  # type: ignore[assignment]


def small_unet(*, wrapped: bool = True) -> UNet2DConditionModel:
    torch.manual_seed(0)
    made = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(16, 32),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=1,
        norm_num_groups=4,
        attention_head_dim=8,
        cross_attention_dim=TEXT,
    )
    if wrapped:
        wrap_layers(made)
    return made.eval()


@dataclass
class Context:
    """What a node is given."""

    unet: Any
    lines: list[str] = field(default_factory=list)
    saved: Tensor | None = None
    on_step: Callable[[int], None] = lambda step: None

    @property
    def logger(self) -> Any:
        return SimpleNamespace(info=self.lines.append)


class LatentsOutput(BaseModel):
    """What a node returns."""


def invocation(kind: str, **about: Any) -> Callable[[type[BaseModel]], type[BaseModel]]:
    """Register a node. As in InvokeAI, it must say what its ``invoke`` returns."""

    def register(cls: type[BaseModel]) -> type[BaseModel]:
        assert inspect.signature(cls.invoke).return_annotation is LatentsOutput  # type: ignore[attr-defined]
        assert about["version"]
        NODES[kind] = cls
        return cls

    return register


class Pipeline:
    """The loop of InvokeAI's node."""

    def __init__(self, unet: Any, scheduler: Any) -> None:
        self.unet, self.scheduler = unet, scheduler

    @torch.inference_mode()
    def step(self, node: DenoiseLatents, t: Tensor, latents: Tensor) -> Tensor:
        batch = latents.shape[0]
        found = self.unet(
            torch.cat([latents] * 2),
            t.expand(2 * batch),
            node.text.repeat(2 * batch, 1, 1),
            cross_attention_kwargs=node.attention or {},
            encoder_attention_mask=None,
            **node.control(batch),
        ).sample
        plain, wanted = found.chunk(2)
        guided = plain + node.cfg_scale * (wanted - plain)
        return self.scheduler.step(guided, t, latents).prev_sample


class DenoiseLatents(BaseModel):
    """InvokeAI's own node."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    noise: Any
    text: Any
    steps: int = 3
    cfg_scale: float = 3.0
    loras: list[Any] = []  # of (weight of a layer, scale)
    hidiffusion: bool = False
    attention: Any = None
    residuals: Any = None
    seamless: bool = False
    modular: bool = False

    def control(self, batch: int) -> dict[str, Any]:
        names = ("down_block_additional_residuals", "mid_block_additional_residual")
        if self.residuals is None:
            return dict.fromkeys(names)
        *down, middle = (part.repeat(2 * batch, 1, 1, 1) for part in self.residuals)
        return dict(zip(names, (down, middle), strict=True))

    @staticmethod
    def create_pipeline(unet: Any, scheduler: Any) -> Pipeline:
        return Pipeline(unet, scheduler)

    @torch.no_grad()
    def invoke(self, context: Context) -> LatentsOutput:
        scheduler = DDIMScheduler()
        scheduler.set_timesteps(self.steps)
        with _patched(context.unet, self.loras), _seamless(context.unet, self.seamless):
            made = Pipeline if self.modular else self.create_pipeline
            pipeline, latents = made(context.unet, scheduler), self.noise
            for number, t in enumerate(scheduler.timesteps):
                context.on_step(number)
                latents = pipeline.step(self, t, latents)
        context.saved = latents.clone()
        return LatentsOutput()


@contextlib.contextmanager
def _patched(unet: nn.Module, loras: list[Any]) -> Iterator[None]:
    before = [(layer, layer.weight.data.clone()) for layer, _, _ in loras]
    for layer, residual, scale in loras:
        layer.weight.data = layer.weight.data + scale * residual
    try:
        yield
    finally:
        for layer, weight in before:
            layer.weight.data = weight


@contextlib.contextmanager
def _seamless(unet: nn.Module, is_on: bool) -> Iterator[None]:
    layers = [layer for layer in unet.modules() if isinstance(layer, nn.Conv2d)] if is_on else []
    before = [(layer, layer._conv_forward) for layer in layers]
    for layer in layers:

        def around(self: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            pad = self._reversed_padding_repeated_twice
            x = nn.functional.pad(x, pad, mode="circular") if any(pad) else x
            return nn.functional.conv2d(x, weight, bias, self.stride)

        layer._conv_forward = types.MethodType(around, layer)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer, own in before:
            layer._conv_forward = own  # type: ignore[method-assign]


def modules() -> dict[str, types.ModuleType]:
    """The modules that a node imports."""
    found = {name: types.ModuleType(name) for name in ("invokeai", "invokeai.app")}
    found["invokeai.app.invocations"] = types.ModuleType("invokeai.app.invocations")
    own = found["invokeai.app.invocations.denoise_latents"] = types.ModuleType("denoise_latents")
    own.DenoiseLatentsInvocation = DenoiseLatents  # type: ignore[attr-defined]
    api = found["invokeai.invocation_api"] = types.ModuleType("invocation_api")
    api.InvocationContext, api.LatentsOutput = Context, LatentsOutput  # type: ignore[attr-defined]
    api.invocation = invocation  # type: ignore[attr-defined]
    return found
