"""Every kernel of real models through the real compiler, for five GPU architectures.

    python benchmarks/kernel_matrix.py --out FILE [--models sd15-unet,clip] [--arch 80,90]

Needs neither a GPU nor weights: models come from their configurations, are captured in fp16 and
compiled for CUDA, and no kernel runs. Each distinct kernel source becomes machine code for each
architecture. Recorded are its shared memory, registers, stack and spills.

Rules: it compiles; shared memory of a block fits (99 KB on sm_86 and sm_89, the architecture's
limit elsewhere); no register is spilled. The exit code is 1 if a kernel breaks one. A stack frame
without spills is no breach: the slow path of sin and cos keeps its table of digits there. For
every kernel with a frame ptxas itself is asked how much it spilled.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn

from strop.backend import compile_graph
from strop.bench import environment, models
from strop.codegen.assemble import Signature
from strop.diffusion.components import adapter_for
from strop.errors import CodegenError
from strop.frontend.capture import capture
from strop.frontend.importer import import_graph
from strop.ir.device import GpuTarget
from strop.ir.source import KernelSource
from strop.options import Options
from strop.runtime.build import compilers as builds
from strop.runtime.build import cubin
from strop.wording import counted

WORKERS = 2
F16 = torch.float16
# of one block, by the CUDA programming guide
SHARED_KB = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 120: 99}
COLUMNS = ("shared", "registers", "stack", "spilled", "seconds")
SLOW_PATH = "slow path of sin and cos: its table of digits, nothing spilled"


@dataclass(frozen=True, slots=True)
class Part:
    """A module, and one call of it. The values of ``args`` are never looked at."""

    module: nn.Module
    args: tuple[Tensor, ...]
    call: Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Usage:
    """What one kernel costs on one architecture."""

    shared: int  # bytes of a block
    registers: int  # of a thread
    stack: int  # bytes of a thread
    spilled: int  # bytes of a thread
    seconds: float

    def breaches(self, arch: int) -> list[str]:
        found = []
        if self.shared > SHARED_KB[arch] * 1024:
            found.append(f"{self.shared} bytes of shared memory, at most {SHARED_KB[arch]} KB")
        if self.spilled:
            found.append(f"{self.spilled} bytes of spill stores and loads")
        return found


# Models


def _on_cpu(build: Callable[[], nn.Module]) -> nn.Module:
    """Uninitialised fp16 weights: memory that nobody touches costs nothing."""
    with torch.device("meta"):
        module = build()
    return module.to(F16).to_empty(device="cpu").eval().requires_grad_(False)


def _unet(module: nn.Module, height: int, width: int, tokens: int) -> Part:
    config: Any = module.config
    args = (
        torch.empty(2, 4, height, width, dtype=F16),
        torch.empty(2),
        torch.empty(2, tokens, config.cross_attention_dim, dtype=F16),
    )
    return Part(module, args, lambda x, t, text: module(x, t, text, return_dict=False))


def _autoencoder(module: Any, height: int, width: int) -> dict[str, Part]:
    latent = torch.empty(2, 4, height, width, dtype=F16)
    factor = 2 ** (len(module.config.block_out_channels) - 1)
    picture = torch.empty(2, 3, factor * height, factor * width, dtype=F16)
    return {
        "vae-decoder": Part(module.decoder, (latent,), module.decoder),
        "vae-encoder": Part(module.encoder, (picture,), module.encoder),
    }


def _text_encoder(module: nn.Module, tokens: int) -> Part:
    ids = torch.empty(2, tokens, dtype=torch.int64)
    return Part(module, (ids,), lambda x: module(x)[0])


def _sd15_unet() -> dict[str, Part]:
    from diffusers import UNet2DConditionModel

    return {"": _unet(_on_cpu(lambda: UNet2DConditionModel(**models.SD15_UNET)), 64, 64, 77)}


def _sd_vae(name: str) -> dict[str, Part]:
    from diffusers import AutoencoderKL

    module = _on_cpu(lambda: AutoencoderKL(**models.SD_VAE))
    return {"": _autoencoder(module, 64, 64)[name]}


def _clip() -> dict[str, Part]:
    from transformers import CLIPTextConfig, CLIPTextModel

    return {"": _text_encoder(_on_cpu(lambda: CLIPTextModel(CLIPTextConfig(**models.CLIP_L))), 77)}


def _sprites() -> dict[str, Part]:
    from strop.models.sprites import network
    from strop.models.sprites.settings import NetworkSettings

    settings = NetworkSettings()
    tokens = network.tokenizer(settings)
    unet = _on_cpu(lambda: network.unet(settings))
    text = _on_cpu(lambda: network.text_encoder(settings, tokens))
    return {
        "unet": _unet(unet, 24, 16, settings.text_length),
        **_autoencoder(_on_cpu(lambda: network.vae(settings)), 24, 16),
        "text-encoder": _text_encoder(text, settings.text_length),
    }


MODELS: Mapping[str, Callable[[], dict[str, Part]]] = {
    "sd15-unet": _sd15_unet,
    "vae-decoder": lambda: _sd_vae("vae-decoder"),
    "vae-encoder": lambda: _sd_vae("vae-encoder"),
    "clip": _clip,
    "sprites": _sprites,
}


def sources_of(part: Part) -> tuple[KernelSource, ...]:
    """The distinct kernels of one program for CUDA, symbolic as ``strop.optimize`` makes them."""
    shapes = adapter_for(part.module).shapes(part.args)
    captured = capture(part.module, part.call, shapes.specs, shapes.hints)
    imported = import_graph(
        captured.gm, captured.symbols, captured.hints, captured.origins, len(captured.state_names)
    )
    signature = Signature(imported.returned, captured.guards)
    return compile_graph(imported.graph, signature, "cuda", Options()).program.sources


def collect(names: Sequence[str], console: Console) -> dict[KernelSource, list[str]]:
    """Every distinct kernel and the models that have it."""
    found: dict[KernelSource, list[str]] = {}
    for name in names:
        for suffix, part in MODELS[name]().items():
            start, model = time.perf_counter(), f"{name}/{suffix}" if suffix else name
            sources = sources_of(part)
            for source in sources:
                found.setdefault(source, []).append(model)
            seconds = time.perf_counter() - start
            console.print(
                f"{model}: {counted(len(sources), 'distinct kernel')}, captured in {seconds:.1f} s"
            )
    return found


# Measuring


def _tool(name: str, *args: str) -> str:
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    found = subprocess.run([str(path), *args], capture_output=True, text=True, check=True)
    return found.stdout + found.stderr


def measure(source: KernelSource, arch: int) -> Usage:
    """Compile in one of the worker processes and read the machine code."""
    start = time.perf_counter()
    compiled = builds.BUILDS.compile(source, arch)
    seconds = time.perf_counter() - start
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.code)
        file.flush()
        text = _tool("cuobjdump", "--dump-resource-usage", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise CodegenError(f"cuobjdump tells nothing about {source.name}: {text}")
    stack = int(found[2])
    spilled = spilled_bytes(source, arch) if stack else 0
    return Usage(compiled.shared, int(found[1]), stack, spilled, seconds)


def spilled_bytes(source: KernelSource, arch: int) -> int:
    """Bytes of spill stores and loads, as ptxas reports them for the PTX that Triton made."""
    with tempfile.TemporaryDirectory() as folder:
        # a process of its own: Triton's cache, where the PTX lies, is a setting of the process
        script = (
            "import json, sys, triton\n"
            "from strop.codegen.triton_worker import compile_request\n"
            "triton.knobs.cache.dir = sys.argv[1]\n"
            "compile_request(json.load(sys.stdin))\n"
        )
        request = json.dumps(cubin.request_of(source, GpuTarget(arch)))
        subprocess.run([sys.executable, "-c", script, folder], input=request, text=True, check=True)
        (ptx,) = Path(folder).rglob("*.ptx")
        target = re.search(r"^\.target (\w+)", ptx.read_text(), re.M)
        assert target is not None
        ptxas = "ptxas-blackwell" if arch >= 100 else "ptxas"
        text = _tool(ptxas, "-v", f"--gpu-name={target[1]}", str(ptx), "-o", f"{folder}/out.cubin")
    found = re.findall(r"(\d+) bytes spill (?:stores|loads)", text)
    if not found:
        raise CodegenError(f"ptxas tells nothing about {source.name}: {text}")
    return sum(map(int, found))


Results = dict[KernelSource, dict[int, Usage | str]]  # text: why it did not compile


def measure_all(sources: Sequence[KernelSource], archs: Sequence[int], console: Console) -> Results:
    results: Results = {source: {} for source in sources}
    columns = (TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    builds.start_workers(WORKERS)
    try:
        with ThreadPoolExecutor(WORKERS) as pool, Progress(*columns, console=console) as bar:
            task = bar.add_task("", total=len(sources) * len(archs))
            jobs = {pool.submit(measure, s, arch): (s, arch) for arch in archs for s in sources}
            for job in as_completed(jobs):
                source, arch = jobs[job]
                try:
                    results[source][arch] = job.result()
                except CodegenError as error:
                    results[source][arch] = str(error)
                bar.advance(task)
    finally:
        builds.stop_workers()
    return results


# Reporting


def key(source: KernelSource) -> str:
    """Tells kernels of one name apart."""
    return cubin.cache_key(source, GpuTarget(0))[:12]


def label(source: KernelSource) -> str:
    return f"{source.name} {key(source)}"


def breaches(results: Results) -> list[str]:
    """One line for every kernel and architecture that breaks a rule."""
    lines = []
    for source, by_arch in results.items():
        for arch, usage in by_arch.items():
            found = [usage] if isinstance(usage, str) else usage.breaches(arch)
            lines += [f"{label(source)} sm_{arch}: {text}" for text in found]
    return sorted(lines)


def frames(results: Results) -> dict[str, dict[str, Any]]:
    """Kernels with a stack frame and no spill, and why they have it."""
    found: dict[str, dict[str, Any]] = {}
    for source, by_arch in results.items():
        for arch, usage in by_arch.items():
            if isinstance(usage, Usage) and usage.stack and not usage.spilled:
                has_angles = re.search(r"\b(sin|cos)\(", source.text)
                why = SLOW_PATH if has_angles else "nothing spilled"
                entry = found.setdefault(label(source), {"why": why, "stack_bytes": {}})
                entry["stack_bytes"][str(arch)] = usage.stack
    return found


def summary(results: Results, archs: Sequence[int]) -> list[dict[str, Any]]:
    rows = []
    for arch in archs:
        usages = [u for r in results.values() if isinstance(u := r[arch], Usage)]
        rows.append(
            {
                "arch": arch,
                "kernels": len(usages),
                "max_shared": max((u.shared for u in usages), default=0),
                "max_registers": max((u.registers for u in usages), default=0),
                "with_stack": sum(u.stack > 0 for u in usages),
                "spilling": sum(u.spilled > 0 for u in usages),
                "median_seconds": round(statistics.median([u.seconds for u in usages] or [0.0]), 3),
                "total_seconds": round(sum(u.seconds for u in usages), 1),
            }
        )
    return rows


def report(
    found: Mapping[KernelSource, list[str]], results: Results, archs: Sequence[int]
) -> dict[str, Any]:
    kernels = []
    for source, by_arch in results.items():
        usage: dict[str, Any] = {}
        for arch in archs:
            u = by_arch[arch]
            usage[str(arch)] = (
                u
                if isinstance(u, str)
                else [u.shared, u.registers, u.stack, u.spilled, round(u.seconds, 3)]
            )
        kernels.append(
            {
                "name": source.name,
                "key": key(source),
                "models": found[source],
                "num_params": len(source.params),
                "num_warps": source.num_warps,
                "split": source.split is not None,
                "usage": usage,
            }
        )
    return {
        "kind": "kernel_matrix",
        "environment": environment.describe(torch.device("cpu")),
        "dtype": "float16",
        "shared_limit_kb": {str(arch): SHARED_KB[arch] for arch in archs},
        "usage_columns": COLUMNS,
        "summary": summary(results, archs),
        "broken": breaches(results),
        "frames": frames(results),
        "kernels": kernels,
    }


def write(path: Path, data: Mapping[str, Any]) -> None:
    """Atomically; one line a kernel."""
    head = {name: value for name, value in data.items() if name != "kernels"}
    lines = ",\n".join("  " + json.dumps(k, separators=(",", ":")) for k in data["kernels"])
    text = json.dumps(head, indent=1)[:-2] + ',\n "kernels": [\n' + lines + "\n ]\n}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(text)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


def show(data: Mapping[str, Any], console: Console) -> None:
    table = Table(
        "arch",
        "kernels",
        "shared",
        "regs",
        "framed",
        "spilling",
        "median s",
        "total s",
        title="largest of all kernels, and seconds to compile",
    )
    for row in data["summary"]:
        table.add_row(f"sm_{row['arch']}", *(str(v) for k, v in row.items() if k != "arch"))
    console.print(table)
    for name, entry in data["frames"].items():
        console.print(f"frame: {name}: {entry['stack_bytes']} ({entry['why']})", soft_wrap=True)
    for line in data["broken"]:
        console.print(f"broken: {line}", soft_wrap=True)
    if not data["broken"]:
        console.print("every kernel keeps the rules")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--models", default=",".join(MODELS), help="of " + ", ".join(MODELS))
    parser.add_argument("--arch", default="80,86,89,90,100", help="of " + str(list(SHARED_KB)))
    args = parser.parse_args()
    names = args.models.split(",")
    unknown = [name for name in names if name not in MODELS]
    if unknown:
        parser.error(f"unknown models {unknown}; there are {list(MODELS)}")
    wanted = args.arch.split(",")
    if not all(arch.isdecimal() and int(arch) in SHARED_KB for arch in wanted):
        parser.error(f"--arch {args.arch}: a list of {list(SHARED_KB)}")
    archs = [int(arch) for arch in wanted]
    console = Console()
    found = collect(names, console)
    results = measure_all(list(found), archs, console)
    data = report(found, results, archs)
    write(args.out, data)
    show(data, console)
    return 1 if data["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
