"""``restore`` leaves nothing behind, and pipelines that nobody optimised run diffusers' own code."""

from __future__ import annotations

import gc
import importlib
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionImg2ImgPipeline, StableDiffusionPipeline
from diffusers.hooks import group_offloading
from diffusers.image_processor import VaeImageProcessor
from diffusers.models import modeling_utils
from diffusers.modular_pipelines import FluxAutoBlocks
from diffusers.utils import torch_utils
from torch import Tensor, nn

import strop
from strop.api import dispatchers_of
from strop.diffusion import noise, offloading
from strop.diffusion.optimised import is_optimised
from strop.diffusion.pipeline import SHARED
from strop.diffusion.stand_ins import StandIn
from strop.dispatch import dispatcher
from tests.e2e import controls, dits, tiny

Table = dict[tuple[str, str], Any]  # owner and name -> value
OPTIONS = tiny.options()


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """A process in which no pipeline is optimised: those of earlier tests step aside."""
    gc.collect()
    held = {id(d): d for d in list(dispatcher._ALL) if id(d) in SHARED._holders}
    for each in list(SHARED._holders):
        SHARED._release(each)
    assert not any(isinstance(v, StandIn) for v in of_diffusers().values())
    yield
    gc.collect()
    for each in held:
        SHARED._enter(each)


# snapshots


def of_diffusers() -> Table:
    """Every attribute of every module of diffusers that is loaded, and of the classes in it."""
    found: Table = {}
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and name.partition(".")[0] == "diffusers":
            owners = [module, *(v for v in list(vars(module).values()) if inspect.isclass(v))]
            for owner in owners:
                label = name if owner is module else f"{owner.__module__}.{owner.__qualname__}"
                if label.partition(".")[0] == "diffusers":
                    found |= {(label, key): value for key, value in list(vars(owner).items())}
    return found


def of_pipeline(pipe: Any) -> Table:
    """Every attribute of a pipeline, and of everything in it that has attributes."""
    held = {"": pipe, **{name: value for name, value in vars(pipe).items()}, **pipe.components}
    for name, component in list(held.items()):
        if isinstance(component, nn.Module):
            held |= {f"{name}.{path}": part for path, part in component.named_modules()}
    return {
        (label, key): value
        for label, owner in held.items()
        for key, value in getattr(owner, "__dict__", {}).items()
    }


def different(before: Table, after: Table, *, is_loaded_later: bool = False) -> list[str]:
    """The attributes that are not the very same objects. ``is_loaded_later``: more modules of
    diffusers may have been loaded, with attributes of their own."""
    names = before.keys() if is_loaded_later else before.keys() | after.keys()
    return sorted(
        ".".join(key)
        for key in names
        if before.get(key, _different) is not after.get(key, _different)
    )


_different = object()


@contextmanager
def nothing_remains(pipe: Any) -> Iterator[None]:
    """Behind this everything is as it was."""
    diffusers, own = of_diffusers(), of_pipeline(pipe)
    yield
    found = different(diffusers, of_diffusers(), is_loaded_later=True)
    assert not found + different(own, of_pipeline(pipe))
    assert not any(isinstance(v, StandIn) for v in of_diffusers().values())


# pipelines


class OwnBar(StableDiffusionPipeline):
    """Which has a bar of its own, as Marigold's."""

    def progress_bar(self, iterable: Any = None, total: Any = None, desc: str = "") -> Any:
        return super().progress_bar(iterable, total)


def with_an_own_bar() -> Any:
    pipe: Any = tiny.pipeline()
    pipe.__class__ = OwnBar
    return pipe


def from_a_picture() -> Any:
    parts = tiny.pipeline().components
    return StableDiffusionImg2ImgPipeline(**parts, requires_safety_checker=False)


def modular() -> Any:
    parts, blocks = dits.flux().components, FluxAutoBlocks()
    blocks.sub_blocks.pop("text_encoder")
    pipe = blocks.init_pipeline()
    pipe.update_components(**{n: parts[n] for n in ("transformer", "vae", "scheduler")})
    return pipe


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.inner(x))


