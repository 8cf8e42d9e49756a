"""Under PyTorch Lightning a fit with Strop's callback takes the steps that one without it does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import strop
from strop.api import dispatchers_of
from strop.errors import OptionError, UnsupportedError
from strop.train import FusedAdamW, lightning_callback

L = pytest.importorskip("lightning.pytorch")
pytestmark = [
    pytest.mark.filterwarnings("ignore:::lightning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),
]
STEPS, NORM = 4, 0.1


class Denoiser(L.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self, ours: bool, **more: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8))
        self.ours, self.more, self.norms = ours, more, list[float]()
        self.report: Any = None

    def training_step(self, batch: Tensor, number: int) -> Tensor:
        rows = self.frozen(batch)
        return (self.net(rows) - rows).square().mean() * 10

    def on_train_end(self) -> None:
        self.report = strop.explain(self.net) if self.ours else None

    def on_train_batch_end(self, *_: Any) -> None:
        if self.ours and (norm := self.optimizers().optimizer.grad_norm) is not None:
            self.norms.append(float(norm))

    def configure_optimizers(self) -> Any:
        kind: Any = FusedAdamW if self.ours else torch.optim.AdamW
        return kind(self.net.parameters(), lr=1e-2, **self.more)


def fitted(ours: bool, devices: int = 1, plugin: Any = None, **given: Any) -> tuple[Any, Any]:
    """The module and its trainer after a fit."""
    module = Denoiser(ours)
    rows = torch.randn(4 * STEPS, 8, generator=torch.Generator().manual_seed(1))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        max_epochs=1,
        callbacks=[lightning_callback()] if ours else [],
        plugins=[plugin()] if plugin else [],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,  # it shuffles
        **given,
    )
    mine = list(range(int(os.environ.get("LOCAL_RANK", "0")), len(rows), devices))
    trainer.fit(module, torch.utils.data.DataLoader(rows[mine], batch_size=4 // devices))
    return module, trainer


def fp16() -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=2)
    return L.plugins.MixedPrecision("16-mixed", "cpu", scaler=scaler)


def way(module: Any) -> Tensor:
    start = nn.utils.parameters_to_vector(Denoiser(True).net.parameters())
    return nn.utils.parameters_to_vector(module.net.parameters()) - start


# Lightning refuses its own clip for fused optimizers where autocast is on.
@pytest.mark.parametrize(
    ("given", "rtol"),
    [
        ({}, 1e-3),
        ({"gradient_clip_val": NORM}, 1e-3),
        ({"precision": "bf16-mixed", "gradient_clip_val": NORM}, 5e-2),
        ({"plugin": fp16, "gradient_clip_val": NORM}, 5e-2),
    ],
    ids=["fp32", "clipped", "bf16", "fp16"],
)
def test_a_fit_takes_the_steps_of_one_without(given: dict[str, Any], rtol: float) -> None:
    ours, trainer = fitted(True, **given)
    theirs, other = fitted(False, **given)
    gap = (way(ours) - way(theirs)).norm()
    assert gap <= rtol * way(theirs).norm()
    assert ours.report.num_graphs == 2
    assert not ours.report.fallbacks
    clip = given.get("gradient_clip_val")
    assert trainer.gradient_clip_val == clip, "it is given back"
    assert len(ours.norms) == (STEPS if clip else 0), "the optimizer has clipped"
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is not None:
        assert type(scaler) is torch.amp.GradScaler
        assert scaler.get_scale() == other.precision_plugin.scaler.get_scale() < 2.0**30
    assert not dispatchers_of(ours.net), "it is restored"


def test_an_own_clip_is_left_alone() -> None:
    class Own(Denoiser):
        def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
            self.clip_gradients(optimizer, gradient_clip_val=NORM, gradient_clip_algorithm="norm")

    module = Own(True)
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        callbacks=[lightning_callback("net")],
        gradient_clip_val=NORM,
    )
    trainer.fit(module, torch.utils.data.DataLoader(torch.randn(4, 8), batch_size=4))
    assert trainer.gradient_clip_val == NORM
    assert not module.norms


@pytest.mark.parametrize(
    ("parts", "more", "strategy", "error", "said"),
    [
        (("unet",), {}, "auto", OptionError, "no submodule 'unet'; it has frozen, net"),
        ((), {"max_grad_norm": 1.0}, "auto", OptionError, "0.1 by Trainer.*1.0 by FusedAdamW"),
        ((), {}, "deepspeed", UnsupportedError, "strategy DeepSpeedStrategy"),
    ],
)
def test_what_does_not_go_together(
    parts: tuple[str, ...], more: Any, strategy: str, error: type[Exception], said: str
) -> None:
    module, callback = Denoiser(True, **more), lightning_callback(*parts)
    trainer = L.Trainer(accelerator="cpu", logger=False, gradient_clip_val=NORM)
    trainer.strategy._optimizers = [module.configure_optimizers()]
    if strategy != "auto":
        trainer._accelerator_connector.strategy = type("DeepSpeedStrategy", (), {})()
    with pytest.raises(error, match=said):
        callback.on_fit_start(trainer, module)
    assert trainer.gradient_clip_val == NORM
    assert not dispatchers_of(module.net)


def test_two_processes_are_one(tmp_path: Path) -> None:
    """Lightning starts the script once more, as its second rank."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OUT": str(tmp_path / "weights.pt")}
    done = subprocess.run(
        [sys.executable, __file__], env=env, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    two = torch.load(tmp_path / "weights.pt")
    one, _ = fitted(True, gradient_clip_val=NORM)
    assert (two - way(one)).norm() <= 1e-3 * way(one).norm()


if __name__ == "__main__":
    made, its = fitted(True, devices=2, gradient_clip_val=NORM)
    assert its.world_size == 2
    if its.global_rank == 0:
        torch.save(way(made).detach(), os.environ["OUT"])
