"""Write the README's tables of results from the JSON files: python benchmarks/readme_table.py"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from strop.bench import cpu_report, infer_report, train_report

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
Found = Mapping[str, Any]
HEADER = (
    "",
    "Strop",
    "eager",
    "eager, CUDA graph",
    "`torch.compile`",
    "`torch.compile`, CUDA graph",
)
PEERS = ("eager", "eager-graph", "inductor", "inductor-graph")
# What the README calls a row of ``strop bench infer``, and how it writes a contender's number.
INFER = {
    "P1": "Stable Diffusion 1.5, one UNet step, 512x512, batch 2",
    "P3": "SDXL, one UNet step, 1024x1024, batch 2",
    "P5-512": "Stable Diffusion 1.5, prompt to picture, 512x512, 50 steps",
    "P5x": "SDXL, prompt to picture, 1024x1024, 30 steps",
    "P7": "peak memory, Stable Diffusion 1.5, 1024x1024",
}
# The same of transformers, measured on one H200.
TRANSFORMERS = {
    "D1": "Flux.1, one step, 1024x1024",
    "D1q": "Qwen-Image, one step, 1024x1024",
    "D1w": "Wan 2.1 1.3B, one step, 480p, 33 frames",
    "D2": "Flux.1, prompt to picture, 1024x1024, 28 steps",
    "D3": "Qwen-Image, prompt to picture, 1024x1024, 50 steps with guidance",
    "D4-z-image": "Z-Image-Turbo, prompt to picture, 1024x1024, 9 steps",
    "D4-klein": "FLUX.2 Klein 4B, prompt to picture, 1024x1024, 4 steps",
    "F7": 'SDXL, prompt to picture, 30 steps, less exact by `numerics=("fp8", "step_cache")`',
}
COLD = "Stable Diffusion 1.5 UNet, first call, nothing cached"
# Rows of ``strop bench train``; "eager" is diffusers' script there.
TRAIN = {
    "P8": "fine-tune Stable Diffusion 1.5, 512x512, batch 8",
    "P11-lora": "LoRA, Stable Diffusion 1.5, batch 1, cached latents",
    "P11x": "fine-tune SDXL, 1024x1024, batch 4, cached latents",
}

# Rows of ``strop bench cpu``: what the README calls them, the type, and our fastest by default.
CPU = {
    "unet-16x24": ("a step of the built-in UNet, 16x24 latents, bf16", "bf16", "strop bf16"),
    "bert-8x64": ("BERT-mini, 8 texts of 64 tokens, int8", "int8", "strop int8, static"),
    "bert-1x32": ("the same, 1 text of 32 tokens, int8", "int8", "strop int8, static"),
    "dlrm-256": ("DLRM with bags of ids, batch 256, fp32", "fp32", "strop fp32"),
}
CPU_PEERS = {"inductor": "`torch.compile`", "openvino": "OpenVINO", "onnxruntime": "ONNX Runtime"}


def table(results: Path = RESULTS) -> str:
    """Return the table in Markdown: a line for each row, with the newest results of ``results``."""
    files = sorted(results.glob("P*_h100_*.json"))  # one device, which the first line names
    infer = {result["row"]: result for result in infer_report.load(files)}
    train = {result["row"]: result for result in train_report.load(files)}
    lines = _of_rows(INFER, infer, HEADER, PEERS)
    cold = infer["P6"]["contenders"]
    first = [f"{cold[name]['first_s']:.1f} s" for name in ("strop", "inductor")]
    lines.append(_line([COLD, f"**{first[0]}**", "-", "-", first[1], "-"]))
    for row, title in TRAIN.items():
        contenders = train[row]["contenders"]
        best = train_report.best_of_ours(train[row])
        script, compiled = (_rate(contenders.get(name, {})) for name in ("diffusers", "torch"))
        ours = f"**{_rate(best[1] if best else {})}**"
        lines.append(_line([title, ours, script, "-", compiled, "-"]))
    return "\n".join(lines)


def transformers_table(results: Path = RESULTS) -> str:
    """Return the table of models of today, beside eager and Inductor's blocks in a CUDA graph."""
    files = [file for row in TRANSFORMERS for file in results.glob(f"{row}_h200_*.json")]
    found = {result["row"]: result for result in map(json.loads, map(Path.read_text, files))}
    header = (*HEADER[:3], HEADER[-1])
    return "\n".join(_of_rows(TRANSFORMERS, found, header, ("eager", "inductor-blocks-graph")))


def _of_rows(
    titles: Mapping[str, str],
    found: Mapping[str, Found],
    header: Sequence[str],
    peers: Sequence[str],
) -> list[str]:
    """Return the lines of a table of rows of ``strop bench infer``, below what they ran on."""
    machine = found[next(iter(titles))]["environment"]
    lines = [f"One {machine['gpu']}, PyTorch {machine['torch']}, random weights; medians:", ""]
    lines += [_line(header), _line(["---"] * len(header))]
    for row, title in titles.items():
        contenders = found[row]["contenders"]
        texts = [_number(found[row], contenders.get(name, {})) for name in ("strop", *peers)]
        lines.append(_line([title, f"**{texts[0]}**", *texts[1:]]))
    return lines


def cpu_table(results: Path = RESULTS) -> str:
    """Return how many times as fast as eager in fp32 each is, on one core of a CPU."""
    found = {result["row"]: result for result in cpu_report.load(results)}
    machine = found["unet-16x24"]["environment"]
    told = f"One core of {machine['cpu']}, PyTorch {machine['torch']}; times eager's speed in fp32:"
    lines = [told, "", _line(["", "Strop", *CPU_PEERS.values()]), _line(["---"] * 5)]
    for row, (title, dtype, ours) in CPU.items():
        names = (ours, *(f"{peer} {dtype}" for peer in CPU_PEERS))
        texts = [_times(found[row]["contenders"].get(name, {})) for name in names]
        lines.append(_line([title, f"**{texts[0]}**", *texts[1:]]))
    return "\n".join(lines)


def _times(contender: Found) -> str:
    return f"{contender['over_eager']:.2f}" if contender.get("over_eager") else "-"


def _number(result: Found, found: Found) -> str:
    if result["measures"] == "memory":
        return f"{found['peak_bytes'] / 2**30:.2f} GiB" if found.get("peak_bytes") else "-"
    if "p50_ms" not in found:
        return "-"
    if result["unit"] == "ms":
        return f"{found['p50_ms']:.1f} ms"
    return f"{found['p50_ms'] / 1e3:.2f} s"


def _rate(found: Found) -> str:
    return f"{found['img_s']:.1f} pictures/s" if found.get("img_s") else "-"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


TABLES = {"results": table, "transformers": transformers_table, "cpu": cpu_table}


def main(arguments: Sequence[str]) -> int:
    """Write the tables into the README; ``--check`` only tells whether they are there."""
    page = ROOT / "README.md"
    if "--check" in arguments:
        text = page.read_text(encoding="utf-8")
        if all(made() in text for made in TABLES.values()):
            return 0
        print("README.md has other tables: run python benchmarks/readme_table.py")
        return 1
    for mark, made in TABLES.items():
        infer_report.write_into(page, made(), mark)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
