"""Scores a sprites folder on held-out prompts: `python -m strop.models.sprites.evaluate`.

Every prompt is drawn once, the picture sizes taking turns, and judged by `score`.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL
from torch import Tensor

from strop.models.guidance import guided
from strop.models.sprites import NAMES, draw, folder_of, folder_of_part, load_from
from strop.models.sprites.grammar import BUCKETS, caption
from strop.models.sprites.score import Score, score
from strop.models.sprites.specs import draw_training_specs, held_out_prompts, scenes

_BATCH = 50


@dataclass(frozen=True)
class Options:
    """Say how an evaluation draws its pictures."""

    count: int = 200
    steps: int = 20
    guidance: float = 4.0
    seed: int = 0
    device: str = "cpu"


def _shares(scores: Sequence[Score]) -> dict[str, float]:
    names = [item.name for item in fields(Score)]
    shares = {name: sum(getattr(s, name) for s in scores) / len(scores) for name in names}
    return {"all_right": sum(s.all_right for s in scores) / len(scores), **shares}


def load_vae(folder: Path, device: torch.device) -> AutoencoderKL:
    """Load an autoencoder in fp32, ready to run on `device`."""
    model = AutoencoderKL.from_pretrained(folder, use_safetensors=True, dtype=torch.float32)
    return model.to(device).eval()


@torch.no_grad()
def validate_scorer(vae: AutoencoderKL | None, count: int = 400, seed: int = 7) -> dict[str, float]:
    """Score true pictures, which must be right, and the same pictures under shuffled prompts.

    Args:
        vae: If given, pictures go through its encoder and decoder first.
        count: Number of pictures, spread over the picture sizes.
        seed: Seed of the pictures.

    Returns:
        Shares of fully right pictures: "true" and "shuffled".
    """
    device = torch.device("cpu") if vae is None else vae.device
    source = torch.Generator(device=device).manual_seed(seed)
    true: list[bool] = []
    shuffled: list[bool] = []
    for width, height in BUCKETS:
        specs = draw_training_specs(count // len(BUCKETS), source)
        prompts = [caption(scene) for scene in scenes(specs)]
        images = draw.pictures(specs, width, height, source)
        if vae is not None:
            images = torch.cat([_round_trip(vae, part) for part in torch.split(images, _BATCH)])
        true += [score(i, p).all_right for i, p in zip(images, prompts, strict=True)]
        turned = prompts[1:] + prompts[:1]
        shuffled += [score(i, p).all_right for i, p in zip(images, turned, strict=True)]
    return {"true": sum(true) / len(true), "shuffled": sum(shuffled) / len(shuffled)}


def _round_trip(vae: AutoencoderKL, images: Tensor) -> Tensor:
    latents = vae.encode(images * 2 - 1).latent_dist.mean
    decoded: Tensor = vae.decode(latents).sample
    return (decoded / 2 + 0.5).clamp(0, 1)


def draw_prompts(
    pipe: Any, prompts: list[str], width: int, height: int, options: Options
) -> Tensor:
    """Draw `prompts` in one batch; returns RGB [len(prompts), 3, height, width] from 0 to 1."""
    # CPU noise, one seed a prompt: a picture depends neither on the batch nor on the device.
    sources = [
        torch.Generator().manual_seed(options.seed * 1_000_003 + index)
        for index in range(len(prompts))
    ]
    result = pipe(
        prompts,
        width=width,
        height=height,
        num_inference_steps=options.steps,
        generator=sources,
        output_type="pt",
        **guided(pipe, prompts, options.guidance),
    )
    images: Tensor = result.images.float().cpu()
    return images


def evaluate(folder: Path, options: Options) -> dict[str, Any]:
    """Score the model in `folder` on held-out prompts; returns what `evaluate_pipeline` does."""
    return evaluate_pipeline(load_from(folder, device=options.device), options)


def evaluate_pipeline(pipe: Any, options: Options) -> dict[str, Any]:
    """Score a pipeline, which may be optimised, on held-out prompts.

    Returns:
        "summary" with the share of right pictures per attribute, for one and for two things and
        per size, "options", and "prompts" with the judgement of each.
    """
    pipe.set_progress_bar_config(disable=True)
    prompts = held_out_prompts(options.count, options.seed)
    rows: list[dict[str, Any]] = []
    scores: list[Score] = []
    for turn, (width, height) in enumerate(BUCKETS):
        mine = prompts[turn :: len(BUCKETS)]
        for start in range(0, len(mine), _BATCH):
            part = mine[start : start + _BATCH]
            for prompt, image in zip(
                part, draw_prompts(pipe, part, width, height, options), strict=True
            ):
                judged = score(image, prompt)
                scores.append(judged)
                row = {"prompt": prompt, "width": width, "height": height, **asdict(judged)}
                rows.append({**row, "all_right": judged.all_right})
    return {"summary": _summary(rows, scores), "options": asdict(options), "prompts": rows}


def _summary(rows: list[dict[str, Any]], scores: list[Score]) -> dict[str, Any]:
    def share(keep: list[bool]) -> float | None:
        right = [row["all_right"] for row, kept in zip(rows, keep, strict=True) if kept]
        return sum(right) / len(right) if right else None

    # "a", "an" and backgrounds apart, only two-thing captions name two shapes.
    two = [any(word in row["prompt"] for word in (" above ", " below ", " of ")) for row in rows]
    summary: dict[str, Any] = {"prompts": len(rows), **_shares(scores)}
    summary["one_thing"] = share([not flag for flag in two])
    summary["two_things"] = share(two)
    for width, height in BUCKETS:
        here = [(row["width"], row["height"]) == (width, height) for row in rows]
        summary[f"{width}x{height}"] = share(here)
    return summary


def _folder(word: str) -> Path:
    return folder_of(word) if word in NAMES else Path(word)


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m strop.models.sprites.evaluate")
    parser.add_argument(
        "--folder",
        type=_folder,
        default=NAMES[0],
        help=f"{' or '.join(NAMES)}, which ship with strop, or a diffusers folder to score",
    )
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--guidance", type=float, default=Options.guidance)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="JSON file for the full result")
    parser.add_argument(
        "--validate-scorer", action="store_true", help="score true pictures instead of drawn ones"
    )
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    args = _arguments(words)
    if args.validate_scorer:
        vae = load_vae(folder_of_part(args.folder, "vae"), torch.device(args.device))
        report: dict[str, Any] = {"summary": validate_scorer(vae, args.count, args.seed)}
    else:
        options = Options(args.count, args.steps, args.guidance, args.seed, args.device)
        report = evaluate(args.folder, options)
    print(json.dumps(report["summary"], indent=1))
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
