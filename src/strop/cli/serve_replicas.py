"""Serve by replicas on Ray (``strop serve --ray``), and write a file that deploys the same."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from socket import create_connection, socket
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from strop.cli import arguments, models
from strop.cli.arguments import DeviceName
from strop.cli.mistakes import CommandError
from strop.cli.serve import (
    LOCAL_NAMES,
    ServeAccess,
    limits_of,
    secret_of,
    serve_until_stopped,
    studio_of,
)
from strop.cli.serve_controlnets import find_controlnets
from strop.cli.serve_options import ServeSettings
from strop.serve.replicas.plan import Machines, ReplicaPlan, ReplicaWish
from strop.wording import counted

if TYPE_CHECKING:
    from strop.serve.guard import GuardRules
    from strop.serve.limits import ServeLimits
    from strop.serve.order import ModelCard
    from strop.serve.studio import Studio

S = TypeVar("S", ServeSettings, ReplicaWish, "FrontSettings")
_IMPORT_PATH = "strop.cli.serve_replicas:build"
_ANSWER_S = 10.0
_HEADER = """\
# Written by strop serve --ray --deployment-file. It is started by
#     serve run {name}
# or, on a Ray cluster that runs, by
#     serve deploy {name}
# The numbers of replicas are in args, not under "deployments": the front must know them, too.
"""


@dataclass(frozen=True)
class FrontSettings:
    """Hold what a front of a deployment file needs besides: the file of the token, whether only its
    own machine asks it, and whether it must have a token."""

    token_file: str = ""
    is_local: bool = True
    needs_token: bool = False


def run(
    settings: ServeSettings,
    counts: ReplicaWish,
    address: str,
    listening: socket,
    access: ServeAccess,
) -> None:
    """Start replicas, and serve from this process until a signal stops it. Raises CommandError and
    PlanError."""
    models.find_model(settings.model)
    settings = _with_whole_paths(settings)
    with _ray(address) as machines:
        settings = replace(settings, device=_device_on(machines, settings.device, address))
        plan = counts.plan(settings.device, machines)
        if not address:
            plan.check_room(machines)
        name = f"strop-{listening.getsockname()[1]}"
        _serve_from_here(settings, plan, name, listening, access)


def _serve_from_here(
    settings: ServeSettings, plan: ReplicaPlan, name: str, listening: socket, access: ServeAccess
) -> None:
    from ray import serve

    from strop.cli.stages import spinner
    from strop.serve.replicas import deployed

    application = deployed.replicas_of(plan, partial(load_replica, settings, plan.cpus))
    try:
        with spinner(f"starting {counted(plan.replicas, 'replica')}"):
            handle = serve.run(application, name=name, route_prefix=None)
            introduction = deployed.RayReplicas(handle).introduction()
        limits = partial(limits_for, settings)
        service = deployed.service_of(introduction, handle, limits, plan.most)
        shown = counted(plan.replicas, "replica")
        if plan.most > plan.replicas:
            shown = f"{plan.replicas} to {counted(plan.most, 'replica')}"
        serve_until_stopped(service, listening, access, shown)
    except RuntimeError as error:  # what serve.run raises where a replica cannot load the model
        raise CommandError(f"the replicas did not start: {error}") from error
    finally:
        serve.delete(name)


def load_replica(settings: ServeSettings, cpus: int) -> Studio:
    """Load the model in a process of Ray's, which has so many cores."""
    arguments.parse_arch(settings.arch)
    device = arguments.chosen_device(DeviceName(settings.device))
    return studio_of(replace(settings, threads=settings.threads or cpus), device)


def limits_for(settings: ServeSettings, card: ModelCard) -> ServeLimits:
    return limits_of(settings, card.size, settings.device)


def rules_of(front: FrontSettings) -> GuardRules:
    """Return who may ask a front of a deployment file. Raises CommandError where its token is not
    on its machine."""
    from strop.serve.guard import GuardRules

    token = os.environ.get("STROP_SERVE_TOKEN", "")  # noqa: TID251 (a secret, which is no option)
    secret = secret_of(Path(front.token_file) if front.token_file else None, token)
    if front.needs_token and not secret:
        raise CommandError("the front finds no token; set STROP_SERVE_TOKEN where it runs")
    return GuardRules(secret, LOCAL_NAMES if front.is_local else ())


def build(args: dict[str, Any]) -> Any:
    """Return the application of a deployment file: Ray Serve calls this with its ``args``. Raises
    CommandError and PlanError for what is wrong with them."""
    from strop.serve.replicas import deployed

    settings, counts, front = _read_args(args)
    plan = counts.plan(settings.device, None)
    return deployed.front_of(
        plan,
        partial(load_replica, settings, plan.cpus),
        partial(limits_for, settings),
        partial(rules_of, front),
    )


