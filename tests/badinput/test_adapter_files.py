"""Files with adapters that are damaged or not for the pipeline: the error names file and key, and
the pipeline is as it was."""

from __future__ import annotations

import functools
import gc
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from operator import is_
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionPipeline
from safetensors.torch import load_file, save_file
from torch import Tensor

import strop
from strop.bench.pipelines.stable import STABLE, ip_adapter_state
from strop.bench.pipelines.tiny import TinyPipeline, drawn
from strop.diffusion.adapter_files import AdapterSource, check_values
from strop.diffusion.adapter_loading import load_checked
from strop.diffusion.snapshots import Snapshot
from strop.errors import AdapterError
from tests.diffusion.test_restored_diffusers import different, of_pipeline
from tests.e2e import tiny

pytestmark = pytest.mark.filterwarnings("ignore")

State = dict[str, Tensor]
CASES = {case.name: case for case in STABLE}
UNET = ["to_q", "to_k", "to_v", "to_out.0"]
TEXT = ["q_proj", "v_proj"]
TO_Q = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"


def lora(name: str = "sd15", part: str = "unet", targets: list[str] = UNET, seed: int = 0) -> State:
    """The state of a LoRA with random factors for a part of a tiny pipeline."""
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    model = getattr(CASES[name].made(), part)
    torch.manual_seed(seed)
    config = LoraConfig(r=2, lora_alpha=4, target_modules=targets, init_lora_weights=False)
    model.add_adapter(config, "made")
    layers = get_peft_model_state_dict(model, adapter_name="made")
    return {f"{part}.{key}": value.contiguous() for key, value in sorted(layers.items())}


def changed(state: State, change: Callable[[Tensor], Tensor], key: str) -> State:
    return {k: change(v).contiguous() if key in k else v for k, v in state.items()}


