"""Artefacts for devices that this machine need not have."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import strop
from strop.api import dispatchers_of, optimize_module
from strop.artefacts.building import CARDS, check_targets
from strop.artefacts.planning import PlanningDispatcher
from strop.artefacts.saving import gather, save_artefact, write_gathered
from strop.cli import app
from strop.codegen.triton import emit
from strop.errors import CacheError, CodegenError, OptionError, UnsupportedError
from strop.frontend import indexed as made_there
from strop.frontend.indexed import indexed, write_indexed
from strop.options import Options
from strop.runtime.build import compilers
from strop.runtime.build.ahead import AheadLoader
from strop.runtime.build.artefact import Artefact
from strop.runtime.build.cubin import Cubin
from strop.runtime.build.processors import (
    ARM,
    CROSS_COMPILERS,
    X86,
    kind_here,
    processor,
    target_name,
)
from tests.artefacts.test_artefacts import (
    Net,
    X,
    forbid_compilers,
    forget,
    fresh_process,
    loaded,
    options,
    run,
)
from tests.codegen.kernels import SAMPLES
from tests.e2e import tiny

__all__ = ["fresh_process"]  # a fixture, which runs by itself


GPU = torch.device("cuda", 0)


def planned(module: nn.Module, target: str, folder: Path) -> nn.Module:
    """The module as it is compiled for another device."""
    device, given = CARDS.get(target) or processor(target), options(folder)
    place = GPU if device.arch else None
    kind = partial(PlanningDispatcher, loader=AheadLoader(target, device, given), place=place)
    optimize_module(module, given, kind=kind)
    return module


# planning


def test_a_planned_module_gives_results_of_the_right_sizes_and_runs_nothing(
    tmp_path: Path,
) -> None:
    unet = planned(tiny.unet(), target_name(), tmp_path)
    (result,) = run(unet, *tiny.unet_args(2, 8, 16, 5), return_dict=False)
    assert (result.shape, result.dtype) == ((2, 4, 8, 16), torch.float32)
    assert not result.any()
    assert not any(entry.bounds for entry in unet.forward.shapes.entries)


@pytest.mark.parametrize("data", [3, 2.5, [], [True, False], [[1, 2, 3], [4, 5, 6]], [[0.5], [2]]])
def test_numbers_of_python_are_constants_of_a_plan(
    data: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has a GPU on which to make a tensor of them."""
    monkeypatch.setattr(made_there, "_has_gpu", lambda: False)
    for name in ("full", "empty"):
        usual = getattr(torch, name)
        on_cpu = lambda *args, device, usual=usual, **how: usual(*args, **how)  # noqa: E731
        monkeypatch.setattr(torch, name, on_cpu)
    for how in ({}, {"dtype": torch.float16}):
        made = made_there.made_on(torch.tensor, data, device="cuda", **how)
        wanted = torch.tensor(data, **how)
        assert (made.dtype, made.shape) == (wanted.dtype, wanted.shape)
        assert torch.equal(made, wanted)


def test_sizes_off_the_grid_are_planned_as_well(tmp_path: Path) -> None:
    unet = planned(tiny.unet().half(), "sm_90", tmp_path)
    for height, width in ((8, 8), (7, 9), (8, 11)):
        call = tiny.unet_args(2, height, width, 5, torch.float16)
        (result,) = run(unet, *call, return_dict=False)
        assert result.shape == (2, 4, height, width)
    found = {v.stored_keys: v.is_ragged for v in unet.forward.variants.all}
    assert sorted(found.values()) == [False, True, True]