def write_file(
    path: Path,
    settings: ServeSettings,
    counts: ReplicaWish,
    front: FrontSettings,
    place: tuple[str, int],
) -> None:
    """Write a deployment file. It has no secret: a token is read where the front runs. Raises
    CommandError and PlanError."""
    try:
        import yaml
    except ImportError as error:
        raise CommandError("a deployment file needs pyyaml: pip install 'strop[ray]'") from error
    arguments.check_file(path)
    models.find_model(settings.model)
    if settings.device == "auto":
        raise CommandError("the file is for other machines: give --device cuda or --device cpu")
    counts.plan(settings.device, None)
    content = deployment(_with_whole_paths(settings), counts, front, place)
    text = _HEADER.format(name=path.name) + yaml.safe_dump(content, sort_keys=False)
    path.write_text(text, encoding="utf-8")
    typer.echo(f"{path}: serve run {path}")


def deployment(
    settings: ServeSettings, counts: ReplicaWish, front: FrontSettings, place: tuple[str, int]
) -> dict[str, Any]:
    """Return the content of a deployment file, in the words of Ray Serve's configuration."""
    args = {"model": asdict(settings), "replicas": asdict(counts), "front": asdict(front)}
    application = {
        "name": "strop",
        "route_prefix": "/",
        "import_path": _IMPORT_PATH,
        "args": args,
    }
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": place[0], "port": place[1]},
        "applications": [application],
    }


def _read_args(args: Mapping[str, Any]) -> tuple[ServeSettings, ReplicaWish, FrontSettings]:
    if set(args) != {"model", "replicas", "front"}:
        raise CommandError("args: give model, replicas and front, each with its own values")
    return (
        _read(ServeSettings, "model", args),
        _read(ReplicaWish, "replicas", args),
        _read(FrontSettings, "front", args),
    )


def _read(kind: type[S], name: str, args: Mapping[str, Any]) -> S:
    from pydantic import TypeAdapter, ValidationError

    unknown = set(args[name]) - {field.name for field in fields(kind)}
    if unknown:
        raise CommandError(f"args: {name} has no {', '.join(sorted(unknown))}")
    try:
        return TypeAdapter(kind).validate_python(args[name])
    except ValidationError as error:
        raise CommandError(f"args: {name}: {error}") from error


def _with_whole_paths(settings: ServeSettings) -> ServeSettings:
    """Return settings that mean the same in a process with another working folder."""
    found = models.find_model(settings.model)
    model = settings.model if found.is_sprites else str(found.folder.resolve())
    lora = str(Path(settings.lora).resolve()) if settings.lora else ""
    nets = find_controlnets(settings.controlnets, found)
    whole = tuple(f"{name}={folder}" for name, folder in nets.items())
    return replace(settings, model=model, lora=lora, controlnets=whole)


def _device_on(machines: Machines, device: str, address: str) -> str:
    """Return "cuda" or "cpu": what this machine has, or what those of a Ray that is joined have."""
    if not address:
        return arguments.chosen_device(DeviceName(device))
    if device == "auto":
        return "cuda" if machines.gpus else "cpu"
    return device


def _check_answers(address: str) -> None:
    """Raise CommandError where nobody answers at an address; Ray would wait for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "//" in host:
        raise CommandError(f"{address!r} is no address of a Ray; give HOST:PORT, or auto")
    try:
        create_connection((host, int(port)), _ANSWER_S).close()
    except (OSError, OverflowError) as error:
        raise CommandError(
            f"no Ray answers at {address} ({error}); start one there: ray start --head"
        ) from error


@contextmanager
def _ray(address: str) -> Iterator[Machines]:
    """Start a Ray of our own, or join one, and leave it in the end. Raises CommandError."""
    if address not in ("", "auto"):
        _check_answers(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # noqa: TID251 (Ray reads it there alone)
    import ray
    from ray import serve

    from strop.serve.logs import log_as_json

    mine: dict[str, Any] = {"_node_ip_address": "127.0.0.1", "include_dashboard": False}
    try:
        ray.init(
            address=address or "local",
            log_to_driver=False,
            logging_level=logging.WARNING,
            **({} if address else mine),
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise CommandError(f"Ray does not start: {error}") from error
    log_as_json()  # from now on Ray's lines, too
    try:
        serve.start(http_options={"location": "NoServer"})
        found = ray.cluster_resources()
        yield Machines(found.get("GPU", 0), found.get("CPU", 0))
    finally:
        if not address:
            serve.shutdown()
        ray.shutdown()
