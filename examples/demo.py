"""Draws a sheet of pictures through Strop, then a few beside eager torch.

python examples/demo.py [--out FOLDER] [--model FOLDER] [--steps 20]

Writes demo.png and demo_compare.png. Every picture size runs through the same compiled graphs.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image
from rich.console import Console

import strop
from strop.cli import models, pictures
from strop.cli.arguments import check_output, has_bf16
from strop.cli.cores import CoreUse, use_free_cores
from strop.cli.mistakes import CommandError, errors, require_diffusion, warn
from strop.cli.sampling import draw, warm_up
from strop.cli.stages import compiling, progress_bar, spinner
from strop.debug.explain import explain
from strop.drawing.request import PictureRequest, PictureSize

SCENES: tuple[tuple[str, PictureSize], ...] = (
    ("a red circle above a blue square on a white background", PictureSize(96, 64)),
    ("a yellow star to the left of a green heart on a navy background", PictureSize(96, 64)),
    ("a large purple diamond in the center on a beige background", PictureSize(64, 64)),
    ("a pink ring below an orange triangle on a black background", PictureSize(64, 96)),
    ("a small cyan cross at the top left on a gray background", PictureSize(96, 96)),
    ("a green square to the right of a red star on a beige background", PictureSize(96, 64)),
    ("an orange heart above a purple ring on a white background", PictureSize(64, 96)),
    ("a large yellow circle on the right on a navy background", PictureSize(96, 96)),
)
COMPARED = (0, 1, 3, 4)
SEED = 0
ROUNDS = 3  # each time is the shortest of so many runs
LATEST_ROUND_S = 75.0  # no further round starts later than this


class Sheets:
    """The pictures of both ways to run, by their place in SCENES, and their shortest seconds."""

    def __init__(self, pipes: dict[str, Any], steps: int, guidance: float) -> None:
        self.pipes = pipes
        self.requests = [PictureRequest(p, s, steps, guidance, SEED) for p, s in SCENES]
        self.pixels: dict[str, dict[int, torch.Tensor]] = {"eager": {}, "strop": {}}
        self.seconds: dict[str, dict[int, float]] = {"eager": {}, "strop": {}}

    def run(self, jobs: list[tuple[str, int]], text: str) -> None:
        """Draw SCENES[n] with each (kind, n) of ``jobs`` in turn; the shortest time stays."""
        with progress_bar() as bar:
            task = bar.add_task(text, total=sum(self.requests[n].steps for _, n in jobs), note="")
            for kind, number in jobs:
                request, pipe = self.requests[number], self.pipes[kind]
                bar.update(task, note=f"{kind}: {request.prompt}")
                if number not in self.pixels[kind]:
                    warm_up(pipe, request)
                start = time.perf_counter()
                pixels = draw(pipe, request, lambda: bar.advance(task))
                seconds = time.perf_counter() - start
                before = self.seconds[kind].get(number, seconds)
                self.pixels[kind][number], self.seconds[kind][number] = pixels, min(before, seconds)

    def psnr_db(self, number: int) -> float:
        return pictures.psnr_db(self.pixels["eager"][number], self.pixels["strop"][number])

    def grid(self) -> Image:
        """All pictures of Strop with their prompts."""
        panels = []
        for number, (prompt, size) in enumerate(SCENES):
            note = f"{size}, {self.seconds['strop'][number]:.2f} s"
            picture = pictures.to_picture(self.pixels["strop"][number])
            panels.append(pictures.Panel(_enlarged(picture), prompt, (note,)))
        return pictures.sheet(panels, columns=4)

    def comparison(self) -> Image:
        """A row of eager pictures above a row of Strop's."""
        panels = []
        for kind in ("eager", "strop"):
            for number in COMPARED:
                picture = _enlarged(pictures.to_picture(self.pixels[kind][number]))
                seconds = self.seconds[kind][number]
                if kind == "eager":
                    note = f"{SCENES[number][1]}, {self.requests[number].steps} steps"
                    panels.append(pictures.Panel(picture, f"torch eager: {seconds:.2f} s", (note,)))
                    continue
                ratio = self.seconds["eager"][number] / seconds
                lines = (f"{ratio:.1f}x as fast", pictures.psnr_text(self.psnr_db(number)))
                panels.append(pictures.Panel(picture, f"Strop: {seconds:.2f} s", lines))
        return pictures.sheet(panels, columns=len(COMPARED))


def _enlarged(picture: Image) -> Image:
    """Three screen pixels for each of the picture's."""
    return pictures.enlarged(picture, picture.height * 3)


