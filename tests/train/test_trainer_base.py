"""Adapters beside a quantised base: gradients beside those of the dequantised weights, and whole
trainings."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from strop.errors import OptionError
from strop.testing import assert_as_accurate_together
from strop.train import frozen_base, given_settings, lora
from strop.train.loop import TrainingLoop
from tests.e2e import tiny
from tests.train import trainer
from tests.train.compiled import gradients, unet_args

# What the libraries say of themselves as they are imported, and diffusers of numpy.
pytestmark = pytest.mark.filterwarnings("ignore")
LIBRARIES = {"int8": "torchao", "fp8": "torchao", "nf4": "bitsandbytes"}
_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
DEVICES = ["cpu", pytest.param("cuda", marks=_GPU)]


def dequantised(linear: Any) -> Tensor:
    if not hasattr(linear.weight, "quant_state"):
        found: Tensor = linear.weight.dequantize()
        return found
    import bitsandbytes

    value: Tensor = bitsandbytes.functional.dequantize_4bit(
        linear.weight.data, linear.weight.quant_state
    )
    return value


def network() -> nn.Module:
    from peft import LoraConfig

    unet = tiny.unet()
    unet.requires_grad_(False)
    unet.add_adapter(LoraConfig(r=3, target_modules=["to_q", "to_v"], init_lora_weights=False))
    return unet.train()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", LIBRARIES)
def test_gradients_are_those_of_the_dequantised_weights(kind: str, device: str) -> None:
    pytest.importorskip(LIBRARIES[kind])
    torch.manual_seed(0)
    ours = network().to(device)
    eager = copy.deepcopy(ours)
    linears = [path for path, part in ours.named_modules() if type(part) is nn.Linear]
    trained = {path for path in linears if "lora_" in path}
    assert frozen_base.quantise(ours, kind) == len(linears) - len(trained) > 20
    moved = 0
    for path in set(linears) - trained:
        plain, value = eager.get_submodule(path), dequantised(ours.get_submodule(path))
        assert plain.weight.shape == value.shape
        moved += not torch.equal(plain.weight, value)
        with torch.no_grad():
            plain.weight.copy_(value)
    assert moved > 20, "else nothing was quantised"
    exact = copy.deepcopy(eager).double()
    triples = []
    for number in range(4):
        args = tuple(t.to(device) for t in unet_args(number))
        mine, theirs = gradients(ours, args), gradients(eager, args)
        wide = gradients(exact, tuple(t.double() for t in args))
        assert mine.keys() == theirs.keys() == wide.keys()
        assert all("lora_" in name for name in mine)
        triples += [(mine[name], theirs[name], wide[name]) for name in mine]
    assert_as_accurate_together(triples)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", LIBRARIES)
def test_trainings(
    kind: str, device: str, tiny_model: Path, pictures: Path, tmp_path: Path
) -> None:
    """They draw, resume to the bit, and leave files that load beside the plain base and name it."""
    pytest.importorskip(LIBRARIES[kind])
    values = {
        "model": tiny_model,
        "train_data_dir": pictures,
        "rank": 2,
        "base_weights": kind,
        "mixed_precision": "bf16",
        "gradient_checkpointing": True,
        "lr_warmup_steps": 0,
        "checkpointing_steps": 1,
        "threads": 1,
        "device": device,
        "deterministic": True,
    }
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    drawn = {"validation_prompt": "a ring", "num_validation_images": 1}
    trainer.train(
        "lora", **values, **drawn, validation_inference_steps=1, output_dir=whole, max_train_steps=2
    )
    trainer.train("lora", **values, output_dir=cut, max_train_steps=1)
    latest = {"max_train_steps": 2, "resume_from_checkpoint": "latest"}
    trainer.train("lora", **values, output_dir=cut, **latest)
    ours, theirs = (trainer.checkpoint_sums(f / "checkpoint-2") for f in (whole, cut))
    assert ours == theirs
    weights = load_file(whole / lora.DIFFUSERS_NAME)
    assert all(t.dtype == torch.float32 for t in weights.values())
    assert any(t.abs().max() > 0 for name, t in weights.items() if ".up." in name)
    for name, note in ((lora.DIFFUSERS_NAME, "base_weights"), (lora.KOHYA_NAME, "ss_base_weights")):
        with safe_open(whole / name, "pt") as file:
            assert file.metadata()[note] == kind
    pipe = trainer.session("lora", **values | {"base_weights": None}, output_dir=tmp_path / "x")
    plain = pipe.model.pipeline
    plain.unet.delete_adapters("default")
    before = trainer.picture(plain)
    plain.load_lora_weights(whole, weight_name=lora.DIFFUSERS_NAME)
    assert not torch.equal(trainer.picture(plain), before)


@pytest.mark.parametrize("adapter", ["loha", "lokr"])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_adapters_of_other_kinds(
    kind: str, adapter: str, tiny_model: Path, pictures: Path, tmp_path: Path
) -> None:
    pytest.importorskip(LIBRARIES[kind])
    values = {"model": tiny_model, "train_data_dir": pictures, "output_dir": tmp_path}
    trainer.train(
        "lora", **values, adapter=adapter, base_weights=kind, max_train_steps=1, threads=1
    )


@pytest.mark.parametrize(("name", "kind"), [("sdxl", "fp8"), ("sd3", "int8"), ("flux", "nf4")])
def test_families(
    name: str, kind: str, folders: dict[str, Path], pictures: Path, tmp_path: Path
) -> None:
    """Their code asks no type of a weight; no linear is left but those of adapters."""
    pytest.importorskip(LIBRARIES[kind])
    values = {"model": folders[name], "train_data_dir": pictures, "output_dir": tmp_path}
    made = trainer.session(
        "lora", **values, base_weights=kind, mixed_precision="bf16", max_train_steps=1, threads=1
    )
    watch = trainer.Watch()
    TrainingLoop(made, watch).run()
    assert watch.steps[-1].grad_norm > 0
    plain = [
        path
        for path, part in made.model.unet.named_modules()
        if type(part) is nn.Linear and type(part.weight) is nn.Parameter and "lora_" not in path
    ]
    assert not plain


@pytest.mark.parametrize("kind", LIBRARIES)
def test_without_its_library_a_kind_names_the_extra(
    kind: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the model is loaded."""
    for name in list(sys.modules):
        if name.partition(".")[0] == LIBRARIES[kind]:
            monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, LIBRARIES[kind], None)
    values = {"model": tiny_model, "train_data_dir": tmp_path / "none", "output_dir": tmp_path}
    with pytest.raises(OptionError, match=rf"{kind} needs {LIBRARIES[kind]} .*strop\[quantised\]"):
        trainer.session("lora", **values, base_weights=kind)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"use_dora": True}, "use_dora trains the lengths"),
        ({"compile_unet": True}, "not built for training beside quantised weights"),
        ({"adapter": "lokr"}, "lokr reads the shapes of weights, which nf4 packs"),
        ({"base_weights": "int4"}, "choose int8, fp8, nf4"),
    ],
)
def test_what_does_not_go_together(given: dict[str, Any], message: str) -> None:
    assert set(frozen_base.KINDS) == set(LIBRARIES)
    with pytest.raises(OptionError, match=message):
        given_settings.make("lora", {"model": "sprites", "base_weights": "nf4", **given})
