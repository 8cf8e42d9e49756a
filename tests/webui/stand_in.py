"""Stand in for what A1111 and Forge promise to extensions: scripts, a UNet, networks, sampling.

It is written from what extensions may rely on, and is no copy. Its names are theirs, since the
extension asks for them. Where they do something in a way that compiled code could miss, it does so
too: A1111's layers put LoRA into weights in place within their forward, which stands in the classes
of torch; Forge gives a model other weights in other memory, and its UNet writes into options and
empties the lists of a ControlNet.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, PROMPT = 32, 2, 24

# the UNet


class ResBlock(nn.Module):
    def __init__(self, wide: int, out: int) -> None:
        super().__init__()
        self.in_layers = nn.Sequential(
            nn.GroupNorm(8, wide), nn.SiLU(), nn.Conv2d(wide, out, 3, padding=1)
        )
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(4 * WIDTH, out))
        self.out_layers = nn.Sequential(
            nn.GroupNorm(8, out), nn.SiLU(), nn.Conv2d(out, out, 3, padding=1)
        )
        self.skip_connection = nn.Conv2d(wide, out, 1) if wide != out else nn.Identity()

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        h = self.in_layers(x) + self.emb_layers(emb)[:, :, None, None]
        return self.skip_connection(x) + self.out_layers(h)


class CrossAttention(nn.Module):
    def __init__(self, wide: int, context: int) -> None:
        super().__init__()
        self.to_q = nn.Linear(wide, wide, bias=False)
        self.to_k, self.to_v = (nn.Linear(context, wide, bias=False) for _ in range(2))
        self.to_out = nn.Linear(wide, wide)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        heads = [
            t.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for t in (self.to_q(x), self.to_k(context), self.to_v(context))
        ]
        return self.to_out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


class SpatialTransformer(nn.Module):
    def __init__(self, wide: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(8, wide)
        self.norm1, self.norm2 = nn.LayerNorm(wide), nn.LayerNorm(wide)
        self.attn1, self.attn2 = CrossAttention(wide, wide), CrossAttention(wide, PROMPT)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        h = self.norm(x).flatten(2).transpose(1, 2)
        n = self.norm1(h)
        h = h + self.attn1(n, n)
        return x + (h + self.attn2(self.norm2(h), context)).transpose(1, 2).reshape(x.shape)


class OptionsTransformer(SpatialTransformer):
    """Writes into the options, or into their default, as Forge's does."""

    def forward(
        self,
        x: Tensor,
        context: Tensor,
        transformer_options: dict[str, Any] = {},  # noqa: B006 - so does Forge
    ) -> Tensor:
        transformer_options["transformer_shape"] = list(x.shape)
        for patch in transformer_options.get("patches", {}).get("input_patch", ()):
            x = patch(x, transformer_options)
        return super().forward(x, context)


