"""Serve pictures over HTTP (``strop serve``)."""

from __future__ import annotations

import importlib.util
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from socket import socket
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import typer

from strop.cli import arguments, models, serve_controlnets
from strop.cli import serve_options as options
from strop.cli.adapters import load_lora
from strop.cli.arguments import ArchOption, DeviceName, DeviceOption, Dtype
from strop.cli.cores import CoreUse
from strop.cli.generate import DtypeOption, ThreadsOption, set_threads
from strop.cli.mistakes import CommandError, reported, require_diffusion, warn
from strop.cli.serve_options import ServeSettings
from strop.drawing.request import PictureRequest, PictureSize
from strop.serve.replicas.plan import ReplicaWish
from strop.wording import counted

if TYPE_CHECKING:
    from strop.serve.limits import ServeLimits
    from strop.serve.order import ModelCard
    from strop.serve.prompts import Spell
    from strop.serve.service import Service
    from strop.serve.studio import Studio

EXAMPLES = """[bold]Examples[/]
$ strop serve   # the built-in model, on http://127.0.0.1:8000
$ strop serve ./stable-diffusion-v1-5 --lora ./loras --port 9000
$ strop serve ./stable-diffusion-v1-5 --controlnet ./canny --controlnet depth=./sd15-depth
$ strop serve ./sdxl --host 0.0.0.0 --token-file token.txt
$ strop serve ./sdxl --ray   # a replica on each GPU
$ strop serve ./sdxl --ray --device cuda --replicas 8 --deployment-file serve.yaml

[bold]Ask it[/]
$ curl 127.0.0.1:8000/api/model   # sizes, limits, LoRAs
$ curl 127.0.0.1:8000/healthz
"""
_NEEDED = {
    "fastapi": "fastapi",
    "uvicorn": "uvicorn",
    "prometheus_client": "prometheus-client",
    "pydantic": "pydantic",
    "multipart": "python-multipart",
}
_LORA_NAME = re.compile(r"[\w.-]{1,100}")
_LARGER = 4  # times the pixels of the model's own size are drawn, unless another limit is given
_BATCHES = {"cpu": 4, "cuda": 8}
_LEAST_TOKEN = 16
_MAKE_ONE = "write a token into it: openssl rand -hex 32 >"
LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")


@reported
def command(
    model: options.ModelArgument = models.SPRITES,
    port: options.PortOption = 8000,
    lora: options.LoraOption = None,
    controlnet: options.ControlNetOption = None,
    host: options.HostOption = "127.0.0.1",
    token_file: options.TokenFileOption = None,
    token: options.TokenOption = "",
    without_token: options.WithoutTokenOption = False,
    max_batch: options.BatchOption = 0,
    max_pixels: options.PixelsOption = 0,
    max_steps: options.MostStepsOption = 150,
    max_waiting: options.WaitingOption = 64,
    eager: options.EagerOption = None,
    device: DeviceOption = DeviceName.auto,
    arch: ArchOption = 0,
    dtype: DtypeOption = Dtype.auto,
    threads: ThreadsOption = 0,
    ray: options.RayOption = False,
    ray_address: options.RayAddressOption = "",
    replicas: options.ReplicasOption = 0,
    max_replicas: options.MaxReplicasOption = 0,
    replicas_per_gpu: options.PerGpuOption = 1,
    replica_cpus: options.ReplicaCpusOption = 0,
    scale_up_s: options.ScaleUpOption = 30.0,
    scale_down_s: options.ScaleDownOption = 600.0,
    deployment_file: options.DeploymentFileOption = None,
) -> None:
    """Serve a model over HTTP, with a web page at the server's address.

    Requests that have the same size, number of steps, guidance and adapters are drawn together;
    others take turns. The interfaces are

    - /v1/images/generations and /v1/images/edits, for clients of OpenAI;
    - /sdapi/v1/txt2img and /sdapi/v1/img2img, for clients of the A1111 web UI;
    - /api/pictures, with progress, previews and cancelling: /openapi.json has all of
      it;
    - /healthz for whoever watches the server, and /metrics for Prometheus.

    Logs are lines of JSON on standard error. The first SIGINT or SIGTERM ends the server when all
    accepted pictures are drawn, the second one at once. Nothing that a request contains is written
    to disk, and no address in it is opened.
    """
    settings = ServeSettings(model, str(lora or ""), max_batch, max_pixels, max_steps, max_waiting)
    settings = replace(settings, eager=eager, device=device.value, arch=arch, dtype=dtype.value)
    settings = replace(settings, threads=threads, controlnets=tuple(controlnet or ()))
    counts = ReplicaWish(replicas, max_replicas, replicas_per_gpu, replica_cpus)
    counts = replace(counts, scale_up_s=scale_up_s, scale_down_s=scale_down_s)
    asked = ServePlace(host, port, token_file, token, without_token)
    on_ray = OnRay(ray, ray_address, counts, deployment_file)
    _start(settings, asked, on_ray)


