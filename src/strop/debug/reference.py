"""Runs a graph with plain torch operators, node by node: the judge of passes and of steps.

Exact values are fp64 throughout and never rounded; plain ones have each node's own dtype, as in
eager. Calls that torch runs anyway (``aten``) have their own dtypes in both.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from strop.errors import UnsupportedError
from strop.ir.code_conv import code_conv2d, code_sums, scaled_conv2d
from strop.ir.contractions import GELU_TANH, NORMED, ColumnNorm, Gate
from strop.ir.dims import Env, Expr
from strop.ir.e4m3 import as_e4m3
from strop.ir.eight_bit import CODES, FORMATS
from strop.ir.exchange import exchanged
from strop.ir.graph import Graph, Node
from strop.ir.linear_scan import linear_scan
from strop.ir.mixed_product import mixed_product
from strop.ir.normed_linear import normed_linear
from strop.ir.ops import OPS, Kind
from strop.ir.recurrence import recurrence_of
from strop.ir.tensor_spec import cornered
from strop.patterns import registry
from strop.runtime.run.library_calls import ACTIVATIONS, ALLOCATING, fold_taps, upsampled

Value = Any  # a Tensor, or a tuple of them for a call with several results
Rule = Callable[[Node, list[Tensor], Env], Value]


def evaluate(
    wanted: Iterable[Node], given: Mapping[Node, Tensor], env: Env, *, exact: bool
) -> dict[Node, Tensor]:
    """Compute the values of ``wanted`` from those of ``given``, behind which nothing looks."""
    wanted = tuple(wanted)
    values: dict[Node, Value] = {}
    device = next((value.device for value in given.values()), torch.device("cpu"))
    with torch.device(device), torch.no_grad():
        for node in sorted(_needed(wanted, given), key=lambda n: n.serial):
            if node in given:
                value = given[node]
            else:
                value = _apply(node, [values[i] for i in node.inputs], env, exact=exact)
            values[node] = _typed(value, node.dtype, exact=exact)
    return {node: values[node] for node in wanted}


def input_values(graph: Graph, arguments: Mapping[int, Tensor]) -> dict[Node, Tensor]:
    """Turn arguments by index into values of the graph's inputs; merged weights hold their parts'
    rows and zeros behind them, or all of them from their corners on."""
    return {node: _input_value(node, arguments) for node in graph.inputs}


def _input_value(node: Node, arguments: Mapping[int, Tensor]) -> Tensor:
    parts = [arguments[i] for i in node.attrs["merged"]]
    if not parts:
        return arguments[node.attrs["index"]]
    if "made" in node.attrs:
        name, role = node.attrs["made"].split()
        codes, scales = FORMATS[name].quantised(torch.cat(parts))
        return codes if role == CODES else scales
    if "corners" in node.attrs:
        return cornered([s.value for s in node.shape], parts, node.attrs["corners"])
    own = torch.cat(parts)
    rows = node.shape[0].value if node.shape[0].is_const else len(own)
    return torch.cat([own, own.new_zeros(rows - len(own), *own.shape[1:])])


def has_reference(op: str) -> bool:
    """Tell whether ``evaluate`` knows an operator of the table."""
    return op in _RULES or op in ("input", "aten", "pattern") or OPS[op].reference is not None


def is_random(node: Node) -> bool:
    """Tell whether two runs of a node differ."""
    return node.op == "aten" and bool(node.attrs.get("tag"))


def _needed(wanted: Iterable[Node], given: Mapping[Node, Tensor]) -> set[Node]:
    stack, seen = list(wanted), set(wanted)
    while stack:
        node = stack.pop()
        if node in given:
            continue
        stack += [i for i in node.inputs if i not in seen]
        seen.update(node.inputs)
    return seen


def _typed(value: Value, dtype: torch.dtype, *, exact: bool) -> Value:
    if not isinstance(value, Tensor):
        return value
    return value.to(torch.float64 if exact and dtype.is_floating_point else dtype)


def _apply(node: Node, operands: list[Tensor], env: Env, *, exact: bool) -> Value:
    rule = _RULES.get(node.op)
    if rule is not None:
        return rule(node, operands, env)
    if node.op == "pattern":
        return _searched(node, operands, env, exact=exact)
    if node.op == "aten":
        own = [x.to(i.dtype) for x, i in zip(operands, node.inputs, strict=True)]
        return ALLOCATING["aten"](_concrete_attrs(node, env))(own)
    if node.kind is Kind.REDUCTION:
        return _reduce(node, operands[0], exact=exact)
    reference = OPS[node.op].reference
    if reference is None:
        raise UnsupportedError(f"{node.op} has no reference in torch (at {node.origin})")
    return reference(*operands, **_concrete_attrs(node, env))


def _searched(node: Node, operands: list[Tensor], env: Env, *, exact: bool) -> Value:
    """Return what a pattern's replacement stands for: the graph of its search."""
    pattern = registry.find(node.attrs["key"], node.attrs["name"])
    arguments = [(i.shape, i.dtype) for i in node.inputs]
    graph = pattern.at(arguments, dict(node.attrs["attributes"]), env).graph
    given = dict(zip(graph.inputs, operands, strict=True))
    values = evaluate(graph.outputs, given, env, exact=exact)
    found = tuple(values[node] for node in graph.outputs)
    return found[0] if node.attrs["single"] else found


