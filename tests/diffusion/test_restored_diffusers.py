"""``restore`` leaves nothing behind, and other pipelines run diffusers' own code."""

from __future__ import annotations

import functools
import gc
import importlib
import inspect
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import (
    DiffusionPipeline,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionPipeline,
)
from diffusers.hooks import HookRegistry, group_offloading
from diffusers.image_processor import VaeImageProcessor
from diffusers.models import modeling_utils
from diffusers.modular_pipelines import FluxAutoBlocks
from diffusers.utils import torch_utils
from torch import Tensor, nn

import strop
from strop.api import dispatchers_of
from strop.diffusion import denoise_loops, noise, offloading
from strop.diffusion.noise import Unwaited
from strop.diffusion.optimised import is_optimised
from strop.diffusion.pipeline import SHARED
from strop.diffusion.scheduler import host_timesteps
from strop.diffusion.stand_ins import StandIn
from strop.dispatch import known_dispatchers
from strop.dispatch.module_state import ModuleState
from strop.testing import psnr
from tests.e2e import controls, dits, tiny

Table = dict[tuple[str, str], Any]  # owner and name -> value
OPTIONS = tiny.options()


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """A process in which no pipeline is optimised: those of earlier tests step aside."""
    if SHARED._holders:
        gc.collect()
    held = {id(d): d for d in list(known_dispatchers.ALL) if id(d) in SHARED._holders}
    for each in list(SHARED._holders):
        SHARED._release(each)
    assert not any(isinstance(v, StandIn) for v in of_diffusers().values())
    yield
    for each in held:
        SHARED._enter(each)


# snapshots


MEMO = "__slotnames__"  # which Python notes in a class when it copies an object of it


def of_diffusers() -> Table:
    """Every attribute of every module of diffusers that is loaded, and of the classes in it."""
    found: Table = {}
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and name.partition(".")[0] == "diffusers":
            owners = [module, *(v for v in list(vars(module).values()) if inspect.isclass(v))]
            for owner in owners:
                label = name if owner is module else f"{owner.__module__}.{owner.__qualname__}"
                if label.partition(".")[0] == "diffusers":
                    table = list(vars(owner).items())
                    found |= {(label, key): value for key, value in table if key != MEMO}
    return found


def of_pipeline(pipe: Any) -> Table:
    """Every attribute of a pipeline, and of everything in it that has attributes."""
    held = {"": pipe, **vars(pipe), **pipe.components}
    for name, component in list(held.items()):
        if isinstance(component, nn.Module):
            held |= {f"{name}.{path}": part for path, part in component.named_modules()}
    return {
        (label, key): value
        for label, owner in held.items()
        for key, value in getattr(owner, "__dict__", {}).items()
    }


def different(before: Table, after: Table) -> list[str]:
    """The attributes that are not the very same objects, of what was there before. A module of
    diffusers that loads its parts when they are asked for may have more of these."""
    owners = {label for label, _ in before}
    names = before.keys() | {key for key in after if key[0] in owners and not _is_lazy(key)}
    return sorted(
        ".".join(key)
        for key in names
        if before.get(key, _different) is not after.get(key, _different)
    )


def _is_lazy(key: tuple[str, str]) -> bool:
    return type(sys.modules.get(key[0])).__name__ == "_LazyModule"


_different = object()


@contextmanager
def nothing_remains(pipe: Any, but: Collection[str] = ()) -> Iterator[None]:
    """Everything is as it was behind this. ``but`` names what diffusers itself has changed."""
    diffusers, own = of_diffusers(), of_pipeline(pipe)
    yield
    found = different(diffusers, of_diffusers())
    assert not found + [n for n in different(own, of_pipeline(pipe)) if n not in but]
    assert not any(isinstance(v, StandIn) for v in of_diffusers().values())


# pipelines


class OwnBar(StableDiffusionPipeline):
    """It has a bar of its own, as Marigold's pipelines do."""

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
    """Hooks of accelerate leave a module like this when they are removed."""
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


def left_by(act: Callable[[Any], Any]) -> list[str]:
    """The attributes that are others behind it in a pipeline that Strop has not seen."""
    plain = tiny.pipeline()
    before = of_pipeline(plain)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("optimize", "restore"):
            patch.setattr(strop, name, lambda pipe, **_: pipe)
        act(plain)
    return different(before, of_pipeline(plain))