@dataclass(frozen=True)
class ServePlace:
    """Hold where the server listens, and for whom."""

    host: str
    port: int
    token_file: Path | None
    token: str
    without_token: bool


@dataclass(frozen=True)
class OnRay:
    """Hold what the options say about Ray."""

    is_on: bool
    address: str
    counts: ReplicaWish
    file: Path | None


def _start(settings: ServeSettings, asked: ServePlace, on_ray: OnRay) -> None:
    """Check where the server listens before anything slow begins, then serve."""
    require_diffusion()
    require_serve()
    _check_ray(on_ray)
    from strop.serve import running

    secret = secret_of(asked.token_file, asked.token)
    is_local = running.is_loopback(asked.host)
    _check_access(asked.host, is_local or asked.without_token or bool(secret))
    access = ServeAccess(secret, LOCAL_NAMES if is_local else ())
    if on_ray.file is not None:
        from strop.cli import serve_replicas

        file = "" if asked.token_file is None else str(asked.token_file.resolve())
        front = serve_replicas.FrontSettings(file, is_local, bool(secret))
        place = (asked.host, asked.port)
        serve_replicas.write_file(on_ray.file, settings, on_ray.counts, front, place)
        return
    listening = running.bound(asked.host, asked.port)
    try:
        if on_ray.is_on:
            from strop.cli import serve_replicas

            serve_replicas.run(settings, on_ray.counts, on_ray.address, listening, access)
        else:
            _serve_here(settings, listening, access)
    finally:
        listening.close()


def _check_ray(on_ray: OnRay) -> None:
    """Raise CommandError for options of Ray without it, and for Ray where it is not installed."""
    if not on_ray.is_on:
        if on_ray != OnRay(False, "", ReplicaWish(), None):
            raise CommandError(
                "an option is given that counts, places or writes down replicas; give --ray, too"
            )
        return
    if importlib.util.find_spec("ray") is None and on_ray.file is None:
        raise CommandError("--ray needs ray: pip install 'strop[ray]'")


