"""Plans of whole graphs, lowered and interpreted, against torch in fp64."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from strop.backend import compile_graph
from strop.codegen.assemble import Signature
from strop.options import Options
from tests.frontend.tracing import trace
from tests.lowering.run_plan import run_plan

F64 = torch.float64
# fp64 throughout: a difference above this is a wrong index or formula, never rounding
EXACT = {"rtol": 1e-9, "atol": 1e-9}
ENVS = ({"b": 2, "h": 3, "w": 5}, {"b": 3, "h": 1, "w": 2}, {"b": 1, "h": 4, "w": 1})


def check(function: Callable[..., Any], *shapes: str, module: nn.Module | None = None) -> None:
    """Trace in fp64 at one set of hints; run at several."""
    owner = module.double().eval() if module is not None else None
    traced = trace(owner or function, *shapes, dtype=F64, **ENVS[0])
    signature = Signature(traced.returned, traced.captured.guards)
    compiled = compile_graph(traced.graph, signature, "cuda", Options())
    graph, fusion = compiled.graph, compiled.plan
    state = [t.detach() for t in owner.state_dict().values()] if owner else []
    for env in ENVS:
        generator = torch.Generator().manual_seed(7)
        args = [
            torch.randn([s.eval(env) for s in spec.sizes], dtype=F64, generator=generator)
            for spec in traced.captured.input_specs
        ]
        expected = (owner or function)(*args)
        expected = [expected] if isinstance(expected, Tensor) else list(expected)
        merged = [
            torch.cat([state[i] for i in n.attrs["merged"]])
            for n in graph.inputs[len(state) + len(args) :]
        ]
        actual = run_plan(graph, fusion, [*state, *args, *merged], env)
        for a, e in zip(actual, expected, strict=True):
            torch.testing.assert_close(a.to(e.dtype), e, **EXACT)


def group_norm_silu(x: Tensor) -> Tensor:
    return F.silu(F.group_norm(x, 2))


def attention_by_hand(x: Tensor) -> Tensor:
    return (x @ x.transpose(1, 2) * 0.3).softmax(-1) @ x


CASES: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "softmax": (lambda x: x.softmax(-1), ("b h 8*w",)),
    "softmax_inner": (lambda x: x.softmax(1), ("b h 8*w",)),
    "softmax_rolled": (lambda x: x.softmax(-1).roll(1, -1) + x.softmax(-1), ("b h 12",)),
    "softmax_rolled_both_ways": (lambda x: x.softmax(-1).roll((1, 2), (1, 2)) * x, ("b h 12",)),
    "softmax_beside_itself": (lambda x: torch.cat([x.softmax(-1), x], 1) * 2, ("b h 12",)),
    "layer_norm": (lambda x: F.layer_norm(x, (12,)), ("b h 12",)),
    "residual_layer_norm": (lambda x, y: (x + y, F.layer_norm(x + y, (12,))), ("b h 12",) * 2),
    "group_norm_silu": (group_norm_silu, ("b 6 2*h w",)),
    "geglu": (lambda x: (lambda a, g: a * F.gelu(g))(*x.chunk(2, -1)), ("b h 16",)),
    "attention": (attention_by_hand, ("b h*w 8",)),
    "cat_then_norm": (
        lambda x, y: F.silu(F.group_norm(torch.cat([x, y], 1), 2)),
        ("b 4 h w", "b 6 h w"),
    ),
    "cat_dim0": (lambda x, y: torch.cat([x * 2, y, x], 0) + 1, ("b 4 h", "b 4 h")),
    "upsample": (lambda x: F.interpolate(F.silu(x), scale_factor=2.0), ("b 4 h w",)),
    "upsample_of_norm": (
        lambda x: F.interpolate(group_norm_silu(x), scale_factor=2.0) + 1,
        ("b 4 h w",),
    ),
    "pad": (lambda x: F.pad(F.silu(x), (0, 1, 2, 0)) * 2, ("b 4 h w",)),
    "transpose_sum": (lambda x: x + x.transpose(1, 2), ("b h h",)),
    "alternating_sum": (lambda x: F.silu(x).sum((0, 2)), ("b 4 h w",)),
    "alternating_sum_5d": (lambda x: F.silu(x).mean((1, 3)), ("b 2 h 3 w",)),
    "sum_of_one": (lambda x: F.silu(x).sum(1), ("b 1 h",)),
    "variance": (lambda x: (x.var(-1), x.std(1), x.var((0, 2), correction=0)), ("b 5 3*h",)),
    "full_mean": (lambda x: (x.mean(), x.amax()), ("b h w",)),
    "two_sums": (lambda x: (x.sum(-1), (x * x).sum(-1), x.amax(-1)), ("b h 8*w",)),
    "norm_of_norm": (lambda x: F.layer_norm(F.layer_norm(x, (8,)) * 2 + x, (8,)), ("b h 8",)),
    "slices": (lambda x: x[:, -3:-1] * x[:, 1:3] + x[:, :2], ("b 6 h",)),
    "slice_of_sum": (lambda x: F.silu(x)[:, 2:] * 2, ("b 6 h",)),
    "heads": (
        lambda x: x.view(x.shape[0], -1, 2, 4).transpose(1, 2).reshape(x.shape[0], 2, -1) + 1,
        ("b h 8",),
    ),
    "depth": (
        lambda x: x.reshape(x.shape[0], x.shape[1] // 2, 2, 3).permute(0, 2, 3, 1) * 2,
        ("b 2*h 3",),
    ),
    "unbind": (lambda x: (lambda a, b, c: a * b + c)(*F.silu(x).unbind(1)), ("b 3 h",)),
    "arange": (lambda x: x * torch.arange(x.shape[1]) + torch.arange(0, 1, 0.25)[1], ("b 2*h",)),
    "one_hot_mask": (lambda x: torch.where(torch.arange(x.shape[1]) < 2, x, x * 2), ("b 3*h",)),
    "timestep_embedding": (
        lambda t: torch.cat([(t[:, None] * torch.arange(4)).sin(), (t[:, None] * 2).cos()], -1),
        ("b",),
    ),
    "broadcasts": (lambda x, y: x[:, None] * y[None, :, None] + y.sum(), ("b h", "w")),
}


@pytest.mark.parametrize("name", CASES)
def test_against_torch(name: str):
    function, shapes = CASES[name]
    check(function, *shapes)


class Block(nn.Module):
    """A ResNet block and attention as in a UNet: convolutions, norms, merged linears."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.conv = nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 3, padding=1)
        self.short = nn.Conv2d(8, 8, 1)
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(F.silu(self.norm(x))) + self.short(x)
        b, c, h, w = y.shape
        rows = y.flatten(2).transpose(1, 2)
        q, k, v = (f(rows).view(b, h * w, 2, 4).transpose(1, 2) for f in (self.q, self.k, self.v))
        z = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, h * w, c)
        return (self.out(z) + rows).transpose(1, 2).view(b, c, h, w)


