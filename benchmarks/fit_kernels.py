"""Measures hand-written kernels at the shapes and tiles that their rules are fitted to.

    python benchmarks/fit_kernels.py KERNEL --out FOLDER [--seconds 120] [options of the kernel]

Each kernel runs in fp16, or as its sweep says, on one H100, beside the library's, in turns, from
CUDA graphs of many calls whose operands change from call to call. FOLDER gets
``KERNEL_h100_DATE.json``: at each shape the microseconds of the library and of every tile, their
spread, and the error of each. ``strop bench select`` judges the rules of ``strop/kernels`` by these
files.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.fitting import (
    attn_codes,
    attn_libraries,
    attn_tma,
    attn_wgmma,
    code_conv,
    codes_gated,
    codes_wgmma,
    conv_narrow,
    conv_upsampled,
    conv_wgmma,
    linear_any_width,
    linear_libraries,
    linear_normed,
    linear_paired,
    linear_wgmma,
)

SWEEPS: Mapping[str, ModuleType] = {
    module.__name__.rpartition(".")[2]: module
    for module in (
        attn_codes,
        attn_libraries,
        attn_tma,
        attn_wgmma,
        code_conv,
        codes_gated,
        codes_wgmma,
        conv_narrow,
        conv_upsampled,
        conv_wgmma,
        linear_any_width,
        linear_libraries,
        linear_normed,
        linear_paired,
        linear_wgmma,
    )
}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    kernels = made.add_subparsers(dest="kernel", metavar="KERNEL", required=True)
    for name, module in SWEEPS.items():
        title = (module.__doc__ or "").partition("\n")[0]
        kernel = kernels.add_parser(name, help=title, description=module.__doc__)
        kernel.add_argument("--out", type=Path, required=True, help="the folder of the result")
        kernel.add_argument("--seconds", type=float, default=module.SECONDS)
        if hasattr(module, "add_options"):
            module.add_options(kernel)
    return made


def main(arguments: Sequence[str]) -> int:
    args = parser().parse_args(arguments)
    SWEEPS[args.kernel].run(args)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
