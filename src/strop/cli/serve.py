"""Serve pictures over HTTP (``strop serve``)."""

from __future__ import annotations

import importlib.util
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from strop.cli import arguments, models
from strop.cli.adapters import load_lora
from strop.cli.arguments import ArchOption, DeviceName, DeviceOption, Dtype
from strop.cli.cores import CoreUse
from strop.cli.generate import DtypeOption, ThreadsOption, set_threads
from strop.cli.mistakes import CommandError, reported, require_diffusion, warn
from strop.drawing.request import PictureRequest
from strop.wording import counted

if TYPE_CHECKING:
    from strop.serve.limits import ServeLimits
    from strop.serve.order import ModelCard, Spell
    from strop.serve.studio import Studio

EXAMPLES = """[bold]Examples[/]
$ strop serve   # the built-in model, on http://127.0.0.1:8000
$ strop serve ./stable-diffusion-v1-5 --lora ./loras --port 9000
$ strop serve ./sdxl --host 0.0.0.0 --token-file token.txt

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
_LOCAL = ("localhost", "127.0.0.1", "[::1]")

ModelArgument = Annotated[
    str,
    typer.Argument(
        help="Serve this model: 'sprites' or 'sprites-dit', which ship with Strop, or a diffusers "
        "folder."
    ),
]
HostOption = Annotated[
    str,
    typer.Option(
        help="Listen on this address. Others than this machine's own need a token, or "
        "--without-token."
    ),
]
PortOption = Annotated[
    int, typer.Option(min=0, max=65535, help="Listen on this port; 0 takes a free one.")
]
LoraOption = Annotated[
    Path | None,
    typer.Option(
        "--lora",
        metavar="DIR",
        help="Load every .safetensors file of this folder as a LoRA. Requests name them by their "
        "file names without the ending; no request reaches another file.",
    ),
]
EagerOption = Annotated[
    bool | None,
    typer.Option(
        "--eager/--no-eager",
        help="Keep the model a second time without Strop, so that the page can compare. "
        r"[dim]\[default: only for sprites][/]",
        show_default=False,
    ),
]
TokenFileOption = Annotated[
    Path | None,
    typer.Option(
        help="Ask every request for the token in this file, as 'Authorization: Bearer TOKEN'. The "
        "environment variable STROP_SERVE_TOKEN does the same."
    ),
]
TokenOption = Annotated[str, typer.Option(envvar="STROP_SERVE_TOKEN", hidden=True)]
WithoutTokenOption = Annotated[
    bool,
    typer.Option("--without-token", help="Serve other machines without asking for a token."),
]
PixelsOption = Annotated[
    int,
    typer.Option(
        min=0,
        max=arguments.MOST_PIXELS,
        help="Draw pictures of up to this many pixels; 0 takes four times the model's own size.",
    ),
]
BatchOption = Annotated[
    int,
    typer.Option(
        min=0,
        max=64,
        help="Draw up to this many pictures together; 0 takes 4 on a CPU and 8 on a GPU. With 1 "
        "each has the bits that strop generate gives.",
    ),
]
WaitingOption = Annotated[
    int,
    typer.Option(min=1, max=100_000, help="Let this many pictures wait; more get status 429."),
]
MostStepsOption = Annotated[
    int, typer.Option(min=1, max=1000, help="Draw in up to this many steps.")
]


@reported
def command(
    model: ModelArgument = models.SPRITES,
    port: PortOption = 8000,
    lora: LoraOption = None,
    host: HostOption = "127.0.0.1",
    token_file: TokenFileOption = None,
    token: TokenOption = "",
    without_token: WithoutTokenOption = False,
    max_batch: BatchOption = 0,
    max_pixels: PixelsOption = 0,
    max_steps: MostStepsOption = 150,
    max_waiting: WaitingOption = 64,
    eager: EagerOption = None,
    device: DeviceOption = DeviceName.auto,
    arch: ArchOption = 0,
    dtype: DtypeOption = Dtype.auto,
    threads: ThreadsOption = 0,
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
    require_diffusion()
    require_serve()
    from strop.serve import running

    secret = _secret(token_file, token)
    is_local = running.is_loopback(host)
    _check_access(host, is_local or without_token or bool(secret))
    listening = running.bound(host, port)
    try:
        found = models.find_model(model)
        if lora is not None and found.is_flux:
            raise CommandError("LoRAs are added to Stable Diffusion only; leave out --lora")
        where = arguments.chosen_device(device)
        kind = arguments.chosen_dtype(dtype, where)
        has_eager = found.is_sprites if eager is None else eager
        studio = _studio(found, kind, where, _lora_files(lora), has_eager, threads)
        limits = _limits(found, where, max_batch, max_pixels, max_steps, max_waiting)
        _serve(
            studio,
            limits,
            listening,
            secret,
            ("localhost", "127.0.0.1", "[::1]") if is_local else (),
        )
    finally:
        listening.close()


def require_serve() -> None:
    missing = [n for module, n in _NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise CommandError(f"this command needs {', '.join(missing)}: pip install 'strop[serve]'")


def _check_access(host: str, is_allowed: bool) -> None:
    if not is_allowed:
        raise CommandError(
            f"{host} is reached from other machines: give --token-file FILE, or --without-token"
        )


def _secret(file: Path | None, token: str) -> str:
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


def _lora_files(folder: Path | None) -> dict[str, Path]:
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


def _studio(
    model: models.ModelFolder,
    dtype: Any,
    device: str,
    loras: dict[str, Path],
    has_eager: bool,
    threads: int,
) -> Studio:
    """Load the model, and draw with it once, so that no request waits for the compiler."""
    import strop
    from strop.cli.stages import compiling, spinner
    from strop.drawing.draw import draw
    from strop.serve.order import ModelCard
    from strop.serve.studio import Studio

    before = CoreUse.now()
    with spinner(f"loading {model.name}"):
        pipes = [models.load(model, dtype, device) for _ in range(2 if has_eager else 1)]
    set_threads(threads, before)
    pipe = strop.optimize(pipes[0])
    for one in pipes:
        _add_loras(one, loras)
    request = PictureRequest("a red circle", model.default_size, 2, model.guidance)
    with compiling(pipe):
        for count in (1, 2):  # a decoder has a graph for one picture, and one for several
            draw(pipe, [request] * count)
    card = ModelCard(
        Path(model.name).resolve().name,
        model.default_size,
        model.factor,
        model.guidance,
        tuple(loras),
        has_eager,
        _spell(model),
    )
    return Studio(card, pipe, pipes[1] if has_eager else None)


def _add_loras(pipe: Any, loras: dict[str, Path]) -> None:
    for name, file in loras.items():
        load_lora(pipe, file, name)
    if loras:
        pipe.disable_lora()


def _spell(model: models.ModelFolder) -> Spell:
    if not model.is_sprites:
        return lambda text, _: (text, "")
    from strop.models.sprites.spelling import spelled

    return lambda text, _: spelled(text)


def _limits(
    model: models.ModelFolder, device: str, batch: int, pixels: int, steps: int, waiting: int
) -> ServeLimits:
    from strop.serve.limits import ServeLimits

    return ServeLimits(
        most_pixels=pixels or _LARGER * model.default_size.num_pixels,
        most_batch=batch or _BATCHES[device],
        most_waiting=waiting,
        most_steps=steps,
    )


def _serve(
    studio: Studio, limits: ServeLimits, listening: Any, secret: str, hosts: tuple[str, ...]
) -> None:
    import torch

    from strop.serve import running
    from strop.serve.app import build_app
    from strop.serve.guard import GuardRules
    from strop.serve.logs import log_as_json
    from strop.serve.service import Service

    threads = torch.get_num_threads()
    service = Service(studio, limits, prepare=lambda: torch.set_num_threads(threads))
    log_as_json()
    card: ModelCard = studio.card
    asks = " (it asks for the token)" if secret else ""
    typer.echo(
        f"{card.name}, {counted(len(card.loras), 'LoRA')}: {running.address_of(listening)}{asks}"
    )
    running.run(build_app(service, GuardRules(secret, hosts)), service, listening)