@pytest.mark.parametrize("act", BETWEEN, ids=lambda act: act.__name__.strip("_"))
def test_everything_is_as_it_was_whatever_happened(act: Callable[[Any], None]) -> None:
    pipe = tiny.pipeline()
    with nothing_remains(pipe, but=left_by(act)):
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
    assert not different(before, of_diffusers())


def test_the_pipeline_may_have_drawn_before_it_is_gone() -> None:
    pipe, before = tiny.pipeline(), of_diffusers()
    controls.picture(strop.optimize(pipe, options=OPTIONS), 16, 16)
    del pipe
    gc.collect()
    assert not different(before, of_diffusers())


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


@pytest.fixture(scope="module")
def codes() -> dict[Any, str]:
    """diffusers' own functions, by their code."""
    places = (torch_utils.randn_tensor, modeling_utils.get_parameter_dtype)
    search = group_offloading._get_top_level_group_offload_hook
    bar, setting = StableDiffusionPipeline.progress_bar, StableDiffusionPipeline.__setattr__
    picture = VaeImageProcessor.postprocess
    functions = [inspect.unwrap(f) for f in (*places, search, bar, setting, picture)]
    own = [getattr(f, "own", f) for f in functions]  # of ours, where they are another test's
    return {function.__code__: function.__name__ for function in own}