def _reduce(node: Node, x: Tensor, *, exact: bool) -> Tensor:
    reference = OPS[node.op].reference
    assert reference is not None, node
    more = {name: value for name, value in node.attrs.items() if name != "dims"}
    if node.op not in ("amax", "amin"):
        x = _typed(x, node.dtype, exact=exact)
    if node.op == "prod":  # torch takes one dim at a time
        for dim in node.attrs["dims"]:
            x = torch.prod(x, dim, keepdim=True)
        return x
    result: Tensor = reference(x, dim=node.attrs["dims"], keepdim=True, **more)
    return result


def _concrete_attrs(node: Node, env: Env) -> dict[str, Any]:
    return {name: _concrete(value, env) for name, value in node.attrs.items()}


def _concrete(value: Any, env: Env) -> Any:
    if isinstance(value, Expr):
        return value.eval(env)
    return tuple(_concrete(v, env) for v in value) if isinstance(value, tuple) else value


def _sizes(node: Node, env: Env) -> list[int]:
    return [size.eval(env) for size in node.shape]


def _slice(node: Node, x: list[Tensor], env: Env) -> Tensor:
    dim, step = node.attrs["dim"], node.attrs["step"]
    places = node.attrs["start"].eval(env) + step * torch.arange(node.shape[dim].eval(env))
    return x[0].index_select(dim, places.to(x[0].device))


def _diagonal(node: Node, x: list[Tensor], env: Env) -> Tensor:
    value, length = x[0], node.shape[-1].eval(env)
    for dim, start in zip(node.attrs["dims"], node.attrs["starts"], strict=True):
        value = value.narrow(dim, start, length)
    return value.diagonal(0, *node.attrs["dims"])


def _iota(node: Node, x: list[Tensor], env: Env) -> Tensor:
    start, step = (_concrete(node.attrs[k], env) for k in ("start", "step"))
    result: Tensor = start + step * torch.arange(_sizes(node, env)[0])
    return result


def _take(node: Node, x: list[Tensor], env: Env) -> Tensor:
    source, *indices = x
    sizes, places = _sizes(node, env), []
    for walk in node.attrs["walks"]:
        if walk is None:
            places.append(indices.pop(0))
        else:
            places.append(torch.arange(sizes[walk]).view(-1, *[1] * (len(sizes) - 1 - walk)))
    return source[tuple(places)].expand(sizes)


def _bag(node: Node, x: list[Tensor]) -> Tensor:
    table, ids, offsets, *weights = x
    if node.attrs.get("is_part"):
        part = slice(int(offsets[0]), int(offsets[-1]))
        ids, weights, offsets = ids[part], [w[part] for w in weights], offsets - offsets[0]
    return F.embedding_bag(
        ids.long(),
        table,
        offsets.long(),
        mode={"sum": "sum", "amax": "max"}[node.attrs["kind"]],
        per_sample_weights=weights[0].to(table.dtype) if weights else None,
        include_last_offset=node.attrs["ends"],
        padding_idx=node.attrs["padding"],
    )


def _geglu(node: Node, columns: Tensor) -> Tensor:
    gate = Gate.of(node.attrs)
    value, gates = columns.chunk(2, -1)[:: -1 if gate.is_first else 1]
    return value * ACTIVATIONS[gate.activation](gates)


def _scaled_product(x: list[Tensor]) -> Tensor:
    codes, weight = (as_e4m3(each).double() for each in x[:2])
    rows, columns, *bias = x[2:]
    sums = torch.matmul(codes, weight.t()) * (rows.double() * columns.double())
    return sums + bias[0].double() if bias else sums


