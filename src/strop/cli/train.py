"""Fine-tune with the flags of diffusers' example scripts (``strop train``)."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from strop.cli.cores import CoreUse, use_free_cores
from strop.cli.help_screen import App
from strop.cli.mistakes import CommandError, reported, require_diffusion, tell, warn
from strop.errors import OptionError, UnsupportedError
from strop.train import given_settings, launch, unbuilt_flags
from strop.train import settings as knobs
from strop.train.places import GroupPlace, place_of_this_process
from strop.train.setting import TASKS
from strop.wording import counted

if TYPE_CHECKING:
    from strop.cli.training_screen import Quiet, Screen
    from strop.train.loop import Outcome
    from strop.train.ranks import Ranks

EXAMPLES = {
    "text-to-image": """[bold]Examples[/]
$ strop train text-to-image --model sprites --max_train_steps 200 --output_dir out
$ strop train text-to-image --model ./stable-diffusion-v1-5 --train_data_dir pictures \
--resolution 512 --center_crop --cache_latents --use_ema --mixed_precision bf16
$ strop train text-to-image --config train.yaml --resume_from_checkpoint latest
""",
    "dreambooth": """[bold]Examples[/]
$ strop train dreambooth --model sprites --instance_data_dir dog --instance_prompt "a sks dog" \
--max_train_steps 200
$ strop train dreambooth --model ./sd --instance_data_dir dog --instance_prompt "a sks dog" \
--with_prior_preservation --class_data_dir dogs --class_prompt "a dog"
""",
    "lora": """[bold]Examples[/]
$ strop train lora --model ./sd --train_data_dir pictures --rank 8 --lora_alpha 16 \
--max_train_steps 1000
$ strop train lora --model ./sd --instance_data_dir dog --instance_prompt "a sks dog"
""",
    "controlnet": """[bold]Examples[/]
$ strop train controlnet --model ./stable-diffusion-v1-5 --train_data_dir pictures \
--conditioning_data_dir edges --resolution 512 --max_train_steps 20000
$ strop train controlnet --model ./sd --train_data_dir pictures \
--validation_prompt "a red circle" --validation_image circle.png --validation_steps 500
""",
}
_FLAGS = """The flags are those of diffusers' {script}, written with - or with _. They are also the
keys of the YAML file of --config; a flag wins over the file."""
_SUMMARIES = {
    "text-to-image": "Train a model on pictures with captions, and write it as a diffusers folder."
    f"\n\n{_FLAGS.format(script='train_text_to_image.py')}",
    "dreambooth": "Teach a model a new subject from a few pictures, and write it as a diffusers"
    f" folder.\n\n{_FLAGS.format(script='train_dreambooth.py')}",
    "lora": "Train adapters on pictures with captions, or of one subject, and write LoRA files."
    "\n\nThe file pytorch_lora_weights.safetensors is for diffusers,"
    " kohya_lora_weights.safetensors for ComfyUI and others.",
    "controlnet": "Train a ControlNet, by which a model draws after edges, depths or poses, and"
    f" write it as a diffusers folder.\n\n{_FLAGS.format(script='train_controlnet.py')}",
}

app = App(
    help="""Train a model, or adapters for it.

    SIGTERM saves a checkpoint and ends a training. --resume_from_checkpoint latest continues it,
    and gives the same bits as a training that was never stopped.""",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _option(knob: Any, task: str) -> inspect.Parameter:
    """Return the command line's view of a setting. A default of None means that it was not given,
    so that a file may tell."""
    about = knob.metadata
    kind = about["kind"]
    names = [f"--{knob.name}"]
    if kind is bool:
        names = [f"--{knob.name}/--no_{knob.name}"]
    elif about["alias"]:
        names.insert(0, f"--{about['alias']}")
    default = knobs.default_of(knob, task)
    text = about["doc"]
    text += f" Choose one of {', '.join(about['choices'])}." if about["choices"] else ""
    if default not in (None, "", (), False):
        text += (
            rf" [dim]\[default: {default:g}][/]"
            if kind is float
            else (rf" [dim]\[default: {default}][/]")
        )
    option = typer.Option(*names, help=text, rich_help_panel=about["panel"], show_default=False)
    wanted = list[str] if kind is tuple else kind
    return inspect.Parameter(
        knob.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[wanted | None, option],
    )


def _unbuilt(name: str) -> inspect.Parameter:
    """Return a flag of diffusers that only says why it is not there."""

    def refuse(value: bool | str | None) -> None:
        if value:
            raise typer.BadParameter(unbuilt_flags.UNBUILT[name], param_hint=f"'--{name}'")

    return _hidden(f"no_{name}", name, refuse)


def _hidden(
    parameter: str, name: str, callback: Callable[[bool | str | None], None] | None = None
) -> inspect.Parameter:
    option = typer.Option(f"--{name}", hidden=True, callback=callback)
    kind = bool if name in unbuilt_flags.SWITCHES else str
    return inspect.Parameter(
        parameter,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, option],
    )


_CONFIG = inspect.Parameter(
    "config",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        Path | None,
        typer.Option(
            "--config",
            help="Read settings from this YAML file, with one 'name: value' on each line.",
            show_default=False,
        ),
    ],
)


def _command(task: str) -> Callable[..., None]:
    """Make ``strop train TASK``, with an option for each setting of the task."""

    @reported
    def command(**given: Any) -> None:
        settings = _settings(task, given)
        require_diffusion()
        _run(settings)

    rows = [
        _CONFIG,
        *(_option(knob, task) for knob in knobs.flags(task)),
        *(_unbuilt(name) for name in unbuilt_flags.UNBUILT),
        *(_hidden(name, name) for name in unbuilt_flags.NEEDLESS),
    ]
    command.__signature__ = inspect.Signature(rows)  # type: ignore[attr-defined]
    command.__annotations__ = {row.name: row.annotation for row in rows}
    command.__doc__ = _SUMMARIES[task]
    return command


def _settings(task: str, given: dict[str, Any]) -> knobs.Settings:
    """Take the defaults, then the file, then the flags. A mistake ends with exit code 2."""
    path = given.pop("config")
    names = {*(knob.name for knob in knobs.flags(task)), *unbuilt_flags.NEEDLESS}
    # Not given: None, or the empty list of an option that may be repeated.
    flags = {n: v for n, v in given.items() if n in names and v is not None and v != []}
    try:
        file = {} if path is None else given_settings.read_yaml(path)
        values = {**_spelt(file, task), **flags}
        made = given_settings.make(task, values)
    except (OptionError, UnsupportedError) as error:
        raise typer.BadParameter(str(error)) from error
    if not place_of_this_process().rank:
        for text in (*given_settings.needless(values), *given_settings.idle(made)):
            warn(text)
    return made


def _spelt(file: dict[str, Any], task: str) -> dict[str, Any]:
    """Return the file's keys as flags spell them, so that a flag replaces its line."""
    aliases = {k.metadata["alias"]: k.name for k in knobs.flags(task) if k.metadata["alias"]}
    plain = {key.replace("-", "_"): value for key, value in file.items()}
    return {aliases.get(key, key): value for key, value in plain.items()}


