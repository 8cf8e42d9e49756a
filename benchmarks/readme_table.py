"""Writes the README's table of results from the JSON files: python benchmarks/readme_table.py"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- results -->", "<!-- /results -->"


def read(name: str) -> dict[str, Any]:
    """The newest result file of this name, which may hold another date."""
    files = sorted(RESULTS.glob(f"{name}_2*.json"))
    if not files:
        raise FileNotFoundError(f"no {name}_*.json in {RESULTS}; run strop bench first")
    found: dict[str, Any] = json.loads(files[-1].read_text())
    return found


def median(result: dict[str, Any], name: str) -> str:
    """Ours and the peers of the same process, or one that ran in a process of its own."""
    times = dict(result["rows"][0]["times"])
    times |= {peer: run["rows"][0] for peer, run in result["peers_apart"].items() if "rows" in run}
    return f"{times[name]['p50_ms']:.1f} ms" if name in times else "-"


def speed_row(title: str, result: dict[str, Any]) -> str:
    names = ("strop", "eager", "eager-graph", "inductor")
    return f"| {title} | " + " | ".join(median(result, name) for name in names) + " |"


def table() -> str:
    unet, vae = read("sd15-unet-512_h100"), read("vae-512_h100")
    start, pipe = read("sd15-unet-512-compile_h100"), read("sd15-pipe_h100")["counts"]
    half, cpu = read("sprites_h100"), read("sprites_cpu")
    launches = read("sd15-kernels_h100")["strop"]
    lines = [
        f"One {unet['environment']['gpu']}, torch {unet['environment']['torch']}, fp16, random"
        " weights, medians:",
        "",
        "| | Strop | eager | eager + CUDA graph | Inductor |",
        "|---|---|---|---|---|",
        speed_row("SD1.5 UNet step, 512x512, batch 2", unet),
        speed_row("SD VAE decoder, 512x512", vae),
        "",
        f"- First call of the SD1.5 UNet: {start['cold']['first_s']:.1f} s with an empty cache,"
        f" {start['cached']['first_s']:.1f} s from the stored plan.",
        f"- `pipe(...)` at 6 sizes x 2 batches: {pipe['num_graphs']} graphs (text encoder, UNet,"
        f" VAE), {pipe['num_recompiles']} recompiles, {len(pipe['fallbacks'])} fallbacks.",
        f"- GPU kernels of a UNet call: {launches['launches']:.0f}, of them"
        f" {launches['generated']:.0f} generated.",
        f"- Sprites in fp16, {half['num_pictures']} pictures: PSNR to eager fp32"
        f" {half['psnr_median_db']:.2f} dB; eager fp16 has {half['control_median_db']:.2f} dB.",
        f"- Sprites in fp32 on two CPU cores, {cpu['num_pictures']} pictures: worst PSNR to eager"
        f" {cpu['psnr_worst_db']:.0f} dB; {cpu['seconds']['strop']:.0f} s against"
        f" {cpu['seconds']['eager']:.0f} s in eager (a shared machine: read it as a ratio).",
    ]
    return "\n".join(lines)


def main() -> None:
    readme = ROOT / "README.md"
    text = readme.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    readme.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}")


if __name__ == "__main__":
    main()