@dataclass
class Unhashable:
    """A pipeline of a user's, which has nothing of diffusers'."""

    unet: nn.Module

    @property
    def components(self) -> dict[str, Any]:
        return {"unet": self.unet}

    def progress_bar(self, iterable: Any = None, total: Any = None) -> Any:
        return iterable


def without_weak_references() -> Any:
    unet = Denoiser()
    return SimpleNamespace(unet=unet, components={"unet": unet}, progress_bar=lambda **_: None)


def hooked_before() -> Any:
    """As hooks of accelerate leave a module when they are removed."""
    pipe: Any = tiny.pipeline()
    pipe.unet.forward = pipe.unet.forward
    return pipe


PIPELINES: dict[str, Callable[[], Any]] = {
    "stable diffusion": tiny.pipeline,
    "controlnets": lambda: controls.with_controlnets(2),
    "from a picture": from_a_picture,
    "sd3": dits.sd3,
    "wan": dits.wan,
    "modular": modular,
    "with a bar of its own": with_an_own_bar,
    "unhashable": lambda: Unhashable(Denoiser()),
    "without weak references": without_weak_references,
    "hooked before": hooked_before,
}


@pytest.mark.parametrize("name", PIPELINES)
def test_everything_is_as_it_was(name: str) -> None:
    pipe = PIPELINES[name]()
    with nothing_remains(pipe):
        before = of_pipeline(pipe), of_diffusers()
        assert strop.optimize(pipe, options=OPTIONS) is pipe
        assert different(before[0], of_pipeline(pipe))
        assert different(before[1], of_diffusers())
        assert strop.restore(pipe) is pipe
    with nothing_remains(pipe):
        strop.restore(pipe)


# what may happen before ``restore``


def _drawn(pipe: Any) -> None:
    controls.picture(pipe, 16, 16)


def _twice(pipe: Any) -> None:
    strop.optimize(pipe, options=OPTIONS)


def _restored_and_optimised(pipe: Any) -> None:
    strop.optimize(strop.restore(pipe), options=OPTIONS)


def _one_by_itself(pipe: Any) -> None:
    strop.optimize(pipe.unet, options=OPTIONS)


def _one_by_one(pipe: Any) -> None:
    for part in (pipe.unet, pipe.vae.encoder, pipe.vae.decoder):
        strop.restore(part)


def _one_there(pipe: Any) -> None:
    strop.restore(pipe.unet)


def _swapped_and_back(pipe: Any) -> None:
    own = {name: getattr(pipe, name) for name in ("unet", "vae", "scheduler")}
    pipe.unet, pipe.vae = tiny.unet(seed=4), tiny.vae(seed=4)
    pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config)
    strop.optimize(pipe, options=OPTIONS)
    for name, component in own.items():
        setattr(pipe, name, component)


def _other_processor(pipe: Any) -> None:
    own, pipe.image_processor = pipe.image_processor, VaeImageProcessor()
    strop.optimize(pipe, options=OPTIONS)
    pipe.image_processor = own


BETWEEN = [
    _drawn,
    _twice,
    _restored_and_optimised,
    _one_by_itself,
    _one_by_one,
    _one_there,
    _swapped_and_back,
    _other_processor,
]


@pytest.mark.parametrize("act", BETWEEN, ids=lambda act: act.__name__.strip("_"))
def test_everything_is_as_it_was_whatever_happened(act: Callable[[Any], None]) -> None:
    pipe = tiny.pipeline()
    controls.picture(pipe, 16, 16)  # which leaves attributes of diffusers' own
    with nothing_remains(pipe):
        strop.optimize(pipe, options=OPTIONS)
        act(pipe)
        strop.restore(pipe)


def test_what_is_no_longer_in_the_pipeline_is_restored_too() -> None:
    pipe: Any = tiny.pipeline()
    unet, vae, processor = pipe.unet, pipe.vae, pipe.image_processor
    strop.optimize(pipe, options=OPTIONS)
    pipe.unet, pipe.vae, pipe.image_processor = tiny.unet(), tiny.vae(), VaeImageProcessor()
    assert sorted(dispatchers_of(pipe)) == ["unet", "vae.decoder", "vae.encoder"]
    strop.restore(pipe)
    for part in (unet, vae.encoder, vae.decoder, pipe.unet, pipe.vae.decoder):
        assert "forward" not in vars(part)
    assert "postprocess" not in vars(processor)


