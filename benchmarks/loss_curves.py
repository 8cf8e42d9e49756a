"""Loss curves of the sprites model from random weights: Strop's trainer beside the plain recipe.

    python benchmarks/loss_curves.py --out DIR [--steps 300] [--seeds 0,1,2] [--batch 16]
        [--mixed_precision no] [--device cpu]

Both see the same drawings, noises and timesteps for a seed. Strop's has its compiled UNet and the
one-pass optimizer with clip and average; the plain recipe is eager, with torch's AdamW,
``clip_grad_norm_`` and diffusers' ``EMAModel``. The band is what the seed changes: at each step the
lowest and the highest of the plain losses, smoothed over ``WINDOW`` steps. Writes JSON and a plot,
and exits with 1 if a curve of Strop leaves the band by more than the rounding that the same steps
show between seeds (a hundredth of its mean width).
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from strop.bench import environment
from strop.train import learner, settings
from strop.train import session as sessions
from strop.train.loop import Loop
from strop.train.metrics import NAME, Metrics

WINDOW = 25  # steps that a smoothed loss is the mean of
SLACK = 0.01  # of the band's mean width
COLOURS = ("#3465a4", "#c4572e", "#7a9a3a", "#8c6bb1", "#d9a441")
Curves = dict[str, dict[int, list[float]]]


class PlainLearner(learner.Learner):
    """What diffusers' script does between two steps. It writes no checkpoints."""

    def __init__(self, given: settings.Settings, modules: dict[str, nn.Module]) -> None:
        super().__init__(given, modules)
        from diffusers.training_utils import EMAModel

        self.most = given.max_grad_norm
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=given.rate, betas=(given.adam_beta1, given.adam_beta2),
            eps=given.adam_epsilon, weight_decay=given.adam_weight_decay,
        )  # fmt: skip
        self.average = EMAModel(self.parameters, decay=given.ema_decay)
        self._norm = torch.zeros(())

    def step(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self._norm = nn.utils.clip_grad_norm_(self.parameters, self.most)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.average.step(self.parameters)

    @property
    def norm(self) -> torch.Tensor:
        return self._norm

    @contextmanager
    def averaged(self) -> Iterator[None]:
        self.average.store(self.parameters)
        self.average.copy_to(self.parameters)
        yield
        self.average.restore(self.parameters)


class Bar:
    """The trainer's progress as a bar."""

    def __init__(self, name: str, total: int) -> None:
        self.bar = tqdm(total=total, desc=name, file=sys.stderr)

    def stage(self, text: str, done: int, total: int) -> None:
        self.bar.set_postfix_str(text)

    def step(self, last: Metrics, total: int, eta_s: float) -> None:
        self.bar.update(last.step - self.bar.n)

    def warn(self, text: str) -> None:
        tqdm.write(text, file=sys.stderr)


def losses(name: str, seed: int, args: argparse.Namespace) -> list[float]:
    """Of every step of one training."""
    folder = Path(tempfile.mkdtemp())
    given = {
        "model": "sprites", "dataset_name": "sprites", "from_scratch": True, "seed": seed,
        "train_batch_size": args.batch, "max_train_steps": args.steps, "learning_rate": 1e-3,
        "lr_scheduler": "constant_with_warmup", "lr_warmup_steps": 20, "max_grad_norm": 1.0,
        "use_ema": True, "mixed_precision": args.mixed_precision, "device": args.device,
        "output_dir": str(folder), "checkpointing_steps": 10**9, "compile_unet": name == "strop",
    }  # fmt: skip
    usual = sessions.Learner
    try:
        if name == "plain":
            sessions.Learner = PlainLearner
        watch = Bar(f"{name}, seed {seed}", args.steps)
        made = settings.make("text-to-image", given)
        Loop(sessions.prepare_session(made, watch.stage, watch.warn), watch).run()
        watch.bar.close()
        rows = [json.loads(line) for line in (folder / NAME).read_text().splitlines()]
    finally:
        sessions.Learner = usual
        shutil.rmtree(folder, ignore_errors=True)
    return [row["loss"] for row in rows]


def smoothed(values: list[float]) -> np.ndarray[Any, Any]:
    width = min(WINDOW, len(values))
    return np.convolve(values, np.full(width, 1 / width), mode="valid")


def judged(curves: Curves) -> dict[str, Any]:
    """How far Strop's curves are from the plain ones of the same seed, and from their band."""
    plain = np.stack([smoothed(values) for values in curves["plain"].values()])
    ours = np.stack([smoothed(values) for values in curves["strop"].values()])
    low, high = plain.min(0), plain.max(0)
    width = float((high - low).mean())
    outside = np.maximum(np.maximum(low - ours, ours - high), 0)
    return {
        "band_width": width,
        "worst_outside": float(outside.max()),
        "worst_between_recipes": float(np.abs(ours - plain).max()),
        "last_plain": plain[:, -1].tolist(),
        "last_strop": ours[:, -1].tolist(),
        "is_inside": bool(outside.max() <= SLACK * width),
    }


def draw(curves: Curves, verdict: dict[str, Any], title: str, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    plain = np.stack([smoothed(values) for values in curves["plain"].values()])
    steps = np.arange(plain.shape[1]) + WINDOW
    axes.fill_between(steps, plain.min(0), plain.max(0), color="#dddddd",
                      label="band of the plain recipe's seeds")  # fmt: skip
    for colour, seed in zip(COLOURS, curves["strop"], strict=False):
        axes.plot(steps, smoothed(curves["plain"][seed]), "--", color=colour, linewidth=2.5,
                  alpha=0.5, label=f"plain, seed {seed}")  # fmt: skip
        axes.plot(steps, smoothed(curves["strop"][seed]), color=colour, linewidth=1,
                  label=f"Strop, seed {seed}")  # fmt: skip
    axes.set_xlabel("step")
    axes.set_ylabel(f"loss, mean of {WINDOW} steps")
    axes.set_yscale("log")
    axes.set_title(f"{title}: recipes differ by {verdict['worst_between_recipes']:.1e} at most, "
                   f"seeds by {verdict['band_width']:.1e} in the mean", fontsize=10)  # fmt: skip
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--mixed_precision", default="no", choices=("no", "bf16", "fp16"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    curves: Curves = {"plain": {}, "strop": {}}
    seconds: dict[str, list[float]] = {"plain": [], "strop": []}
    for seed in map(int, args.seeds.split(",")):
        for name in curves:
            started = time.perf_counter()
            curves[name][seed] = losses(name, seed, args)
            seconds[name].append(round(time.perf_counter() - started, 1))
    verdict = judged(curves)
    where = environment.describe(torch.device(args.device))
    result = {"kind": "loss_curves", "environment": where, "steps": args.steps,
              "batch": args.batch, "mixed_precision": args.mixed_precision, "window": WINDOW,
              "seconds": seconds, "verdict": verdict, "losses": curves}  # fmt: skip
    stem = f"loss_curves-{args.mixed_precision}_{args.device}"
    (args.out / f"{stem}.json").write_text(json.dumps(result) + "\n")
    title = f"sprites from random weights, batch {args.batch}, {args.mixed_precision}"
    draw(curves, verdict, f"{title}, {args.device}", args.out / f"{stem}.png")
    print(json.dumps(verdict, indent=1))
    sys.exit(0 if verdict["is_inside"] else 1)


if __name__ == "__main__":
    main()
