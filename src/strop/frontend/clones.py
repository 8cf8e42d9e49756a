"""Copy a module to trace it: the copy has modules of its own, and shares every tensor."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from strop.errors import CaptureError
from strop.frontend import int8_layers, sharded_context
from strop.frontend.adapted_layers import is_folded
from strop.frontend.computed_weights import compute, computed_weights
from strop.frontend.layerwise_casting import cast_as, cast_of, left_out
from strop.frontend.low_rank_layers import stand_in
from strop.frontend.module_parts import graph_module_like, has_other_forward, is_inside_a_hook
from strop.frontend.module_tensors import Tables, named_state, tensor_places
from strop.frontend.moving_hooks import ATTRIBUTES, moving_hooks, set_by_hooks
from strop.frontend.sharded_units import is_sharded, unsharded

_HOOKS = {name for name in vars(nn.Module()) if "_hooks" in name and "state_dict" not in name}


def clone_structure(module: nn.Module, tables: Tables = MappingProxyType({})) -> nn.Module:
    """Return a copy of the modules that shares every tensor, to trace without disturbing other
    threads. A layer that has one of ``tables`` stands in the place of the one that wraps it, with
    the Parameters in it, and computes its low-rank part if these hold one. Another stands for each
    linear of ``int8_layers``."""
    held = [table[key] for _, table, key in tensor_places(module.named_modules())]
    memo: dict[int, Any] = {id(t): t for t in (*held, *named_state(module).values())}
    for table in tables.values():
        memo |= {id(t): t for t in table.values()}
    memo |= {
        id(part): int8_layers.stand_in(part)
        for part in module.modules()
        if int8_layers.is_int8(part)
    }
    try:
        clone = _deep_copied(module, memo)
        for number, table in tables.items():
            memo[number]._parameters |= table
        clone = _unwrapped(clone) if tables else clone
        for number in tables:
            stand_in(memo[number])
        return clone
    except CaptureError:
        raise
    except Exception as error:  # locks, open files, computed tensors: objects may raise anything
        raise CaptureError(f"{type(module).__name__} cannot be copied: {error}") from error


def _unwrapped(module: nn.Module) -> nn.Module:
    """Put plain layers in the place of those that peft has wrapped."""
    if is_folded(module):
        return _unwrapped(module.base_layer)  # type: ignore[arg-type]
    for name, child in module._modules.items():
        if child is not None:
            module._modules[name] = _unwrapped(child)
    return module


def _deep_copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    is_around = is_inside_a_hook(module) and not moving_hooks(module)
    if is_around:  # accelerate's hook holds the models before this one
        memo |= {id(vars(module).get(name)): None for name in ATTRIBUTES}
    moved = [part for part in module.modules() if moving_hooks(part)]
    memo |= {id(value): None for part in moved for _, value in set_by_hooks(part)}
    for part in module.modules():
        _refuse_copy(part, is_root=part is module, is_outermost=is_around and part is module)
        own = part.__dict__.get("forward")
        if getattr(own, "is_strop", False):
            memo[id(own)] = None  # dispatchers stay with the original
    _copy_graph_modules(module, memo)
    module = unsharded(module) if is_sharded(module) else module
    casts = list(left_out(module))
    memo |= {id(hook): None for _, _, hooks in casts for hook in hooks}
    shards = list(sharded_context.left_out(module))
    memo |= {id(hook): None for _, _, hooks in shards for hook in hooks}
    memo |= {id(config): config for config in sharded_context.configs_of(module)}
    memo |= {id(weight): None for weight in computed_weights(module)}
    memo |= {id(function): function for function in _scripted(module)}
    clone = copy.deepcopy(module, memo)
    for part, cast, _ in casts:
        cast_as(memo[id(part)], cast)
    for part, sharding, _ in shards:
        sharded_context.shard_as(memo[id(part)], sharding, is_root=part is module)
    for part in clone.modules():
        compute(part)
    for hooks in _HOOKS & vars(clone).keys():  # the module's own, which run around its forward
        vars(clone)[hooks].clear()
    _take_out(clone, ("forward",))
    copied = [memo[id(part)] for part in moved]
    _take_out(clone, ATTRIBUTES, [clone, *copied] if is_around else copied)
    return clone


def _scripted(module: nn.Module) -> Iterator[Any]:
    """Yield functions of TorchScript among attributes, which refuse to be copied, and hold
    nothing."""
    for part in module.modules():
        yield from (v for v in vars(part).values() if isinstance(v, torch.jit.ScriptFunction))


def _take_out(
    clone: nn.Module, names: Sequence[str], parts: Sequence[nn.Module] | None = None
) -> None:
    """Take out of a copy, or of these parts of it, what was not copied."""
    for own in map(vars, clone.modules() if parts is None else parts):
        for name in names:
            if name in own and own[name] is None:
                del own[name]


def _refuse_copy(part: nn.Module, *, is_root: bool, is_outermost: bool) -> None:
    if isinstance(part, nn.parallel.DistributedDataParallel):
        # a copy would put hooks of its own on the parameters, and a trace has none of them
        raise CaptureError("DistributedDataParallel cannot be traced; optimize the module in it")
    if is_sharded(part) and not is_root:
        raise CaptureError(
            "a part was sharded by fully_shard: call strop.optimize(train=True) behind that, which"
            " compiles such parts by themselves"
        )
    is_traced = cast_of(part) is not None or sharded_context.sharding_hooks(part)
    if has_other_forward(part) and not is_traced and not is_outermost:
        raise CaptureError(f"the forward of a {type(part).__name__} inside was replaced")


def _copy_graph_modules(module: nn.Module, memo: dict[int, Any]) -> None:
    """Put copies of all modules of torch.fx into ``memo``, which share their graphs."""
    for part in reversed(list(module.modules())):  # what is inside of another comes first
        if isinstance(part, GraphModule):
            memo[id(part)] = made = graph_module_like(part)
            children = part._modules.items()
            made._modules = {name: copy.deepcopy(child, memo) for name, child in children}
            if getattr(vars(made).get("forward"), "is_strop", False):
                del vars(made)["forward"]
