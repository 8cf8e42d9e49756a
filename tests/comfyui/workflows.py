"""Workflows in the format of ComfyUI's API, put together from nodes."""

from __future__ import annotations

from typing import Any

Graph = dict[str, dict[str, Any]]
CHECKPOINT, CONTROL_NET = "small.safetensors", "control.safetensors"
LORAS = ("first.safetensors", "second.safetensors")
PICTURE = "given.png"


def node(kind: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": kind, "inputs": inputs}


def text_to_latent(
    *,
    width: int = 32,
    height: int = 32,
    batch: int = 1,
    steps: int = 2,
    seed: int = 1,
    strop: bool = True,
    loras: tuple[str, ...] = (),
    control: bool = False,
    picture: bool = False,
    mask: bool = False,
    patch: bool = False,
    area: bool = False,
) -> Graph:
    """Return a workflow that saves a latent. ``strop`` has its model compiled, behind adapters and
    before what patches it."""
    graph = {
        "load": node("CheckpointLoaderSimple", ckpt_name=CHECKPOINT),
        "prompt": node("CLIPTextEncode", text="a red circle", clip=["load", 1]),
        "without": node("CLIPTextEncode", text="", clip=["load", 1]),
        "latent": node("EmptyLatentImage", width=width, height=height, batch_size=batch),
    }
    model, prompt, latent = ["load", 0], ["prompt", 0], ["latent", 0]
    for name in loras:
        graph[name] = node("LoraLoaderModelOnly", model=model, lora_name=name, strength_model=1.0)
        model = [name, 0]
    graph["strop"] = node("StropOptimizeModel", model=model, enabled=strop)
    model = ["strop", 0]
    if patch:
        graph["patch"] = node("FreeU", model=model, b1=1.1, b2=1.2, s1=0.9, s2=0.2)
        model = ["patch", 0]
    if picture or control:
        graph["picture"] = node("LoadImage", image=PICTURE)
    if picture:
        graph["latent"] = node("VAEEncode", pixels=["picture", 0], vae=["load", 2])
    if mask:
        graph["mask"] = node("SolidMask", value=1.0, width=16, height=32)
        graph["masked"] = node("SetLatentNoiseMask", samples=latent, mask=["mask", 0])
        latent = ["masked", 0]
    if control:
        graph["net"] = node("ControlNetLoader", control_net_name=CONTROL_NET)
        graph["control"] = node(
            "ControlNetApply",
            conditioning=prompt,
            control_net=["net", 0],
            image=["picture", 0],
            strength=1.0,
        )
        prompt = ["control", 0]
    if area:
        graph["part"] = node(
            "ConditioningSetArea", conditioning=prompt, width=64, height=64, x=0, y=0, strength=1.0
        )
        graph["both"] = node(
            "ConditioningCombine", conditioning_1=["part", 0], conditioning_2=["without", 0]
        )
        prompt = ["both", 0]
    graph["draw"] = node(
        "KSampler",
        model=model,
        seed=seed,
        steps=steps,
        cfg=2.0,
        sampler_name="euler",
        scheduler="normal",
        positive=prompt,
        negative=["without", 0],
        latent_image=latent,
        denoise=0.6 if picture else 1.0,
    )
    graph["save"] = node("SaveLatent", samples=["draw", 0], filename_prefix="latent")
    graph["report"] = node("StropReport", after=["draw", 0], model=["strop", 0])
    return graph


def prompt_to_picture(*, strop: bool, width: int = 32, text: str = "a red circle") -> Graph:
    """Return a workflow whose CLIP and VAE are compiled. Its latent is the picture that is given,
    so that no UNet runs."""
    return {
        "load": node("CheckpointLoaderSimple", ckpt_name=CHECKPOINT),
        "clip": node("StropOptimizeCLIP", clip=["load", 1], enabled=strop),
        "vae": node("StropOptimizeVAE", vae=["load", 2], enabled=strop),
        "prompt": node("CLIPTextEncode", text=text, clip=["clip", 0]),
        "picture": node("LoadImage", image=PICTURE),
        "scaled": node(
            "ImageScale",
            image=["picture", 0],
            upscale_method="nearest-exact",
            width=width,
            height=32,
            crop="disabled",
        ),
        "encode": node("VAEEncode", pixels=["scaled", 0], vae=["vae", 0]),
        "decode": node("VAEDecode", samples=["encode", 0], vae=["vae", 0]),
        "save": node("SaveImage", images=["decode", 0], filename_prefix="picture"),
        "latent": node("SaveLatent", samples=["encode", 0], filename_prefix="latent"),
        "use": node("ConditioningZeroOut", conditioning=["prompt", 0]),
        "preview": node("StropReport", after=["use", 0], vae=["vae", 0], clip=["clip", 0]),
        "last": node("StropReport", after=["decode", 0], vae=["vae", 0], clip=["clip", 0]),
    }
