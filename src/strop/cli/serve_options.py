"""Name the options of ``strop serve``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from strop.cli import arguments

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
ControlNetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--controlnet",
        metavar="[NAME=]FOLDER",
        help="Load the ControlNet in this diffusers folder. Requests of A1111's interface name it "
        "by the name of the folder, or by NAME. Give it several times for several.",
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
RayOption = Annotated[
    bool,
    typer.Option(
        "--ray",
        help="Draw by replicas on Ray Serve: one for each GPU, or for each --replica-cpus cores "
        "with --device cpu. A picture whose replica dies is drawn by another one. Needs "
        "strop\\[ray].",
    ),
]
RayAddressOption = Annotated[
    str,
    typer.Option(
        metavar="HOST:PORT",
        help="Join this Ray, or 'auto' for the one of this machine, where the model lies under the "
        "same path on all machines. Without it a Ray is started here, and stopped at the end.",
    ),
]
ReplicasOption = Annotated[
    int, typer.Option(min=0, max=1000, help="Have this many replicas; 0 takes as many as fit.")
]
MaxReplicasOption = Annotated[
    int,
    typer.Option(
        min=0,
        max=1000,
        help="Start up to this many replicas while pictures wait, and end them again; 0 takes the "
        "number of --replicas.",
    ),
]
PerGpuOption = Annotated[
    int, typer.Option(min=1, max=16, help="Let this many replicas share a GPU.")
]
ReplicaCpusOption = Annotated[
    int,
    typer.Option(
        min=0,
        max=1024,
        help="Give each replica this many cores, and as many threads; 0 takes 1 on a GPU, and on a "
        "CPU an even share, or 4.",
    ),
]
ScaleUpOption = Annotated[
    float,
    typer.Option(min=0, help="Start a replica when pictures have waited for so many seconds."),
]
ScaleDownOption = Annotated[
    float, typer.Option(min=0, help="End a replica that was not needed for so many seconds.")
]
DeploymentFileOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Write a file for 'serve run' and 'serve deploy' that serves the same, and end. With "
        "--ray only.",
    ),
]


@dataclass(frozen=True)
class ServeSettings:
    """Hold what is served, and how much of it, as plain values: they travel to other machines. What
    is "" or 0 is left to the model and the machine."""

    model: str
    lora: str = ""
    max_batch: int = 0
    max_pixels: int = 0
    max_steps: int = 150
    max_waiting: int = 64
    eager: bool | None = None
    device: str = "auto"
    arch: int = 0
    dtype: str = "auto"
    threads: int = 0
    controlnets: tuple[str, ...] = ()
