"""Build an artefact on a machine that need not have the devices that it is for
(``strop build``)."""

from __future__ import annotations

import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from strop.cli.arguments import parse_size
from strop.cli.mistakes import errors, plain, reported, require_diffusion
from strop.drawing.request import PictureSize
from strop.options import Options

EXAMPLES = """[bold]Examples[/]
$ strop build --model sdxl --target sm_80,sm_90 -o sdxl.strop
$ strop build --model ./my-model --target sm_90 --sign maker.key -o my-model.strop
$ strop build --model ./my-model --target sm_80,sm_89,cpu-v3 -o my-model.strop
$ CXX=aarch64-linux-gnu-g++ strop build --model ./my-model --target aarch64-v8.6 -o my-model.strop
$ strop build --model ./my-model --target cpu --size 768x512 --dtype fp32 -o my-model.strop

[bold]Then[/], where it runs, in Python:
$ strop.load(pipe, "my-model.strop", trust="sha256:...")   # the fingerprint that build prints
$ strop.load(pipe, "my-model.strop", trust="maker.pub")    # the public key, if it is signed
"""


class WeightType(StrEnum):
    """Name the type of the weights that an artefact is for."""

    auto = "auto"
    fp32 = "fp32"
    fp16 = "fp16"
    bf16 = "bf16"


def _targets(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (part.strip() for part in text.split(","))))


Model = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Build for this pipeline: sd15, sdxl or flux, or a folder as pipe.save_pretrained"
        " writes it. Its configuration is read, and the tokenizer; weights need not be there.",
    ),
]
Targets = Annotated[
    str,
    typer.Option(
        metavar="NAMES",
        help="Compile for these devices, with commas between them: sm_80, sm_86, sm_89 and"
        " sm_90 are NVIDIA GPUs, cpu-v3 processors with AVX2, cpu-v4 those with AVX-512,"
        " aarch64-v8, aarch64-v8.2, aarch64-v8.6 and aarch64-sve those of Arm, and cpu is this"
        " one.",
    ),
]
Output = Annotated[Path, typer.Option("-o", "--output", help="Write the artefact to this file.")]
Weights = Annotated[
    WeightType,
    typer.Option(
        help="Build for weights of this type; auto takes fp16 for a UNet and bf16 for a transformer"
        " on GPUs, and fp32 for processors alone."
    ),
]
Sizes = Annotated[
    list[PictureSize] | None,
    typer.Option(
        parser=parse_size,
        metavar="WxH",
        help="Trace pictures of this width and height; give it several times for several. One"
        " graph serves all sizes as a rule, so that the model's own will do.",
    ),
]
Compiler = Annotated[
    str,
    typer.Option(
        "--cxx",
        envvar="CXX",
        metavar="COMMAND",
        help="Compile with this for processors of another kind than this one's, such as"
        " aarch64-linux-gnu-g++, which is the default for those of Arm.",
    ),
]
Sign = Annotated[
    Path | None,
    typer.Option(
        metavar="KEY",
        help="Sign the artefact with this secret key, which `minisign -G -W` makes. The signature"
        " is written beside it.",
    ),
]


@reported
def command(
    model: Model,
    target: Targets,
    output: Output,
    dtype: Weights = WeightType.auto,
    size: Sizes = None,
    sign: Sign = None,
    cxx: Compiler = "",
) -> None:
    """Compile a pipeline ahead, for all sizes, into one file without weights: an artefact.

    It needs no GPU, only Triton for GPUs and g++ for processors, a cross compiler for those of
    another kind than this machine's. Where strop.load reads the file,
    the first picture traces and compiles nothing, and neither Triton nor g++ need be there. The
    versions of Strop, PyTorch, diffusers, transformers and peft must be the same in both places.
    """
    require_diffusion()
    import torch

    from strop.artefacts.building import CARDS, build_artefact, check_targets
    from strop.artefacts.saving import signing_key
    from strop.artefacts.skeletons import model_folder, usual_dtype

    names, key = check_targets(_targets(target)), signing_key(sign)
    folder, on_gpu = model_folder(model), any(name in CARDS for name in names)
    types = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    types["auto"] = usual_dtype(folder) if on_gpu else torch.float32
    screen, began = errors(), time.perf_counter()

    def say(text: str) -> None:
        screen.print(f"[dim]{time.perf_counter() - began:6.1f} s[/]  {plain(text)}")

    saved = build_artefact(
        folder,
        names,
        output,
        dtype=types[dtype.value],
        sizes=[(one.height, one.width) for one in size or ()],
        options=Options.from_environment(),
        say=say,
        key=key,
        compiler=cxx,
    )
    typer.echo(str(saved))