class UNetModel(nn.Module):
    """Has the blocks of the original code's UNet, on two levels."""

    transformer = SpatialTransformer

    def __init__(self) -> None:
        super().__init__()
        self.time_embed = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.SiLU(), nn.Linear(4 * WIDTH, 4 * WIDTH)
        )
        down = nn.Conv2d(WIDTH, 2 * WIDTH, 3, stride=2, padding=1)
        self.input_blocks = nn.ModuleList([nn.Conv2d(4, WIDTH, 3, padding=1), down])
        self.middle_block = nn.ModuleList(
            [ResBlock(2 * WIDTH, 2 * WIDTH), self.transformer(2 * WIDTH)]
        )
        up = nn.Conv2d(2 * WIDTH, WIDTH, 3, padding=1)
        self.output_blocks = nn.ModuleList([up, ResBlock(2 * WIDTH, WIDTH)])
        self.out = nn.Sequential(
            nn.GroupNorm(8, WIDTH), nn.SiLU(), nn.Conv2d(WIDTH, 4, 3, padding=1)
        )

    def embedded(self, x: Tensor, timesteps: Tensor) -> Tensor:
        angles = timesteps[:, None] * torch.exp(torch.arange(WIDTH // 2, device=x.device) * -0.5)
        return self.time_embed(torch.cat([angles.cos(), angles.sin()], -1).to(x.dtype))

    def decoded(self, h: Tensor, skipped: Tensor, emb: Tensor) -> Tensor:
        h = self.output_blocks[0](F.interpolate(h, size=skipped.shape[2:], mode="nearest"))
        return self.out(self.output_blocks[1](torch.cat([h, skipped], 1), emb))


class A1111UNet(UNetModel):
    def forward(
        self, x: Tensor, timesteps: Any = None, context: Any = None, y: Any = None
    ) -> Tensor:
        emb, skipped = self.embedded(x, timesteps), self.input_blocks[0](x)
        h = self.middle_block[0](self.input_blocks[1](skipped), emb)
        return self.decoded(self.middle_block[1](h, context), skipped, emb)


class ForgeUNet(UNetModel):
    transformer = OptionsTransformer

    def forward(
        self,
        x: Tensor,
        timesteps: Any = None,
        context: Any = None,
        y: Any = None,
        control: Any = None,
        transformer_options: dict[str, Any] = {},  # noqa: B006 - so does Forge
        **kwargs: Any,
    ) -> Tensor:
        options = transformer_options
        options["original_shape"], options["block"] = list(x.shape), ("input", 0)
        emb = self.embedded(x, timesteps)
        skipped = self.controlled(self.input_blocks[0](x), control, "input")
        options["block"] = ("middle", 0)
        h = self.middle_block[0](self.input_blocks[1](skipped), emb)
        h = self.controlled(self.middle_block[1](h, context, options), control, "middle")
        for modifier in options.get("block_modifiers", ()):
            h = modifier(h, "after", options)
        return self.decoded(h, skipped, emb)

    def controlled(self, h: Tensor, control: Any, name: str) -> Tensor:
        """Add the last tensor of a ControlNet's list in place, and take it out there."""
        if control is not None and control[name]:
            part = control[name].pop()
            if part is not None:
                h += part
        return h


# modules.scripts, modules.script_callbacks, gradio


class Script:
    def title(self) -> str:
        raise NotImplementedError


@dataclass
class WebUi:
    """Is one web UI: what its modules hold, and the models that it has loaded."""

    is_forge: bool
    loaded: list[Any] = field(default_factory=list)  # callbacks for models
    unets: list[Any] = field(default_factory=list)  # callbacks for choices of a UNet
    modules: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.shared = _module("modules.shared", opts=SimpleNamespace(lora_functional=False))
        self.shared.cmd_opts = SimpleNamespace(lowvram=False, medvram=False)
        self.shared.state = SimpleNamespace(interrupted=False, current_latent=None)
        self.shared.sd_model = None
        scripts = _module("modules.scripts", Script=Script, AlwaysVisible=object())
        callbacks = _module(
            "modules.script_callbacks",
            on_model_loaded=self.loaded.append,
            on_list_unets=self.unets.append,
        )
        devices = _module("modules.devices", device=torch.device("cpu"))
        found = [self.shared, scripts, callbacks, devices, gradio()]
        if self.is_forge:
            found.append(_module("modules_forge"))
        else:
            self.sd_unet = unet_module(self.shared)
            self.networks = networks_module()
            found += [self.sd_unet, self.networks]
        package = _module("modules")
        for module in found:
            if module.__name__.startswith("modules."):
                setattr(package, module.__name__.partition(".")[2], module)
        self.modules = {module.__name__: module for module in [package, *found]}

    def load(self, seed: int) -> Any:
        """Load a checkpoint, and tell whoever wants to know."""
        torch.manual_seed(seed)
        unet = (ForgeUNet() if self.is_forge else A1111UNet()).eval().requires_grad_(False)
        model = ForgeModel(unet) if self.is_forge else LdmModel(unet)
        self.shared.sd_model = model
        for callback in self.loaded:
            callback(model)
        return model


def _module(name: str, **held: Any) -> Any:
    module = types.ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)  # so that find_spec finds it
    vars(module).update(held)
    return module


def gradio() -> Any:
    """Has the three components that the extension shows."""

    class Component:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.args, self.kwargs = args, kwargs

    @contextlib.contextmanager
    def accordion(label: str, **_: Any) -> Iterator[None]:
        yield

    return _module("gradio", Accordion=accordion, Checkbox=Component, HTML=Component)


# modules.sd_unet


def unet_module(shared: Any) -> Any:
    module = _module("modules.sd_unet", current_unet=None, current_unet_option=None)

    class SdUnetOption:
        label: Any = None
        model_name: Any = None

        def create_unet(self) -> Any:
            raise NotImplementedError

    class SdUnet(nn.Module):
        def activate(self) -> None:
            pass

        def deactivate(self) -> None:
            pass

    def apply_unet(option: Any = None) -> None:
        """Choose a UNet, or none. Choosing one moves A1111's own to the CPU."""
        if module.current_unet is not None:
            module.current_unet.deactivate()
        module.current_unet_option, module.current_unet = option, None
        if option is not None:
            shared.sd_model.model.diffusion_model.to("cpu")
            module.current_unet = option.create_unet()
            module.current_unet.option = option
            module.current_unet.activate()

    vars(module).update(SdUnetOption=SdUnetOption, SdUnet=SdUnet, apply_unet=apply_unet)
    return module


def asks_first(original: Any, sd_unet: Any) -> Any:
    """Return the forward of A1111's class of a UNet, which asks for another UNet first."""

    def forward(self: Any, x: Any, timesteps: Any = None, context: Any = None, *a: Any, **k: Any):
        if sd_unet.current_unet is not None:
            return sd_unet.current_unet.forward(x, timesteps, context, *a, **k)
        return original(self, x, timesteps, context, *a, **k)

    return forward


# networks, A1111's extension for LoRA

KINDS = {
    "Linear": nn.Linear, "Conv2d": nn.Conv2d, "GroupNorm": nn.GroupNorm,
    "LayerNorm": nn.LayerNorm, "MultiheadAttention": nn.MultiheadAttention,
}  # fmt: skip


@dataclass
class Network:
    name: str
    deltas: dict[str, tuple[Tensor, Tensor]]
    unet_multiplier: float = 1.0


def networks_module() -> Any:
    originals = SimpleNamespace(**{f"{n}_forward": kind.forward for n, kind in KINDS.items()})
    module = _module("networks", loaded_networks=[], originals=originals)

    def network_apply_weights(layer: Any) -> None:
        """Bring a layer's weight in line with the networks of the prompt, in place."""
        name = getattr(layer, "network_layer_name", None)
        if name is None:
            return
        wanted = tuple((one.name, one.unet_multiplier) for one in module.loaded_networks)
        if getattr(layer, "network_current_names", ()) == wanted:
            return
        if getattr(layer, "network_weights_backup", None) is None:
            layer.network_weights_backup = layer.weight.to("cpu", copy=True)
        layer.weight.copy_(layer.network_weights_backup)
        for one in module.loaded_networks:
            if name in one.deltas:
                up, down = one.deltas[name]
                delta = (up @ down).reshape(layer.weight.shape) * one.unet_multiplier
                layer.weight.copy_(layer.weight + delta)
        layer.network_current_names = wanted

    def patched(original: Any) -> Any:
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            network_apply_weights(self)
            return original(self, *args, **kwargs)

        return forward

    module.network_apply_weights = network_apply_weights
    for name, kind in KINDS.items():
        setattr(module, f"network_{name}_forward", patched(kind.forward))
    return module


# models, and the making of a picture


class LdmModel(nn.Module):
    """Is A1111's model: its UNet is ``model.diffusion_model``."""

    lowvram = False

    def __init__(self, unet: nn.Module) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.diffusion_model = unet
        for name, layer in unet.named_modules():
            layer.network_layer_name = name.replace(".", "_")

    def denoised(self, p: Picture, x: Tensor, t: Tensor, context: Tensor) -> Tensor:
        return self.model.diffusion_model(x, t, context=context)


class KModel(nn.Module):
    def __init__(self, unet: nn.Module) -> None:
        super().__init__()
        self.diffusion_model = unet

    def apply_model(self, x: Tensor, t: Tensor, **conds: Any) -> Tensor:
        context, control = conds.pop("c_crossattn"), conds.pop("control", None)
        options = conds.pop("transformer_options")
        return self.diffusion_model(
            x, t, context=context, control=control, transformer_options=options, **conds
        )


class ForgeModel:
    """Is Forge's engine: its UNet is ``forge_objects.unet.model.diffusion_model``."""

    def __init__(self, unet: nn.Module) -> None:
        options: dict[str, Any] = {"transformer_options": {}}
        patcher = SimpleNamespace(model=KModel(unet), model_options=options)
        self.forge_objects = SimpleNamespace(unet=patcher)
        self.backup: dict[str, Any] = {}

    def put_lora(self, deltas: dict[str, tuple[Tensor, Tensor]], scale: float = 1.0) -> None:
        """Give layers other weights, in other memory, after bringing back what was there."""
        unet = self.forge_objects.unet.model.diffusion_model
        for name, weight in self.backup.items():
            unet.get_submodule(name).weight = weight
        self.backup = {}
        for name, (up, down) in deltas.items():
            layer = unet.get_submodule(name)
            self.backup[name] = layer.weight
            new = layer.weight + (up @ down).reshape(layer.weight.shape) * scale
            layer.weight = nn.Parameter(new, requires_grad=False)

    def denoised(self, p: Picture, x: Tensor, t: Tensor, context: Tensor) -> Tensor:
        unet = self.forge_objects.unet
        options = dict(unet.model_options["transformer_options"])
        options.update(cond_or_uncond=[0, 1], sigmas=t, cond_mark=torch.zeros_like(t))
        options.update(cond_indices=[0], uncond_indices=[1])
        given = {"control": p.control(x), "control_model": p.control} if p.control else {}
        return unet.model.apply_model(
            x, t, c_crossattn=context, transformer_options=options, **given
        )


@dataclass
class Picture:
    """Is what a web UI calls ``p``: what is asked for, and what was said of it."""

    ui: WebUi
    size: tuple[int, int] = (8, 8)
    batch: int = 1
    batches: int = 1
    steps: int = 2
    hires: float = 0.0
    control: Any = None
    hires_model: Any = None
    preview: Any = None  # is called in each step with the latent
    comments: list[str] = field(default_factory=list)

    @property
    def sd_model(self) -> Any:
        return self.ui.shared.sd_model

    def comment(self, text: str) -> None:
        self.comments.append(text)


def _noise(p: Picture, seed: int, height: int, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(p.batch, 4, height, width, generator=generator)


def _sampled(p: Picture, x: Tensor, script: Any, enabled: bool) -> Tensor:
    if script is not None:
        script.process_before_every_sampling(p, enabled, x=x, noise=x)
    prompts = torch.randn(2, 7, PROMPT, generator=torch.Generator().manual_seed(1))
    context = prompts.repeat_interleave(len(x), 0)
    for step in range(p.steps):
        if p.ui.shared.state.interrupted:
            break
        t = torch.full((2 * len(x),), 1.0 - step / p.steps)
        wanted, unwanted = p.sd_model.denoised(p, torch.cat([x, x]), t * 1000, context).chunk(2)
        x = x - (unwanted + 5.0 * (wanted - unwanted)) * 0.3
        p.ui.shared.state.current_latent = x
        if p.preview is not None:
            p.preview(x)
    return x


@torch.no_grad()
def process_images(p: Picture, script: Any = None, enabled: bool = True) -> list[Tensor]:
    """Make pictures as both web UIs do, and call a script's functions where they do."""
    p.ui.shared.state.interrupted = False
    found = []
    if script is not None:
        script.process(p, enabled)
    for number in range(p.batches):
        if script is not None:
            script.process_batch(p, enabled, batch_number=number, prompts=[], seeds=[], subseeds=[])
        x = _sampled(p, _noise(p, number, *p.size), script, enabled)
        if p.hires:
            before = p.sd_model
            p.ui.shared.sd_model = p.hires_model or before
            x = _sampled(p, F.interpolate(x, scale_factor=p.hires), script, enabled)
            p.ui.shared.sd_model = before
        if script is not None:
            script.postprocess_batch(p, enabled, images=x, batch_number=number)
        found.append(x)
    if script is not None:
        script.postprocess(p, None, enabled)
    return found
