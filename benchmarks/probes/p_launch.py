"""Probes 1 and 2: the cost of launching kernels and of graph nodes."""

from __future__ import annotations

import ctypes
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import cubin
import torch
from common import Ctx, attempt, capture, cpu_us, replay_us

COUNTS = (5, 12, 24, 40, 60, 130)


def static_load(built: Any, name: str, folder: pathlib.Path) -> tuple[int, tuple[Any, ...]]:
    """The function handle, and the tuple _load_kernel gave (its length changed over versions)."""
    path = folder / f"{name}.cubin"
    path.write_bytes(built.asm["cubin"])
    launcher = torch._C._StaticCudaLauncher
    loaded = launcher._load_kernel(str(path), name, built.metadata.shared, 0)
    return loaded[-3], loaded


def ctypes_load(built: Any, name: str) -> tuple[Any, ctypes.c_void_p, float]:
    cuda = ctypes.CDLL("libcuda.so.1")
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    start = time.perf_counter()
    code = cuda.cuModuleLoadData(ctypes.byref(module), built.asm["cubin"])
    code = code or cuda.cuModuleGetFunction(ctypes.byref(function), module, name.encode())
    seconds = time.perf_counter() - start
    if code:
        raise RuntimeError(f"driver error {code}")
    return cuda, function, seconds


def ctypes_call(cuda: Any, function: ctypes.c_void_p, values: list[Any]) -> Callable[[], object]:
    """A call with everything converted beforehand; raises on a driver error."""
    array = (ctypes.c_void_p * len(values))(
        *[ctypes.cast(ctypes.pointer(v), ctypes.c_void_p) for v in values]
    )
    launch = cuda.cuLaunchKernel
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    launch.argtypes = [ctypes.c_void_p] + [ctypes.c_uint] * 7 + [ctypes.c_void_p] * 3
    keep = values

    def call() -> object:
        if launch(function, 1, 1, 1, 128, 1, 1, 0, stream, array, None):
            raise RuntimeError(f"cuLaunchKernel failed ({len(keep)} arguments)")
        return None

    return call


def check(call: Callable[[], object], o: torch.Tensor, want: torch.Tensor) -> bool:
    o.fill_(-1)
    call()
    torch.cuda.synchronize()
    return bool(torch.equal(o, want))


def one_count(count: int, built: Any, module: Any, folder: pathlib.Path) -> dict[str, Any]:
    name = f"args{count}"
    x = torch.randint(0, 1000, (128,), device="cuda", dtype=torch.int32)
    o = torch.empty_like(x)
    ints = list(range(3, count + 1))
    want = x + sum(ints)
    stream = torch.cuda.current_stream().cuda_stream
    row: dict[str, Any] = {"args": count}

    def static(pointers: tuple[Any, Any]) -> dict[str, Any]:
        function, loaded = static_load(built, name, folder)
        launch = torch._C._StaticCudaLauncher._launch_kernel
        types = "OO" + "i" * len(ints) + "OO"
        args = (*pointers, *ints, None, None)

        def call() -> object:
            return launch(function, 1, 1, 1, 4, 0, types, args, stream)

        right = check(call, o, want)
        return {"ok": right, "us": cpu_us(call), "loaded": str(loaded)}

    def driver() -> dict[str, Any]:
        cuda, function, seconds = ctypes_load(built, name)
        p, i = ctypes.c_uint64, ctypes.c_int32
        values = [p(o.data_ptr()), p(x.data_ptr()), *[i(v) for v in ints], p(0), p(0)]
        call = ctypes_call(cuda, function, values)
        return {"ok": check(call, o, want), "us": cpu_us(call), "load_ms": seconds * 1e3}

    def jit() -> dict[str, Any]:
        kernel = getattr(module, name)[(1,)]

        def call() -> object:
            return kernel(o, x, *ints, BLOCK=128)

        return {"ok": check(call, o, want), "us": cpu_us(call)}

    row["static_int"] = attempt(lambda: static((o.data_ptr(), x.data_ptr())))
    row["static_tensor"] = attempt(lambda: static((o, x)))
    row["ctypes"] = attempt(driver)
    row["jit"] = attempt(jit)
    return row


def brief(value: Any) -> str:
    return (
        f"{value['us']:.2f}{'' if value['ok'] else ' WRONG'}" if isinstance(value, dict) else value
    )


