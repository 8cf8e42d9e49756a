"""Set up OpenVINO, ONNX Runtime and Inductor on one thread of a CPU, each at its strongest.

Each function takes a model in fp32 and an example of its arguments, and returns a function of the
same arguments. OpenVINO and ONNX Runtime get a program for each shape, except for models of ragged
features, which have one for all sizes. None of them is called with more than one thread.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
import io
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Given = tuple[Tensor, ...]
Way = Callable[..., Any]
CALIBRATING = 32  # calls by which ranges of activations are found
INSTALL = "pip install 'strop[peers]'"
# what each library needs to run a model in the precisions of the rows
NEEDS = {
    "openvino": ("openvino",),
    "openvino int8": ("openvino", "nncf"),
    "onnxruntime": ("onnxruntime", "onnx", "onnxscript"),
    "inductor int8": ("torchao",),
    "torchao": ("torchao",),
}


def missing(needs: Sequence[str]) -> str:
    """Return what to do about packages that are not installed, or nothing."""
    lacking = [name for name in needs if importlib.util.find_spec(name) is None]
    return f"{', '.join(lacking)} not installed: {INSTALL}" if lacking else ""


# ---- OpenVINO ----------------------------------------------------------------------------------


class OpenVino:
    """Calls a model that OpenVINO has converted, compiled anew for each shape unless it
    ``is_ragged``."""

    def __init__(self, model: Any, precision: str, *, is_ragged: bool) -> None:
        self.model, self.precision, self.is_ragged = model, precision, is_ragged
        self._compiled: dict[Any, Any] = {}

    def __call__(self, *given: Tensor) -> Any:
        key = () if self.is_ragged else tuple(tensor.shape for tensor in given)
        request = self._compiled.get(key)
        if request is None:
            request = self._compiled[key] = self._request(key)
        return request.infer([each.numpy() for each in given], share_inputs=True)[0]

    def _request(self, shapes: Sequence[Sequence[int]]) -> Any:
        import openvino

        if shapes:
            places = zip(self.model.inputs, shapes, strict=True)
            self.model.reshape({place: list(shape) for place, shape in places})
        how = {
            "INFERENCE_PRECISION_HINT": self.precision,
            "INFERENCE_NUM_THREADS": 1,
            "NUM_STREAMS": 1,
            "PERFORMANCE_HINT": "LATENCY",
        }
        return openvino.Core().compile_model(self.model, "CPU", how).create_infer_request()


def openvino_fp32(model: nn.Module, example: Given, *, is_ragged: bool = False) -> Way:
    return OpenVino(_converted(model, example), "f32", is_ragged=is_ragged)


def openvino_bf16(model: nn.Module, example: Given) -> Way:
    return OpenVino(_converted(model, example), "bf16", is_ragged=False)


def openvino_int8(model: nn.Module, example: Given) -> Way:
    """Quantise by NNCF after training, with its preset for transformers, and compute what stays in
    floating point in bf16."""
    import nncf

    drawn = [[tensor.numpy() for tensor in call] for call in calibrating(example)]
    quantised = nncf.quantize(
        _converted(model, example),
        nncf.Dataset(drawn),
        model_type=nncf.ModelType.TRANSFORMER,
        subset_size=CALIBRATING,
    )
    return OpenVino(quantised, "bf16", is_ragged=False)


def _converted(model: nn.Module, example: Given) -> Any:
    import openvino

    return openvino.convert_model(model, example_input=example)


def calibrating(given: Given) -> Iterator[Given]:
    """Yield calls like the given one, by which ranges are found."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(CALIBRATING):
        yield tuple(_like(tensor, generator) for tensor in given)


