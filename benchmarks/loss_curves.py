"""Loss curves of the sprites model from random weights: Strop's trainer beside the plain recipe.

    python benchmarks/loss_curves.py --out DIR [--steps 300] [--seeds 0,1,2] [--batch 16]
        [--mixed_precision no] [--device cpu]

Both see the same drawings, noises and timesteps for a seed. Strop's has its compiled UNet and the
one-pass optimizer with clip and average; the plain recipe is eager, with torch's AdamW,
``clip_grad_norm_`` and diffusers' ``EMAModel``. Training is chaotic: what differs in the last bit
differs visibly some hundred steps later. So the plain recipe runs once more for each seed, with all
weights moved by one unit in the last place at first, and Strop's curves are judged by these: by
their distance from the plain ones of their seed, and by the share of steps in which they lie in the
band between the lowest and the highest of the plain seeds. Losses are means over ``WINDOW`` steps.
Writes JSON and a plot; exits with 1 if Strop's are further off than the moved ones by more than
``SLACK``. Curves that the JSON in DIR has of the same settings are not run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from strop.bench import environment
from strop.train import given_settings, learner, settings
from strop.train import session as sessions
from strop.train.loop import TrainingLoop
from strop.train.metrics import NAME, Metrics

WINDOW = 25  # steps that a smoothed loss is the mean of
SLACK = 0.25  # of a distance or a share that few curves tell
FIRST = 10  # steps in which rounding has not grown yet
MOVED = 1 + 2.0**-23
NAMES = ("plain", "moved", "strop")
COLOURS = ("#3465a4", "#c4572e", "#7a9a3a", "#8c6bb1", "#d9a441")
Curves = dict[str, dict[int, list[float]]]


class PlainLearner(learner.Learner):
    """What diffusers' script does between two steps. It writes no checkpoints."""

    is_moved = False

    def __init__(self, given: settings.Settings, modules: dict[str, nn.Module]) -> None:
        super().__init__(given, modules)
        from diffusers.training_utils import EMAModel

        self.most = given.max_grad_norm
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=given.rate,
            betas=(given.adam_beta1, given.adam_beta2),
            eps=given.adam_epsilon,
            weight_decay=given.adam_weight_decay,
        )
        if self.is_moved:
            torch._foreach_mul_([p.detach() for p in self.parameters], MOVED)
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


class MovedLearner(PlainLearner):
    """From weights that are one unit in the last place larger."""

    is_moved = True


LEARNERS = {"plain": PlainLearner, "moved": MovedLearner, "strop": learner.Learner}


class Bar:
    """The trainer's progress as a bar."""

    def __init__(self, name: str, total: int) -> None:
        self.bar = tqdm(total=total, desc=name, file=sys.stderr)

    def stage(self, text: str, done: int, total: int) -> None:
        self.bar.set_postfix_str(text)

    def step(self, last: Metrics, total: int, eta_s: float) -> None:
        self.bar.set_postfix_str(f"loss {last.loss:.4f}", refresh=False)
        self.bar.update(last.step - self.bar.n)

    def warn(self, text: str) -> None:
        tqdm.write(text, file=sys.stderr)


