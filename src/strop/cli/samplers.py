"""Choose a sampler on the command line, under the names that the interfaces of the server have."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from strop.cli.mistakes import CommandError, require_diffusion

if TYPE_CHECKING:
    from strop.cli.models import ModelFolder

SamplerOption = Annotated[
    str,
    typer.Option(
        help="Draw by this sampler, under its name in A1111, such as 'Euler a' or 'DPM++ 2M"
        " Karras'; --list-samplers shows them. [dim]\\[default: the model's own][/]",
        show_default=False,
    ),
]
ScheduleOption = Annotated[
    str,
    typer.Option(
        help="Let the sampler take its steps so: karras, exponential, uniform, simple or"
        " sgm_uniform, as far as it has them. [dim]\\[default: the sampler's own][/]",
        show_default=False,
    ),
]
ListOption = Annotated[
    bool,
    typer.Option(
        "--list-samplers", help="Show the samplers that draw with the model, and do nothing else."
    ),
]


def of_model(model: ModelFolder) -> dict[str, Sequence[str]]:
    """Return the samplers that draw with a model beside its own, by the scheduler of its folder,
    without its weights. Raises CommandError if that cannot be read."""
    import diffusers

    from strop.drawing.samplers import samplers_of

    folder = model.folder / "scheduler"
    try:
        config: dict[str, Any] = json.loads((folder / "scheduler_config.json").read_text("utf-8"))
        kind = getattr(diffusers, config["_class_name"])
        return samplers_of(kind.from_config(config))
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise CommandError(f"cannot read the scheduler in {folder}: {error}") from error


def find(sampler: str, schedule: str, model: ModelFolder) -> tuple[str, str]:
    """Return a sampler and a schedule as they are called here. Raises BadParameter for what does
    not draw with the model."""
    from strop.drawing.samplers import AUTOMATIC, UnknownSamplerError, chosen

    if not (sampler or schedule):
        return "", AUTOMATIC
    try:
        return chosen(sampler, schedule, of_model(model))
    except UnknownSamplerError as error:
        raise typer.BadParameter(str(error), param_hint=f"'--{error.field}'") from error


def show(model: ModelFolder) -> None:
    """Print the samplers of a model and their schedules, the automatic one first."""
    from strop.drawing.samplers import ALIASES

    require_diffusion()
    have, name = of_model(model), model.name
    screen = Console(highlight=False, soft_wrap=True)
    if not have:
        screen.print(f"{name} is drawn by its own sampler alone", markup=False)
        return
    table = Table("--sampler", "--schedule, the automatic one first", "other names", box=None)
    for one, schedules in have.items():
        others = [alias for alias, meant in ALIASES.items() if meant == one]
        table.add_row(one, ", ".join(schedules), ", ".join(others))
    screen.print(table)
    screen.print(f"without --sampler {name} is drawn by its own", markup=False)
