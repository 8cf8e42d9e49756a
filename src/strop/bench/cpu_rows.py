"""List the rows of ``strop bench cpu``: models, shapes, contenders, and what must hold."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

import strop
from strop.bench import cpu_peers, cpu_workloads, recommendation
from strop.bench.cpu_peers import NEEDS, Given, Way
from strop.bench.cpu_smoothed import smoothed
from strop.errors import OptionError
from strop.options import Options

EAGER, OURS = "eager fp32", "strop"  # OURS begins the names of Strop's contenders


@dataclass(frozen=True, slots=True)
class Contender:
    """Describe a way to call a model. ``make`` gets it in fp32, and an example of its arguments.
    ``how`` says in the results what was done to it, ``needs`` names packages."""

    name: str
    how: str
    make: Callable[[nn.Module, Given], Way]
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Must:
    """Demand of one contender to be ``least`` times as fast as another, or, without ``least``, to
    have an error that is no larger."""

    contender: str
    other: str
    least: float | None = None

    @property
    def text(self) -> str:
        if self.least is None:
            return f"{self.contender}: error at most that of {self.other}"
        return f"{self.contender}: at least {self.least:g} x {self.other}"


@dataclass(frozen=True, slots=True)
class CpuModel:
    """Describe a model: how it and its arguments are made, and by whom it is called. A model
    ``is_ragged`` if each call has other sizes."""

    name: str
    title: str
    make: Callable[[], nn.Module]
    inputs: Callable[[nn.Module, tuple[int, ...], torch.Generator], Given]
    contenders: tuple[Contender, ...]
    is_ragged: bool = False


@dataclass(frozen=True, slots=True)
class CpuRow:
    """Describe a row: a model, a shape, and what must hold."""

    model: str
    shape: tuple[int, ...]
    musts: tuple[Must, ...] = field(default=())

    @property
    def name(self) -> str:
        return f"{self.model}-{'x'.join(map(str, self.shape))}"


def _eager(model: nn.Module, example: Given) -> Way:
    return model


def _strop(model: nn.Module, example: Given) -> Way:
    optimized: Way = strop.optimize(copy.deepcopy(model))
    return optimized


def _strop_on_large_pages(model: nn.Module, example: Given) -> Way:
    optimized: Way = strop.optimize(copy.deepcopy(model), options=Options(large_pages=True))
    return optimized


def _strop_bf16(model: nn.Module, example: Given) -> Way:
    optimized: Way = strop.optimize(copy.deepcopy(model).bfloat16())
    return lambda *given: optimized(*cpu_peers.in_bf16(given))


def _eager_int8(model: nn.Module, example: Given) -> Way:
    codes: Way = cpu_workloads.in_int8(model)
    return codes


def _strop_int8(
    model: nn.Module,
    example: Given,
    off: tuple[str, ...] = (),
    *,
    has_zero_points: bool = False,
) -> Way:
    codes = cpu_workloads.in_int8(model, has_zero_points=has_zero_points)
    optimized: Way = strop.optimize(codes, options=Options(kernels_off=off))
    return optimized


def _strop_static(model: nn.Module, example: Given) -> Way:
    """Return BERT in bf16 as PT2E quantises it after SmoothQuant, exported once for all batches and
    lengths."""
    sizes = {0: Dim("batch", max=64), 1: Dim("length", max=512)}
    smooth = smoothed(model, cpu_peers.calibrating(example)).bfloat16()
    quantised = cpu_peers.by_pt2e(smooth, example, tuple(sizes for _ in example))
    for part in quantised.modules():
        part.training = False  # torch forbids eval() on exported modules
    optimized: Way = strop.optimize(quantised)
    return optimized


ZERO_POINTS, STATIC = "strop int8, zero points", "strop int8, static"
_TORCHAO = "torchao's int8 weights and dynamic rows of a bf16 model"
_OPENVINO = "OpenVINO, one thread, latency hint, a program for each shape"
_ONNX = "ONNX Runtime, one thread, exported by torch.onnx (dynamo) for each shape"
_INDUCTOR = "torch.compile(dynamic=False) with freezing, a program for each shape"

_EAGER = Contender(EAGER, "torch, weights in fp32", _eager)
_STROP = Contender("strop fp32", "strop.optimize, one graph for all shapes", _strop)
_STROP_BF16 = Contender("strop bf16", "strop.optimize of the model in bf16", _strop_bf16)
_OPENVINO_BF16 = Contender(
    "openvino bf16",
    f"{_OPENVINO}, INFERENCE_PRECISION_HINT bf16",
    cpu_peers.openvino_bf16,
    NEEDS["openvino"],
)
_INDUCTOR_BF16 = Contender(
    "inductor bf16", f"{_INDUCTOR}, weights in bf16", cpu_peers.inductor_bf16
)
_PEERS_FP32 = (
    Contender("inductor fp32", _INDUCTOR, cpu_peers.inductor_fp32),
    Contender(
        "openvino fp32",
        f"{_OPENVINO}, INFERENCE_PRECISION_HINT f32",
        cpu_peers.openvino_fp32,
        NEEDS["openvino"],
    ),
    Contender("onnxruntime fp32", _ONNX, cpu_peers.onnxruntime_fp32, NEEDS["onnxruntime"]),
)
_IN_FLOATING_POINT = (
    _EAGER,
    *_PEERS_FP32,
    _STROP,
    Contender(
        "eager bf16",
        "torch, weights in bf16",
        lambda model, example: _narrowed(copy.deepcopy(model).bfloat16()),
    ),
    _INDUCTOR_BF16,
    _OPENVINO_BF16,
    _STROP_BF16,
)
_IN_INT8 = (
    _EAGER,
    *_PEERS_FP32,
    _STROP,
    _INDUCTOR_BF16,
    _OPENVINO_BF16,
    _STROP_BF16,
    Contender("eager int8", _TORCHAO, _eager_int8, NEEDS["torchao"]),
    Contender(
        "inductor int8",
        f"PT2E of torchao, X86InductorQuantizer, static ranges, bf16 by autocast; {_INDUCTOR}",
        cpu_peers.inductor_int8,
        NEEDS["inductor int8"],
    ),
    Contender(
        "openvino int8",
        f"NNCF after training (transformer preset, {cpu_peers.CALIBRATING} calls), the rest in"
        f" bf16; {_OPENVINO}",
        cpu_peers.openvino_int8,
        NEEDS["openvino int8"],
    ),
    Contender(
        "onnxruntime int8",
        f"quantize_dynamic, signed weights by channel; {_ONNX}",
        cpu_peers.onnxruntime_int8,
        NEEDS["onnxruntime"],
    ),
    Contender(
        "strop int8, _int_mm",
        f"{_TORCHAO}, strop.optimize without its own product",
        partial(_strop_int8, off=("code_sums",)),
        NEEDS["torchao"],
    ),
    Contender("strop int8", f"{_TORCHAO}, strop.optimize", _strop_int8, NEEDS["torchao"]),
    Contender(
        ZERO_POINTS,
        f"{_TORCHAO}, rows with zero points (ASYMMETRIC), strop.optimize",
        partial(_strop_int8, has_zero_points=True),
        NEEDS["torchao"],
    ),
    Contender(
        STATIC,
        "SmoothQuant, then PT2E of torchao, X86InductorQuantizer, static ranges, of a bf16 model"
        " exported once for all shapes; strop.optimize",
        _strop_static,
        NEEDS["torchao"],
    ),
)
_RAGGED = (
    _EAGER,
    Contender(
        "inductor fp32",
        "torch.compile(dynamic=True); a bag of one id is a graph of its own, and calls beyond"
        " torch's limit of 8 graphs run in eager, as some of batch 1 do",
        cpu_peers.inductor_ragged,
    ),
    Contender(
        "openvino fp32",
        "OpenVINO, one thread, latency hint, one program of dynamic shapes",
        partial(cpu_peers.openvino_fp32, is_ragged=True),
        NEEDS["openvino"],
    ),
    Contender(
        "onnxruntime fp32",
        "ONNX Runtime, one thread, exported once with dynamic shapes",
        partial(cpu_peers.onnxruntime_fp32, is_ragged=True),
        NEEDS["onnxruntime"],
    ),
    _STROP,
    Contender(
        "strop large pages fp32",
        "strop.optimize(options=Options(large_pages=True)), one graph for all shapes",
        _strop_on_large_pages,
    ),
)


def _narrowed(model: nn.Module) -> Way:
    return lambda *given: model(*cpu_peers.in_bf16(given))


def _recommender(name: str) -> nn.Module:
    torch.manual_seed(0)
    return recommendation.MODELS[name]().eval().requires_grad_(False)


def _calls(
    model: nn.Module, shape: tuple[int, ...], generator: torch.Generator
) -> tuple[Tensor, ...]:
    return recommendation.call_of(shape[0], generator)


_TITLES = {
    "dlrm": "DLRM, ragged features",
    "wide": "wide & deep, ragged features",
    "deepfm": "DeepFM, ragged histories",
    "lookups": "what DLRM looks up, stacked",
}
MODELS: Mapping[str, CpuModel] = {
    model.name: model
    for model in (
        CpuModel(
            "unet",
            "a step of the sprites UNet, two pictures",
            cpu_workloads.sprites_step,
            cpu_workloads.sprites_inputs,
            _IN_FLOATING_POINT,
        ),
        CpuModel("bert", "BERT-mini", cpu_workloads.bert, cpu_workloads.bert_inputs, _IN_INT8),
        *(
            CpuModel(name, title, partial(_recommender, name), _calls, _RAGGED, is_ragged=True)
            for name, title in _TITLES.items()
        ),
    )
}


def _unet(shape: tuple[int, int], fp32: float, bf16: float) -> CpuRow:
    musts = (
        Must("strop fp32", EAGER, fp32),
        Must("strop bf16", EAGER, bf16),
        Must("strop fp32", "openvino fp32", 1.0),
        Must("strop bf16", "openvino bf16", 1.0),
    )
    return CpuRow("unet", shape, musts)


def _bert(shape: tuple[int, int], least: float) -> CpuRow:
    # beside peers, whose ranges are static and whose columns are smoothed, stands who has both
    peers = ("inductor int8", "openvino int8", "onnxruntime int8")
    musts = (
        Must("strop int8", EAGER, least),
        Must(ZERO_POINTS, EAGER, least),
        Must(STATIC, EAGER, least),
        Must(STATIC, "openvino int8", 1.05),
        *(Must(STATIC, peer) for peer in peers),
    )
    return CpuRow("bert", shape, musts)


def _ragged(model: str, batch: int) -> CpuRow:
    musts = [Must("strop fp32", EAGER, 1.3), Must("strop fp32", "inductor fp32", 1.15)]
    if model == "lookups":
        musts = [Must("strop fp32", EAGER, 2.4)] if batch == 256 else []
    return CpuRow(model, (batch,), tuple(musts))


ROWS = (
    _unet((16, 24), 1.6, 2.6),
    _unet((64, 64), 1.5, 2.2),
    _bert((8, 64), 3.8),
    _bert((1, 32), 4.5),
    _bert((32, 128), 4.1),
    *(_ragged(model, batch) for model in _TITLES for batch in (256, 1, 2048)),
)


def chosen_rows(names: Sequence[str]) -> tuple[CpuRow, ...]:
    """Return the rows of these names, or of models of these names; all without any. Raises
    OptionError for another name."""
    known = {*MODELS, *(row.name for row in ROWS)}
    if unknown := sorted(set(names) - known):
        rows = ", ".join(row.name for row in ROWS)
        raise OptionError(
            f"no row {', '.join(unknown)}; there are {rows}, and all of {', '.join(MODELS)}"
        )
    return tuple(row for row in ROWS if not names or {row.name, row.model} & set(names))


PEERS = ("inductor", "openvino", "onnxruntime")


def contenders_of(model: CpuModel, peers: Sequence[str]) -> tuple[Contender, ...]:
    """Return eager, Strop and these peers."""
    return tuple(
        each for each in model.contenders if not is_peer(each.name) or each.name.split()[0] in peers
    )


def is_peer(contender: str) -> bool:
    """Tell whether a contender is one of a library beside torch's eager mode and Strop."""
    return contender.split()[0] in PEERS


def text_of(contender: Mapping[str, Any]) -> str:
    """Return why there are no times, or nothing."""
    return str(contender.get("missing") or contender.get("failed") or "")
