"""Trace transformers whose tokens diffusers divides among processes: context parallelism.

``enable_parallelism(config=ContextParallelConfig(...))`` puts hooks around forwards, which take the
process's own part of what goes in, or gather what all have of what comes out
(diffusers.hooks.context_parallel), and has attention exchange heads for tokens. A program does the
same: hooks around parts are traced as they stand, those around the whole run around the program.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from strop.frontend import hook_chains
from strop.frontend.hook_chains import is_own, links
from strop.frontend.stable_text import qualified

_HOOKS = "diffusers.hooks.context_parallel"
_SPLIT, _GATHER = f"{_HOOKS}.ContextParallelSplitHook", f"{_HOOKS}.ContextParallelGatherHook"
_CONFIG = "_parallel_config"  # of a model, and of what computes its attention
_SHARDED = "_strop_sharded"  # an attribute of a copy: what its hooks do


class ShardedForward:
    """This is the forward of a copy: it does what the hooks around the original's do."""

    is_of_copy = True

    def __init__(self, part: nn.Module, hooks: tuple[Any, ...]) -> None:
        self._part, self._hooks = part, hooks

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for hook in self._hooks:
            args, kwargs = hook.pre_forward(self._part, *args, **kwargs)
        result = type(self._part).forward(self._part, *args, **kwargs)
        for hook in reversed(self._hooks):
            result = hook.post_forward(self._part, result)
        return result


def sharding_hooks(module: nn.Module) -> tuple[Any, ...]:
    """Return the hooks around a module's forward, from the outside, if they divide and gather
    tokens, and nothing else stands in front of its class's forward or of a dispatcher; else
    none."""
    if "_diffusers_hook" not in vars(module):
        return ()
    chain = list(links(module))
    if not chain or any(qualified(type(hook)) not in (_SPLIT, _GATHER) for hook, _ in chain):
        return ()
    inmost = chain[-1][1]
    is_whole = getattr(inmost, "is_strop", False) or is_own(inmost, module)
    return tuple(hook for hook, _ in chain) if is_whole else ()


def configs_of(module: nn.Module) -> list[Any]:
    """Return the settings of parallelism of a model, and of all that computes its attention."""
    found = [held.get(_CONFIG) for held in holders_of(module)]
    return list({id(config): config for config in found if config is not None}.values())


def holders_of(module: nn.Module) -> Iterator[dict[str, Any]]:
    """Yield the attributes of all that may hold settings of parallelism in a model."""
    for part in module.modules():
        yield vars(part)
        yield getattr(vars(part).get("processor"), "__dict__", {})


def drop_configs(module: nn.Module) -> None:
    """Have a model, and what computes its attention, know nothing of parallelism."""
    for held in holders_of(module):
        held.pop(_CONFIG, None)


def _refusal(configs: Iterable[Any]) -> str:
    """Say why a model whose tokens are divided by these settings cannot be compiled, or nothing."""
    for config in map(_of_context, configs):
        if config is None:
            continue
        if config.ring_degree > 1:
            return (
                f"context parallelism by rings (ring_degree={config.ring_degree}) is not compiled:"
                " give ContextParallelConfig(ulysses_degree=...)"
            )
        if config.ulysses_anything:
            return (
                "context parallelism with ulysses_anything=True asks the other processes for their"
                " sizes in each call, and is not compiled: without it, tokens and heads have to be"
                " multiples of ulysses_degree"
            )
    return ""


def found_in(
    module: nn.Module, parts: Iterable[tuple[str, nn.Module]]
) -> tuple[dict[str, str], tuple[str, ...], str]:
    """Write out, by the paths of a model's ``parts``, how tokens are divided there, and with whom
    the model exchanges some: part of a program's key. Then comes why it cannot be compiled, or
    nothing."""
    configs = configs_of(module)
    shards = {path: text_of(hooks) for path, part in parts if (hooks := sharding_hooks(part))}
    others = tuple(map(_text_of_config, filter(None, map(_of_context, configs))))
    return shards, others, _refusal(configs)


def text_of(hooks: Iterable[Any]) -> str:
    return repr(
        [
            (type(hook).__name__, hook.metadata, _text_of_config(hook.parallel_config))
            for hook in hooks
        ]
    )


def _of_context(config: Any) -> Any:
    return getattr(config, "context_parallel_config", None)


def _text_of_config(config: Any) -> str:
    """Write out the degrees, which process of its groups this is, and the names of these."""
    groups = [(mesh.get_local_rank(), mesh.get_group().group_name) for mesh in _meshes(config)]
    degrees = config.ring_degree, config.ulysses_degree
    anything = config.ulysses_anything, config.ring_anything
    return repr((degrees, anything, config.convert_to_fp32, groups))


def _meshes(config: Any) -> tuple[Any, ...]:
    return config._flattened_mesh, config._ring_mesh, config._ulysses_mesh


def watched_hooks(module: nn.Module) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yield where it is held what ``found_in`` tells."""
    if module.__dict__.get(_CONFIG) is not None:
        yield vars(module), _CONFIG
    for hook in sharding_hooks(module):
        own = vars(hook)
        yield from ((own, name) for name in ("metadata", "parallel_config"))
        yield from hook_chains.watched(hook)


def left_out(module: nn.Module) -> Iterator[tuple[nn.Module, tuple[Any, ...], tuple[Any, Any]]]:
    """Yield the modules with such hooks, and what a copy of each is to be made without: the
    function around its forward, and its registry."""
    for part in module.modules():
        if hooks := sharding_hooks(part):
            yield part, hooks, (vars(part)["forward"], vars(part)["_diffusers_hook"])


def shard_as(copied: nn.Module, hooks: tuple[Any, ...], *, is_root: bool) -> None:
    """Have a copy, made without the hooks, compute as the original does with them. Those of the
    whole module run around the program."""
    for name in ("forward", "_diffusers_hook"):
        vars(copied).pop(name, None)
    if not is_root:
        vars(copied)[_SHARDED] = text_of(hooks)  # tells repeated blocks apart
        vars(copied)["forward"] = ShardedForward(copied, hooks)
