"""A GPU that stands in for an older one: its record, the requests to the compiler, and the keys."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import strop
from strop.codegen.triton import emit
from strop.errors import CodegenError, OptionError
from strop.ir.device import CPU, SHARED_BYTES, Device, GpuTarget
from strop.ir.source import KernelSource
from strop.kernels.library import forms, select
from strop.options import Options
from strop.runtime.build import compilers, cubin, loader
from strop.runtime.build.cache import DiskCache
from strop.runtime.build.cubin import Cubin, cache_key, request_of
from strop.runtime.build.loader import CudaLoader, kernel_loader
from strop.runtime.run import library_calls as calls
from tests.codegen.kernels import SAMPLES
from tests.gpus import A100, H100, RTX_5090
from tests.kernels.launching import PLAIN, SAME, problem

KIB = 1 << 10
CHANGED = {"name", "arch", "shared_bytes", "runs_on"}
POINTWISE = emit(SAMPLES["silu_flat"](torch.float16).kernel).source


@pytest.fixture(autouse=True)
def _any_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys name its version, and where there is no GPU it need not be installed."""
    monkeypatch.setattr(cubin, "triton_version", lambda: "3.6.0")
    cache_key.cache_clear()


# the record


@pytest.mark.parametrize("card", [H100, RTX_5090], ids=lambda card: card.name)
@pytest.mark.parametrize(("arch", "kib"), [(80, 163), (86, 99), (87, 163), (89, 99)])
def test_a_newer_card_has_an_older_ones_features(card: Device, arch: int, kib: int) -> None:
    older = card.as_arch(arch)
    assert older.name == f"{card.name} as sm_{arch}"
    assert older.target == GpuTarget(arch, card.arch)
    assert older.shared_bytes == min(card.shared_bytes, kib * KIB)
    assert [older.has_tma, older.has_wgmma, older.has_pdl] == [False] * 3
    same = {field.name for field in fields(Device)} - CHANGED
    assert all(getattr(older, name) == getattr(card, name) for name in same)


def test_the_peak_is_that_of_the_card_on_which_libraries_run() -> None:
    older = H100.as_arch(86)
    assert older.half_flops == H100.half_flops > 0
    assert older.fp8_flops == H100.fp8_flops > 0
    assert older.single_flops == H100.single_flops > 0


@pytest.mark.parametrize("card", [A100, H100, RTX_5090], ids=lambda card: card.name)
def test_its_own_architecture_restricts_nothing(card: Device) -> None:
    assert card.as_arch(0) is card
    assert card.as_arch(card.arch) is card
    assert card.target.is_native
    assert card.target == GpuTarget(card.arch) == GpuTarget(card.arch, card.arch)


def test_a_cpu_stands_in_for_no_gpu() -> None:
    assert CPU.as_arch(80) is CPU


@pytest.mark.parametrize(
    ("card", "arch", "told"),
    [
        (A100, 86, "A100.* is sm_80, which cannot run kernels for sm_86; .* no other architecture"),
        (A100, 90, "for sm_90; .* no other architecture"),
        (H100, 100, "for sm_100; it can stand in for arch=80, 86, 87, 89; without arch"),
        (H100, 120, "H100.* is sm_90, which cannot run kernels for sm_120"),
        (RTX_5090, 90, "for sm_90; it can stand in for arch=80, 86, 87, 89;"),  # that PTX is sm_90a
        (RTX_5090, 121, "RTX 5090 is sm_120, which cannot"),
        (H100, 75, r"arch=75: kernels need compute capability 8\.0 or newer; there are 80, 86, 87"),
        (H100, 70, r"arch=70: kernels need compute capability 8\.0"),
        (H100, 88, "arch=88: there is no such GPU architecture"),
        (CPU, 88, "arch=88: there is no such GPU architecture"),
    ],
)
def test_what_cannot_be_is_told_with_what_can(card: Device, arch: int, told: str) -> None:
    with pytest.raises(OptionError, match=told):
        card.as_arch(arch)


def test_a_block_never_has_more_than_the_table_says() -> None:
    for card in (A100, H100, RTX_5090):
        assert card.shared_bytes == SHARED_BYTES[card.arch]


# requests and keys


@pytest.mark.parametrize("arch", [80, 86, 89])
def test_a_request_says_whose_code_it_is(arch: int) -> None:
    native, ported = (request_of(POINTWISE, GpuTarget(arch, on)) for on in (0, 90))
    assert "runs_on" not in native
    assert ported == {**native, "runs_on": 90}
    assert ported["constants"]["EARLY"] == 0
    assert request_of(POINTWISE, GpuTarget(90))["constants"]["EARLY"] == 1


def test_keys_differ_by_either_number() -> None:
    pairs = [(80, 80), (90, 90), (80, 90), (86, 90), (80, 100), (80, 120)]
    assert len({cache_key(POINTWISE, GpuTarget(*pair)) for pair in pairs}) == len(pairs)


def test_keys_of_native_code_are_those_from_before_there_were_two_numbers() -> None:
    request = request_of(POINTWISE, GpuTarget(90))
    expected = {
        "name",
        "text",
        "signature",
        "constants",
        "divisible",
        "num_warps",
        "max_registers",
        "arch",
        "boxes",
    }
    assert request.keys() == expected
    assert request["arch"] == 90