class Clip(nn.Sequential):
    """Convolutions that are torch's, with biases."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv3d(3, 8, 3, padding=1), nn.ReLU(), nn.ConvTranspose3d(8, 4, 2, stride=2)
        )


@pytest.mark.parametrize("target", ["sm_90", target_name()])
def test_a_gpu_adds_biases_of_torchs_convolutions_in_kernels(target: str, tmp_path: Path) -> None:
    module = planned(Clip().eval(), target, tmp_path)
    (result,) = (run(module, torch.randn(2, 3, 4, 6, 8)),)
    assert result.shape == (2, 4, 8, 12, 16)
    (variant,) = module.forward.variants.all
    calls = [dict(step.attrs) for step in variant.program.call_steps]
    assert {call["target"] for call in calls} == {"aten.convolution.default"}
    has_bias = [call["args"][2] is not None for call in calls]
    kernels = [step.ops for step in variant.program.kernel_steps]
    if target == "sm_90":
        assert has_bias == [False, False]
        assert kernels == [("add", "relu"), ("add",)]
    else:
        assert has_bias == [True, True]
        assert kernels == [("relu",)]


def test_modules_are_traced_as_if_on_a_gpu(tmp_path: Path) -> None:
    calls: dict[nn.Module, tuple[Tensor, ...]] = {
        tiny.unet().half(): tiny.unet_args(2, 8, 8, 5, torch.float16),
        tiny.clip(): (torch.zeros(2, 7, dtype=torch.int64),),
        tiny.vae().decoder: (torch.zeros(1, 4, 8, 8),),
    }
    for module, call in calls.items():
        run(planned(module, "sm_90", tmp_path), *call)
        (variant,) = module.forward.variants.all
        assert variant.program.device == "cuda"
        assert not variant.program.foreign_calls
        assert {spec.device for spec in (*variant.specs, *variant.rows)} == {GPU}


def test_what_is_planned_for_this_processor_runs_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = planned(Net().eval(), target_name(), tmp_path / "before")
    run(module, X)
    report = save_artefact(dispatchers_of(module), tmp_path / "net.strop")
    forget()
    forbid_compilers(monkeypatch)
    served = loaded(tmp_path, report.path)
    # fp32 results of small sums in another order
    torch.testing.assert_close(run(served, X), run(Net().eval(), X), rtol=1e-5, atol=1e-6)
    assert served.forward.variants.num_captures == 0


def test_one_file_is_for_several_targets(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    gathered = []
    for target in ("cpu-v3", "cpu-v4", "sm_90"):
        module = planned(Net().eval(), target, tmp_path)
        run(module, X)
        gathered.append(gather(dispatchers_of(module)))
        strop.restore(module)
    report = write_gathered(gathered, tmp_path / "net.strop")
    assert report.targets == ("cpu-v3", "cpu-v4", "sm_90")
    assert report.num_plans == 2  # one for all processors
    artefact = Artefact(report.path)
    cubins = [artefact.read(*place) for place in artefact.sections if place[0] == "cubin"]
    assert cubins
    assert {Cubin.from_bytes(data or b"").arch for data in cubins} == {90}
    assert {kind for kind, _ in artefact.sections} == {"plan", "cpp", "so", "cubin"}


def built_for(target: str, folder: Path, compiler: str = "") -> Path:
    """An artefact of a module for a processor."""
    module, given = Net().eval(), options(folder / "ahead")
    loader = AheadLoader(target, processor(target), given, compiler=compiler)
    optimize_module(module, given, kind=partial(PlanningDispatcher, loader=loader, place=None))
    run(module, X)
    return save_artefact(dispatchers_of(module), folder / f"{target}.strop").path


@pytest.mark.skipif(kind_here() != X86, reason="is about x86-64")
def test_an_artefact_for_another_processor_is_refused_here(tmp_path: Path) -> None:
    if shutil.which(CROSS_COMPILERS[ARM]) is None:
        pytest.skip(f"{CROSS_COMPILERS[ARM]} was not found")
    path = built_for("aarch64-v8.6", tmp_path)
    artefact = Artefact(path)
    units = [place for place in artefact.sections if place[0] == "so"]
    assert units
    for code in (artefact.read(*place) or b"" for place in units):
        assert (code[:4], code[18:20]) == (b"\x7fELF", (183).to_bytes(2, "little"))  # AArch64
    forget()
    refusal = f"has machine code for aarch64-v8.6, and .* is on {target_name()}"
    with pytest.raises(CacheError, match=refusal):
        loaded(tmp_path, path)


def test_a_missing_cross_compiler_is_named(tmp_path: Path) -> None:
    foreign = "cpu-v3" if kind_here() == ARM else "aarch64-v8.2"
    with pytest.raises(CodegenError, match=f"no-such-g.. was not found.*for {foreign}.*CXX"):
        built_for(foreign, tmp_path, "no-such-g++")


@pytest.mark.skipif(kind_here() != X86, reason="is about x86-64")
def test_an_artefact_for_a_lower_processor_is_loaded_by_name(tmp_path: Path) -> None:
    if target_name() == "cpu-v1":
        pytest.skip("nothing is lower")
    path = built_for("cpu-v1", tmp_path)
    forget()
    with pytest.raises(CacheError, match=r"load it with strop.Options\(target='cpu-v1'\)"):
        loaded(tmp_path / "here", path)
    module = Net().eval()
    lower = Options(cache_dir=str(tmp_path / "lower"), target="cpu-v1")
    strop.load(module, path, trust=True, options=lower)
    torch.testing.assert_close(run(module, X), run(Net().eval(), X), rtol=1e-5, atol=1e-6)
    assert module.forward.variants.num_captures == 0


def test_a_kernel_that_cannot_be_compiled_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("triton")
    good = emit(SAMPLES["silu_flat"](torch.float16).kernel).source
    bad = replace(good, text=good.text.replace("tl.load", "tl.no_such_load"))
    loader = AheadLoader("sm_90", CARDS["sm_90"], options(tmp_path))
    (entry,) = loader.machine_code([good, bad])
    assert Cubin.from_bytes(entry.data).arch == 90
    assert "could not be built ahead" in caplog.text
    assert "no_such_load" in caplog.text


def test_what_would_run_in_eager_is_refused(tmp_path: Path) -> None:
    module = planned(Net().train(), target_name(), tmp_path)
    with pytest.raises(UnsupportedError, match="Net cannot be compiled ahead"):
        run(module, X)


def test_targets_have_names() -> None:
    assert check_targets(["cpu", target_name(), "sm_90"]) == (target_name(), "sm_90")
    assert check_targets(["aarch64-v8.6", "cpu-v3"]) == ("aarch64-v8.6", "cpu-v3")
    for name in ("sm_9", "cpu-v9", "aarch64"):
        with pytest.raises(OptionError, match=f"there is no target {name}; there are cpu, cpu-"):
            check_targets([name])
    assert [f"sm_{card.arch}" for card in CARDS.values()] == [*CARDS]


# indices, which PyTorch refuses for tensors on a GPU that is not there

INDICES: dict[str, Any] = {
    "a number": 1,
    "a negative number": (slice(None), -1),
    "a slice": slice(1, None),
    "all": slice(None),
    "a step": (slice(None, None, 2), slice(1, 3)),
    "new dims": (None, slice(None), None),
    "an ellipsis": (..., 0),
    "an ellipsis in the middle": (0, ..., None, slice(1, 2)),
    "a tensor": torch.tensor([1, 0, 1]),
    "a list": [1, 0],
    "tensors apart": (torch.tensor([0, 1]), slice(None), torch.tensor([2, 0])),
    "a number and a tensor": (1, slice(None), torch.tensor([2, 0])),
    "nothing": (),
}


@pytest.mark.parametrize("name", INDICES)
def test_indices_are_those_of_torch(name: str) -> None:
    x = torch.arange(2 * 3 * 4).reshape(2, 3, 4)
    assert torch.equal(indexed(x, INDICES[name]), x[INDICES[name]])
    ours, expected = x.clone(), x.clone()
    for value in (-1, torch.tensor(-2)):
        write_indexed(ours, INDICES[name], value)
        expected[INDICES[name]] = value
        assert torch.equal(ours, expected)


def test_a_mask_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="a mask as an index"):
        indexed(torch.ones(2), torch.tensor([True, False]))


# the command


def build(*words: str) -> Any:
    runner = CliRunner()
    return runner.invoke(app, ["build", *words], env={"COLUMNS": "200"}, catch_exceptions=False)


def test_the_command_says_what_is_wrong(tmp_path: Path) -> None:
    wrong = build("--model", str(tmp_path), "--target", "cpu", "-o", "x.strop")
    assert wrong.exit_code == 1
    assert "is no model that can be built: its model_index.json cannot be read" in wrong.output
    wrong = build("--model", str(tmp_path), "--target", "sm_1,cpu", "-o", "x.strop")
    assert "there is no target sm_1; there are cpu" in wrong.output


@pytest.mark.filterwarnings("ignore")  # numpy's, of diffusers' scheduler
def test_a_folder_without_weights_is_enough(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from strop.models import sprites

    monkeypatch.setenv("STROP_CACHE_DIR", str(tmp_path / "before"))
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    done = build("--model", str(folder), "--target", "cpu", "-o", str(tmp_path / "x.strop"))
    assert done.exit_code == 0, done.output
    assert "left out: vae.encoder (it has not run)" in done.output
    forget()
    forbid_compilers(monkeypatch)
    pipe, eager = (sprites.load_from(tiny_model) for _ in range(2))
    given = Options(cache_dir=str(tmp_path / "after"), strict=True)
    strop.load(pipe, tmp_path / "x.strop", trust=True, options=given)
    call: dict[str, Any] = {"width": 32, "height": 48, "num_inference_steps": 2}
    pictures = [
        one("a red circle", generator=torch.manual_seed(0), output_type="pt", **call).images
        for one in (pipe, eager)
    ]
    torch.testing.assert_close(*pictures, rtol=1e-3, atol=1e-3)  # fp32 through many layers


# on a GPU

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
ELSEWHERE = """
import sys
import torch
from pathlib import Path
from strop.api import dispatchers_of
from strop.artefacts.saving import save_artefact
from tests.artefacts.test_building import planned
from tests.e2e import tiny

