"""Which target a processor is, and which it can run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import strop
from strop.errors import OptionError
from strop.options import Options
from strop.runtime.build import processors
from strop.runtime.build.processors import ARM, TARGETS, X86

NEOVERSE_N1 = "fp asimd evtstrm aes crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp"
CPUINFO = {
    "aarch64-v8": "processor\t: 0\nFeatures\t: fp asimd evtstrm crc32 cpuid\n",
    "aarch64-v8.2": f"Features\t: {NEOVERSE_N1} ssbs\n",
    "aarch64-v8.6": f"Features\t: {NEOVERSE_N1} i8mm bf16\n",
    "aarch64-sve": f"Features\t: {NEOVERSE_N1} sve svei8mm svebf16 i8mm bf16\n",
}


@pytest.mark.parametrize("target", CPUINFO)
def test_features_name_the_target(target: str) -> None:
    found = processors.features_of(CPUINFO[target])
    assert processors.target_of_features(found) == target


def test_cores_of_two_kinds_have_what_both_have() -> None:
    both = CPUINFO["aarch64-sve"] + CPUINFO["aarch64-v8.2"]
    assert processors.target_of_features(processors.features_of(both)) == "aarch64-v8.2"
    # products of bf16 without those of int8, and SVE without either, as A64FX has
    for more in ("bf16", "sve"):
        assert processors.target_of_features([*NEOVERSE_N1.split(), more]) == "aarch64-v8.2"
    assert processors.target_of_features(processors.features_of("")) == "aarch64-v8"


def test_a_machine_of_arm_reads_its_features(monkeypatch: pytest.MonkeyPatch) -> None:
    processors.target_name.cache_clear()
    monkeypatch.setattr(processors.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(processors, "_features", lambda: NEOVERSE_N1.split())
    try:
        assert processors.target_name() == "aarch64-v8.2"
        assert processors.processor().isa == "neon"
        assert processors.compiler_for("aarch64-v8.6") == "g++"
        assert processors.compiler_for("cpu-v3", "my-g++") == "my-g++"
        with pytest.raises(OptionError, match=r"is aarch64-v8.2.*aarch64-v8;.*--target cpu-v3"):
            processors.check_runs_here("cpu-v3")
        processors.check_runs_here("aarch64-v8")
    finally:
        processors.target_name.cache_clear()


def test_targets_of_a_kind_are_in_order() -> None:
    assert processors.targets_below("cpu-v3") == ("cpu-v3", "cpu-v1")
    assert processors.targets_below("aarch64-v8.6") == (
        "aarch64-v8.6",
        "aarch64-v8.2",
        "aarch64-v8",
    )
    assert {row.kind for row in TARGETS.values()} == {X86, ARM}


@pytest.mark.skipif(processors.kind_here() != X86, reason="is about x86-64")
def test_a_lower_target_is_run_and_another_refused(tmp_path) -> None:
    class Net(nn.Module):
        def forward(self, x):
            return x.exp() + 1

    x, folder = torch.randn(5, 33), str(tmp_path)
    module = strop.optimize(
        Net().eval(), options=Options(target="cpu-v1", cache_dir=folder, strict=True)
    )
    torch.testing.assert_close(module(x), x.exp() + 1)
    for target, why in (("aarch64-v8.6", "strop build --target"), ("cpu-v9", "no such target")):
        options = Options(target=target, cache_dir=folder)
        with pytest.raises(OptionError, match=why):
            strop.optimize(Net().eval(), options=options)(x)
