"""The kernels of the step through the real compiler, without a GPU; and what the host uploads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from strop import train
from strop.runtime.build.cubin import compile_cubin
from strop.train import sources
from strop.train.sources import TensorForm, Tunings
from tests.codegen.test_triton_compile import disassemble, resources
from tests.train import interpreted

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
FORMS = {
    "fp32": TensorForm(
        F32, F32, 2, ema=True, shadow=None, random=False, aligned=True, grad_aligned=True
    ),
    "shadow": TensorForm(
        BF16, F32, 2, ema=True, shadow=BF16, random=False, aligned=True, grad_aligned=True
    ),
    "random": TensorForm(
        BF16, BF16, 2, ema=True, shadow=None, random=True, aligned=True, grad_aligned=True
    ),
    "fp16": TensorForm(
        F16, F16, 1, ema=False, shadow=None, random=False, aligned=True, grad_aligned=True
    ),
    "fp64": TensorForm(
        F64, F64, 2, ema=True, shadow=None, random=False, aligned=True, grad_aligned=True
    ),
    "bucket": TensorForm(
        F32, F32, 2, ema=True, shadow=None, random=False, aligned=True, grad_aligned=False
    ),
    "8bit": TensorForm(
        F32,
        F32,
        2,
        ema=True,
        shadow=None,
        random=False,
        aligned=True,
        grad_aligned=True,
        quantized=True,
    ),
    "8bit_random": TensorForm(
        BF16,
        BF16,
        2,
        ema=True,
        shadow=None,
        random=True,
        aligned=True,
        grad_aligned=True,
        quantized=True,
    ),
    "unaligned": TensorForm(
        F32, F32, 0, ema=False, shadow=F16, random=False, aligned=False, grad_aligned=True
    ),
}
TUNING = Tunings()


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("arch", [80, 90])
def test_accesses_are_16_bytes_wide(arch: int, name: str, tmp_path: Path) -> None:
    """In blocks that are full; the last block of a tensor goes element by element."""
    form = FORMS[name]
    arrays = [(form.grad, form.grad_aligned), (form.param, form.aligned)]
    arrays += [(F32, form.aligned)] * (form.ema + form.num_states * (not form.quantized))
    least = 4 if form.quantized else 1  # with 8-bit states a thread has four elements at a time
    sweeps = {
        sources.gradient_sweep(form, TUNING.gradient): form.grad_aligned,
        sources.update_sweep(form, TUNING.update_of(form)): sum(
            aligned and dtype.itemsize >= least for dtype, aligned in arrays
        ),
    }
    for source, expected in sweeps.items():
        cubin = compile_cubin(source, arch)
        registers, stack = resources(cubin, tmp_path)
        assert stack <= 8  # with gradients at any address
        assert registers <= (168 if form.wide else 128)
        found = disassemble(cubin, tmp_path)
        wide = sum(op.startswith("LDG.E.128") for op in found)
        assert wide >= expected, found
        assert expected or not wide, found


@pytest.mark.parametrize("name", ["shadow", "8bit"])
@pytest.mark.parametrize("arch", [86, 89, 100, 120])
def test_kernels_compile(arch: int, name: str, tmp_path: Path) -> None:
    form = FORMS[name]
    update = sources.update_sweep(form, TUNING.update_of(form))
    for source in (sources.gradient_sweep(form, TUNING.gradient), update):
        assert resources(compile_cubin(source, arch), tmp_path)[1] == 0


@pytest.mark.parametrize("adam", [True, False])
def test_settle_compiles(adam: bool, tmp_path: Path) -> None:
    source = sources.settle(measured=True, clip=True, amp=True, ema=True, adam=adam)
    for arch in (80, 90):
        assert resources(compile_cubin(source, arch), tmp_path)[1] == 0


def test_launches_and_uploads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three launches for any number of tensors of one form; addresses go up when they change."""
    launcher = interpreted.use(monkeypatch)
    params = [nn.Parameter(torch.ones(3)) for _ in range(20)]
    optimizer = train.FusedAdamW(params, max_grad_norm=1.0, ema_decay=0.9)

    def step(renew: bool) -> tuple[list[str], int, int]:
        kept = [p.grad for p in params]
        for p in params:
            p.grad = torch.ones(3) if renew else p.grad
        launcher.launches.clear()
        before = optimizer.stepper and optimizer.stepper.uploads
        optimizer.step()
        after = optimizer.stepper.uploads
        del kept
        return launcher.launches, *(b - a for a, b in zip(before or (0, 0), after, strict=True))

    names = ["gradient_sweep", "settle", "update_sweep"]
    assert step(renew=True) == (names, 1, 1)
    assert step(renew=False) == (names, 0, 0)
    assert step(renew=True) == (names, 1, 0)
    optimizer.param_groups[0]["lr"] = 0.5
    assert step(renew=False) == (names, 0, 1)
    params[0].grad = torch.ones(4)[1:]  # not aligned to 16 bytes: a form of its own
    twice = ["gradient_sweep"] * 2 + ["settle"] + ["update_sweep"] * 2
    assert step(renew=False) == (twice, 1, 0)
    plain = train.FusedAdamW(params)
    launcher.launches.clear()
    plain.step()
    assert launcher.launches == ["settle", "update_sweep", "update_sweep"]
