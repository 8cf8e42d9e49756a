"""Stand in for what ComfyUI promises to nodes: patchers, wrappers, a sampler, a UNet of its kind.

It is written from what nodes may rely on, and is no copy. Its names are ComfyUI's, since the node
pack asks for them. Where ComfyUI does something in a way that compiled code could miss, it does so
too: weights that are replaced by others in new memory and come back, options that the model writes
into, lists of a ControlNet that it empties, layers that ask for an interrupt.
"""

from __future__ import annotations

import sys
import types
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# comfy.model_management


class InterruptProcessingException(Exception):
    """Stops a prompt that the user has cancelled."""


interrupted = False


def interrupt_current_processing(value: bool = True) -> None:
    global interrupted
    interrupted = value


def throw_exception_if_processing_interrupted() -> None:
    global interrupted
    if interrupted:
        interrupted = False
        raise InterruptProcessingException


# comfy.patcher_extension


class WrappersMP:
    APPLY_MODEL = "apply_model"
    DIFFUSION_MODEL = "diffusion_model"


class CallbacksMP:
    ON_DETACH = "on_detach_after"


class WrapperExecutor:
    """Calls wrappers one in the other, the first outermost, and the function innermost."""

    def __init__(self, original: Any, class_obj: Any, wrappers: list[Any], idx: int = 0) -> None:
        self.original, self.class_obj = original, class_obj
        self.wrappers, self.idx = list(wrappers), idx

    def execute(self, *args: Any, **kwargs: Any) -> Any:
        if self.idx == len(self.wrappers):
            return self.original(*args, **kwargs)
        return self.wrappers[self.idx](self, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        behind = WrapperExecutor(self.original, self.class_obj, self.wrappers, self.idx + 1)
        return behind.execute(*args, **kwargs)


def wrappers_of(kind: str, options: dict[str, Any]) -> list[Any]:
    by_key = options.get("wrappers", {}).get(kind, {})
    return [wrapper for some in by_key.values() for wrapper in some]


# layers


class Castable:
    """Marks a layer whose weights may be cast or patched while it runs."""

    comfy_cast_weights = False
    weight_function: Sequence[Callable[[Tensor], Tensor]] = ()
    bias_function: Sequence[Callable[[Tensor], Tensor]] = ()

    def ready_weights(self) -> tuple[Tensor, Tensor | None]:
        throw_exception_if_processing_interrupted()
        weight, bias = self.weight, self.bias
        for function in self.weight_function:
            weight = function(weight)
        for function in self.bias_function:
            bias = function(bias)
        return weight, bias


class Linear(nn.Linear, Castable):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, *self.ready_weights())


class Conv2d(nn.Conv2d, Castable):
    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, *self.ready_weights())


# the model

WIDTH, HEADS, PROMPT = 32, 2, 24


class ResidualBlock(nn.Module):
    def __init__(self, wide: int, out: int) -> None:
        super().__init__()
        self.norm_in, self.norm_out = nn.GroupNorm(8, wide), nn.GroupNorm(8, out)
        self.conv_in, self.conv_out = (
            Conv2d(wide, out, 3, padding=1),
            Conv2d(out, out, 3, padding=1),
        )
        self.time = Linear(4 * WIDTH, out)
        self.skip = Conv2d(wide, out, 1) if wide != out else nn.Identity()

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        h = self.conv_in(F.silu(self.norm_in(x)))
        h = h + self.time(F.silu(emb))[:, :, None, None]
        return self.skip(x) + self.conv_out(F.silu(self.norm_out(h)))


