"""Kohya's form of adapters of transformers, read back by diffusers' converters of LoRAs and of
models of the first releases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from strop.errors import UnsupportedError
from strop.train import kohya, lora
from strop.train.families import FAMILIES
from tests.train import trainer
from tests.train.test_trainer_families import KINDS, given, loaded, picture

diffusers = pytest.importorskip("diffusers")
pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")

RANK, ALPHA = 4, 6.0
COLUMNS = 5  # of the weights that are compared
FAMILY = {one.name: one for one in FAMILIES}
FLUX, SD3 = "Flux.1", "Stable Diffusion 3"
ZEROS = torch.zeros(7 * 3072, 1)  # as many rows as the widest layer of Flux


def flux() -> Any:
    """diffusers' converters know no other width."""
    with torch.device("meta"):
        return diffusers.FluxTransformer2DModel(
            num_layers=1, num_single_layers=1, guidance_embeds=True
        )


def sd3(qk_norm: str | None = "rms_norm", dual: tuple[int, ...] = (0,)) -> Any:
    with torch.device("meta"):
        return diffusers.SD3Transformer2DModel(
            num_layers=2,
            num_attention_heads=2,
            attention_head_dim=8,
            joint_attention_dim=24,
            caption_projection_dim=16,
            pooled_projection_dim=12,
            dual_attention_layers=dual,
            qk_norm=qk_norm,
        )


MODELS: dict[str, Callable[[], Any]] = {FLUX: flux, SD3: sd3}


def layers_of(module: nn.Module) -> list[str]:
    return [n for n, one in module.named_modules() if isinstance(one, nn.Linear | nn.Conv2d)]


class FirstRelease(dict[str, Tensor]):
    """A model some weights of which are given; the others are zeros."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__(weights)
        self.asked: list[str] = []

    def pop(self, key: str, *default: Any) -> Tensor:
        self.asked.append(key)
        return super().pop(key, ZEROS)


def by_diffusers(name: str, weights: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Weights of layers by their paths in diffusers, and all paths of the first release."""
    from diffusers.loaders import single_file_utils as utils

    blocks = ("double_blocks.0", "single_blocks.0", "guidance_in")
    convert = utils.convert_flux_transformer_checkpoint_to_diffusers
    if name == SD3:
        blocks = ("joint_blocks.0.x_block.attn2", "joint_blocks.1", "context_embedder")
        convert = utils.convert_sd3_transformer_checkpoint_to_diffusers
    there = FirstRelease({f"{one}.weight": ZEROS for one in blocks} | weights)
    found = convert(there)
    return (
        {key.removesuffix(".weight"): t for key, t in found.items() if key.endswith(".weight")},
        [key.removesuffix(".weight") for key in there.asked if key.endswith(".weight")],
    )


def adapted(module: Any, kind: str, layers: Sequence[str]) -> dict[str, Tensor]:
    """Random weights of adapters, as peft names them."""
    from peft import LoHaConfig, LoKrConfig, LoraConfig
    from peft.utils import get_peft_model_state_dict

    config: Any = LoraConfig(r=RANK, target_modules=list(layers), use_dora=kind == "dora")
    if kind in ("loha", "lokr"):
        config = (LoHaConfig if kind == "loha" else LoKrConfig)(r=RANK, target_modules=list(layers))
    with torch.device("meta"):
        module.add_adapter(config)
    source = torch.Generator().manual_seed(1)
    shapes = {key: one.shape for key, one in get_peft_model_state_dict(module).items()}
    return {key: torch.randn(shape, generator=source) for key, shape in shapes.items()}


def written(
    name: str, module: Any, weights: dict[str, Tensor], alpha: float = ALPHA
) -> dict[str, Tensor]:
    model: Any = SimpleNamespace(family=FAMILY[name], modules={"transformer": module})
    return kohya.tensors(model, "transformer", weights, alpha, RANK)


