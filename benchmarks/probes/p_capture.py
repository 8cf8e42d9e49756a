"""Probe 8: make_fx tracing of the SD1.5 UNet with symbolic sizes, and the guards it plants."""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx.experimental._config as fx_config
from common import SD15, Ctx
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
    statically_known_true,
)
from torch.overrides import TorchFunctionMode

F = torch.nn.functional


def register() -> None:
    """Opaque conv and attention ops whose fakes are shape arithmetic alone."""

    @torch.library.custom_op("stropprobe::conv2d", mutates_args=())
    def conv2d(
        x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, stride: int, padding: int
    ) -> torch.Tensor:
        return F.conv2d(x, w, b, stride, padding)

    @conv2d.register_fake
    def _(
        x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, stride: int, padding: int
    ) -> torch.Tensor:
        def out(size: Any, kernel: Any) -> Any:
            if 2 * padding == kernel - 1 and statically_known_true(size % stride == 0):
                return size // stride
            return (size + 2 * padding - kernel) // stride + 1

        n, _, h, wd = x.shape
        return x.new_empty((n, w.shape[0], out(h, w.shape[2]), out(wd, w.shape[3])))

    @torch.library.custom_op("stropprobe::sdpa", mutates_args=())
    def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v).clone()

    @sdpa.register_fake
    def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        b, heads, s, _ = q.shape
        return q.new_empty((b, s, heads, v.shape[3])).transpose(1, 2)

    @torch.library.custom_op("stropprobe::up2x", mutates_args=())
    def up2x(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x, scale_factor=2.0, mode="nearest")

    @up2x.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        n, c, h, w = x.shape
        return x.new_empty((n, c, 2 * h, 2 * w))


def one(value: Any) -> int:
    return int(value[0] if isinstance(value, (tuple, list)) else value)


class Retarget(TorchFunctionMode):
    """Sends convolution, attention and nearest 2x upsampling to the opaque ops."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.conv2d:
            x, w, b, stride, padding = args[:5]
            return torch.ops.stropprobe.conv2d(x, w, b, one(stride), one(padding))
        if func is F.scaled_dot_product_attention:
            q, k, v = args[:3] if len(args) >= 3 else (*args, kwargs["key"], kwargs["value"])[:3]
            return torch.ops.stropprobe.sdpa(q, k, v)
        if func is F.interpolate and kwargs.get("scale_factor") == 2.0:
            return torch.ops.stropprobe.up2x(args[0])
        return func(*args, **kwargs)


@contextlib.contextmanager
def config() -> Iterator[None]:
    with fx_config.patch(use_duck_shape=False, backed_size_oblivious=True):
        yield


def symbols(mode: FakeTensorMode, hints: tuple[int, ...]) -> list[Any]:
    dummy = torch.empty(hints, device="meta")
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * len(hints))
    fake = mode.from_tensor(dummy, source=ConstantSource("d"), symbolic_context=context)
    return list(fake.shape)


def build(mode: FakeTensorMode, device: str) -> tuple[Any, dict[str, Any]]:
    from diffusers import UNet2DConditionModel

    with torch.device("meta"):
        model = UNet2DConditionModel(**SD15).half().eval()
    with mode:
        state = {
            k: torch.empty(v.shape, dtype=v.dtype, device=device)
            for k, v in [*model.named_parameters(), *model.named_buffers()]
        }
    return model, state


def trace(device: str, retarget: bool) -> dict[str, Any]:
    """Trace the UNet; guards, replacements, histogram and seconds."""
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    start = time.perf_counter()
    model, state = build(mode, device)
    built = time.perf_counter()
    b, h, w, s = symbols(mode, (2, 8, 12, 77))
    with mode:
        half = {"device": device, "dtype": torch.float16}
        x = torch.empty((b, 4, 8 * h, 8 * w), **half)
        t = torch.empty((b,), device=device, dtype=torch.float32)
        e = torch.empty((b, s, 768), **half)

    def forward(sizes: Any, params: Any, x: Any, t: Any, e: Any) -> Any:
        call = torch.func.functional_call
        return call(model, params, (x, t, e), {"return_dict": False}, tie_weights=False)[0]

    target: Callable[..., Any] = forward
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(mode)
        stack.enter_context(enable_python_dispatcher())
        if retarget:
            stack.enter_context(Retarget())
        gm = make_fx(target, tracing_mode="real")((b, h, w, s), state, x, t, e)
    done = time.perf_counter()
    result = next(n for n in gm.graph.nodes if n.op == "output")
    out = result.all_input_nodes[0].meta["val"]
    names = collections.Counter(str(n.target) for n in gm.graph.nodes if n.op == "call_function")
    guards = [str(g.expr) for g in env.guards]
    return {
        "device": device,
        "retarget": retarget,
        "build_s": round(built - start, 2),
        "trace_s": round(done - built, 2),
        "nodes": len(gm.graph.nodes),
        "calls": sum(names.values()),
        "histogram": dict(names.most_common(40)),
        "guards": len(guards),
        "guard_texts": sorted(set(guards)),
        "batch_guards": sorted({g for g in guards if str(b.node.expr) in g}),
        "symbols": [str(v) for v in (b, h, w, s)],
        "replacements": {str(k): str(v) for k, v in env.replacements.items()},
        "ranges": {str(k): str(v) for k, v in env.var_to_range.items()},
        "out_shape": [str(v) for v in out.shape],
        "out_stride": [str(v) for v in out.stride()],
    }


def run(ctx: Ctx, device: str = "cuda") -> dict[str, Any]:
    register()
    result = {}
    for retarget in (True, False):
        if ctx.left() < 5:
            ctx.row(f"  capture retarget={retarget}: skipped, no time")
            continue
        try:
            with config():
                data = trace(device, retarget)
        except Exception as error:
            data = {"error": f"{type(error).__name__}: {error}"[:2000]}
            ctx.row(f"  capture retarget={retarget}: {data['error'][:300]}")
            result[f"retarget_{retarget}"] = data
            continue
        result[f"retarget_{retarget}"] = data
        ctx.row(
            f"  capture {device} retarget={retarget}: {data['trace_s']} s, {data['nodes']} nodes, "
            f"{data['guards']} guards {data['guard_texts'][:8]}, symbols {data['symbols']}, "
            f"replaced {data['replacements']}, out {data['out_shape']} {data['out_stride']}"
        )
        top = list(data["histogram"].items())[:12]
        ctx.row("    " + ", ".join(f"{k.replace('aten.', '')} {v}" for k, v in top))
    return result