def calls_in(run: Callable[[], Any], codes: dict[Any, str]) -> tuple[Counter[str], Any]:
    """How often each of these functions is called, and the result."""
    calls = Counter[str]()

    def seen(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code in codes:
            calls[codes[frame.f_code]] += 1

    sys.setprofile(seen)
    try:
        result = run()
    finally:
        sys.setprofile(None)
    return calls, result


def drawn(pipe: Any, **more: Any) -> Tensor:
    """The bytes of a picture, whose noise comes from the host as if it went to a GPU."""
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


def test_others_run_diffusers_own_code(answered: list[str], codes: dict[Any, str]) -> None:
    plain: Any = tiny.pipeline()
    drawn(plain)  # which leaves attributes of diffusers' own
    before, wanted = calls_in(lambda: drawn(plain), codes)
    assert set(before) == {*codes.values()}
    fast = strop.optimize(tiny.pipeline(), options=OPTIONS)
    calls, found = calls_in(lambda: drawn(plain), codes)
    assert calls == before
    assert torch.equal(found, wanted)
    assert not answered
    assert not is_optimised(plain)
    own = {name: vars(part) for name, part in plain.components.items() if part is not None}
    assert not any("forward" in each or "step" in each for each in own.values())
    drawn(fast)
    assert {*answered} == {"Unwaited", "Search", "FloatingType"}


@pytest.mark.parametrize("is_outer", [True, False])
def test_each_within_the_other_runs_its_own(is_outer: bool, answered: list[str]) -> None:
    """A callback of one pipeline runs another one."""
    plain, fast = tiny.pipeline(), strop.optimize(tiny.pipeline(), options=OPTIONS)
    wanted, inside = drawn(plain), list[list[str]]()

    def callback(pipe: Any, step: int, timestep: Any, now: dict[str, Any]) -> dict[str, Any]:
        so_far = len(answered)
        inner = drawn(plain if is_outer else fast)
        assert torch.equal(inner, wanted) or not is_outer
        inside.append(answered[so_far:])
        return {}

    drawn(fast if is_outer else plain, callback_on_step_end=callback)
    assert len(inside) == 2
    assert all(("Unwaited" in each) is not is_outer for each in inside)
    assert all(bool(each) is not is_outer for each in inside)
    assert bool(answered[: -len(inside[-1]) or None]) or not is_outer


def test_a_module_that_was_optimised_by_itself_makes_no_optimised_pipeline(
    answered: list[str],
) -> None:
    pipe, other = tiny.pipeline(), tiny.pipeline()
    strop.optimize(other, options=OPTIONS)
    strop.optimize(pipe.unet, options=OPTIONS)
    drawn(pipe)
    assert not answered
    pipe.unet = tiny.unet(seed=5)  # nobody has asked for it
    assert not dispatchers_of(pipe)


def test_dynamo_traces_diffusers_own_code_through_ours(answered: list[str]) -> None:
    pipes: list[Any] = [tiny.pipeline(), strop.optimize(tiny.pipeline(), options=OPTIONS)]
    for pipe in pipes:
        cast = torch.compile(lambda x, p=pipe: x.to(p.unet.dtype), backend="eager", fullgraph=True)
        assert cast(torch.ones(2).half()).dtype == torch.float32
    assert not answered


def test_one_of_two_is_restored(answered: list[str]) -> None:
    one, other = (tiny.pipeline() for _ in range(2))
    wanted = drawn(one)
    with nothing_remains(other, but=left_by(drawn)):
        strop.optimize(other, options=OPTIONS)
        before = of_diffusers()
        strop.optimize(one, options=OPTIONS)
        strop.restore(one)
        strop.restore(one)
        assert not different(before, of_diffusers())
        assert torch.equal(drawn(one), wanted)
        assert not answered
        assert sorted(dispatchers_of(other)) == ["unet", "vae.decoder", "vae.encoder"]
        found = drawn(other)
        assert (found.int() - wanted.int()).abs().max() <= 1
        assert other.unet.forward.counters.hoisted.num_reuses == 1  # its loop is marked
        assert {*answered} == {"Unwaited", "Search", "FloatingType"}
        strop.restore(other)
    assert torch.equal(drawn(other), wanted)


@pytest.mark.parametrize("is_reversed", [False, True])
def test_shared_components_stay_until_both_are_restored(is_reversed: bool) -> None:
    one: Any = tiny.pipeline()
    pipes = [one, StableDiffusionImg2ImgPipeline(**one.components, requires_safety_checker=False)]
    with nothing_remains(one), nothing_remains(pipes[1]):
        for pipe in pipes:
            strop.optimize(pipe, options=OPTIONS)
        first, second = reversed(pipes) if is_reversed else pipes
        strop.restore(first)
        assert "postprocess" not in vars(first.image_processor)
        assert sorted(dispatchers_of(second)) == ["unet", "vae.decoder", "vae.encoder"]
        assert denoise_loops.loops_of(second)
        strop.restore(second)


def test_a_pipeline_that_is_gone_claims_nothing() -> None:
    one: Any = tiny.pipeline()
    strop.optimize(one, options=OPTIONS)
    other: Any = StableDiffusionImg2ImgPipeline(**one.components, requires_safety_checker=False)
    strop.optimize(other, options=OPTIONS)
    other.itself = SimpleNamespace(pipe=other)  # nobody but the collector finds out
    del other
    strop.restore(one)
    assert not dispatchers_of(one)


def test_a_pipeline_made_of_an_optimised_one_is_restored_at_once(answered: list[str]) -> None:
    one: Any = tiny.pipeline()
    with nothing_remains(one, but=left_by(drawn)):
        strop.optimize(one, options=OPTIONS)
        other: Any = StableDiffusionPipeline(**one.components, requires_safety_checker=False)
        drawn(other)
        assert {*answered} == {"Unwaited", "Search", "FloatingType"}
        strop.restore(other)
        assert not dispatchers_of(one)
        strop.restore(one)


# what others have put there


def places() -> dict[str, tuple[Any, str]]:
    """Every attribute of diffusers that ``optimize`` sets: of the modules that have one thing under
    the same name, the one that defines it."""
    before, pipe = of_diffusers(), tiny.pipeline()
    strop.optimize(pipe, options=OPTIONS)
    after = of_diffusers()
    found = different(before, after)
    strop.restore(pipe)
    named = {}
    for label, name in after:
        value = before.get((label, name))
        if f"{label}.{name}" in found and label.startswith(getattr(value, "__module__", "")):
            module, _, kind = label.rpartition(".")
            is_class = label not in sys.modules
            owner = vars(sys.modules[module])[kind] if is_class else sys.modules[label]
            named[f"{owner.__name__}.{name}"] = owner, name
    return named


PLACES = (
    "DiffusionPipeline.__setattr__",
    "DiffusionPipeline.enable_model_cpu_offload",
    "DiffusionPipeline.progress_bar",
    "HookRegistry.__init__",
    "LoopSequentialPipelineBlocks.progress_bar",
    "ModularPipeline.__call__",
    "ModularPipeline.__setattr__",
    "StableDiffusionLoraLoaderMixin.load_lora_weights",  # for all classes that load files
    "diffusers.hooks.group_offloading._get_top_level_group_offload_hook",
    "diffusers.models.modeling_utils.get_parameter_dtype",
    "diffusers.utils.torch_utils.get_module_execution_device",
    "diffusers.utils.torch_utils.randn_tensor",
)


LOADERS = ("load_lora_weights", "load_textual_inversion", "load_ip_adapter")


def test_these_are_the_places() -> None:
    loaders = {
        f"{owner.__name__}.{name}"
        for (label, name) in of_diffusers()
        if name in LOADERS and label.startswith("diffusers.loaders.")
        for owner in [vars(sys.modules[label.rpartition(".")[0]])[label.rpartition(".")[2]]]
    }
    assert {*places()} == {*PLACES} | (loaders - {"LoraBaseMixin.load_lora_weights"})


@pytest.mark.parametrize(
    ("place", "is_marked"),
    [(place, True) for place in PLACES]
    + [(place, False) for place in PLACES if place.endswith(("bar", "randn_tensor"))],
)
def test_what_others_put_around_ours_stays(
    place: str, is_marked: bool, answered: list[str]
) -> None:
    """``is_marked``: by ``functools.wraps``, which copies the attributes of what is wrapped."""
    plain = tiny.pipeline()
    before, wanted = of_diffusers(), drawn(plain)
    (owner, name), pipe = places()[place], tiny.pipeline()
    strop.optimize(pipe, options=OPTIONS)
    ours, calls = vars(owner)[name], list[str]()

    def around(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return ours(*args, **kwargs)

    theirs = functools.wraps(ours)(around) if is_marked else around
    setattr(owner, name, theirs)
    for _ in range(2):
        strop.restore(pipe)
        assert vars(owner)[name] is theirs
        found = different(before, of_diffusers())
        assert {key.rpartition(".")[2] for key in found} == {name}
        assert torch.equal(drawn(pipe), wanted)  # ours does what the original does
        assert not answered
        strop.optimize(pipe, options=OPTIONS)
        with pipe.progress_bar(total=1):
            assert pipe.unet.forward.loop.is_running
        pipe.vae = tiny.vae()
        assert "forward" in vars(pipe.vae.decoder)
    strop.restore(pipe)
    setattr(owner, name, ours)  # as a patch is taken away
    strop.optimize(pipe, options=OPTIONS)
    strop.restore(pipe)
    assert not different(before, of_diffusers())


def around_ours(owner: Any, name: str, patch: pytest.MonkeyPatch) -> Any:
    """A pipeline that is optimised again, with ours of the first time below somebody's."""
    patch.setattr(owner, name, vars(owner)[name])  # which comes back in the end
    pipe: Any = strop.optimize(tiny.pipeline(), options=OPTIONS)
    ours = vars(owner)[name]
    setattr(owner, name, lambda *args, **kwargs: ours(*args, **kwargs))
    return strop.optimize(strop.restore(pipe), options=OPTIONS)


def test_ours_of_the_first_time_knows_nothing_of_later_hooks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "_get_top_level_group_offload_hook"
    pipe = around_ours(group_offloading, name, monkeypatch)
    place = torch.device("cpu")
    group_offloading.apply_group_offloading(pipe.vae, place, offload_type="leaf_level")
    assert group_offloading._get_top_level_group_offload_hook(pipe.vae) is not None
    strop.restore(pipe)


def test_a_loop_begins_once(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = list[Any]()
    pipe = around_ours(DiffusionPipeline, "progress_bar", monkeypatch)
    monkeypatch.setattr(pipe.unet.forward.loop, "begin", lambda *args, **how: begun.append(args))
    with pipe.progress_bar(total=1):
        assert len(begun) == 1
    strop.restore(pipe)


@pytest.mark.parametrize("place", PLACES)
def test_what_others_put_instead_of_ours_stays(place: str) -> None:
    before, (owner, name) = of_diffusers(), places()[place]
    original, pipe = getattr(owner, name), tiny.pipeline()
    had = name in vars(owner)

    def theirs(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    strop.optimize(pipe, options=OPTIONS)
    setattr(owner, name, theirs)
    strop.restore(pipe)
    assert vars(owner)[name] is theirs
    setattr(owner, name, original)
    if not had:
        delattr(owner, name)
    assert not different(before, of_diffusers())


def test_a_bar_that_somebody_has_put_into_a_pipeline() -> None:
    pipe: Any = with_an_own_bar()
    own = pipe.progress_bar = functools.partial(OwnBar.progress_bar, pipe)
    with nothing_remains(pipe):
        strop.optimize(pipe, options=OPTIONS)
        ours = pipe.progress_bar
        assert ours is not own
        strop.restore(pipe)
        assert pipe.progress_bar is own
    strop.optimize(pipe, options=OPTIONS)
    kept, loop = pipe.progress_bar, pipe.unet.forward.loop
    pipe.progress_bar = theirs = lambda *args, **kwargs: kept(*args, **kwargs)
    strop.restore(pipe)
    assert pipe.progress_bar is theirs
    with theirs(total=2):
        assert not loop.is_running


# in the midst of a loop


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedulers hear timesteps from the host, as on a GPU."""
    there = functools.partial(host_timesteps, host="elsewhere")
    monkeypatch.setattr(denoise_loops, "host_timesteps", there)


def test_restored_in_a_callback(elsewhere: None) -> None:
    plain, pipe = tiny.pipeline(), tiny.pipeline()
    wanted, seen = controls.picture(plain, 16, 16), list[bool]()

    def callback(pipe: Any, step: int, timestep: Any, now: dict[str, Any]) -> dict[str, Any]:
        seen.append("step" in vars(pipe.scheduler))
        if step == 0:
            strop.restore(pipe)
            seen.append("step" in vars(pipe.scheduler))
        return {}

    with nothing_remains(pipe, but=left_by(_drawn)):
        strop.optimize(pipe, options=OPTIONS)
        found = controls.picture(pipe, 16, 16, callback_on_step_end=callback)
    assert seen == [True, False, False, False]
    assert psnr(found, wanted) >= 60


def test_a_step_that_somebody_puts_there_in_a_loop_stays(elsewhere: None) -> None:
    plain, pipe = tiny.pipeline(), strop.optimize(tiny.pipeline(), options=OPTIONS)
    wanted, calls = controls.picture(plain, 16, 16), list[Any]()

    def callback(pipe: Any, step: int, timestep: Any, now: dict[str, Any]) -> dict[str, Any]:
        if step == 0:
            ours = pipe.scheduler.step
            pipe.scheduler.step = lambda *args, **how: calls.append(args) or ours(*args, **how)
        return {}

    found = controls.picture(pipe, 16, 16, callback_on_step_end=callback)
    assert psnr(found, wanted) >= 60
    assert len(calls) == 2
    theirs = pipe.scheduler.step
    strop.restore(pipe)
    assert pipe.scheduler.step is theirs
    assert torch.equal(controls.picture(pipe, 16, 16), wanted)
    assert len(calls) == 5


def test_a_module_is_the_same_while_a_stand_in_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each module would be traced again when a pipeline comes or goes."""
    known = modeling_utils.get_parameter_dtype
    own = known.own if isinstance(known, StandIn) else known
    monkeypatch.setattr(modeling_utils, "get_parameter_dtype", own)
    state = ModuleState(tiny.unet())
    places = {place.label for place in state.global_guards._places}
    assert "diffusers.models.modeling_utils.get_parameter_dtype" in places
    before = state.structure
    monkeypatch.setattr(modeling_utils, "get_parameter_dtype", Unwaited(own))
    state.scan()
    assert state.structure == before
    monkeypatch.setattr(modeling_utils, "get_parameter_dtype", own)
    assert not state.global_guards.have_changed()


# threads


def test_threads_optimise_and_restore_at_once() -> None:
    before, failures = of_diffusers(), list[BaseException]()
    start = threading.Barrier(4)

    def work() -> None:
        try:
            start.wait()
            for number in range(15):
                pipe = Unhashable(Denoiser())
                strop.optimize(pipe, options=OPTIONS)
                assert isinstance(torch_utils.randn_tensor, StandIn)
                assert isinstance(modeling_utils.get_parameter_dtype, StandIn)
                if number % 3:
                    strop.restore(pipe)
                del pipe
        except BaseException as failure:
            failures.append(failure)
            raise

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    gc.collect()
    assert not different(before, of_diffusers())


def test_registries_are_counted_from_the_beginning_again() -> None:
    """One that is made while nobody looks is found by the next pipeline that is optimised."""
    pipe: Any = tiny.pipeline()
    strop.restore(strop.optimize(pipe, options=OPTIONS))
    registry = HookRegistry.check_if_exists_or_initialize(pipe.vae)
    strop.optimize(pipe, options=OPTIONS)
    search: Any = group_offloading._get_top_level_group_offload_hook
    assert search.registries.may_exist
    assert registry is pipe.vae._diffusers_hook