def _run(settings: knobs.Settings) -> None:
    place = place_of_this_process()
    if place.count > 1 and settings.max_restarts:
        raise OptionError(
            "--max_restarts is for processes that strop starts (--num_processes): another launcher "
            "has to start its own again, as torchrun does by its own --max-restarts"
        )
    if place.count == 1 and (settings.num_processes > 1 or settings.max_restarts):
        count, restarts = settings.num_processes, settings.max_restarts
        own = ["--max_restarts", "0"] if restarts else []  # a file may say it, too
        words = [sys.executable, "-m", "strop", *sys.argv[1:], *own]
        raise typer.Exit(launch.launch(words, count, restarts, warn))
    _train(settings, place)


def _train(settings: knobs.Settings, place: GroupPlace) -> None:
    """Train as the process that this one is among its group; rank 0 tells the user."""
    before = CoreUse.now()
    import torch

    from strop.cli import models
    from strop.cli.training_screen import Quiet, Screen
    from strop.train.messages import LostRanksError
    from strop.train.ranks import joined

    models.quieten()
    is_alone = place.count == 1
    if is_alone and not settings.threads and use_free_cores(before):
        count = counted(torch.get_num_threads(), "CPU thread")
        warn(f"other programs keep cores busy: {count} (--threads)")
    screen = Quiet() if place.rank else Screen()
    try:
        with screen, joined(settings, place) as ranks:
            outcome = _train_as(settings, ranks, screen)
    except torch.OutOfMemoryError as error:
        raise CommandError(
            "the GPU has too little memory; lower --train_batch_size and raise "
            "--gradient_accumulation_steps, or add --gradient_checkpointing; lora and controlnet "
            "take --blocks_to_swap"
        ) from error
    except (LostRanksError, torch.AcceleratorError) as error:  # another attempt may go on
        tell(error)
        raise typer.Exit(launch.LOST) from error
    screen.result(settings, outcome)
    if outcome.stopped_by is not None:
        raise typer.Exit(128 + outcome.stopped_by)


def _train_as(settings: knobs.Settings, ranks: Ranks, screen: Screen | Quiet) -> Outcome:
    from strop.train.loop import TrainingLoop
    from strop.train.session import prepare_session

    session = prepare_session(settings, screen.stage, screen.warn, ranks)
    screen.session(session)
    return TrainingLoop(session, screen).run()


for _task in TASKS:
    app.command(
        _task,
        epilog=EXAMPLES[_task],
        context_settings={"token_normalize_func": lambda name: name.replace("_", "-")},
    )(_command(_task))