def run_launch(ctx: Ctx) -> dict[str, Any]:
    launcher = getattr(torch._C, "_StaticCudaLauncher", None)
    doc = {n: getattr(launcher, n).__doc__ for n in dir(launcher) if not n.startswith("__")}
    ctx.row(f"  _StaticCudaLauncher: {doc}")
    torch.empty(1, device="cuda")
    folder = pathlib.Path(tempfile.mkdtemp())
    path = folder / "many.py"
    cubin.write_module(path, [cubin.many_args(count) for count in COUNTS])
    module = cubin.load_module(path)
    rows = []
    ctx.row("  us/launch: args | static(int ptr) | static(tensor) | ctypes | triton JIT")
    for count in COUNTS:
        if ctx.left() < 1:
            break
        row = attempt(lambda c=count: one_count(c, cubin.build_args(module, c), module, folder))
        rows.append(row)
        if isinstance(row, dict):
            cells = [brief(row[k]) for k in ("static_int", "static_tensor", "ctypes", "jit")]
            ctx.row(f"    {count:4d} | " + " | ".join(cells))
        else:
            ctx.row(f"    {count:4d} | {row}")
    x = torch.zeros(128, device="cuda")
    add = cpu_us(lambda: torch.add(x, 1.0, out=x))
    ctx.row(f"  torch.add(out=) {add:.2f} us")
    return {"doc": doc, "rows": rows, "torch_add_us": add}


def pdl_chain(length: int, pdl: bool) -> float:
    """us per node of a graph of tiny Triton kernels, with programmatic dependent launch or not."""
    from kernels import tiny

    x = torch.zeros(128, device="cuda", dtype=torch.int32)

    def call() -> object:
        return tiny[(1,)](x, 128, PDL=pdl, BLOCK=128, num_warps=4, launch_pdl=pdl)

    call()
    torch.cuda.synchronize()
    graph = capture([call], length)
    x.zero_()
    graph.replay()
    torch.cuda.synchronize()
    if int(x[0]) != length:
        raise RuntimeError(f"the chain counted {int(x[0])}, not {length}")
    return replay_us(graph) / length


def chain(calls: list[Callable[[], object]], length: int) -> dict[str, float]:
    torch.cuda.synchronize()
    start = time.perf_counter()
    graph = capture(calls, length)
    seconds = time.perf_counter() - start
    device = replay_us(graph)
    host = []
    for _ in range(9):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        graph.replay()
        host.append((time.perf_counter() - begin) * 1e6)
    torch.cuda.synchronize()
    return {
        "nodes": length,
        "us": round(device, 1),
        "us_per_node": round(device / length, 3),
        "replay_host_us": round(statistics.median(host), 1),
        "capture_s": round(seconds, 4),
    }


def run_graph(ctx: Ctx) -> dict[str, Any]:
    small = torch.randn(128, device="cuda")
    result: dict[str, Any] = {}

    def note(name: str, call: Callable[[], Any]) -> None:
        result[name] = attempt(call)
        ctx.row(f"  {name}: {result[name]}")

    def tiny_add() -> object:
        return small.add_(1e-3)

    for length in (100, 400, 750):
        note(f"tiny x{length}", lambda n=length: chain([tiny_add], n))
    for mb in (1, 2):
        n = mb * (1 << 20) // 2
        sets = [[torch.randn(n, device="cuda").half() for _ in range(3)] for _ in range(24)]
        calls = [lambda s=s: torch.add(s[0], s[1], out=s[2]) for s in sets]
        note(f"pointwise {mb}MB x440", lambda c=calls: chain(c, 440))
        one = sets[0]
        hot = [lambda s=one: torch.mul(s[0], 1.01, out=s[2]), lambda s=one: s[2].mul_(0.99)]
        note(f"pointwise {mb}MB in-L2 x440", lambda c=hot: chain(c, 440))

    def local() -> float:
        start = time.perf_counter()
        graph = capture([tiny_add], 440, mode="thread_local")
        graph.replay()
        torch.cuda.synchronize()
        return round(time.perf_counter() - start, 4)

    note("thread_local capture x440 s", local)
    note("triton tiny x400 us/node", lambda: round(pdl_chain(400, False), 3))
    note("triton tiny x400 us/node, PDL", lambda: round(pdl_chain(400, True), 3))
    return result