@pytest.mark.parametrize("name", [n for n in PIPELINES if n != "without weak references"])
def test_diffusers_is_as_it_was_when_the_pipeline_is_gone(name: str) -> None:
    pipe = PIPELINES[name]()
    before = of_diffusers()
    strop.optimize(pipe, options=OPTIONS)
    assert different(before, of_diffusers())
    del pipe
    gc.collect()
    assert not different(before, of_diffusers(), is_loaded_later=True)


def test_modules_that_diffusers_loads_in_the_meantime() -> None:
    """They import what stands there, which is ours."""
    place = "diffusers.pipelines.marigold.pipeline_marigold_normals"
    own, pipe = torch_utils.randn_tensor, tiny.pipeline()
    sys.modules.pop(place, None)
    strop.optimize(pipe, options=OPTIONS)
    late = importlib.import_module(place)
    late.__dict__["an_alias"] = late.randn_tensor
    assert isinstance(late.randn_tensor, StandIn)
    strop.restore(pipe)
    assert late.randn_tensor is late.an_alias is own


# pipelines beside each other


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Calls of diffusers' own functions, by their code."""
    codes = {
        torch_utils.randn_tensor.__code__: "randn_tensor",
        torch_utils.get_module_execution_device.__code__: "get_module_execution_device",
        modeling_utils.get_parameter_dtype.__code__: "get_parameter_dtype",
        group_offloading._get_top_level_group_offload_hook.__code__: "hook",
        StableDiffusionPipeline.progress_bar.__code__: "progress_bar",
        StableDiffusionPipeline.__setattr__.__code__: "__setattr__",
        VaeImageProcessor.postprocess.__code__: "postprocess",
        VaeImageProcessor.pt_to_numpy.__code__: "pt_to_numpy",
    }
    calls = Counter[str]()

    def seen(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code in codes:
            calls[codes[frame.f_code]] += 1

    @contextmanager
    def counting() -> Iterator[Counter[str]]:
        calls.clear()
        sys.setprofile(seen)
        try:
            yield calls
        finally:
            sys.setprofile(None)

    yield counting  # type: ignore[misc]


def drawn(pipe: Any, **more: Any) -> Tensor:
    """As PIL, and from the host's noise as if it were on its way to a GPU."""
    g = torch.Generator().manual_seed(3)
    prompt = torch.randn(1, 7, tiny.PROMPT_DIM, generator=g)
    (image,) = pipe(
        prompt_embeds=prompt,
        negative_prompt_embeds=prompt / 2,
        num_inference_steps=2,
        height=16,
        width=16,
        generator=g,
        **more,
    ).images
    return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which stand-ins have answered otherwise than by diffusers' own functions."""
    answers: list[str] = []
    for kind in (noise.Unwaited, *offloading.Quick.__subclasses__()):

        def answer(self: Any, *args: Any, own: Any = kind.answer, **kwargs: Any) -> Any:
            answers.append(type(self).__name__)
            return own(self, *args, **kwargs)

        monkeypatch.setattr(kind, "answer", answer)
    monkeypatch.setattr(noise, "is_drawn_on_host", lambda generator, device: True)
    monkeypatch.setattr(noise, "sent", lambda drawn, device: drawn)
    return answers


def test_others_run_diffusers_own_code(answered: list[str]) -> None:
    plain: Any = tiny.pipeline()
    with counted() as counting:
        plain.set_progress_bar_config(disable=True)
        drawn(plain)  # which leaves attributes of diffusers' own
        with counting() as calls:  # type: ignore[operator]
            wanted = drawn(plain)
        before = dict(calls)
        assert len(before) == 6, before  # nobody asks for the device of inputs; one keeps pictures
        fast = strop.optimize(tiny.pipeline(), options=OPTIONS)
        with counting() as calls:  # type: ignore[operator]
            found = drawn(plain)
        assert dict(calls) == before
    assert torch.equal(found, wanted)
    assert not answered
    assert not is_optimised(plain)
    own = {name: vars(part) for name, part in plain.components.items() if part is not None}
    assert not any("forward" in each or "step" in each for each in own.values())
    drawn(fast)
    assert {*answered} >= {"Unwaited", "Search", "FloatingType"}
