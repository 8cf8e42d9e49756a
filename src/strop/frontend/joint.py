"""Trace a forward that will be differentiated so that little of it has to be kept.

A norm becomes its statistics, which are saved, and arithmetic, which the backward does again: torch
keeps norms whole and so saves what they give as well. Dropout becomes a seed, which is saved, and a
mask that either pass draws from it: its gradient is the same dropout of the gradient.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._decomp import get_decompositions
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

import strop.frontend.whole  # noqa: F401  (defines torch.ops.strop)
from strop.frontend import of_torch
from strop.frontend.differentiated import define, is_transformed
from strop.frontend.draws import draws
from strop.frontend.functional import storage_of
from strop.ir import philox

aten = torch.ops.aten
TANGENT = "tangents_"  # torch's partitioners know them by this name
_CONVOLUTIONS = {
    aten.convolution.default,
    aten.convolution_backward.default,
}
_HALVES = (torch.float16, torch.bfloat16)
_STATISTICS = {  # where gradients of norms take mean and reciprocal deviation
    aten.native_layer_norm_backward.default: (3, 4),
    aten.native_group_norm_backward.default: (2, 3),
    aten.native_batch_norm_backward.default: (5, 6),
}
# where the gradient of a batch norm takes running statistics, and those of the batch
_RUNNING_STATISTICS, _BATCH_STATISTICS = slice(3, 5), slice(5, 7)
_IN_TRAINING = 7  # and whether it does
_EXTREMES = {
    aten.amax.default,
    aten.amin.default,
    aten.max.default,
    aten.min.default,
    aten.aminmax.default,
    aten.linalg_vector_norm.default,
}
_library = torch.library.Library("strop", "FRAGMENT")
_library.define("group_statistics(Tensor x, int groups, float eps) -> (Tensor, Tensor)")
_library.define("batch_statistics(Tensor x) -> (Tensor, Tensor)")
_library.define("layer_statistics(Tensor x, int dims, float eps) -> (Tensor, Tensor)")
# ``number`` tells the seeds of one tensor apart, which torch would merge
_library.define(
    "seed(Tensor like, int number) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,)
)
_library.define("dropout(Tensor x, Tensor seed, float p) -> Tensor")


_numbers = itertools.count()


def wide(x: Tensor) -> torch.dtype:
    """Return the type in which kernels compute."""
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype


def _moments(x: Tensor, dims: tuple[int, ...], eps: float) -> tuple[Tensor, Tensor]:
    var, mean = torch.var_mean(x.to(wide(x)), dims, correction=0, keepdim=True)
    return mean, (var + eps).rsqrt()


def _group_statistics(x: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    n, c, *rest = x.shape
    mean, rstd = _moments(
        x.reshape(n, groups, c // groups, *rest), tuple(range(2, len(rest) + 3)), eps
    )
    return mean.reshape(n, groups), rstd.reshape(n, groups)


def _layer_statistics(x: Tensor, dims: int, eps: float) -> tuple[Tensor, Tensor]:
    return _moments(x, tuple(range(x.dim() - dims, x.dim())), eps)


def _batch_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    dims = tuple(d for d in range(x.dim()) if d != 1)
    var, mean = torch.var_mean(x.to(wide(x)), dims, correction=0)
    return mean, var


def _batch_shapes(x: Tensor) -> tuple[Tensor, Tensor]:
    shape, dtype = (x.shape[1],), wide(x)
    return x.new_empty(shape, dtype=dtype), x.new_empty(shape, dtype=dtype)


def _group_shapes(x: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    return (
        x.new_empty((x.shape[0], groups), dtype=wide(x)),
        x.new_empty((x.shape[0], groups), dtype=wide(x)),
    )


def _layer_shapes(x: Tensor, dims: int, eps: float) -> tuple[Tensor, Tensor]:
    shape = (*x.shape[: x.dim() - dims], *[1] * dims)
    return x.new_empty(shape, dtype=wide(x)), x.new_empty(shape, dtype=wide(x))


def _seed(like: Tensor, number: int) -> Tensor:
    return torch.randint(0, 2**63 - 1, (), dtype=torch.int64, device=like.device)


def _dropout(x: Tensor, seed: Tensor, p: float) -> Tensor:
    """Draw what the kernels compute: the element's place is its logical one, in either pass."""
    places = torch.arange(x.numel(), dtype=torch.int64, device=x.device).reshape(x.shape)
    kept = philox.uniform(seed.expand(x.shape), places) >= p
    return x * kept * (0.0 if p == 1 else 1 / (1 - p))