assert not torch.cuda.is_available()
unet = planned(tiny.unet().half(), sys.argv[2], Path(sys.argv[1]).parent / "elsewhere")
with torch.no_grad():
    unet(*tiny.unet_args(2, 8, 8, 5, torch.float16))
save_artefact(dispatchers_of(unet), Path(sys.argv[1]))
"""


def forbid_gpu_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_compilers(monkeypatch)
    monkeypatch.setattr(compilers, "Worker", None)
    monkeypatch.setattr(compilers, "BUILDS", compilers.Builds())


def on_gpu(module: nn.Module, *args: Tensor) -> Tensor:
    result: Tensor = run(module, *(arg.cuda() for arg in args))[0]
    return result


@pytest.mark.gpu
@needs_gpu
def test_what_was_saved_on_a_gpu_runs_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = tiny.unet_args(2, 8, 8, 5, torch.float16)
    unet = strop.optimize(tiny.unet().half().cuda(), options=options(tmp_path / "before"))
    expected = on_gpu(unet, *call)
    report = strop.save(unet, tmp_path / "unet.strop")
    forget()
    forbid_gpu_compilers(monkeypatch)
    served = loaded(tmp_path, report.path, tiny.unet().half().cuda())
    assert torch.equal(on_gpu(served, *call), expected)
    assert compilers.BUILDS.num_built == 0
    assert served.forward.variants.num_captures == 0


@pytest.mark.gpu
@needs_gpu
def test_what_was_built_without_a_gpu_runs_on_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    major, minor = torch.cuda.get_device_capability()
    if f"sm_{major}{minor}" not in CARDS:
        pytest.skip(f"no card stands for sm_{major}{minor}")
    path = tmp_path / "unet.strop"
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    command = [sys.executable, "-c", ELSEWHERE, str(path), f"sm_{major}{minor}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    forbid_gpu_compilers(monkeypatch)
    twin = tiny.unet().half().cuda()
    served = loaded(tmp_path, path, tiny.unet().half().cuda())
    call = tiny.unet_args(2, 8, 8, 5, torch.float16)
    # half types: a tiny network with random weights, in another order of sums
    torch.testing.assert_close(on_gpu(served, *call), on_gpu(twin, *call), rtol=2e-2, atol=2e-2)
    assert served.forward.variants.num_captures == 0
    assert compilers.BUILDS.num_built == 0