def run(out: Path, model_name: str, steps: int) -> None:
    """Draw everything and print the summary."""
    targets = out / "demo.png", out / "demo_compare.png"
    for target in targets:
        check_output(target)
    require_diffusion()
    model = models.find_model(model_name)
    begin = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float16 if device == "cuda" else torch.float32
    before = CoreUse.now()
    with spinner(f"loading {model.name}"):
        pipes = {kind: models.load(model, dtype, device) for kind in ("eager", "strop")}
    sheets = Sheets(pipes, steps, model.guidance)
    if use_free_cores(before):
        warn(f"other programs keep cores busy: {torch.get_num_threads()} CPU threads")
    compile_seconds = _compile(pipes["strop"], sheets.requests[0])
    sheets.run([("strop", n) for n in range(len(SCENES))], "drawing")
    both = [(kind, n) for n in COMPARED for kind in ("eager", "strop")]
    for number in range(ROUNDS):
        if number == 0 or time.perf_counter() - begin < LATEST_ROUND_S:
            sheets.run(both, f"comparing, round {number + 1} of {ROUNDS}")
    for picture, target in zip((sheets.grid(), sheets.comparison()), targets, strict=True):
        pictures.save(picture, target)
    _summarise(sheets, compile_seconds, time.perf_counter() - begin)
    if device == "cpu" and has_bf16():
        _compare_bf16(model, sheets)
    Console().print(f"pictures: {targets[0]}, {targets[1]}", markup=False, soft_wrap=True)


def _compile(pipe: Any, request: PictureRequest) -> float:
    """Put Strop in front of ``pipe``; seconds until everything is compiled."""
    start = time.perf_counter()
    strop.optimize(pipe)
    with compiling(pipe):
        warm_up(pipe, request)
    return time.perf_counter() - start


def _compare_bf16(model: models.ModelFolder, exact: Sheets) -> None:
    """Draw the compared pictures once more in bf16, and print how far they are from eager fp32."""
    pipes = {kind: models.load(model, torch.bfloat16, "cpu") for kind in ("eager", "strop")}
    sheets = Sheets(pipes, exact.requests[0].steps, model.guidance)
    _compile(pipes["strop"], sheets.requests[0])
    sheets.run([(kind, n) for n in COMPARED for kind in ("eager", "strop")], "comparing in bf16")
    slow = sum(exact.seconds["eager"][n] for n in COMPARED)
    texts = []
    for kind, name in (("eager", "eager"), ("strop", "Strop")):
        took, wanted = sum(sheets.seconds[kind].values()), exact.pixels["eager"]
        off = min(pictures.psnr_db(wanted[n], sheets.pixels[kind][n]) for n in COMPARED)
        ratio = f"{slow / took:.1f}x of eager fp32"
        texts.append(f"{name} {took:.2f} s ({ratio}; worst {pictures.psnr_text(off)} to it)")
    screen = Console(highlight=False, soft_wrap=True)
    screen.print(f"the same in bf16, one run: {', '.join(texts)}")


def _summarise(sheets: Sheets, compile_seconds: float, total: float) -> None:
    ours, eager = sheets.seconds["strop"], sheets.seconds["eager"]
    times = sum(eager[n] for n in COMPARED), sum(ours[n] for n in COMPARED)
    worst = pictures.psnr_text(min(sheets.psnr_db(n) for n in COMPARED))
    report = explain(sheets.pipes["strop"])
    sizes = len({size for _, size in SCENES})
    screen = Console(highlight=False, soft_wrap=True)
    screen.print(
        f"{len(SCENES)} pictures of {sizes} sizes, {sum(ours.values()):.1f} s of sampling;"
        f" compiled in {compile_seconds:.1f} s; {total:.0f} s in all"
    )
    screen.print(
        f"{len(COMPARED)} pictures, shortest of {ROUNDS} runs: eager {times[0]:.2f} s,"
        f" Strop {times[1]:.2f} s ({times[0] / times[1]:.1f}x);"
        f" worst {worst}"
    )
    screen.print(
        f"{report.num_graphs} graphs, {report.num_recompiles} recompiles,"
        f" {sum(report.fallbacks.values())} calls in eager"
    )


def main() -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(), help="folder for the pictures")
    parser.add_argument("--model", default=models.SPRITES, help="sprites, or a diffusers folder")
    parser.add_argument("--steps", type=int, default=20, help="denoising steps")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error("--steps must be at least 1")
    try:
        run(args.out, args.model, args.steps)
    except CommandError as error:
        errors().print(f"error: {error}", markup=False)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