def _like(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Return another draw of the same kind: numbers of tokens; a mask stays."""
    if tensor.dtype.is_floating_point:
        return torch.randn(tensor.shape, generator=generator)
    most = int(tensor.max())
    return tensor if most <= 1 else torch.randint(0, most, tensor.shape, generator=generator)


# ---- ONNX Runtime ------------------------------------------------------------------------------


class OnnxRuntime:
    """Calls a model that is exported for each shape, or once if it ``is_ragged``. With
    ``quantises`` its linears are in int8, by ranges that each call finds."""

    def __init__(self, model: nn.Module, *, is_ragged: bool, quantises: bool) -> None:
        self.model, self.is_ragged, self.quantises = model, is_ragged, quantises
        self._sessions: dict[Any, Any] = {}

    def __call__(self, *given: Tensor) -> Any:
        key = () if self.is_ragged else tuple(tensor.shape for tensor in given)
        if key not in self._sessions:
            self._sessions[key] = self._session(given)
        session, names = self._sessions[key]
        arrays = (each.numpy() for each in given)
        return session.run(None, dict(zip(names, arrays, strict=False)))[0]

    def _session(self, given: Given) -> tuple[Any, list[str]]:
        import onnxruntime

        with tempfile.TemporaryDirectory() as folder:
            path = self._exported(given, Path(folder))
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = options.inter_op_num_threads = 1
            session = onnxruntime.InferenceSession(
                str(path), options, providers=["CPUExecutionProvider"]
            )
        return session, [place.name for place in session.get_inputs()]

    def _exported(self, given: Given, folder: Path) -> Path:
        plain, quantised = folder / "plain.onnx", folder / "int8.onnx"
        shapes = {"dynamic_shapes": self._any_sizes(given)} if self.is_ragged else {}
        torch.onnx.export(self.model, given, plain, dynamo=True, verbose=False, **shapes)  # type: ignore[arg-type]
        if not self.quantises:
            return plain
        from onnxruntime.quantization import QuantType, quantize_dynamic

        quantize_dynamic(plain, quantised, weight_type=QuantType.QInt8, per_channel=True)
        return quantised

    def _any_sizes(self, given: Given) -> tuple[Any, ...]:
        """Return sizes that the exporter is to find, in the structure of ``forward``'s arguments,
        of which the last may be a list."""
        sizes = tuple(dict.fromkeys(range(each.dim()), torch.export.Dim.AUTO) for each in given)
        kinds = [each.kind for each in inspect.signature(self.model.forward).parameters.values()]
        named = len([kind for kind in kinds if kind is not inspect.Parameter.VAR_POSITIONAL])
        return sizes if named == len(kinds) else (*sizes[:named], sizes[named:])


def onnxruntime_fp32(model: nn.Module, example: Given, *, is_ragged: bool = False) -> Way:
    return OnnxRuntime(model, is_ragged=is_ragged, quantises=False)


def onnxruntime_int8(model: nn.Module, example: Given) -> Way:
    return OnnxRuntime(model, is_ragged=False, quantises=True)


# ---- Inductor ----------------------------------------------------------------------------------


def inductor_fp32(model: nn.Module, example: Given) -> Way:
    return _frozen(copy.deepcopy(model))


def inductor_bf16(model: nn.Module, example: Given) -> Way:
    way = _frozen(copy.deepcopy(model).bfloat16())
    return lambda *given: way(*in_bf16(given))


def inductor_ragged(model: nn.Module, example: Given) -> Way:
    compiled: Way = torch.compile(copy.deepcopy(model), dynamic=True)
    return compiled


def inductor_int8(model: nn.Module, example: Given) -> Way:
    """Quantise by PT2E of torchao with Inductor's quantizer for x86, static ranges, for each
    shape; what stays in floating point is in bf16, by autocast."""
    found: dict[Any, Way] = {}

    def call(*given: Tensor) -> Any:
        key = tuple(tensor.shape for tensor in given)
        if key not in found:
            found[key] = _frozen(by_pt2e(model, given))
        with torch.autocast("cpu", torch.bfloat16):
            return found[key](*given)

    return call


def by_pt2e(model: nn.Module, given: Given, sizes: Any = None) -> nn.Module:
    """Return a copy that PT2E has quantised with static ranges, which calls like the given one
    have; ``sizes`` names those that may change, in the form of ``torch.export``."""
    import torchao.quantization.pt2e.quantizer.x86_inductor_quantizer as x86
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    traced = torch.export.export(copy.deepcopy(model), given, dynamic_shapes=sizes).module()
    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config())
    watched = prepare_pt2e(traced, quantizer)
    for call in calibrating(given):
        watched(*call)
    quantised: nn.Module = convert_pt2e(watched)
    return quantised


def _frozen(model: nn.Module) -> Way:
    """Compile for each shape, with weights packed while it compiles."""
    compiled: Way = torch.compile(model, dynamic=False)
    seen: set[Any] = set()

    def call(*given: Tensor) -> Any:
        key = tuple(tensor.shape for tensor in given)
        if key in seen:
            return compiled(*given)
        seen.add(key)
        with torch._inductor.config.patch(freezing=True):
            return compiled(*given)

    return call


# ---- what all of them share --------------------------------------------------------------------


def in_bf16(given: Given) -> Given:
    return tuple(x.bfloat16() if x.dtype.is_floating_point else x for x in given)


@contextmanager
def quiet() -> Iterator[None]:
    """Hide what libraries say about models that they can convert all the same, and their bars."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
