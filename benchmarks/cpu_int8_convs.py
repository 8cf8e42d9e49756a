"""Measure a step of the sprites UNet on a CPU, quantised by PT2E with its convolutions.

    python benchmarks/cpu_int8_convs.py --out FILE [--samples N]

torchao's X86InductorQuantizer quantises all linears and convolutions, with static ranges of eight
random calls at each size. On one thread, in CPU time of this process, in turns: quote the ratios,
medians of those of each turn. "strop int8, dequantised" is Strop without products of codes.
"error" is that of the noise, relative to fp64 by the norm.
"""

from __future__ import annotations

import argparse
import copy
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import strop
from strop.bench import environment
from strop.bench.cpu_turns import in_turns, ratio
from strop.bench.cpu_workloads import sprites_inputs, sprites_step
from strop.bench.report import write_json
from strop.bench.timer import timing_of
from strop.options import Options

SHAPES = ((16, 24), (64, 64))  # height and width of latents; two pictures
CALLS = 8  # of which the ranges are taken


def in_pt2e(model: nn.Module, given: tuple[Tensor, ...]) -> Any:
    """Return the model as PT2E quantises it, for inputs of these sizes."""
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config())
    watched = prepare_pt2e(torch.export.export(model, given).module(), quantizer)
    latents, _, text = given
    for number in range(CALLS):
        watched(torch.randn_like(latents), torch.tensor(1000 * number // CALLS), text)
    found = convert_pt2e(watched)
    for part in found.modules():
        part.training = False
    return found


def rows(samples: int) -> Iterator[dict[str, Any]]:
    model, generator = sprites_step(), torch.Generator().manual_seed(0)
    exact = copy.deepcopy(model).double()
    for shape in SHAPES:
        given = sprites_inputs(model, shape, generator)
        codes = in_pt2e(model, given)
        without = Options(disable=("dequantised_linear",))
        half = strop.optimize(copy.deepcopy(model).bfloat16())
        found: dict[str, Any] = {
            "eager fp32": model,
            "eager int8": codes,
            "strop fp32": strop.optimize(copy.deepcopy(model)),
            "strop bf16": lambda x, time, text, half=half: half(
                x.bfloat16(), time, text.bfloat16()
            ),
            "strop int8, dequantised": strop.optimize(copy.deepcopy(codes), options=without),
            "strop int8": strop.optimize(copy.deepcopy(codes)),
        }
        latents, time, text = given
        wanted = exact(latents.double(), time, text.double())
        errors = {name: _error(way(*given), wanted) for name, way in found.items()}
        calls = {name: partial(way, *given) for name, way in found.items()}
        times = in_turns(calls, samples, warm_ups=2)
        base = times["eager fp32"]
        yield {
            "shape": list(shape),
            **{name: timing_of(each).to_dict() for name, each in times.items()},
            "speed over eager fp32": {name: ratio(base, each) for name, each in times.items()},
            "error": errors,
        }


def _error(found: Tensor, wanted: Tensor) -> float:
    return float(((found.double() - wanted).norm() / wanted.norm()).item())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=15)
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # torch.export's and torchao's own
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    done, here = [], environment.describe(torch.device("cpu"))
    for row in rows(args.samples):
        done.append(row)
        print({k: v for k, v in row.items() if not isinstance(v, dict) or "p50_ms" not in v})
        write_json({"kind": "cpu_int8_convs", "environment": here, "rows": done}, args.out)


if __name__ == "__main__":
    main()