def losses(name: str, seed: int, args: argparse.Namespace) -> list[float]:
    """Of every step of one training."""
    folder = Path(tempfile.mkdtemp())
    given = {
        "model": "sprites",
        "dataset_name": "sprites",
        "from_scratch": True,
        "seed": seed,
        "train_batch_size": args.batch,
        "max_train_steps": args.steps,
        "learning_rate": 1e-3,
        "lr_scheduler": "constant_with_warmup",
        "lr_warmup_steps": 20,
        "max_grad_norm": 1.0,
        "use_ema": True,
        "mixed_precision": args.mixed_precision,
        "device": args.device,
        "output_dir": str(folder),
        "checkpointing_steps": 10**9,
        "compile_unet": name == "strop",
    }
    usual = sessions.Learner
    try:
        sessions.Learner = LEARNERS[name]  # type: ignore[misc]
        watch = Bar(f"{name}, seed {seed}", args.steps)
        made = given_settings.make("text-to-image", given)
        TrainingLoop(sessions.prepare_session(made, watch.stage, watch.warn), watch).run()
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
    """Distances and shares of the module's docstring, and whether Strop's are as good."""
    smooth = {n: np.stack([smoothed(v) for v in curves[n].values()]) for n in NAMES}
    plain = smooth["plain"]
    low, high = plain.min(0), plain.max(0)
    first = np.array([curves["plain"][seed][:FIRST] for seed in curves["plain"]])
    found: dict[str, Any] = {
        "between_seeds": rms(plain - np.roll(plain, 1, 0)),
        "band_width": float((high - low).mean()),
    }
    for name in ("moved", "strop"):
        own = smooth[name]
        start = np.array([curves[name][seed][:FIRST] for seed in curves[name]])
        found[name] = {
            "distance": rms(own - plain),
            "mean_difference": float((own - plain).mean()),
            "share_inside": float(((low <= own) & (own <= high)).mean()),
            "first_steps": float(np.abs(start / first - 1).max()),
        }
    ours, moved = found["strop"], found["moved"]
    found["is_inside"] = bool(
        ours["distance"] <= (1 + SLACK) * moved["distance"]
        and ours["distance"] <= found["between_seeds"]
        and ours["share_inside"] >= (1 - SLACK) * moved["share_inside"]
    )
    return found


def rms(values: np.ndarray[Any, Any]) -> float:
    return float(np.sqrt(np.square(values).mean()))


def draw(curves: Curves, verdict: dict[str, Any], title: str, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    plain = np.stack([smoothed(values) for values in curves["plain"].values()])
    steps = np.arange(plain.shape[1]) + WINDOW
    axes.fill_between(
        steps, plain.min(0), plain.max(0), color="#dddddd", label="band of the plain recipe's seeds"
    )
    for colour, seed in zip(COLOURS, curves["strop"], strict=False):
        axes.plot(
            steps,
            smoothed(curves["plain"][seed]),
            "--",
            color=colour,
            linewidth=2.5,
            alpha=0.5,
            label=f"plain, seed {seed}",
        )
        axes.plot(
            steps,
            smoothed(curves["moved"][seed]),
            ":",
            color=colour,
            linewidth=1,
            label=f"plain from moved weights, seed {seed}",
        )
        axes.plot(
            steps,
            smoothed(curves["strop"][seed]),
            color=colour,
            linewidth=1,
            label=f"Strop, seed {seed}",
        )
    axes.set_xlabel("step")
    axes.set_ylabel(f"loss, mean of {WINDOW} steps")
    axes.set_yscale("log")
    apart = {name: verdict[name]["distance"] for name in ("strop", "moved")}
    axes.set_title(
        f"{title}\nRMS distance from plain: Strop {apart['strop']:.4f}, "
        f"plain from moved weights {apart['moved']:.4f}, "
        f"between seeds {verdict['between_seeds']:.4f}",
        fontsize=10,
    )
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
    path = args.out / f"loss_curves-{args.mixed_precision}_{args.device}.json"
    about = {
        "kind": "loss_curves",
        "steps": args.steps,
        "batch": args.batch,
        "mixed_precision": args.mixed_precision,
        "device": args.device,
    }
    curves = earlier(path, about)
    for seed, name in itertools.product(map(int, args.seeds.split(",")), NAMES):
        if seed not in curves[name]:
            curves[name][seed] = losses(name, seed, args)
    verdict = judged(curves)
    where = environment.describe(torch.device(args.device))
    result = about | {"environment": where, "window": WINDOW, "verdict": verdict, "losses": curves}
    path.write_text(json.dumps(result) + "\n")
    precision = {"no": "fp32"}.get(args.mixed_precision, args.mixed_precision)
    title = f"sprites from random weights, batch {args.batch}, {precision}, {args.device}"
    draw(curves, verdict, title, path.with_suffix(".png"))
    print(json.dumps(verdict, indent=1))
    sys.exit(0 if verdict["is_inside"] else 1)


def earlier(path: Path, about: dict[str, Any]) -> Curves:
    """What a run with the same settings has measured."""
    curves: Curves = {name: {} for name in NAMES}
    result = json.loads(path.read_text()) if path.is_file() else {}
    if all(result.get(key) == value for key, value in about.items()):
        for name, found in result["losses"].items():
            curves[name] |= {int(seed): values for seed, values in found.items()}
    return curves


if __name__ == "__main__":
    main()
