"""The kernels of training steps for NVIDIA GPUs, without one: values in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

import strop
from strop.backend import compile_graph
from strop.codegen.assemble import Signature
from strop.ir.graph import Ref
from strop.ir.loops import Schedule
from strop.options import Options
from tests.codegen.test_model_kernels import check, model_of
from tests.train.compiled import MODELS, Mlp, gradients, mlp_args, options

CASES = {**MODELS, "dropout": (lambda: Mlp(dropout=0.3), mlp_args)}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("dropout", torch.float32), ("block", torch.float16), ("resnet", torch.float16)],
    ids=str,
)
def test_values(name: str, dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    torch._dynamo.reset()
    make, args = CASES[name]
    module = strop.optimize(make().train().to(dtype), train=True, options=options(record=True))
    gradients(module, tuple(a.to(dtype) for a in args(1)))
    seen = set()
    for record in module.forward.log.records:
        graph = record.compiled.imported
        assert graph is not None
        signature = Signature([Ref(n) for n in range(len(graph.outputs))], ())
        model = model_of(compile_graph(graph, signature, "cuda", Options()))
        for sample, form in model.samples.values():
            seen.add(sample.kernel.schedule)
            for splits in (1, 2) if sample.kernel.schedule is Schedule.COLUMN else (1,):
                check(sample, model.env, splits, form)
    assert Schedule.COLUMN in seen, "gradients of norm weights and biases"
