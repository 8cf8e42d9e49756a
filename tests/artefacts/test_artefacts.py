"""An artefact carries what was compiled into a process that compiles nothing, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor, nn

import strop
from strop.artefacts import contents
from strop.dispatch import stored_variants, variants
from strop.dispatch.native_look import SOURCE as LOOK
from strop.errors import CacheError, CodegenError, OptionError
from strop.frontend.low_rank_layers import is_factor
from strop.ir.source import KernelSource
from strop.options import Options
from strop.runtime.build import loader as kernels
from strop.runtime.build.artefact import LOADED, Artefact
from strop.runtime.build.native import NativeKernels
from tests.e2e import tiny

PROMPTS = {
    "prompt_embeds": torch.zeros(1, 5, tiny.PROMPT_DIM),
    "negative_prompt_embeds": torch.ones(1, 5, tiny.PROMPT_DIM),
}
X = torch.randn(3, 8, generator=torch.manual_seed(0))


class Net(nn.Module):
    """Two kernels with a product between them."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, width), nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).sigmoid()).softmax(-1)


@pytest.fixture(autouse=True)
def fresh_process():
    """No kernel and no artefact of an earlier test is in memory."""
    forget()
    yield
    forget()


def forget() -> None:
    kernels.kernel_loader.cache_clear()
    LOADED.clear()


def options(folder: Path, **more: Any) -> Options:
    return Options(**({"cache_dir": str(folder), "strict": True} | more))


def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with torch.no_grad():
        return module(*args, **kwargs)


def saved(folder: Path, module: nn.Module | None = None) -> Path:
    """An artefact of a small net, in a folder that no cache is in."""
    module = strop.optimize(module or Net().eval(), options=options(folder / "before"))
    run(module, X)
    path = folder / "net.strop"
    strop.save(module, path)
    forget()
    return path


def loaded(folder: Path, path: Path, module: nn.Module | None = None, **more: Any) -> nn.Module:
    """A net that has the artefact and an empty cache."""
    module = module or Net().eval()
    given: dict[str, Any] = {"trust": True, "options": options(folder / "after")} | more
    return strop.load(module, path, **given)


def forbid_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("an artefact must not trace or compile")

    def compiling(self: NativeKernels, missing: Sequence[KernelSource]) -> None:
        if missing != [LOOK]:
            forbidden()
        raise CodegenError("there is no compiler")  # a module is then looked at in Python

    monkeypatch.setattr(variants, "capture", forbidden)
    monkeypatch.setattr(NativeKernels, "_compile", compiling)


def test_a_module_runs_from_an_artefact_with_other_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path)
    forbid_compilers(monkeypatch)
    other = Net().eval()
    with torch.no_grad():
        other.first.weight.mul_(2)
    expected = run(other, X)
    module = loaded(tmp_path, path, other)
    # fp32 results of small sums in another order
    torch.testing.assert_close(run(module, X), expected, rtol=1e-5, atol=1e-6)
    assert module.forward.variants.num_captures == 0
    assert module.forward.variants.all[0].from_disk
    assert not (tmp_path / "after" / "plan").exists()  # it was read where it lies


def test_every_size_and_every_skeleton_that_ran_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unet = strop.optimize(tiny.unet(), options=options(tmp_path / "before"))
    calls = [tiny.unet_args(2, 8, 8, 5), tiny.unet_args(1, 16, 8, 7)]
    run(unet, *calls[0])
    report = strop.save(unet, tmp_path / "unet.strop")
    assert report.num_plans == 1
    assert report.num_kernels > 5
    expected = [run(unet, *call)[0] for call in calls]
    forget()
    forbid_compilers(monkeypatch)
    module = loaded(tmp_path, tmp_path / "unet.strop", tiny.unet())
    for call, result in zip(reversed(calls), reversed(expected), strict=True):
        assert torch.equal(run(module, *call)[0], result)
    assert module.forward.variants.num_captures == 0


def test_saving_again_from_an_artefact_gives_the_same(tmp_path: Path) -> None:
    path = saved(tmp_path)
    module = loaded(tmp_path, path)
    run(module, X)
    again = strop.save(module, tmp_path / "again.strop")
    first, second = Artefact(path), Artefact(again.path)
    assert first.sections.keys() == second.sections.keys()
    count = sum(kind == "cpp" for kind, _ in first.sections)  # by what the processor has
    assert str(again).startswith(f"{again.path}: 1 plan, {count} kernels for cpu-")