def nan_at(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[1] = float("nan")
    return tensor


class Subject:
    """An optimised pipeline that has an adapter, and knows what it draws."""

    def __init__(self, case: TinyPipeline) -> None:
        self.case, self.pipe = case, case.made()
        strop.optimize(self.pipe, options=tiny.options())
        self.pipe.load_lora_weights(lora(seed=1), adapter_name="kept")
        self.pipe.set_adapters(["kept"], [0.5])
        self.picture = drawn(case, self.pipe)
        self.captures = self._num_captures()

    def _num_captures(self) -> int:
        return int(self.pipe.unet.forward.variants.num_captures)

    def is_as_it_was(self) -> None:
        assert self.pipe.get_list_adapters() == {"unet": ["kept"]}
        assert all(map(torch.equal, drawn(self.case, self.pipe), self.picture))
        assert self._num_captures() == self.captures
        assert self.pipe.unet.forward.counters.fallbacks == {}


@pytest.fixture(scope="module")
def subject() -> Subject:
    return Subject(CASES["sd15"])


SD = lora()
WRITERS: dict[str, tuple[Callable[[], State], str]] = {
    "SDXL": (lambda: lora("sdxl"), r"attn2\.to_k\.lora_A\.weight has the shape \(2, 64\)"),
    "other layers": (
        lambda: {key.replace("attentions", "motion"): value for key, value in SD.items()},
        r"unet\.down_blocks\.0\.motion\.\S+ adapts a layer that the unet \(UNet2DConditionModel\)",
    ),
    "another kind of model": (
        lambda: {key.replace("unet.", "transformer."): value for key, value in SD.items()},
        r"nothing of it is for this pipeline \(StableDiffusionPipeline\).* begin with transformer",
    ),
    "a factor that is cut": (
        lambda: changed(SD, lambda v: v[:5], f"{TO_Q}.lora_B"),
        r"unet\.\S+to_q\.lora_B\.weight has the shape \(5, 2\).*takes \(16, 2\)",
    ),
    "another rank": (
        lambda: changed(SD, lambda v: v[:1], f"{TO_Q}.lora_A"),
        r"to_q\.lora_B\.weight has the shape \(16, 2\); at rank 1",
    ),
    "half a pair": (
        lambda: {k: v for k, v in SD.items() if f"{TO_Q}.lora_B" not in k},
        r"to_q\.lora_A\.weight has no lora_B beside it",
    ),
    "NaN": (
        lambda: changed(SD, nan_at, f"{TO_Q}.lora_A"),
        r"to_q\.lora_A\.weight is NaN or infinite in 1 of 32 values",
    ),
    "infinite": (
        lambda: changed(SD, lambda v: v / 0, f"{TO_Q}.lora_A"),
        r"to_q\.lora_A\.weight is NaN or infinite in 32 of 32 values",
    ),
    "the text encoder's do not fit": (
        lambda: SD | changed(lora(part="text_encoder", targets=TEXT), lambda v: v[:, :5], "lora_A"),
        r"text_encoder\.encoder\.layers\.0\.\S+lora_A\.weight has the shape \(2, 5\)",
    ),
}


@pytest.mark.parametrize("hotswap", [False, True])
@pytest.mark.parametrize("name", WRITERS)
def test_a_lora_that_does_not_fit(
    subject: Subject, tmp_path: Path, name: str, hotswap: bool
) -> None:
    make, expected = WRITERS[name]
    file = tmp_path / "bad.safetensors"
    save_file(make(), file)
    before = of_pipeline(subject.pipe)
    if hotswap and name.startswith("the text"):
        expected = (
            "hotswapping is not supported for text encoders"  # when the UNet has been swapped
        )
    with pytest.raises(ValueError, match=expected) as raised:
        subject.pipe.load_lora_weights(
            file, adapter_name="kept" if hotswap else "new", hotswap=hotswap
        )
    assert str(file) in "\n".join([str(raised.value), *getattr(raised.value, "__notes__", [])])
    assert different(before, of_pipeline(subject.pipe)) == []
    subject.is_as_it_was()


def pickled(path: Path) -> None:
    torch.save(SD, path)


def cut_at(end: int) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        save_file(SD, path)
        path.write_bytes(path.read_bytes()[:end])

    return write


def text(content: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(content)


DAMAGED: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "cut": (
        "a.safetensors",
        cut_at(-300),
        r"bytes of 19,\d+, and ends within unet\.up",
    ),
    "cut in its header": ("a.safetensors", cut_at(99), "it ends within its list of keys"),
    "empty": ("a.safetensors", text(""), "it is empty"),
    "a page": ("a.safetensors", text("<!doctype html>" * 9), "it is a page of the web"),
    "git lfs": (
        "a.safetensors",
        text("version https://git-lfs.github.com/spec"),
        "git lfs pull",
    ),
    "noise": ("a.safetensors", text("abcdefgh" * 9), "does not begin as safetensors do"),
    "a pickle": ("a.bin", pickled, r"a\.bin is a pickle.*python -c"),
    "a pickle in disguise": ("a.safetensors", pickled, r"is a pickle.*a_converted\.safetensors"),
    "a checkpoint": ("a.ckpt", pickled, r"a\.ckpt is a pickle"),
}


@pytest.mark.parametrize("name", DAMAGED)
@pytest.mark.parametrize("place", ["file", "folder", "weight_name"])
def test_a_file_that_is_no_sound_safetensors(
    subject: Subject, tmp_path: Path, name: str, place: str
) -> None:
    ending, write, expected = DAMAGED[name]
    write(tmp_path / ending)
    given = tmp_path / ending if place == "file" else tmp_path
    more = {"weight_name": ending} if place == "weight_name" else {}
    with pytest.raises(AdapterError, match=expected):
        subject.pipe.load_lora_weights(given, adapter_name="new", **more)
    subject.is_as_it_was()


@pytest.mark.parametrize(
    ("words", "more", "expected"),
    [
        ("absent.safetensors", {}, r"absent\.safetensors: there is no such file"),
        ("./absent", {}, "there is no such file or folder"),
        (
            "{folder}",
            {"weight_name": "b.safetensors"},
            r"has no b\.safetensors; it has a\.s",
        ),
        ("name/on-hub", {"weight_name": "a.bin"}, r"a\.bin is a pickle"),
        ("name/on-hub", {"use_safetensors": False}, "use_safetensors=False asks for a pickle"),
        ("{folder}", {"adapter_name": "kept"}, "has an adapter 'kept' already.*hotswap=True"),
    ],
)
def test_a_wrong_name(
    subject: Subject, tmp_path: Path, words: str, more: dict[str, Any], expected: str
) -> None:
    save_file(SD, tmp_path / "a.safetensors")
    with pytest.raises(AdapterError, match=expected):
        subject.pipe.load_lora_weights(words.format(folder=tmp_path), **more)
    subject.is_as_it_was()


def test_what_breaks_off_in_the_midst_is_put_back(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The UNet is loaded by then, and its weights are frozen, swapped and wrapped anew."""
    pipe, given = subject.pipe, SD | lora(part="text_encoder", targets=TEXT)
    given |= lora(targets=["conv1", "proj_in"])
    before = of_pipeline(pipe)
    weight = pipe.unet.conv_in.weight.requires_grad_(True)

    def interrupted(*_: Any, **__: Any) -> None:
        assert "new" in pipe.unet.peft_config
        raise KeyboardInterrupt

    monkeypatch.setattr(type(pipe.text_encoder), "load_adapter", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pipe.load_lora_weights(given, adapter_name="new")
    assert weight.requires_grad
    weight.requires_grad_(False)
    assert different(before, of_pipeline(pipe)) == []
    subject.is_as_it_was()


def test_containers_are_put_back_filled_or_empty() -> None:
    """A snapshot copies those alone that hold something."""
    pipe = CASES["sd15"].made()
    part = pipe.unet.conv_in
    part.notes, part.words, part.seen = {}, ["a"], {1}
    before, held = of_pipeline(pipe), (part.notes, part.words, part.seen)
    snapshot = Snapshot(pipe)
    part.notes["b"], part.later = 2, []
    part.words.append("c")
    part.seen.clear()
    part.register_forward_hook(lambda *_: None)
    snapshot.put_back()
    assert (part.notes, part.words, part.seen) == ({}, ["a"], {1})
    assert all(map(is_, (part.notes, part.words, part.seen), held))
    assert not part._forward_hooks
    assert different(before, of_pipeline(pipe)) == []


@pytest.mark.parametrize(
    "dtype",
    [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e5m2],
)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_of_each_type_are_looked_at(dtype: torch.dtype, value: float) -> None:
    wide = torch.linspace(-3, 3, 6)
    others = {"none": wide[:0].to(dtype), "whole": torch.arange(3), "shapes": wide.to("meta")}
    tensors = others | {"good": wide.to(dtype, copy=True), "bad": wide.view(2, 3).t().to(dtype)}
    check_values(AdapterSource("the file", tensors=tensors))
    wide[4] = value
    tensors["bad"] = wide.view(2, 3).t().to(dtype)
    with pytest.raises(AdapterError, match=r"the file: bad is NaN or infinite in 1 of 6 values"):
        check_values(AdapterSource("the file", tensors=tensors))


def test_no_garbage_is_collected_amid_loading(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of new objects would have it walk over all that compiled models keep."""
    seen, given = list[bool](), lora(targets=["conv1", "proj_in"])
    own = type(subject.pipe.unet).load_lora_adapter

    @functools.wraps(own)
    def load(*args: Any, **kwargs: Any) -> Any:
        seen.append(gc.isenabled())
        return own(*args, **kwargs)

    monkeypatch.setattr(type(subject.pipe.unet), "load_lora_adapter", load)
    subject.pipe.load_lora_weights(given, adapter_name="new")
    assert (seen, gc.isenabled()) == ([False], True)
    subject.pipe.delete_adapters("new")
    subject.pipe.set_adapters(["kept"], [0.5])
    subject.is_as_it_was()


# What diffusers takes


def kohya(state: State) -> State:
    """The file as kohya's tools write it, with an alpha."""
    found: State = {}
    for key, value in state.items():
        path, _, part = key.removeprefix("unet.").partition(".lora_")
        name = "lora_unet_" + path.replace(".", "_")
        found[f"{name}.lora_{'down' if part[0] == 'A' else 'up'}.weight"] = value
        found[f"{name}.alpha"] = torch.tensor(1.0)
    return found


def test_the_key_has_the_name_of_the_file(subject: Subject) -> None:
    """diffusers knows the layers of other tools' files by other names."""
    bad = kohya(changed(SD, lambda v: v[:, :7], f"{TO_Q}.lora_A"))
    expected = rf"unet\.{TO_Q}\S+ has the shape.*the file calls it lora_unet_\S+to_q\.lora_down"
    with pytest.raises(AdapterError, match=expected):
        subject.pipe.load_lora_weights(bad, adapter_name="new")
    subject.is_as_it_was()


def warned_of(state: State) -> State:
    """A key for a layer that the model lacks, of which diffusers warns."""
    return state | {f"unet.{TO_Q}_absent.lora_A.weight": torch.ones(2, 16)}


SOUND: dict[str, Callable[[], State]] = {
    "peft's keys": lambda: SD,
    "some layers": lambda: {k: v for k, v in SD.items() if "mid_block" in k},
    "convolutions": lambda: lora(targets=["conv1", "proj_in", "conv_shortcut"]),
    "both parts": lambda: SD | lora(part="text_encoder", targets=TEXT),
    "the text encoder's alone": lambda: lora(part="text_encoder", targets=TEXT),
    "a text encoder that is not there": lambda: (
        SD | {k.replace("text_encoder", "text_encoder_2"): v for k, v in SD.items()}
    ),
    "kohya": lambda: kohya(SD),
    "a layer that is not there": lambda: warned_of(SD),
}


@pytest.mark.parametrize("name", SOUND)
def test_sound_files_load_as_in_diffusers(tmp_path: Path, name: str) -> None:
    ours, plain = CASES["sd15"].made(), CASES["sd15"].made()
    strop.optimize(ours, options=tiny.options())
    save_file(SOUND[name](), tmp_path / "a.safetensors")
    for pipe, given, more in (
        (plain, tmp_path / "a.safetensors", {}),
        (ours, tmp_path, {"weight_name": "a.safetensors"}),
    ):
        pipe.load_lora_weights(given, adapter_name="new", **more)
    assert ours.get_list_adapters() == plain.get_list_adapters() != {}
    for part in ("unet", "text_encoder"):
        states = [getattr(pipe, part).state_dict() for pipe in (ours, plain)]
        assert states[0].keys() == states[1].keys()
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[1])
        scales = [
            [m.scaling for m in getattr(pipe, part).modules() if hasattr(m, "lora_A")]
            for pipe in (ours, plain)
        ]
        assert scales[0] == scales[1]


def test_the_alpha_in_the_header_of_a_file_is_read(tmp_path: Path) -> None:
    """diffusers finds it in a file alone, not in a dictionary of its tensors."""
    from peft import LoraConfig

    giver, ours = CASES["sd15"].made(), CASES["sd15"].made()
    giver.unet.add_adapter(LoraConfig(r=2, lora_alpha=7, target_modules=UNET), "made")
    giver.unet.save_lora_adapter(tmp_path, adapter_name="made")
    file = tmp_path / "pytorch_lora_weights.safetensors"
    state = {f"unet.{key}": value for key, value in load_file(file).items()}
    header = {f"unet.{k}": v for k, v in giver.unet.peft_config["made"].to_dict().items()}
    header = {k: sorted(v) if isinstance(v, set) else v for k, v in header.items()}
    save_file(state, file, metadata={"lora_adapter_metadata": json.dumps(header, default=str)})
    strop.optimize(ours, options=tiny.options())
    ours.load_lora_weights(tmp_path, adapter_name="new")
    assert ours.unet.get_submodule(TO_Q).scaling == {"new": 3.5}


def test_other_pipelines_and_restored_ones_are_diffusers_own(tmp_path: Path) -> None:
    torch.save(SD, tmp_path / "a.bin")
    ours, plain = CASES["sd15"].made(), CASES["sd15"].made()
    strop.optimize(ours, options=tiny.options())
    plain.load_lora_weights(tmp_path / "a.bin", adapter_name="new")
    assert plain.get_list_adapters() == {"unet": ["new"]}
    with pytest.raises(AdapterError):
        ours.load_lora_weights(tmp_path / "a.bin")
    twin = StableDiffusionPipeline(**ours.components, requires_safety_checker=False)
    with pytest.raises(AdapterError):
        twin.load_lora_weights(tmp_path / "a.bin")
    strop.restore(ours)
    ours.load_lora_weights(tmp_path / "a.bin", adapter_name="new")
    assert ours.get_list_adapters() == {"unet": ["new"]}


def test_a_plain_pipeline_is_checked_on_demand(tmp_path: Path) -> None:
    pipe = CASES["sd15"].made()
    before = of_pipeline(pipe)
    with pytest.raises(AdapterError, match=r"lora_A\.weight has the shape \(2, 64\)"):
        load_checked(pipe, "load_lora_weights", lora("sdxl"), adapter_name="new")
    assert different(before, of_pipeline(pipe)) == []
    load_checked(pipe, "load_lora_weights", SD, adapter_name="new")
    assert pipe.get_list_adapters() == {"unet": ["new"]}


# Textual inversions and IP-Adapters


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({"<cat>": torch.ones(2, 48)}, r"<cat> has the shape \(2, 48\).*takes vectors of 32"),
        ({"<cat>": torch.full((32,), float("nan"))}, "<cat> is NaN or infinite in 32 of 32"),
    ],
)
def test_a_textual_inversion_that_does_not_fit(
    subject: Subject, tmp_path: Path, state: State, expected: str
) -> None:
    save_file(state, tmp_path / "learned_embeds.safetensors")
    words = len(subject.pipe.tokenizer)
    for given in (tmp_path, tmp_path / "learned_embeds.safetensors", [str(tmp_path)], state):
        with pytest.raises(AdapterError, match=expected):
            subject.pipe.load_textual_inversion(given)
    torch.save({"<cat>": torch.ones(32)}, tmp_path / "a.pt")
    with pytest.raises(AdapterError, match=r"a\.pt is a pickle.*string_to_param"):
        subject.pipe.load_textual_inversion(tmp_path / "a.pt", token="<cat>")
    assert len(subject.pipe.tokenizer) == words
    subject.is_as_it_was()


