"""Define the ``strop`` command. Nothing here imports torch before a verb has checked its
arguments."""

from __future__ import annotations

from typing import Annotated

import typer

import strop
from strop.cli import bench, build, cache, cases, doctor, env, explain, generate, serve, train
from strop.cli.help_screen import App

__all__ = ["app", "main"]

app = App(
    name="strop",
    help="""Strop makes PyTorch diffusion models fast: it compiles a model once, for every size
    of pictures.

    Start with:
    $ strop generate "a red circle above a blue square" -o out.png""",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="""[bold]To look inside[/]
    $ strop explain --html report.html   # passes, fusion plan, kernels, costs

    [bold]When a picture is wrong[/]
    $ STROP_CHECK=1 strop generate ...   # names the first step that differs from torch
    $ STROP_DUMP=dumps strop generate ...; strop bisect dumps/001_unet   # names the pass to blame

    A command ends with 0 when it is done, with 1 when it has failed, and with 2 when its arguments
    are wrong.""",
)
app.command("generate", epilog=generate.EXAMPLES)(generate.command)
app.command("serve", epilog=serve.EXAMPLES)(serve.command)
app.command("explain", epilog=explain.EXAMPLES)(explain.command)
app.command("build", epilog=build.EXAMPLES)(build.command)
app.command("repro", epilog=cases.REPRO_EXAMPLES)(cases.repro)
app.command("minify", epilog=cases.MINIFY_EXAMPLES)(cases.minify)
app.command("bisect", epilog=cases.BISECT_EXAMPLES)(cases.bisect)
app.command("doctor", epilog=doctor.EXAMPLES)(doctor.command)
app.command("env", epilog=env.EXAMPLES)(env.command)
app.add_typer(train.app, name="train")
app.add_typer(bench.app, name="bench")
app.add_typer(cache.app, name="cache")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"strop {strop.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line; ends the process with 0, 1 or 2."""
    app(prog_name="strop")
