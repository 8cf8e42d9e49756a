"""Every row of the operator tables with a derivative, and every row of a backward operator, has a
case in the tables of these tests, or a reason why it has none.

What a case meets is read from its trace: the overloads of the joint graph, and the nodes that the
importer makes of them. What has a derivative says torch's own table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torchgen
import yaml
from torch import nn

from strop.frontend import importer
from strop.frontend.step import capture_step
from strop.frontend.whole import IN_TORCH
from strop.ir.ops import OPS, Kind, Types
from strop.ir.tensor_spec import TensorSpec
from tests.train import test_backward_arithmetic, test_backward_places
from tests.train.test_compiled_operators import CASES, Case, Pointwise, Sum

pytestmark = pytest.mark.usefixtures("fresh")

FAMILIES: dict[str, Mapping[str, Case]] = {
    "structured": CASES,
    "batch norms": test_backward_arithmetic.NORMS,
    **test_backward_arithmetic.FAMILIES,
    **test_backward_places.FAMILIES,
}
HINTS = {"b": 3, "h": 6}
CPU = torch.device("cpu")

_ATTENTION = [f"_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn")]
_RESIZING = [
    *(
        f"{name}{rank}d"
        for name in ("upsample_nearest", "_upsample_nearest_exact")
        for rank in (1, 2, 3)
    ),
    "upsample_linear1d",
    "upsample_bilinear2d",
    "upsample_trilinear3d",
    "upsample_bicubic2d",
]
WITHOUT: dict[str, Sequence[str]] = {
    "torch takes it apart before our tables see it": (
        *(f"library {name}" for name in _RESIZING),
        *(f"aten.{name}.default" for name in _RESIZING),
        *(f"library {name}_backward" for name in _RESIZING),
        "library _unsafe_index",
        "library _unsafe_index_put",
        "aten._unsafe_index.Tensor",
        "aten._unsafe_index_put.default",
        "softshrink",
        "hardshrink",
        "softshrink_backward",
        "hardshrink_backward",
        "aten.native_batch_norm.default",
        "aten.linear.default",
    ),
    "frontend.joint takes it apart": (
        "aten.native_group_norm.default",
        "aten.native_layer_norm.default",
        "aten.native_dropout.default",
        "aten.native_dropout_backward.default",
        "library native_dropout",
        "aten.constant_pad_nd.default",
    ),
    "another overload stands for it in traces": ("aten.alias.default", "aten.squeeze.default"),
    "of GPUs, whose tests are test_gradients_on_a_gpu and test_attention_layout": (
        *(f"library {name}" for name in _ATTENTION),
        *(f"library {name}_backward" for name in _ATTENTION),
        "aten.cudnn_batch_norm.default",
        "aten._fused_rms_norm.default",
        "aten._fused_rms_norm_backward.default",
    ),
    "draws, and torch says that nothing flows back": ("library bernoulli", "library normal"),
    "its derivative, digamma, has no row, so strict mode refuses it": ("lgamma",),
}


def _spec(text: str) -> TensorSpec:
    dims, _, below = text.partition("<")
    return TensorSpec(tuple(dims.split()), torch.int64 if below else torch.float32, CPU)


def _met(module: nn.Module, specs: Sequence[TensorSpec]) -> set[str]:
    """Names of overloads, and of rows that the importer has made nodes of."""
    wants = [spec.dtype.is_floating_point for spec in specs]
    step = capture_step(module, module.forward, specs, HINTS, wants)
    graph = importer.import_graph(
        step.graph, step.sizes.symbols, step.sizes.hints, step.origins
    ).graph
    called = (IN_TORCH.get(node.target, node.target) for node in step.graph.graph.nodes)
    return {*map(str, called), *(node.op for node in graph.nodes)}


def _all_met() -> set[str]:
    found = set[str]()
    for cases in FAMILIES.values():
        texts = [text for _, shapes in cases.values() for text in shapes]
        found |= _met(Sum(cases), [_spec(text) for text in ("", *texts)])
    pointwise = Pointwise()
    rows = (str(len(pointwise.names)), "b", "9")
    return found | _met(pointwise, [TensorSpec(rows, torch.float32, CPU)] * 3)


def _derivatives() -> set[str]:
    """Overloads through which something flows back."""
    path = Path(torchgen.__file__).parent / "packaged/autograd/derivatives.yaml"
    found = set()
    for entry in yaml.safe_load(path.read_text()):
        name = entry.pop("name").partition("(")[0]
        outputs = entry.pop("output_differentiability", [True])
        texts = [
            text
            for formula in (entry, *entry.pop("dispatch", {}).values())
            for key, text in formula.items()
            if key != "result"
        ]
        flows = (t != "non_differentiable" and "not_implemented" not in t for t in map(str, texts))
        if any(outputs) and any(flows):
            found.add(f"aten.{name}" if "." in name else f"aten.{name}.default")
    return found


def _rows() -> Iterator[tuple[str, set[str]]]:
    """Names of rows, and of the overloads that stand for each in a training graph."""
    known = _derivatives()

    def chosen(overloads: Sequence[Any]) -> set[str]:
        return {name for name in map(str, overloads) if name in known or "backward" in name}

    for row in OPS.values():
        if Types.FLOAT in row.types and (names := chosen(row.overloads)):
            yield row.name, names
    for table in importer._TABLES:
        yield from ((name, {name}) for name in sorted(chosen(tuple(table))))


def test_every_row_has_a_case() -> None:
    met, rows = _all_met(), list(_rows())
    assert len(rows) > 250, "torch's table of derivatives has been read"
    missing = set()
    for name, overloads in rows:
        row = OPS.get(name)
        needs_node = row is not None and row.kind is not Kind.OPAQUE
        if not overloads & met or (needs_node and name not in met):
            missing.add(name)
    reasons = {name for names in WITHOUT.values() for name in names}
    assert missing <= reasons, f"no case and no reason: {sorted(missing - reasons)}"
    assert reasons <= {name for name, _ in rows}, "a reason for no row"