class Attention(nn.Module):
    def __init__(self, wide: int, context: int) -> None:
        super().__init__()
        self.to_q = Linear(wide, wide, bias=False)
        self.to_k, self.to_v = (Linear(context, wide, bias=False) for _ in range(2))
        self.to_out = Linear(wide, wide)

    def forward(self, x: Tensor, context: Tensor, replaced: Any, options: dict[str, Any]) -> Tensor:
        q, k, v = self.to_q(x), self.to_k(context), self.to_v(context)
        if replaced is not None:
            return self.to_out(replaced(q, k, v, options))
        heads = [t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v)]
        found = F.scaled_dot_product_attention(*heads)
        return self.to_out(found.transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    """Asks the options which node wants something of its attention, as ComfyUI's does."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(8, wide)
        self.norm1, self.norm2 = nn.LayerNorm(wide), nn.LayerNorm(wide)
        self.attn1, self.attn2 = Attention(wide, wide), Attention(wide, PROMPT)

    def forward(self, x: Tensor, context: Tensor, options: dict[str, Any]) -> Tensor:
        options["activations_shape"] = list(x.shape)
        extra = {key: value for key, value in options.items() if not key.startswith("patches")}
        replaced = options.get("patches_replace", {})
        h = self.norm(x).flatten(2).transpose(1, 2)
        n = self.norm1(h)
        h = h + self.attn1(n, n, replaced.get("attn1", {}).get(options["block"]), extra)
        n = self.norm2(h)
        for patch in options.get("patches", {}).get("attn2_patch", ()):
            n, context, _ = patch(n, context, context, extra)
        h = h + self.attn2(n, context, replaced.get("attn2", {}).get(options["block"]), extra)
        return x + h.transpose(1, 2).reshape(x.shape)


def controlled(h: Tensor, control: dict[str, list[Tensor | None]] | None, name: str) -> Tensor:
    """Add the last tensor of a ControlNet's list to ``h``, in place, and take it out there."""
    if control is not None and control.get(name):
        part = control[name].pop()
        if part is not None:
            h += part
    return h


def attended(
    layer: Transformer,
    h: Tensor,
    context: Tensor,
    transformer_options: dict[str, Any] = {},  # noqa: B006 - so does ComfyUI
) -> Tensor:
    """Run a layer that writes into the options: those that are given, or the default, for good."""
    transformer_options.setdefault("block", ("middle", 0))
    return layer(h, context, transformer_options)


class OriginalUNet(nn.Module):
    """Has the signature and the manners of the original code's UNet, on two levels."""

    def __init__(self) -> None:
        super().__init__()
        self.dtype = torch.float32
        self.time_embed = nn.Sequential(
            Linear(WIDTH, 4 * WIDTH), nn.SiLU(), Linear(4 * WIDTH, 4 * WIDTH)
        )
        self.first = Conv2d(4, WIDTH, 3, padding=1)
        self.down = Conv2d(WIDTH, 2 * WIDTH, 3, stride=2, padding=1)
        self.middle, self.attention = ResidualBlock(2 * WIDTH, 2 * WIDTH), Transformer(2 * WIDTH)
        self.up = Conv2d(2 * WIDTH, WIDTH, 3, padding=1)
        self.last = ResidualBlock(2 * WIDTH, WIDTH)
        self.out = nn.Sequential(nn.GroupNorm(8, WIDTH), nn.SiLU(), Conv2d(WIDTH, 4, 3, padding=1))

    def forward(
        self,
        x: Tensor,
        timesteps: Tensor,
        context: Tensor,
        y: Tensor | None = None,
        control: Any = None,
        transformer_options: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        wrappers = wrappers_of(WrappersMP.DIFFUSION_MODEL, transformer_options)
        executor = WrapperExecutor(self._forward, self, wrappers)
        return executor.execute(x, timesteps, context, y, control, transformer_options, **kwargs)

    def _forward(
        self,
        x: Tensor,
        timesteps: Tensor,
        context: Tensor,
        y: Tensor | None = None,
        control: Any = None,
        transformer_options: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        options = transformer_options
        options["original_shape"] = list(x.shape)
        options["transformer_index"] = 0
        angles = timesteps[:, None] * torch.exp(torch.arange(WIDTH // 2, device=x.device) * -0.5)
        emb = self.time_embed(torch.cat([angles.cos(), angles.sin()], -1).to(x.dtype))
        for patch in options.get("patches", {}).get("emb_patch", ()):
            emb = patch(emb, WIDTH, options)
        options["block"] = ("input", 0)
        h = controlled(self.first(x), control, "input")
        skipped = h
        options["block"] = ("middle", 0)
        h = attended(self.attention, self.middle(self.down(h), emb), context, options)
        options["transformer_index"] += 1
        h = controlled(h, control, "middle")
        options["block"] = ("output", 0)
        skipped = controlled(skipped, control, "output")
        h = self.up(F.interpolate(h, size=skipped.shape[2:], mode="nearest"))
        for patch in options.get("patches", {}).get("output_block_patch", ()):
            h, skipped = patch(h, skipped, options)
        return self.out(self.last(torch.cat([h, skipped], 1), emb))


class BaseModel(nn.Module):
    """Is what a patcher loads: the diffusion model, and what is known of how to sample it."""

    def __init__(self, diffusion_model: nn.Module) -> None:
        super().__init__()
        self.diffusion_model = diffusion_model
        self.current_patcher: ModelPatcher | None = None

    def apply_model(self, x: Tensor, t: Tensor, **conds: Any) -> Tensor:
        context, control = conds.pop("c_crossattn"), conds.pop("control", None)
        options = conds.pop("transformer_options")
        found = self.diffusion_model(
            x, t * 1000, context=context, control=control, transformer_options=options, **conds
        )
        return x - found * t[:, None, None, None]


# comfy.model_patcher


class ModelPatcher:
    """Holds what one branch of a workflow wants of a model that all its clones share."""

    def __init__(self, model: BaseModel) -> None:
        self.model = model
        self.patches: dict[str, list[tuple[float, Tensor, Tensor]]] = {}
        self.backup: dict[str, Tensor] = {}  # of what is in the model: all clones have this one
        self.object_patches: dict[str, Any] = {}
        self.object_backup: dict[str, Any] = {}
        self.model_options: dict[str, Any] = {"transformer_options": {}}
        self.wrappers: dict[str, dict[str, list[Any]]] = {}
        self.callbacks: dict[str, dict[str, list[Any]]] = {}
        self.attachments: dict[str, Any] = {}
        self.patches_uuid = uuid.uuid4()

    def clone(self) -> ModelPatcher:
        other = ModelPatcher(self.model)
        other.patches = {key: [*some] for key, some in self.patches.items()}
        other.backup, other.object_backup = self.backup, self.object_backup
        other.object_patches = dict(self.object_patches)
        other.model_options = copied(self.model_options)
        other.wrappers, other.callbacks = copied(self.wrappers), copied(self.callbacks)
        other.attachments = dict(self.attachments)
        other.patches_uuid = self.patches_uuid
        return other

    def is_dynamic(self) -> bool:
        return False

    def add_patches(self, patches: dict[str, tuple[Tensor, Tensor]], strength: float = 1.0) -> None:
        for key, (up, down) in patches.items():
            self.patches.setdefault(key, []).append((strength, up, down))
        self.patches_uuid = uuid.uuid4()

    def add_object_patch(self, name: str, value: Any) -> None:
        self.object_patches[name] = value

    def set_model_patch(self, patch: Any, name: str) -> None:
        options = self.model_options["transformer_options"]
        options.setdefault("patches", {}).setdefault(name, []).append(patch)

    def set_model_attn1_replace(self, patch: Any, block: str, number: int) -> None:
        options = self.model_options["transformer_options"]
        options.setdefault("patches_replace", {}).setdefault("attn1", {})[block, number] = patch

    def add_wrapper_with_key(self, kind: str, key: str, wrapper: Any) -> None:
        self.wrappers.setdefault(kind, {}).setdefault(key, []).append(wrapper)

    def remove_wrappers_with_key(self, kind: str, key: str) -> None:
        self.wrappers.get(kind, {}).pop(key, None)

    def add_callback_with_key(self, kind: str, key: str, callback: Any) -> None:
        self.callbacks.setdefault(kind, {}).setdefault(key, []).append(callback)

    def remove_callbacks_with_key(self, kind: str, key: str) -> None:
        self.callbacks.get(kind, {}).pop(key, None)

    def patch_model(self, *, is_low_vram: bool = False) -> None:
        """Put this clone's patches into the model: by new weights in new memory, or under low VRAM
        by functions that layers call."""
        for name, value in self.object_patches.items():
            holder, _, last = name.rpartition(".")
            owner = self.model.get_submodule(holder)
            self.object_backup.setdefault(name, getattr(owner, last))
            setattr(owner, last, value)
        for key, patches in self.patches.items():
            name, _, last = key.rpartition(".")
            layer = self.model.get_submodule(name)
            if is_low_vram:
                layer.weight_function = [lambda weight, some=patches: patched(weight, some)]
                continue
            old = getattr(layer, last)
            self.backup[key] = old
            setattr(layer, last, nn.Parameter(patched(old, patches), requires_grad=False))

    def unpatch_model(self) -> None:
        """Bring all back that lies in the model, whichever clone has put it there."""
        for layer in self.model.modules():
            if isinstance(layer, Castable):
                layer.weight_function, layer.bias_function = [], []
        for key, weight in self.backup.items():
            name, _, last = key.rpartition(".")
            layer = self.model.get_submodule(name)
            setattr(layer, last, nn.Parameter(weight, requires_grad=False))
        self.backup.clear()
        for name, value in self.object_backup.items():
            holder, _, last = name.rpartition(".")
            setattr(self.model.get_submodule(holder), last, value)
        self.object_backup.clear()

    def detach(self, unpatch_all: bool = True) -> None:
        """Leave the model to another clone, or take it off its device as well."""
        if unpatch_all:
            self.unpatch_model()
        for some in self.callbacks.get(CallbacksMP.ON_DETACH, {}).values():
            for callback in some:
                callback(self, unpatch_all)


def patched(weight: Tensor, patches: list[tuple[float, Tensor, Tensor]]) -> Tensor:
    found = weight.detach().clone()
    for strength, up, down in patches:
        found += strength * (up @ down).view(weight.shape)
    return found


def copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: copied(part) for key, part in value.items()}
    return [*value] if isinstance(value, list) else value


# comfy.sd


class Autoencoder(nn.Module):
    """Is the module of a VAE: two methods, and no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = Conv2d(3, 16, 3, 2, 1), Conv2d(4, 16, 3, padding=1)
        self.norm, self.code, self.out = (
            nn.GroupNorm(4, 16),
            Conv2d(16, 4, 1),
            Conv2d(16, 3, 3, padding=1),
        )

    def encode(self, x: Tensor) -> Tensor:
        return self.code(F.silu(self.norm(self.down(x))))

    def decode(self, z: Tensor) -> Tensor:
        return self.out(F.interpolate(F.silu(self.norm(self.up(z))), scale_factor=2.0))


class VAE:
    """Is what a workflow hands on."""

    def __init__(self, model: nn.Module) -> None:
        self.first_stage_model, self.patcher = model, ModelPatcher(model)

    @torch.inference_mode()
    def decode(self, samples: Tensor) -> Tensor:
        return self.first_stage_model.decode(samples)

    @torch.inference_mode()
    def encode(self, pixels: Tensor) -> Tensor:
        return self.first_stage_model.encode(pixels)


class CLIPEncoder(nn.Module):
    """Holds the layers of CLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention(PROMPT, PROMPT) for _ in range(2))

    def forward(
        self, x: Tensor, mask: Tensor | None = None, intermediate_output: Any = None
    ) -> Any:
        for layer in self.layers:
            x += layer(x, x + mask[0, 0], None, {})  # so the first of them writes into its argument
        return x, None


class TextModel(nn.Module):
    """Is the module of a text encoder: the layers, and code around them that takes lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.encoder = nn.Embedding(50, PROMPT), CLIPEncoder()
        self.options: dict[str, Any] = {}

    def set_clip_options(self, options: dict[str, Any]) -> None:
        self.options = options

    def encode_token_weights(self, tokens: list[int]) -> tuple[Tensor, Tensor]:
        mask = torch.full((len(tokens), len(tokens)), -1.0).triu_(1)
        x, _ = self.encoder(self.table(torch.tensor([tokens])), mask=mask)
        return x, x[:, len(tokens) - 1]


class CLIP:
    """Is what a workflow hands on."""

    def __init__(self, model: nn.Module | None = None) -> None:
        if model is not None:
            self.cond_stage_model, self.patcher = model, ModelPatcher(model)

    def clone(self) -> CLIP:
        other = CLIP()
        other.cond_stage_model, other.patcher = self.cond_stage_model, self.patcher.clone()
        return other

    @torch.inference_mode()
    def encode(self, tokens: list[int]) -> tuple[Tensor, Tensor]:
        self.cond_stage_model.set_clip_options({"layer": -1})
        return self.cond_stage_model.encode_token_weights(tokens)


# comfy.sampler_helpers, and the sampler


def prepare_model_patcher(model: ModelPatcher, conds: Any, model_options: dict[str, Any]) -> None:
    """Put the wrappers and callbacks of a clone among the options of its calls."""
    options = model_options["transformer_options"]
    options |= {"wrappers": copied(model.wrappers), "callbacks": copied(model.callbacks)}


@torch.inference_mode()
def sample(
    patcher: ModelPatcher,
    noise: Tensor,
    prompts: tuple[Tensor, Tensor],
    *,
    steps: int = 2,
    control: Callable[[Tensor], dict[str, list[Tensor | None]]] | None = None,
    is_low_vram: bool = False,
    preview: Callable[[int], None] = lambda step: None,
) -> Tensor:
    """Load a clone's patches, and draw: Euler's steps, both prompts in one batch."""
    model_options = copied(patcher.model_options)
    sys.modules["comfy.sampler_helpers"].prepare_model_patcher(patcher, {}, model_options)
    patcher.unpatch_model()
    patcher.patch_model(is_low_vram=is_low_vram)
    model, x = patcher.model, noise
    sigmas = torch.linspace(1, 0, steps + 1)
    for step in range(steps):
        both, t = torch.cat([x, x]), sigmas[step].expand(2 * len(x))
        options = copied(model_options["transformer_options"])
        options |= {
            "sample_sigmas": sigmas,
            "sigmas": sigmas[step : step + 1],
            "cond_or_uncond": [1, 0],
            "uuids": [uuid.uuid4(), uuid.uuid4()],
        }
        context = torch.cat([prompt.expand(len(x), -1, -1) for prompt in prompts])
        conds: dict[str, Any] = {"c_crossattn": context, "transformer_options": options}
        if control is not None:
            conds["control"] = control(both)
        without, found = model.apply_model(both, t.clone(), **conds).chunk(2)
        x = x + (x - (without + 2 * (found - without))) / sigmas[step] * (
            sigmas[step + 1] - sigmas[step]
        )
        preview(step)
    return x


def modules() -> dict[str, types.ModuleType]:
    """Return the modules that the node pack imports, by their names."""
    here = sys.modules[__name__]
    management = types.ModuleType("comfy.model_management")
    for name in (
        "InterruptProcessingException",
        "interrupt_current_processing",
        "throw_exception_if_processing_interrupted",
    ):
        setattr(management, name, getattr(here, name))
    extension = types.ModuleType("comfy.patcher_extension")
    extension.WrappersMP, extension.CallbacksMP = WrappersMP, CallbacksMP
    helpers, sd = types.ModuleType("comfy.sampler_helpers"), types.ModuleType("comfy.sd")
    helpers.prepare_model_patcher, sd.VAE, sd.CLIP = prepare_model_patcher, VAE, CLIP
    comfy = types.ModuleType("comfy")
    comfy.model_management, comfy.patcher_extension = management, extension
    comfy.sampler_helpers, comfy.sd = helpers, sd
    return {part.__name__: part for part in (comfy, management, extension, helpers, sd)}