def test_one_artefact_serves_any_lora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unet = strop.optimize(tiny.unet(), options=options(tmp_path / "before"))
    call = tiny.unet_args(2, 8, 8, 5)
    plain = run(unet, *call)[0]
    report = strop.save(unet, tmp_path / "unet.strop")
    forget()
    forbid_compilers(monkeypatch)
    adapted, twin = tiny.unet(), tiny.unet()
    for module in (adapted, twin):
        torch.manual_seed(1)
        config = LoraConfig(r=3, target_modules=["to_q", "to_v"], init_lora_weights=False)
        module.add_adapter(config)
    expected = run(twin, *call)[0]
    loaded(tmp_path, report.path, adapted)
    result = run(adapted, *call)[0]
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)  # fp32, other orders
    assert not torch.allclose(result, plain, rtol=1e-3, atol=1e-3)
    assert adapted.forward.variants.num_captures == 0
    unmerged = options(tmp_path / "after", lora="unmerged")  # has another graph, of the same model
    assert loaded(tmp_path, report.path, adapted, options=unmerged) is adapted
    assert any(map(is_factor, adapted.forward.state.names))


PROCESS = """
import sys
sys.modules["triton"] = None
import torch, strop
from tests.e2e import tiny

pipe = tiny.pipeline()
strop.load(pipe, sys.argv[1], trust=sys.argv[2])
prompts = {"prompt_embeds": torch.zeros(1, 5, 16), "negative_prompt_embeds": torch.ones(1, 5, 16)}
result = pipe(**prompts, width=16, height=16, num_inference_steps=2, output_type="latent")
for name in ("unet",):
    served = getattr(pipe, name).forward
    print(name, served.variants.num_captures, served.counters.eager_calls)
"""


@pytest.mark.slow
def test_a_pipeline_needs_no_compiler_and_no_cache(tmp_path: Path) -> None:
    pipe = tiny.pipeline()
    strop.optimize(pipe, options=Options(cache_dir=str(tmp_path / "before")))
    pipe(**PROMPTS, width=16, height=16, num_inference_steps=2, output_type="latent")
    report = strop.save(pipe, tmp_path / "pipe.strop")
    environment = {
        "PATH": str(tmp_path / "nothing"),
        "STROP_CACHE_DIR": str(tmp_path / "after"),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "HOME": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", PROCESS, str(report.path), report.fingerprint],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["unet", "0", "0"]


# trust


def test_a_stranger_is_not_trusted(tmp_path: Path) -> None:
    path, module = saved(tmp_path), Net().eval()
    with pytest.raises(CacheError, match=r"machine code.* trust=True .*fingerprint"):
        loaded(tmp_path, path, module, trust=False)
    assert "forward" not in vars(module)
    with pytest.raises(CacheError, match="another file than the one that you trust"):
        loaded(tmp_path, path, trust="sha256:" + "0" * 64)
    with pytest.raises(OptionError, match="trust='yes'"):
        loaded(tmp_path, path, trust="yes")
    with pytest.raises(OptionError, match="trust=1"):
        loaded(tmp_path, path, trust=1)
    loaded(tmp_path, path, trust=f"sha256:{Artefact(path).fingerprint}")


def test_the_own_cache_folder_is_trusted_while_it_is_private(tmp_path: Path) -> None:
    folder = tmp_path / "after"
    folder.mkdir(mode=0o700)
    path = folder / "net.strop"
    saved(tmp_path).rename(path)
    loaded(tmp_path, path, trust=False)
    path.chmod(0o666)
    with pytest.raises(CacheError, match=r"can be written by others \(mode 0666\)"):
        loaded(tmp_path, path, trust=False)
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere.strop")
    (tmp_path / "elsewhere.strop").write_bytes(b"")
    with pytest.raises(CacheError, match="does not lie in your cache folder"):
        loaded(tmp_path, path, trust=False)


def test_the_cache_folder_is_that_of_an_optimised_module(tmp_path: Path) -> None:
    folder = tmp_path / "after"
    folder.mkdir(mode=0o700)
    path = saved(tmp_path).rename(folder / "net.strop")
    module = strop.optimize(Net().eval(), options=options(folder))
    assert strop.load(module, path) is module
    with pytest.raises(CacheError, match="does not lie in your cache folder"):
        strop.load(Net().eval(), path)


# what it was not made for


def test_only_modules_and_pipelines_are_taken(tmp_path: Path) -> None:
    for call in (strop.save, strop.load):
        with pytest.raises(OptionError, match=rf"strop\.{call.__name__} got a int; it takes"):
            call(3, tmp_path / "x.strop")


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    path, module = saved(tmp_path), Net(width=16).eval()
    with pytest.raises(CacheError, match=r"another model: Net is a Net with 4 weights, float32"):
        loaded(tmp_path, path, module)
    assert "forward" not in vars(module)
    with pytest.raises(CacheError, match="4 weights, bfloat16"):
        loaded(tmp_path, path, Net().eval().bfloat16())
    with pytest.raises(CacheError, match=r"serves none of Linear: it is for Net"):
        loaded(tmp_path, path, nn.Linear(8, 8).eval())


def test_other_options_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    with pytest.raises(CacheError, match=r"give strop.load the options of strop\.save"):
        loaded(tmp_path, path, options=options(tmp_path, disable=("dot_merge",)))


def test_other_versions_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path)
    found = tuple(v.replace("torch ", "torch 9") for v in stored_variants.versions())
    monkeypatch.setattr(contents, "versions", lambda: found)
    with pytest.raises(CacheError, match=r"was made with torch 2.*and here is torch 92"):
        loaded(tmp_path, path)
    monkeypatch.undo()
    monkeypatch.setattr(contents, "own_source", lambda: "other")
    with pytest.raises(CacheError, match="another state of Strop's source"):
        loaded(tmp_path, path)