def test_ptx_for_one_architecture_is_refused_for_another() -> None:
    source = replace(
        POINTWISE, language="ptx", name="product", constants=(("SHARED", 0), ("EARLY", 1))
    )
    assert request_of(source, GpuTarget(90))["arch"] == 90
    with pytest.raises(CodegenError, match=r"product is written in PTX for sm_90.*for sm_80"):
        request_of(source, GpuTarget(80, 90))


# the loader


def on_h100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(loader, "gpu", lambda index: H100)


@pytest.mark.parametrize("arch", [80, 86, 89])
def test_a_loader_is_for_a_device_and_an_architecture(
    arch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_h100(monkeypatch)
    plain, older = (kernel_loader("cuda", 7, str(tmp_path), 1, a) for a in (0, arch))
    assert plain.device == H100
    assert older.device == H100.as_arch(arch)
    assert kernel_loader("cuda", 7, str(tmp_path), 1, arch) is older


def test_a_loader_refuses_what_the_gpu_cannot_stand_in_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_h100(monkeypatch)
    with pytest.raises(OptionError, match="it can stand in for arch=80, 86, 87, 89"):
        kernel_loader("cuda", 7, str(tmp_path), 1, 100)
    device = kernel_loader("cpu", 0, str(tmp_path), 1, 100).device
    assert replace(device, isa="", has_vnni=False) == CPU


def made(shared: int) -> Callable[..., dict[KernelSource, Cubin]]:
    def build(sources: Sequence[KernelSource], target: GpuTarget, *_: Any) -> Any:
        return {source: Cubin(source.name, b"", shared, 4, target.arch) for source in sources}

    return build


@pytest.mark.parametrize(
    ("device", "kib", "fits"),
    [
        (H100, 100, True),
        (H100, 228, False),
        (H100.as_arch(80), 163, True),
        (H100.as_arch(80), 164, False),
        (H100.as_arch(86), 99, True),
        (H100.as_arch(86), 100, False),
        (H100.as_arch(89), 100, False),
    ],
)
def test_a_kernel_has_the_shared_memory_of_its_architecture(
    device: Device, kib: int, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilers, "build", made(kib * KIB))
    library = CudaLoader(DiskCache(tmp_path), 1, device)
    if fits:
        library.build([POINTWISE])
        return
    told = f"{kib * KIB} bytes of shared memory, and a block on {device.name} can have"
    with pytest.raises(CodegenError, match=told):
        library.build([POINTWISE])


@pytest.mark.parametrize(
    ("device", "is_there"), [(H100, True), (H100.as_arch(80), False), (A100, False)]
)
def test_kernels_for_wgmma_are_not_begun_elsewhere(device: Device, is_there: bool) -> None:
    """Nor are any that read by the tensor memory accelerator."""
    x, heads = (2048, 1280), (2, 8, 4096, 40)
    asked = (
        problem("linear", x, (1280, 1280)),
        problem("conv2d", (2, 320, 64, 64), (320, 320, 3, 3), **SAME),
        problem("attention", heads, heads, heads, **PLAIN),
    )
    for each in asked:
        chosen = select(each.call, each, device)
        for sources in (chosen.sources, list(forms(each.call, device))):
            assert any(source.boxes for source in sources) == is_there


# library calls


@pytest.mark.parametrize(
    ("device", "most"), [(H100, 256), (RTX_5090, 256), (A100, 128), (H100.as_arch(86), 128)]
)
def test_attention_asks_cudnn_for_the_heads_of_the_architecture(
    device: Device, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def fits(q: Tensor, v: Tensor, largest: int) -> bool:
        asked.append(largest)
        return False

    monkeypatch.setattr(calls, "_fits_cudnn_attention", fits)
    q = torch.randn(1, 2, 4, 8)
    result = calls.allocating_on(device)["attention"]({"causal": False, "scale": 0.3})([q, q, q])
    assert result.shape == q.shape
    assert asked == [most]


@pytest.mark.parametrize(("dim", "most", "fits"), [(128, 128, True), (160, 128, False)])
def test_heads_that_fit(dim: int, most: int, fits: bool) -> None:
    q = torch.empty(1, 1, 1, dim, dtype=torch.float16)
    assert calls._fits_cudnn_attention(q, q, most) is fits


# stored plans


class Net(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * 2).sigmoid()


def test_a_stored_plan_says_its_architecture_and_is_for_no_other(tmp_path: Path) -> None:
    for arch in (0, 86, 80):  # a CPU has none, but a plan is known by its options
        net = strop.optimize(Net().eval(), options=Options(cache_dir=str(tmp_path), arch=arch))
        with torch.no_grad():
            net(torch.randn(3, 4))
        assert not net.forward.variants.all[0].from_disk
    cache = DiskCache(tmp_path)
    plans = [json.loads(cache.read("plan", p.name) or b"") for p in (tmp_path / "plan").iterdir()]
    assert sorted(plan["arch"] for plan in plans) == [0, 80, 86]


def test_files_of_measurements_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from strop.bench import environment

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    for arch, label in (("0", "h100"), ("86", "h100-as-sm86")):
        monkeypatch.setenv("STROP_ARCH", arch)
        assert environment.device_label(torch.device("cuda")) == label
    assert environment.switches()["arch"] == 86
