"""Command line of the training: `python -m strop.models.sprites.train VERB --out DIR`.

Verbs: `vae`, `diffusion`, `export`, and `all`, which does the three in order, checks the scorer
and scores the result. Every verb can be stopped and continued with --resume.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from strop.models.sprites import checkpoint, evaluate
from strop.models.sprites.export import export
from strop.models.sprites.loop import Piece
from strop.models.sprites.settings import NAMED, Settings
from strop.models.sprites.train_diffusion import train_diffusion
from strop.models.sprites.train_vae import train_vae


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m strop.models.sprites.train")
    parser.add_argument("verb", choices=("vae", "diffusion", "export", "all"))
    parser.add_argument("--out", type=Path, required=True, help="folder of the training")
    parser.add_argument("--minutes", type=float, default=10.0, help="length of this piece")
    parser.add_argument("--plan-minutes", type=float, help="length of all pieces together")
    parser.add_argument("--vae-minutes", type=float, default=3.0, help="vae's length within 'all'")
    parser.add_argument("--resume", action="store_true", help="continue a checkpoint")
    parser.add_argument("--init", type=Path, help="an exported model to start from")
    parser.add_argument("--vae-eager", action="store_true", help="do not compile the VAE")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--settings", choices=tuple(NAMED), default="full")
    parser.add_argument("--no-compile", action="store_true", help="run every network eagerly")
    parser.add_argument("--count", type=int, default=200, help="prompts that 'all' scores")
    return parser.parse_args(words)


def _vae(args: argparse.Namespace, settings: Settings, minutes: float, plan: float | None) -> bool:
    piece = Piece(args.out / "vae.ckpt", minutes, plan, settings.vae.steps, args.resume)
    compiled = not (args.no_compile or args.vae_eager)
    compiled = compiled and torch.device(args.device).type == "cuda"
    return train_vae(settings, args.out, piece, torch.device(args.device), compiled, args.init)


def _diffusion(args: argparse.Namespace, settings: Settings, minutes: float) -> bool:
    steps, plan = settings.diffusion.steps, args.plan_minutes
    piece = Piece(args.out / "diffusion.ckpt", minutes, plan, steps, args.resume)
    compiled = not args.no_compile and torch.device(args.device).type == "cuda"
    return train_diffusion(
        settings, args.out, piece, torch.device(args.device), compiled, args.init
    )


def _all(args: argparse.Namespace, settings: Settings) -> None:
    start = time.monotonic()
    device = torch.device(args.device)
    # The autoencoder must not change any more once the diffusion has seen its latents.
    if checkpoint.find(args.out / "diffusion.ckpt") is None:
        # A little longer than planned, so that a slow end still decays the rate to zero.
        _vae(args, settings, args.vae_minutes * 1.15, args.vae_minutes)
        checked = evaluate.validate_scorer(evaluate.load_vae(args.out / "vae", device), 200)
        print("scorer:", json.dumps(checked), flush=True)
    left = args.minutes - (time.monotonic() - start) / 60
    complete = _diffusion(args, settings, left)
    folder = export(settings, args.out)
    report = evaluate.evaluate(folder, evaluate.Options(count=args.count, device=args.device))
    (args.out / "evaluation.json").write_text(json.dumps(report, indent=1) + "\n")
    print("summary:", json.dumps(report["summary"]), flush=True)
    print("training", "complete" if complete else "unfinished: run again with --resume", flush=True)


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    args = _arguments(words)
    settings = NAMED[args.settings]
    args.out.mkdir(parents=True, exist_ok=True)
    if torch.device(args.device).type == "cuda":
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = True
    if args.verb == "vae":
        _vae(args, settings, args.minutes, args.plan_minutes)
    elif args.verb == "diffusion":
        _diffusion(args, settings, args.minutes)
    elif args.verb == "export":
        print(export(settings, args.out))
    else:
        _all(args, settings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