def test_another_target_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path)
    monkeypatch.setattr(kernels.CpuLoader, "target_name", "sm_80")
    with pytest.raises(CacheError, match=r"machine code for cpu-.*Net is on sm_80"):
        loaded(tmp_path, path)


def test_nothing_is_saved_of_what_has_not_run(tmp_path: Path) -> None:
    module = strop.optimize(Net().eval(), options=options(tmp_path))
    with pytest.raises(OptionError, match=r"Net \(it has not run\).*strop.warmup"):
        strop.save(module, tmp_path / "net.strop")
    run(module, X)
    with pytest.raises(CacheError, match="cannot be written: No such file or directory"):
        strop.save(module, tmp_path / "no" / "net.strop")
    assert [file.name for file in tmp_path.glob("*.strop*")] == []


# warming up


def test_warming_up_draws_each_size() -> None:
    pipe = tiny.pipeline()
    with pytest.raises(OptionError, match=r"takes a pipeline that strop.optimize has\s+seen"):
        strop.warmup(pipe, sizes=[(16, 16)])
    strop.optimize(pipe, options=tiny.options())
    for wrong in ([], [16, 16], [(16, 0)], 16):
        with pytest.raises(OptionError, match="heights and widths"):
            strop.warmup(pipe, sizes=wrong)
    more = PROMPTS | {"prompt": None, "output_type": "latent"}
    strop.warmup(pipe, sizes=[(16, 16), (32, 16)], **more)
    assert pipe.unet.forward.counters.calls == 4
    assert len(pipe.unet.forward.variants.all) == 1
    assert pipe.vae.decoder.forward.counters.calls == 0


def test_sizes_off_the_grid_are_served_in_any_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A UNet has other graphs for sizes that it cannot halve without a remainder."""
    calls = {
        "even": tiny.unet_args(2, 8, 8, 5),
        "odd": tiny.unet_args(2, 7, 9, 5),
        "half odd": tiny.unet_args(2, 8, 11, 5),
    }
    unet = strop.optimize(tiny.unet(), options=options(tmp_path / "before", strict=False))
    expected = {}
    for name, call in calls.items():
        run(unet, *call)  # in eager, while a graph is built
        unet.forward.variants.wait()
        expected[name] = run(unet, *call)[0]
    path = tmp_path / "unet.strop"
    strop.save(unet, path)
    strop.restore(unet)
    for order in (["odd", "even", "half odd"], ["even", "half odd", "odd"]):
        forget()
        with monkeypatch.context() as patch:
            forbid_compilers(patch)
            module = loaded(tmp_path, path, tiny.unet())
            for name in order:
                assert torch.equal(run(module, *calls[name])[0], expected[name]), name
            assert module.forward.variants.num_captures == 0