def _window(node: Node, x: list[Tensor], env: Env) -> Tensor:
    """Read a window by places in memory, where the value lies dense in its order."""
    (whole,), base = x, node.inputs[0]
    flat = whole.permute(base.order or tuple(range(whole.dim()))).reshape(-1)
    start, strides = _concrete(node.attrs["start"], env), _concrete(node.attrs["strides"], env)
    return flat.as_strided(_sizes(node, env), strides, start)


def _attention(node: Node, x: list[Tensor], env: Env) -> Tensor:
    mask = x[3] if len(x) > 3 else None
    if mask is not None and mask.is_floating_point():
        mask = mask.to(x[0].dtype)
    q, k, v = x[:3]
    if q.dim() == k.dim() == 4 and q.shape[1] > k.shape[1]:
        k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
    return torch._C._nn.scaled_dot_product_attention(
        q, k, v, mask, 0.0, node.attrs["causal"], scale=node.attrs["scale"]
    )


def _paired(x: Sequence[Tensor]) -> Tensor:
    return F.linear(x[0], x[1], *x[4:]) + F.linear(x[2], x[3])


_RULES: dict[str, Rule] = {
    "constant": lambda n, x, env: torch.tensor(_concrete(n.attrs["value"], env)),
    "iota": _iota,
    "cat": lambda n, x, env: torch.cat(x, n.attrs["dim"]),
    "join": lambda n, x, env: torch.cat(x, n.attrs["dim"]),
    "part": lambda n, x, env: x[0],
    "take": _take,
    "bag": lambda n, x, env: _bag(n, x),
    "cast": lambda n, x, env: x[0],
    "copy": lambda n, x, env: x[0],
    "write": lambda n, x, env: x[1],
    "item": lambda n, x, env: operator.getitem(x[0], n.attrs["index"]),
    "reshape": lambda n, x, env: x[0].reshape(_sizes(n, env)),
    "permute": lambda n, x, env: x[0].permute(n.attrs["dims"]),
    "expand": lambda n, x, env: x[0].expand(_sizes(n, env)),
    "slice": _slice,
    "diagonal": _diagonal,
    "window": _window,
    "linear": lambda n, x, env: F.linear(*x),
    "trimmed_linear": lambda n, x, env: F.linear(*x)[..., : n.attrs["columns"]],
    "linear_add": lambda n, x, env: F.linear(x[0], x[1], *x[3:]) + x[2],
    **dict.fromkeys(NORMED, lambda n, x, env: normed_linear(x, ColumnNorm.of(n.op, n.attrs))),
    "linear_gelu": lambda n, x, env: ACTIVATIONS[GELU_TANH](F.linear(*x)),
    "geglu": lambda n, x, env: _geglu(n, F.linear(*x)),
    "paired_linear": lambda n, x, env: _paired(x),
    "paired_linear_add": lambda n, x, env: _paired([*x[:4], *x[5:]]) + x[4],
    "paired_geglu": lambda n, x, env: _geglu(n, _paired(x)),
    "matmul": lambda n, x, env: torch.matmul(*x),
    "mixed_product": lambda n, x, env: mixed_product(*x),
    "linear_scan": lambda n, x, env: linear_scan(x[0], x[1]),
    "recurrence": lambda n, x, env: recurrence_of(x, n.attrs),
    "code_sums": lambda n, x, env: code_sums(*x, **n.attrs),
    "scaled_product": lambda n, x, env: _scaled_product(x),
    "scaled_geglu": lambda n, x, env: _geglu(n, _scaled_product(x)),
    "code_conv2d": lambda n, x, env: code_conv2d(*x, **_concrete_attrs(n, env)),
    "scaled_conv2d": lambda n, x, env: scaled_conv2d(*x, **_concrete_attrs(n, env)),
    "conv2d": lambda n, x, env: torch.conv2d(
        x[0], x[1], x[2] if len(x) > 2 else None, **_concrete_attrs(n, env)
    ),
    "folded_taps": lambda n, x, env: fold_taps(x[0]),
    "upsampled_conv2d": lambda n, x, env: upsampled(*x),
    "attention": _attention,
    "exchange": lambda n, x, env: exchanged(
        x[0].to(n.dtype), n.attrs["how"], n.attrs["group"], n.attrs["size"]
    ),
}