class _Dropout(torch.autograd.Function):
    """Drop out such that the gradient is the same dropout of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seed: Tensor, p: float) -> Tensor:
        ctx.save_for_backward(seed)
        ctx.p = p
        dropped: Tensor = torch.ops.strop.dropout(x, seed, p)
        return dropped

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (seed,), (grad,) = ctx.saved_tensors, gradients
        return torch.ops.strop.dropout(grad, seed, ctx.p), None, None


def _differentiated_seed(like: Tensor, number: int) -> Tensor:
    """Stay whole inside a gradient too: ``keep_less`` knows a seed by its operator."""
    if is_transformed():
        return _seed(like, number)
    seed: Tensor = torch.ops.strop.seed(like.detach(), number)
    return seed


def _differentiated_dropout(x: Tensor, seed: Tensor, p: float) -> Tensor:
    if is_transformed():  # by what an autograd.Function has no rule for
        return _dropout(x, seed, p)
    dropped: Tensor = _Dropout.apply(x, seed, p)  # type: ignore[no-untyped-call]
    return dropped


for _name, _function, _shapes in (
    ("group_statistics", _group_statistics, _group_shapes),
    ("batch_statistics", _batch_statistics, _batch_shapes),
    ("layer_statistics", _layer_statistics, _layer_shapes),
):
    define(_library, _name, _function, _shapes)
define(
    _library,
    "seed",
    _seed,
    lambda like, number: like.new_empty((), dtype=torch.int64),
    differentiated=_differentiated_seed,
)
define(
    _library,
    "dropout",
    _dropout,
    lambda x, seed, p: torch.empty_like(x),
    differentiated=_differentiated_dropout,
)


def _call_dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    if not training or p == 0:
        return input
    if inplace or not 0 < p <= 1:
        return F.dropout(input, p, training, inplace)
    result: Tensor = torch.ops.strop.dropout(input, torch.ops.strop.seed(input, next(_numbers)), p)
    return result


# what a graph that is to be differentiated gets besides ``operators.COMPOSITES``
RETARGET: dict[Callable[..., Any], Callable[..., Tensor]] = {
    F.dropout: _call_dropout,
    torch.dropout: lambda x, p, train: _call_dropout(x, p, train),
}


def _applied(
    x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    scale = rstd if weight is None else rstd * weight
    y = (x.to(mean.dtype) - mean) * scale
    return (y if bias is None else y + bias).to(x.dtype)


def _group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    n: int,
    c: int,
    hw: int,
    groups: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    mean, rstd = torch.ops.strop.group_statistics(x, groups, eps)
    ones = [1] * (x.dim() - 2)

    def spread(statistic: Tensor) -> Tensor:
        return statistic.unsqueeze(2).expand(n, groups, c // groups).reshape(n, c, *ones)

    affine = (None if p is None else p.reshape(1, c, *ones) for p in (weight, bias))
    y = _applied(x, spread(mean), spread(rstd), *affine)
    kept = _statistics_type(x, weight, bias)
    return y, mean.to(kept), rstd.to(kept)


def _layer_norm(
    x: Tensor, normalized: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    mean, rstd = torch.ops.strop.layer_statistics(x, len(normalized), eps)
    kept = _statistics_type(x, weight, bias)
    y = _applied(x, mean, rstd, weight, bias).contiguous()  # as eager's always is
    return y, mean.to(kept), rstd.to(kept)


def _batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """Normalise by the statistics of the batch, and write the running ones. Without either, it
    stays the operator that it is."""
    if not training or running_mean is None or running_var is None:
        return NotImplemented
    mean, var = torch.ops.strop.batch_statistics(x)
    rstd = (var + eps).rsqrt()
    count = x.numel() // x.shape[1]
    for running, now in ((running_mean, mean), (running_var, var * (count / (count - 1)))):
        running.copy_(running.to(now.dtype) * (1 - momentum) + now * momentum)
    ones = [1] * (x.dim() - 2)

    def spread(value: Tensor | None) -> Any:
        return None if value is None else value.reshape(1, x.shape[1], *ones)

    y = _applied(x, spread(mean), spread(rstd), spread(weight), spread(bias))
    kept = _statistics_type(x, weight, bias)
    return y, mean.to(kept), rstd.to(kept)


def _cudnn_batch_norm(x: Tensor, *given: Any) -> Any:
    found = _batch_norm(x, *given)
    return found if found is NotImplemented else (*found, x.new_empty((0,), dtype=torch.uint8))


def _cudnn_batch_norm_backward(
    x: Tensor,
    grad: Tensor,
    weight: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    eps: float,
    reserve: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    found: tuple[Tensor, Tensor, Tensor] = aten.native_batch_norm_backward(
        grad, x, weight, running_mean, running_var, mean, rstd, True, eps, [True] * 3
    )
    return found


def _statistics_type(x: Tensor, *parameters: Tensor | None) -> torch.dtype:
    """Return the type in which eager returns a norm's statistics: on a CPU that of the operands, if
    they have one; otherwise that of the arithmetic."""
    is_mixed = any(p is not None and p.dtype != x.dtype for p in parameters)
    return wide(x) if is_mixed or x.device.type != "cpu" else x.dtype


# of torch's: arithmetic on elements, and views with a place to be written to
_OF_TORCH = of_torch.DECOMPOSITIONS | get_decompositions(
    [
        aten.smooth_l1_loss_backward,
        aten.huber_loss_backward,
        aten.binary_cross_entropy_backward,
        aten.slice_backward,
        aten.select_backward,
        aten.logit_backward,
        aten.glu_backward,
        aten.diagonal_backward,
    ]
)
DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    **_OF_TORCH,
    aten.native_batch_norm.default: _batch_norm,
    aten._native_batch_norm_legit.default: _batch_norm,
    aten.cudnn_batch_norm.default: _cudnn_batch_norm,
    aten.cudnn_batch_norm_backward.default: _cudnn_batch_norm_backward,
    aten.native_group_norm.default: _group_norm,
    aten.native_layer_norm.default: _layer_norm,
    # torch has no shape rule for it that knows symbols
    aten._upsample_bicubic2d_aa_backward.default: torch.ops.strop._upsample_bicubic2d_aa_backward,
}


def keep_less(joint: GraphModule) -> None:
    """Tell torch's min-cut what it is to know of our kernels, by tags, and by readers moved to
    other values."""
    _drop_clones(joint)
    _read_wide_statistics(joint)
    _widen_again(joint)
    _drop_batch_statistics(joint)
    _keep_extremes(joint)
    for node in joint.graph.nodes:
        is_seed = node.target is torch.ops.strop.seed.default
        if is_seed or ("recompute" in node.meta and draws(node)):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE  # inside of a checkpoint too


def _widen_again(joint: GraphModule) -> None:
    """Have casts to fp32 that a backward operator reads computed again, of half as many bytes.

    Under autocast a norm gets an fp32 copy of its input. The min-cut takes operators for kernels of
    their own, which need the copy in memory, and so kept it; our kernels read what was cast.
    """
    behind: set[Node] = set()  # what depends on gradients
    for node in joint.graph.nodes:
        is_gradient = node.op == "placeholder" and node.name.startswith(TANGENT)
        if is_gradient or not behind.isdisjoint(node.all_input_nodes):
            behind.add(node)
    for cast in joint.graph.find_nodes(op="call_function", target=aten._to_copy.default):
        if cast in behind or behind.isdisjoint(cast.users) or "recompute" in cast.meta:
            continue
        if cast.meta["val"].dtype == torch.float32 and cast.args[0].meta["val"].dtype in _HALVES:
            cast.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            cast.meta["ac_graph_id"] = 0  # torch 2.11 compares those of neighbours


def _read_wide_statistics(joint: GraphModule) -> None:
    """Have gradients of norms read statistics as they were computed, not as eager returns them on a
    CPU, in a half type."""
    for backward, places in _STATISTICS.items():
        for node in joint.graph.find_nodes(op="call_function", target=backward):
            for place in places:
                if getattr(node.args[place], "target", None) is aten._to_copy.default:
                    node.update_arg(place, node.args[place].args[0])


def _drop_batch_statistics(joint: GraphModule) -> None:
    """Have no gradient of a batch norm ask for statistics that it does not read: in evaluation not
    for those of a batch, which are zeros, two tensors of each norm that the forward would write and
    keep; in training not for the running ones, which the forward writes."""
    of_norm = aten.native_batch_norm_backward.default
    for node in joint.graph.find_nodes(op="call_function", target=of_norm):
        args = list(node.args)
        args[_RUNNING_STATISTICS if args[_IN_TRAINING] else _BATCH_STATISTICS] = None, None
        node.args = tuple(args)


def _keep_extremes(joint: GraphModule) -> None:
    """Have an extreme kept, and what it was taken of: its gradient goes to the elements that equal
    it, and none may when other kernels have computed them again."""
    for equal in joint.graph.find_nodes(op="call_function", target=aten.eq.Tensor):
        for value in equal.all_input_nodes:
            while value.op == "call_function" and _is_view(value):
                value = value.args[0]
            whole = value.args[0] if value.target is operator.getitem else value
            if whole.target in _EXTREMES:
                for kept in (value, whole.args[0]):
                    kept.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _is_view(node: Node) -> bool:
    return storage_of(node) in map(storage_of, node.all_input_nodes)


def _drop_clones(joint: GraphModule) -> None:
    """Have convolutions read what was made contiguous for them: they lay out their operands
    themselves, and a backward that reads value and clone would have both kept."""
    for clone in joint.graph.find_nodes(op="call_function", target=aten.clone.default):
        source = clone.args[0]
        readers = {user.target for user in clone.users}
        if source.op == "call_function" and not _is_view(source) and readers <= _CONVOLUTIONS:
            clone.replace_all_uses_with(source)
            joint.graph.erase_node(clone)
