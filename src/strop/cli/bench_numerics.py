"""Judge what changes numerics by name (``strop bench pictures --numerics``)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from strop.cli.mistakes import CommandError
from strop.cli.tables import known, show

if TYPE_CHECKING:
    from torch import Tensor

_SIDE = 192  # of a picture in the file with the worst ones


def judge(names: list[str], device: str, num_prompts: int, budget: float, out: Path | None) -> None:
    """Print a row for each model and name, and the errors of layers in 8 bits. Raises CommandError
    where too few pictures are right."""
    from strop.bench import numerics
    from strop.cli.models import quieten
    from strop.cli.stages import progress_bar
    from strop.options import NAMED_NUMERICS

    known("--numerics", names, NAMED_NUMERICS)
    quieten()
    with progress_bar() as bar:
        task = bar.add_task("drawing", total=None, note="exactly")
        result, worst = numerics.run(
            names,
            out,
            device,
            num_prompts=num_prompts,
            budget=budget,
            step=lambda text: bar.update(task, note=text),
        )
    if len(layers := numerics.layer_rows(result)) > 1:
        show(layers[0], layers[1:], {})
    header, *rows = numerics.rows_of(result)
    show(header, rows, result)
    if out is not None:
        _save(worst, Path(result["file"]).with_suffix(".png"))
    if not result["is_good"]:
        raise CommandError("too few pictures are right: see the lines marked BROKEN")


def _save(worst: list[tuple[str, Tensor, Tensor]], path: Path) -> None:
    """Write the worst picture of each row beside the exact one."""
    from strop.cli import pictures

    panels = []
    for title, picture, exact in worst:
        for pixels, kind in ((exact, "exact"), (picture, title)):
            shown = pictures.enlarged(pictures.to_picture(pixels), _SIDE)
            panels.append(pictures.Panel(shown, kind))
    pictures.save(pictures.sheet(panels, columns=2), path)