def test_a_textual_inversion_that_breaks_off_is_put_back(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text encoder has a larger table by then."""
    before = of_pipeline(subject.pipe)
    rows = subject.pipe.text_encoder.config.vocab_size

    def full(*_: Any) -> None:
        assert subject.pipe.text_encoder.config.vocab_size != rows
        raise RuntimeError("no room")

    monkeypatch.setattr(subject.pipe.tokenizer, "add_tokens", full)
    with pytest.raises(RuntimeError, match="no room") as raised:
        subject.pipe.load_textual_inversion({"<cat>": torch.ones(32)})
    assert "as it was before" in raised.value.__notes__[0]
    monkeypatch.undo()
    assert subject.pipe.text_encoder.config.vocab_size == rows
    assert different(before, of_pipeline(subject.pipe)) == []
    subject.is_as_it_was()


def flat(state: dict[str, Any]) -> State:
    return {f"{part}.{key}": value for part in state for key, value in state[part].items()}


IP_WRITERS: dict[str, tuple[Callable[[State], State], str]] = {
    "NaN": (
        lambda s: changed(s, nan_at, "1.to_k_ip"),
        r"1\.to_k_ip\.weight is NaN or infinite in 1",
    ),
    "another model": (
        lambda s: changed(s, lambda v: v[:, :5], "3.to_v_ip"),
        r"ip_adapter\.3\.to_v_ip\.weight has the shape \(\d+, 5\); the model takes \(\d+, 32\)",
    ),
    "fewer layers": (
        lambda s: {k: v for k, v in s.items() if "7." not in k},
        r"ip_adapter\.7\.to_k_ip\.weight is missing: the file has weights for 3 .* model has 4",
    ),
    "no pictures": (
        lambda s: {k: v for k, v in s.items() if "image_proj" not in k},
        r"image_proj\.\* is missing",
    ),
    "a projection that is cut": (
        lambda s: changed(s, lambda v: v[:3], "image_proj.proj.bias"),
        "",  # what diffusers raises, with the name of the file
    ),
}


@pytest.mark.parametrize("name", IP_WRITERS)
def test_an_ip_adapter_that_does_not_fit(tmp_path: Path, name: str) -> None:
    pipe = CASES["sd15-ip-adapter"].parts
    made = TinyPipeline("ip", "StableDiffusionPipeline", pipe).made()
    strop.optimize(made, options=tiny.options())
    change, expected = IP_WRITERS[name]
    sound = flat(ip_adapter_state(made.unet))
    save_file(change(sound), tmp_path / "ip.safetensors")
    before = of_pipeline(made)
    with pytest.raises((ValueError, RuntimeError), match=expected) as raised:
        made.load_ip_adapter(tmp_path, subfolder="", weight_name="ip.safetensors")
    said = "\n".join([str(raised.value), *getattr(raised.value, "__notes__", [])])
    assert str(tmp_path / "ip.safetensors") in said
    assert different(before, of_pipeline(made)) == []
    save_file(sound, tmp_path / "ip.safetensors")
    made.load_ip_adapter(tmp_path, subfolder="", weight_name="ip.safetensors")
    assert made.unet.encoder_hid_proj is not None


@pytest.mark.parametrize(
    ("method", "state", "more"),
    [
        ("load_lora_weights", SD, {}),
        ("load_textual_inversion", {"<cat>": torch.ones(1, 32)}, {}),
        (
            "load_textual_inversion",
            {"string_to_param": {"*": torch.ones(1, 32, requires_grad=True)}, "name": "cat"},
            {"token": "<cat>"},
        ),
        ("load_ip_adapter", {"image_proj": {}, "ip_adapter": {}}, {"subfolder": ""}),
    ],
)
def test_the_advice_for_pickles_works(
    tmp_path: Path, method: str, state: dict[str, Any], more: dict[str, Any]
) -> None:
    case = TinyPipeline("ip", "StableDiffusionPipeline", CASES["sd15-ip-adapter"].parts)
    pipe = case.made()
    is_ip = method == "load_ip_adapter"
    torch.save(ip_adapter_state(pipe.unet) if is_ip else state, tmp_path / "a.bin")
    named = {"weight_name": "a.bin"} if is_ip else {}
    given = tmp_path if is_ip else tmp_path / "a.bin"
    with pytest.raises(AdapterError) as raised:
        load_checked(pipe, method, given, **named, **more)
    (command,) = re.findall(r"python (-c .*)$", str(raised.value))
    subprocess.run([sys.executable, *shlex.split(command)], check=True)
    named = {"weight_name": "a.safetensors"} if is_ip else {}
    load_checked(pipe, method, given if is_ip else tmp_path / "a.safetensors", **named, **more)
