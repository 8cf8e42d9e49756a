"""Whole models on this GPU as if it were an older one: right results, by nothing that it lacks.

Widths are small and head sizes those of the models: 40, 80 and 160 of SD1.5, 64 of SDXL, 512 of the
VAE.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import strop
from strop import train
from strop.ir.source import KernelSource
from strop.options import Options
from strop.runtime.build.cubin import Cubin
from strop.runtime.build.devices import gpu
from strop.runtime.build.loader import BoundKernel, CudaLoader
from strop.testing import assert_as_accurate_as_eager, assert_as_accurate_together

pytest.importorskip("diffusers")

from strop.bench import models

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
        reason="needs an NVIDIA GPU newer than the ones it stands in for",
    ),
]

ARCHS = [80, 86, 89]
F16 = torch.float16
SD15 = models.SD15_UNET | {
    "sample_size": 32,
    "cross_attention_dim": 96,
    "block_out_channels": (80, 160, 320, 320),
    "layers_per_block": 1,
    "attention_head_dim": 2,  # heads: of 40, 80 and 160
    "norm_num_groups": 16,
}
SDXL = models.SDXL_UNET | {
    "sample_size": 32,
    "cross_attention_dim": 128,
    "block_out_channels": (64, 128, 256),
    "layers_per_block": 1,
    "attention_head_dim": [1, 2, 4],  # heads of 64
    "transformer_layers_per_block": [1, 1, 2],
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 6 * 8 + 32,
    "norm_num_groups": 16,
}
VAE = models.SD_VAE | {
    "block_out_channels": (32, 64, 64, 512),  # one head of 512
    "layers_per_block": 1,
    "norm_num_groups": 16,
}
CASES: dict[str, tuple[models.Build, models.Size]] = {
    "tiny": (models.unet_workload(models.TINY_UNET, tokens=7), (64, 96)),
    "sd15": (models.unet_workload(SD15), (256, 256)),
    "sdxl": (models.unet_workload(SDXL), (256, 192)),
    "vae": (models.vae_workload(VAE), (128, 192)),
}


@dataclass
class Launches:
    """What has been bound: kernels by device, their machine code, and how they are launched."""

    seen: list[tuple[Any, KernelSource, Cubin, BoundKernel]] = field(default_factory=list)

    @property
    def num_early(self) -> int:
        return sum(launch._config.num_attributes for *_, launch in self.seen)  # type: ignore[attr-defined]

    def check(self, arch: int) -> None:
        """All are such as an older GPU could run."""
        assert self.seen, "no kernel was launched"
        card = gpu(torch.cuda.current_device())
        for device, source, cubin, _ in self.seen:
            assert device == card.as_arch(arch), source.name
            assert source.language == "triton", source.name
            assert not source.boxes, source.name
            assert (cubin.arch, cubin.early, any(cubin.boxes)) == (arch, False, False), source.name
            assert cubin.shared <= device.shared_bytes <= card.shared_bytes, source.name
        assert self.num_early == 0


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    found, usual = Launches(), CudaLoader.bind

    def bind(self: CudaLoader, source: KernelSource, *given: Any, **how: Any) -> BoundKernel:
        launch = usual(self, source, *given, **how)
        found.seen.append((self.device, source, self._cubins[source], launch))
        return launch

    monkeypatch.setattr(CudaLoader, "bind", bind)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def widened(value: Any) -> Any:
    """The same numbers in fp64."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {name: widened(each) for name, each in value.items()}
    return value


def run(name: str, options: Options) -> None:
    """Results of a first call, of a replay, and at another size, beside eager's."""
    build, size = CASES[name]
    made = build(torch.device("cuda"), F16)
    exact = copy.deepcopy(made.target).double()
    eager = copy.deepcopy(made.target)
    ours = strop.optimize(made.target, options=options)
    with torch.no_grad():
        for height, width in (size, size, (size[0], size[1] + 64)):
            given = made.inputs((height, width), 2)
            expected, reference = made.call(eager, given), made.call(exact, widened(given))
            result = made.call(ours, given)
            assert_as_accurate_as_eager(result, expected, reference.double())
    strop.restore(ours)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", CASES)
def test_as_accurate_as_eager(name: str, arch: int, launches: Launches, folder: Path) -> None:
    run(name, Options(cache_dir=str(folder), strict=True, arch=arch))
    launches.check(arch)


def test_the_gpu_itself_launches_early(launches: Launches, folder: Path) -> None:
    """So that the checks above would find what they look for."""
    run("sd15", Options(cache_dir=str(folder), strict=True))
    assert launches.num_early > 0
    assert {device.arch for device, *_ in launches.seen} == {gpu(0).arch}


def test_one_process_runs_both(launches: Launches, folder: Path) -> None:
    """Two loaders for one card, which do not take each other's kernels."""
    for arch in (0, 86, 0, 80):
        run("tiny", Options(cache_dir=str(folder), strict=True, arch=arch))
    archs = {(device.arch, cubin.arch) for device, _, cubin, _ in launches.seen}
    assert archs == {(a, a) for a in (gpu(0).arch, 86, 80)}


@pytest.fixture
def fresh_training(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch._dynamo.reset()
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    yield
    torch._dynamo.reset()


def gradients(net: Any, given: Mapping[str, Any]) -> dict[str, Tensor]:
    net.zero_grad(set_to_none=True)
    guess = models.call_for_tensor(net, given)
    F.mse_loss(guess, torch.ones_like(guess)).backward()
    return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.usefixtures("fresh_training")
def test_a_training_step(
    arch: int, launches: Launches, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward, backward and the fused optimizer, which reads the environment. Gradients are as near
    fp64 as those of the card's own kernels; other tests judge these beside eager's."""
    monkeypatch.setenv("STROP_CACHE_DIR", str(folder))
    config = models.TINY_UNET | {"block_out_channels": (40, 80), "attention_head_dim": 1}
    made = models.unet_workload(config, tokens=7)(torch.device("cuda"), torch.float32)
    eager, given = made.target.requires_grad_(True).train(), made.inputs((64, 96), 2)
    exact = copy.deepcopy(eager).double()
    native = gradients(strop.optimize(copy.deepcopy(eager), train=True), given)
    launches.seen.clear()
    monkeypatch.setenv("STROP_ARCH", str(arch))
    ours = strop.optimize(copy.deepcopy(eager), train=True)
    found, true = gradients(ours, given), gradients(exact, widened(given))
    assert found.keys() == native.keys() == true.keys()
    assert ours.forward.trained_calls == 1
    assert_as_accurate_together([(found[name], native[name], true[name]) for name in true])

    for name, p in eager.named_parameters():  # of equal gradients, the same step
        p.grad = found[name].clone()
    torch.optim.AdamW(eager.parameters(), lr=1e-3, weight_decay=0.01).step()
    train.FusedAdamW(ours.parameters(), lr=1e-3, weight_decay=0.01).step()
    for p, q in zip(ours.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    assert "update_sweep" in {source.name for _, source, *_ in launches.seen}
    launches.check(arch)