def product(factors: dict[str, Tensor], scale: float) -> Tensor:
    """The first columns of W' - W."""
    one = {key: t.flatten(1) for key, t in factors.items() if t.ndim > 1}
    if "hada_w1_a" in one:
        pairs = [one[f"hada_w{i}_a"] @ one[f"hada_w{i}_b"][:, :COLUMNS] for i in (1, 2)]
        return scale * pairs[0] * pairs[1]
    up, down = ("lora_B", "lora_A") if "lora_B.weight" in one else ("lora_up", "lora_down")
    return scale * one[f"{up}.weight"] @ one[f"{down}.weight"][:, :COLUMNS]


def by_layer(weights: dict[str, Tensor], layers: Sequence[str]) -> dict[str, dict[str, Tensor]]:
    found: dict[str, dict[str, Tensor]] = {path: {} for path in layers}
    for key, tensor in weights.items():
        path = max((one for one in layers if key.startswith(f"{one}.")), key=len)
        found[path][key.removeprefix(f"{path}.")] = tensor
    return found


def merged(name: str, file: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What the file adds to each layer of diffusers, and the lengths of its rows: by the rule of
    LyCORIS and ComfyUI, and diffusers' converter of whole models."""
    _, paths = by_diffusers(name, {})
    names = {f"lora_unet_{path.replace('.', '_')}": path for path in paths}
    bases = sorted({key.split(".")[0] for key in file})
    added, lengths = {}, {}
    for base, factors in by_layer(file, bases).items():
        down = factors.get("lora_down.weight", factors.get("hada_w1_b"))
        assert down is not None
        scale = float(factors["alpha"]) / len(down)
        added[f"{names[base]}.weight"] = product(factors, scale)
        if "dora_scale" in factors:
            assert factors["dora_scale"].ndim == down.ndim
            lengths[f"{names[base]}.weight"] = factors["dora_scale"].flatten(1)
    return by_diffusers(name, added)[0], by_diffusers(name, lengths)[0]


SOME = ("attn.to_q", "add_v_proj")  # of layers that are one layer in the first release


@pytest.mark.parametrize(
    ("kind", "ends"), [("lora", ""), ("lora", SOME), ("loha", ""), ("loha", SOME), ("dora", "")]
)
@pytest.mark.parametrize("name", MODELS)
def test_products_of_every_layer(name: str, kind: str, ends: Any) -> None:
    """Layers without an adapter are left as they are."""
    module = MODELS[name]()
    layers = [one for one in layers_of(module) if one.endswith(ends)]
    weights = adapted(module, kind, layers)
    added, lengths = merged(name, written(name, module, weights))
    for path, factors in by_layer(weights, layers).items():
        torch.testing.assert_close(added.pop(path), product(factors, ALPHA / RANK))
        if kind == "dora":
            length = next(t for key, t in factors.items() if "magnitude" in key)
            assert torch.equal(lengths[path].flatten(), length.flatten())
    assert not any(tensor.any() for tensor in added.values())


def test_diffusers_reads_the_same_factors_of_flux() -> None:
    """Bit by bit where the alpha is the rank; a layer without an adapter gets one of zeros."""
    from diffusers.loaders.lora_conversion_utils import _convert_kohya_flux_lora_to_diffusers

    module = flux()
    layers = [one for one in layers_of(module) if "block" in one and "mlp" not in one]
    weights = adapted(module, "lora", layers)
    found = _convert_kohya_flux_lora_to_diffusers(written(FLUX, module, weights, RANK))
    for key, tensor in weights.items():
        assert torch.equal(found.pop(f"transformer.{key}"), tensor), key
    assert set(found) == {
        f"transformer.single_transformer_blocks.0.proj_mlp.lora_{one}.weight" for one in "AB"
    }
    assert not any(tensor.any() for tensor in found.values())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", ["dora", "lokr"])
def test_adapters_that_cannot_be_joined_keep_their_own_names(name: str, kind: str) -> None:
    """LyCORIS's names of diffusers' layers, for all of the transformer; but lengths whose rows
    ComfyUI would leave where they are."""
    module = MODELS[name]()
    layers = [one for one in layers_of(module) if one.endswith(("to_q", "to_out.0", "out.linear"))]
    weights = adapted(module, kind, layers)
    file = written(name, module, weights)
    own = {f"lycoris_{path.replace('.', '_')}": path for path in layers}
    if kind == "dora":
        del own["lycoris_norm_out_linear"]
        last = "lora_unet_final_layer_adaLN_modulation_1"
        length = weights["norm_out.linear.lora_magnitude_vector"]
        assert torch.equal(file[f"{last}.dora_scale"].flatten(), length.roll(len(length) // 2))
        file = {key: tensor for key, tensor in file.items() if not key.startswith(f"{last}.")}
    assert {key.split(".")[0] for key in file} == set(own)
    for base, path in own.items():
        assert float(file[f"{base}.alpha"]) == ALPHA
        if kind == "dora":
            assert torch.equal(file[f"{base}.lora_down.weight"], weights[f"{path}.lora_A.weight"])


def test_layers_without_a_name_are_refused() -> None:
    parts = {"transformer": sd3()}
    with pytest.raises(UnsupportedError, match=r"transformer_blocks\.0\.new has no name"):
        FAMILY[SD3].kohya_place(parts, "transformer", "transformer_blocks.0.new")


def test_versions_of_stable_diffusion_3() -> None:
    models = {"medium": sd3(None, ()), "5-large": sd3(dual=()), "5-medium": sd3()}
    for version, module in models.items():
        notes = FAMILY[SD3].kohya_notes({"transformer": module}, "")
        assert notes["ss_base_model_version"] == version


NETWORKS = {"flux": "networks.lora_flux", "sd3": "networks.lora_sd3"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NETWORKS)
def test_files_of_trainings(
    name: str, kind: str, folders: dict[str, Path], pictures: Path, tmp_path: Path
) -> None:
    """They name text encoders as well, and the same training writes the same bytes."""
    contents = []
    for out in (tmp_path / "one", tmp_path / "two"):
        values = given(folders, name, pictures, out) | {"rank": RANK, "train_text_encoder": True}
        trainer.train("lora", **values, max_train_steps=1, **KINDS[kind])
        contents.append((out / lora.KOHYA_NAME).read_bytes())
    assert contents[0] == contents[1]
    names = ("lora_unet_", "lora_te1_text_model_", "lora_te2_text_model_", "lycoris_")
    with safe_open(out / lora.KOHYA_NAME, "pt") as file:
        found = {next(one for one in names if key.startswith(one)) for key in file.keys()}  # noqa: SIM118
        network = file.metadata()["ss_network_module"]
    is_apart = kind == "lokr" or (kind, name) == ("dora", "flux")
    assert found == {names[3 if is_apart else 0], *names[1 : 2 + (name == "sd3")]}
    assert network == (NETWORKS[name] if kind in ("lora", "dora") else "lycoris.kohya")


def test_diffusers_draws_with_kohyas_file_of_flux(
    folders: dict[str, Path], pictures: Path, tmp_path: Path
) -> None:
    """As with its own: the layers whose width its converter does not take for granted."""
    values = given(folders, "flux", pictures, tmp_path) | {"rank": 3, "lora_alpha": 12.0}
    layers = [f"transformer_blocks.0.attn.{one}" for one in ("to_q", "to_k", "to_out.0")]
    layers += ["add_q_proj", "add_k_proj", "add_v_proj", "ff.net.2", "norm1_context.linear"]
    values |= {"lora_layers": ",".join(layers), "train_text_encoder": True}
    trainer.train("lora", **values, learning_rate=0.05, lr_warmup_steps=0, max_train_steps=2)
    assert any("txt_attn_qkv" in key for key in load_file(tmp_path / lora.KOHYA_NAME))
    found = []
    for file in (lora.DIFFUSERS_NAME, lora.KOHYA_NAME):
        pipe = loaded(folders["flux"])
        pipe.load_lora_weights(tmp_path, weight_name=file)
        found.append(picture(pipe))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=2e-5)
    assert (found[0] - picture(loaded(folders["flux"]))).abs().max() > 1e-3
