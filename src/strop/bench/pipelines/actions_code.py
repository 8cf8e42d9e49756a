"""List actions on how a result is computed: hooks, blocks, processors, classes and functions."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from strop.api import dispatchers_of, optimize, restore
from strop.bench.pipelines.actions_weights import first_layer, other_weights


def first_block(module: nn.Module) -> tuple[nn.ModuleList, int]:
    """Return a list of blocks and the place of one in it: the largest list that is repeated."""
    lists = [m for m in module.modules() if isinstance(m, nn.ModuleList) and len(m)]
    return max(lists, key=lambda m: sum(p.numel() for p in m.parameters())), 0


def training_mode(module: nn.Module) -> None:
    module.train()


def swap_block(module: nn.Module) -> None:
    blocks, place = first_block(module)
    other = copy.deepcopy(blocks[place])
    other.load_state_dict(other_weights(other))
    blocks[place] = other


def swap_activation(unet: Any) -> None:
    unet.conv_act = nn.Tanh()


def plain_attribute(unet: Any) -> None:
    unet.mid_block.resnets[0].output_scale_factor = 3.0


def _doubled(module: nn.Module, given: Any, found: Any) -> Any:
    if isinstance(found, Tensor):
        return found * 2
    if isinstance(found, tuple):
        return (_doubled(module, given, found[0]), *found[1:])
    found.sample = found.sample * 2
    return found


def forward_hook(module: nn.Module) -> None:
    module.register_forward_hook(_doubled)


def _shrunk(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Halve the first argument that holds numbers."""
    values = [*args, *kwargs.values()]
    first = next(v for v in values if isinstance(v, Tensor) and v.is_floating_point())

    def own(value: Any) -> Any:
        return value * 0.5 if value is first else value

    return tuple(map(own, args)), {name: own(value) for name, value in kwargs.items()}


def forward_pre_hook(module: nn.Module) -> None:
    module.register_forward_pre_hook(_shrunk, with_kwargs=True)


def hook_on_a_part(module: nn.Module) -> None:
    first_layer(module).register_forward_hook(_doubled)


def hook_added_and_removed(module: nn.Module) -> None:
    first_layer(module).register_forward_hook(_doubled).remove()


@contextmanager
def global_hook(module: nn.Module) -> Iterator[None]:
    layer = first_layer(module)

    def hook(hooked: nn.Module, given: Any, found: Any) -> Any:
        return found * 2 if hooked is layer else None

    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def forward_replaced(module: Any) -> None:
    """Replace the forward by another function around it, as accelerate's hooks do."""
    before = module.forward

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return _doubled(module, args, before(*args, **kwargs))

    module.forward = wrapped


def forward_of_a_part_replaced(module: nn.Module) -> None:
    layer = first_layer(module)
    before = layer.forward
    layer.forward = lambda *args, **kwargs: before(*args, **kwargs) * 2


def class_assigned(module: nn.Module) -> None:
    """Make one layer an object of another class."""
    layer = first_layer(module)
    before: Any = type(layer).forward

    def forward(self: Any, *args: Any) -> Any:
        return before(self, *args) * 2

    layer.__class__ = type("Patched", (type(layer),), {"forward": forward})


def _repeated_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of a block of diffusers that gives one tensor."""
    for part in module.modules():
        if type(part).__name__ in ("FeedForward", "ResnetBlock2D", "TimestepEmbedding"):
            return type(part)
    return type(first_layer(module))


@contextmanager
def class_patched(module: nn.Module) -> Iterator[None]:
    kind: Any = _repeated_class(module)
    before = kind.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return before(self, *args, **kwargs) * 1.5

    kind.forward = forward
    try:
        yield
    finally:
        kind.forward = before


@contextmanager
def function_patched(module: nn.Module) -> Iterator[None]:
    """Replace a function of the module's own file, as plug-ins do."""
    from diffusers.models import embeddings

    before = embeddings.get_timestep_embedding

    def patched(*args: Any, **kwargs: Any) -> Any:
        return before(*args, **kwargs) * 0.5

    embeddings.get_timestep_embedding = patched
    try:
        yield
    finally:
        embeddings.get_timestep_embedding = before


def swap_processors(unet: Any) -> None:
    from diffusers.models.attention_processor import AttnProcessor

    unet.set_attn_processor(AttnProcessor())


class Scaled:
    """Process attention with a setting."""

    def __init__(self, inner: Any, scale: float) -> None:
        self.inner, self.scale = inner, scale

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs) * self.scale


class Counting:
    """Process attention, and grow after a call, as schedules of guidance do."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.calls = inner, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        found = self.inner(*args, **kwargs)
        return found if self.calls <= 1 else found * 50


def scaled_processors(unet: Any) -> None:
    unet.set_attn_processor({n: Scaled(p, 0.5) for n, p in unet.attn_processors.items()})


def counting_processors(unet: Any) -> None:
    unet.set_attn_processor({n: Counting(p) for n, p in unet.attn_processors.items()})


def gradient_checkpointing(module: Any) -> None:
    module.enable_gradient_checkpointing()


def deep_copied(pipe: Any) -> Any:
    """Return a copy, which is used from then on; the copy of an optimised pipeline is a plain
    one."""
    return copy.deepcopy(pipe)


def pickled(pipe: Any) -> Any:
    return pickle.loads(pickle.dumps(pipe))


def saved_and_loaded(pipe: Any) -> None:
    """Send the weights through a file, as ``torch.save`` writes them."""
    for part in pipe.components.values():
        if isinstance(part, nn.Module):
            file = io.BytesIO()
            torch.save(part.state_dict(), file)
            file.seek(0)
            part.load_state_dict(torch.load(file))


def restored_and_optimized(pipe: Any) -> None:
    dispatchers = dispatchers_of(pipe)
    if dispatchers:
        options = next(iter(dispatchers.values())).options
        optimize(restore(pipe), options=options)


def repeated_blocks_compiled(module: Any) -> None:
    module.compile_repeated_blocks(backend="eager")


def drawn_in_a_thread(pipe: Any) -> None:
    """Call the denoiser in another thread."""
    thread = threading.Thread(target=_decode, args=(pipe,))
    thread.start()
    thread.join()


def _decode(pipe: Any) -> None:
    with torch.no_grad():
        vae = getattr(pipe, "vae", None)
        if vae is not None and hasattr(vae.config, "latent_channels"):
            vae.decode(torch.zeros(1, vae.config.latent_channels, 8, 8))
