"""Teaches the sprites model a cat from five pictures, and draws before and after.

python examples/dreambooth.py [--out FOLDER] [--steps 600] [--threads 1]

Runs `strop train dreambooth`, minutes on a CPU, and writes dreambooth.png. The five pictures are in
examples/cat; --pictures draws them anew.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import torch
from PIL import Image, ImageDraw

from strop.cli import models, pictures
from strop.cli.sampling import draw
from strop.drawing.request import PictureRequest, PictureSize
from strop.models import sprites
from strop.models.sprites.grammar import BACKGROUNDS, COLOURS

HERE = Path(__file__).parent
CATS = HERE / "cat"
SUBJECT, CLASS = "a sks cat", "an orange circle"
PROMPTS = (
    SUBJECT,
    f"{SUBJECT} on a navy background",
    f"{SUBJECT} on the left",
    f"{CLASS} on a white background",
    "a blue star on a black background",
)
SIDE, SHARP, SEED, STEPS, GUIDANCE = 64, 8, 1, 20, 3.0
# Background, centre and radius of each picture, as shares of the side. Mostly on white: of five
# backgrounds under one prompt a small model learns the mean, of one it learns no other.
SCENES = (
    ("white", 0.50, 0.55, 0.30),
    ("black", 0.35, 0.50, 0.27),
    ("white", 0.62, 0.60, 0.28),
    ("navy", 0.50, 0.62, 0.25),
    ("white", 0.42, 0.42, 0.26),
)


def cat(background: str, x: float, y: float, radius: float) -> Image.Image:
    """An orange cat whose eyes and mouth are holes: the autoencoder knows no other details."""
    side = SIDE * SHARP
    fur, hole = COLOURS["orange"], BACKGROUNDS[background]
    page = Image.new("RGB", (side, side), hole)
    brush = ImageDraw.Draw(page)

    def points(*places: tuple[float, float]) -> list[tuple[float, float]]:
        return [((x + a * radius) * side, (y + b * radius) * side) for a, b in places]

    def disc(a: float, b: float, size: float, fill: tuple[int, int, int]) -> None:
        brush.ellipse(points((a - size, b - size), (a + size, b + size)), fill=fill)

    for sign in (-1, 1):
        brush.polygon(points((sign * 0.92, -1.15), (sign * 0.15, -0.8), (sign * 0.95, -0.2)), fur)
    disc(0, 0, 1, fur)
    for sign in (-1, 1):
        disc(sign * 0.4, -0.15, 0.22, hole)
    brush.polygon(points((-0.3, 0.35), (0.3, 0.35), (0, 0.65)), hole)
    return page.resize((SIDE, SIDE), Image.Resampling.LANCZOS)


def train(out: Path, steps: int, threads: int) -> None:
    words = {
        "model": "sprites",
        "instance_data_dir": CATS,
        "instance_prompt": SUBJECT,
        "class_data_dir": out / "class",
        "class_prompt": CLASS,
        "num_class_images": 30,
        "resolution": SIDE,
        "train_batch_size": 5,
        "max_train_steps": steps,
        "learning_rate": 2e-4,
        "lr_scheduler": "cosine",
        "lr_warmup_steps": 10,
        "checkpointing_steps": 50,
        "resume_from_checkpoint": "latest",
        "output_dir": out / "model",
        "threads": threads,
    }
    command = [
        sys.executable,
        "-m",
        "strop",
        "train",
        "dreambooth",
        "--with_prior_preservation",
        "--center_crop",
        "--cache_latents",
        "--pre_compute_text_embeddings",
    ]
    subprocess.run([*command, *(f"--{name}={value}" for name, value in words.items())], check=True)


def row(folder: Path) -> list[Image.Image]:
    models.quieten()
    pipe = sprites.load_from(folder)
    pipe.set_progress_bar_config(disable=True)
    requests = [
        PictureRequest(prompt, PictureSize(SIDE, SIDE), STEPS, GUIDANCE, SEED) for prompt in PROMPTS
    ]
    return [pictures.to_picture(draw(pipe, request)) for request in requests]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE.parent / "runs" / "dreambooth")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--threads", type=int, default=0, help="0: as many as cores are free")
    parser.add_argument("--pictures", action="store_true", help="only draw the five pictures")
    args = parser.parse_args()
    if args.pictures:
        CATS.mkdir(exist_ok=True)
        for number, scene in enumerate(SCENES):
            cat(*scene).save(CATS / f"{number}.png")
        return
    args.out.mkdir(parents=True, exist_ok=True)
    train(args.out, args.steps, args.threads)
    if args.threads:
        torch.set_num_threads(args.threads)
    given = [Image.open(CATS / f"{number}.png") for number in range(len(SCENES))]
    rows = {"taught with": given, "before": row(sprites.WEIGHTS), "after": row(args.out / "model")}
    panels = [
        pictures.Panel(
            pictures.enlarged(picture, 128), title, () if title == "taught with" else (prompt,)
        )
        for title, drawn in rows.items()
        for picture, prompt in zip(drawn, PROMPTS, strict=True)
    ]
    target = args.out / "dreambooth.png"
    pictures.save(pictures.sheet(panels, columns=len(PROMPTS)), target)
    print(f"before and after in {target}")


if __name__ == "__main__":
    main()