def require_serve() -> None:
    missing = [n for module, n in _NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise CommandError(f"this command needs {', '.join(missing)}: pip install 'strop[serve]'")


def _check_access(host: str, is_allowed: bool) -> None:
    if not is_allowed:
        raise CommandError(
            f"{host} is reached from other machines: give --token-file FILE, or --without-token"
        )


def secret_of(file: Path | None, token: str) -> str:
    """Return the token that requests need, or nothing. Raises CommandError for a bad one."""
    if file is None:
        secret, source = token, "STROP_SERVE_TOKEN"
    else:
        if not file.is_file():
            raise CommandError(f"there is no file {file}; {_MAKE_ONE} {file}")
        secret, source = file.read_text(encoding="utf-8").strip(), str(file)
        if file.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
            warn(f"others can read {file}: chmod 600 {file}")
        if not secret:
            raise CommandError(f"{file} is empty; {_MAKE_ONE} {file}")
    if secret and (len(secret) < _LEAST_TOKEN or not secret.isascii() or not secret.isprintable()):
        raise CommandError(
            f"the token of {source} must have at least {_LEAST_TOKEN} letters or digits; make one:"
            " openssl rand -hex 32"
        )
    return secret


def lora_files(folder: Path | None) -> dict[str, Path]:
    """Return the LoRAs of a folder by name. Raises CommandError where there are none."""
    if folder is None:
        return {}
    if not folder.is_dir():
        raise CommandError(f"there is no folder {folder}; --lora takes one with .safetensors files")
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        if _LORA_NAME.fullmatch(file.stem) is None or "." in file.stem:
            raise CommandError(
                f"{file}: a LoRA is asked for by its name, which has letters, digits, - and _ only;"
                " rename the file"
            )
        found[file.stem] = file
    if not found:
        raise CommandError(f"{folder} has no .safetensors file")
    return found


def load_studio(
    model: models.ModelFolder,
    dtype: Any,
    device: str,
    loras: dict[str, Path],
    has_eager: bool,
    threads: int,
    controlnets: Mapping[str, Path] = MappingProxyType({}),
) -> Studio:
    """Load the model, and draw with it once, so that no request waits for the compiler."""
    import strop
    from strop.cli.stages import compiling, spinner
    from strop.drawing.draw import draw
    from strop.drawing.embeddings import reads_weights
    from strop.drawing.samplers import samplers_of
    from strop.drawing.twice import draws_twice
    from strop.serve.order import ModelCard
    from strop.serve.studio import Studio

    before = CoreUse.now()
    with spinner(f"loading {model.name}"):
        pipes = [models.load(model, dtype, device) for _ in range(2 if has_eager else 1)]
    set_threads(threads, before)
    pipe = strop.optimize(pipes[0])
    for one in pipes:
        _add_loras(one, loras)
    controlled = serve_controlnets.controlled(pipe, controlnets, dtype)
    request = PictureRequest("a red circle", model.default_size, 2, model.guidance)
    with compiling(pipe):
        for count in (1, 2):  # a decoder has a graph for one picture, and one for several
            draw(pipe, [request] * count)
        serve_controlnets.draw_with_each(pipe, controlled, request)
    card = ModelCard(
        Path(model.name).resolve().name,
        model.default_size,
        model.factor,
        model.guidance,
        tuple(loras),
        has_eager,
        _spell(model),
        samplers=samplers_of(pipe.scheduler),
        reads_weights=reads_weights(pipe),
        draws_twice=draws_twice(pipe),
        controlnets=tuple(controlled),
    )
    return Studio(card, pipe, pipes[1] if has_eager else None, controlled)


def _add_loras(pipe: Any, loras: dict[str, Path]) -> None:
    for name, file in loras.items():
        load_lora(pipe, file, name)
    if loras:
        pipe.disable_lora()


def _spell(model: models.ModelFolder) -> Spell:
    return _spelled if model.is_sprites else _as_it_is


def _spelled(text: str, _: str) -> tuple[str, str]:
    from strop.models.sprites.spelling import spelled

    return spelled(text)


def _as_it_is(text: str, _: str) -> tuple[str, str]:
    return text, ""


def limits_of(settings: ServeSettings, size: PictureSize, device: str) -> ServeLimits:
    """Return the limits of a server whose model draws pictures of ``size`` by itself."""
    from strop.serve.limits import ServeLimits

    return ServeLimits(
        most_pixels=settings.max_pixels or _LARGER * size.num_pixels,
        most_batch=settings.max_batch or _BATCHES[device],
        most_waiting=settings.max_waiting,
        most_steps=settings.max_steps,
    )


def studio_of(settings: ServeSettings, device: str) -> Studio:
    """Load and compile the model of the settings. Raises CommandError for what cannot be had."""
    found = models.find_model(settings.model)
    folder = Path(settings.lora) if settings.lora else None
    if folder is not None and found.is_flux:
        raise CommandError("LoRAs are added to Stable Diffusion only; leave out --lora")
    nets = serve_controlnets.find_controlnets(settings.controlnets, found)
    kind = arguments.chosen_dtype(Dtype(settings.dtype), device)
    has_eager = found.is_sprites if settings.eager is None else settings.eager
    loras = lora_files(folder)
    return load_studio(found, kind, device, loras, has_eager, settings.threads, nets)


def _serve_here(settings: ServeSettings, listening: socket, access: ServeAccess) -> None:
    models.find_model(settings.model)  # before the device is looked for, which takes a while
    device = arguments.chosen_device(DeviceName(settings.device))
    studio = studio_of(settings, device)
    import torch

    from strop.serve.service import Service

    threads = torch.get_num_threads()
    limits = limits_of(settings, studio.card.size, device)
    service = Service(studio, limits, prepare=lambda: torch.set_num_threads(threads))
    serve_until_stopped(service, listening, access)


@dataclass(frozen=True)
class ServeAccess:
    """Hold the token that requests need, and the names under which the server answers."""

    secret: str
    hosts: tuple[str, ...]


def serve_until_stopped(
    service: Service, listening: socket, access: ServeAccess, more: str = ""
) -> None:
    """Say where the server is, and serve until a signal stops it."""
    from strop.serve import running
    from strop.serve.app import build_app
    from strop.serve.guard import GuardRules
    from strop.serve.logs import log_as_json

    log_as_json()
    card: ModelCard = service.painter.card
    asks = " (it asks for the token)" if access.secret else ""
    nets = [counted(len(card.controlnets), "ControlNet")] if card.controlnets else []
    parts = (card.name, counted(len(card.loras), "LoRA"), *nets, *([more] if more else ()))
    what = ", ".join(parts)
    typer.echo(f"{what}: {running.address_of(listening)}{asks}")
    running.run(build_app(service, GuardRules(access.secret, access.hosts)), service, listening)