def test_a_block_with_library_calls():
    check(lambda x: x, "b 8 2*h 2*w", module=Block())


Labelled = tuple[Tensor, tuple[str, ...]]


class Random:
    """A program of random operators. Sizes have labels, so that no choice depends on a size."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(self, *args: Tensor) -> list[Tensor]:
        r = random.Random(self.seed)
        values = [(args[0], ("b", "4", "h", "6")), (args[1], ("1", "4", "h", "1"))]
        for _ in range(r.randint(3, 10)):
            values.append(self.step(r, values))
        made = [tensor for tensor, _ in values[2:]]
        return r.sample(made, r.randint(1, min(3, len(made))))

    def step(self, r: random.Random, values: list[Labelled]) -> Labelled:
        x, labels = r.choice(values)
        kind = r.choice(("unary", "unary", "binary", "binary", "reduce", "view", "norm", "cat"))
        if kind == "binary":
            fits = [v for v, other in values if _broadcasts(other, labels)]
            return r.choice((torch.add, torch.mul, torch.maximum, torch.sub))(
                x, r.choice(fits)
            ), labels
        if kind == "reduce":
            dims = r.sample(range(len(labels)), r.randint(1, len(labels) - 1))
            kept = tuple("1" if d in dims else label for d, label in enumerate(labels))
            return r.choice((torch.sum, torch.mean, torch.amax))(x, dims, keepdim=True), kept
        if kind == "norm":
            return (x.softmax(-1) if r.random() < 0.5 else F.layer_norm(x, x.shape[-1:])), labels
        if kind == "cat":
            d = r.randrange(len(labels))
            return torch.cat([x, x.neg()], d), (*labels[:d], f"2*{labels[d]}", *labels[d + 1 :])
        if kind == "view":
            return self.view(r, x, labels)
        return r.choice((torch.tanh, torch.sigmoid, F.silu, torch.neg, torch.sin))(x), labels

    def view(self, r: random.Random, x: Tensor, labels: tuple[str, ...]) -> Labelled:
        kind, d = r.choice(("permute", "slice", "flat", "unsqueeze")), r.randrange(len(labels))
        if kind == "permute":
            dims = r.sample(range(len(labels)), len(labels))
            return x.permute(dims), tuple(labels[i] for i in dims)
        if kind == "slice" and labels[d] in ("4", "6"):
            return x.narrow(d, 1, 3), (*labels[:d], "3", *labels[d + 1 :])
        if kind == "flat" and len(labels) > 2 and d + 1 < len(labels):
            both = f"{labels[d]}*{labels[d + 1]}"
            return x.flatten(d, d + 1), (*labels[:d], both, *labels[d + 2 :])
        return x.unsqueeze(d), (*labels[:d], "1", *labels[d:])


def _broadcasts(small: tuple[str, ...], large: tuple[str, ...]) -> bool:
    return len(small) == len(large) and all(
        s in ("1", big) for s, big in zip(small, large, strict=True)
    )


@pytest.mark.parametrize("seed", range(60))
def test_random_programs(seed: int):
    check(Random(seed), "b 4 h 6", "1 4 h 1")
