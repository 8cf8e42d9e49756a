"""Programs as JSON: nothing is lost, and damaged text is refused, never evaluated."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from strop.errors import CacheError
from strop.ir.dims import const, symbol
from strop.ir.graph import Builder, Graph, Ref, finish
from strop.ir.program import (
    Buffer,
    CallStep,
    Guard,
    InputSpec,
    KernelStep,
    Program,
    Returned,
    TensorRef,
)
from strop.ir.serialize import from_json, graph_from_json, graph_to_json, to_json
from strop.ir.source import KernelSource, Scratch, Split

B = symbol("b")
ONE = const(1)


def program() -> Program:
    source = KernelSource(
        "k",
        "triton",
        "text \u00e9\n",
        (torch.float16, torch.bool),
        (16, 1),
        (B // 2, ONE),
        (Scratch(torch.int32, B * 4, True),),
        Split(B, ONE, 32),
        (("BLOCK", 128),),
        8,
    )
    ref = TensorRef(0, B * 3, (B, ONE), (ONE, const(0)))
    attrs = (
        ("args", (Ref(0), None, 1.5, float("inf"), float("nan"), -0.0, True, "x", B)),
        ("scalars", (1j, complex(-0.0, -0.0), complex("nan-infj"))),
        ("device", torch.device("cpu")),
        ("layout", torch.strided),
        ("memory", torch.channels_last),
    )
    return Program(
        "cuda",
        (InputSpec((B, ONE), (ONE, ONE), torch.bfloat16, True, (1, 2)),),
        (Buffer("call", (B,), (ONE,), torch.float32, 3),),
        (source,),
        (
            KernelStep(
                kernel=0,
                buffers=(0,),
                offsets=(B,),
                writes=(0,),
                scalars=(B,),
                origin="unet.x",
                ops=("silu",),
            ),
            CallStep("aten", (ref,), attrs, (0, -1), "y"),
        ),
        (Returned(ref), Returned(size=B + 1), Returned(value=2.5), Returned()),
        (Guard(B, "<", const(64)),),
        (("b", 2),),
    )


def test_round_trip():
    before = program()
    after = from_json(to_json(before))
    assert repr(after) == repr(before)  # nan is not equal to itself
    assert to_json(after) == to_json(before)
    assert after.sources[0] == before.sources[0]
    assert hash(after.sources[0]) == hash(before.sources[0])


def damaged(**changes: Any) -> str:
    value = json.loads(to_json(program()))
    value.update(changes)
    return json.dumps(value)


def marked(kind: str, text: str) -> dict[str, str]:
    return {"$": kind, "text": text}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "null",
        "[]",
        "3",
        '"x"',
        '{"$":"Program"}',
        '{"a":1}',
        "[" * 100_000,
        damaged(extra=1),
        damaged(device=marked("dtype", "torch.load")),
        damaged(device=marked("layout", "torch.load")),
        damaged(device=marked("layout", "torch.nothing")),
        damaged(device=marked("device", "toaster")),
        damaged(device=marked("float", "1.0")),
        damaged(device=marked("complex", "j()")),
        damaged(device=marked("Expr", "__import__('os')")),
        damaged(device=marked("Node", "x")),
        damaged(device={"$": ["Expr"], "text": "b"}),
        damaged(device={"$": "Expr"}),
        damaged(device={"$": "Expr", "text": 3}),
        json.dumps({"$": "Ref", "index": 3}),
    ],
)
def test_damaged_text_is_refused(text: str):
    with pytest.raises(CacheError):
        from_json(text)


def test_what_a_program_cannot_hold_is_named():
    with pytest.raises(CacheError, match="object"):
        to_json(Program("cpu", (), (), (), (), (Returned(value=object()),), (), ()))


def graph() -> Graph:
    """Every kind of attribute: numbers, sizes, templates of calls, dtypes."""
    b = Builder()
    b.origin = "block.act"
    x = b.make("input", (), (B, 8), torch.float16, order=(1, 0), index=0, state=False, merged=())
    y = b.pointwise("add", x, b.constant(float("-inf"), torch.float32), dtype=x.dtype, alpha=1)
    part = b.slice(y, 0, B * 0, B // 2)
    call = b.make(
        "aten",
        (part,),
        (),
        torch.uint8,
        target="aten.topk.default",
        kwargs=(),
        args=(Ref(0), 3, B + 1, torch.float32),
        single=False,
        tag="",
        outputs=(((B, const(3)), torch.float16), None),
    )
    return finish(b, [x], [b.make("item", (call,), (B, 3), torch.float16, index=0)], {"b": 6})


def test_graph_round_trip():
    before = graph_to_json(graph())
    after = graph_from_json(json.loads(json.dumps(before)))
    assert graph_to_json(after) == before
    assert after.hints == {"b": 6}
    assert [n.op for n in after.nodes] == [n.op for n in graph().nodes]
    assert after.inputs[0].order == (1, 0)
    call = after.outputs[0].inputs[0]
    assert call.attrs["args"] == (Ref(0), 3, B + 1, torch.float32)
    assert call.attrs["outputs"] == (((B, const(3)), torch.float16), None)


@pytest.mark.parametrize(
    "change",
    [
        {"op": "os.system"},
        {"inputs": [7]},
        {"inputs": [-1]},
        {"dtype": "torch.load"},
        {"shape": ["__import__('os')"]},
        {"attrs": [["x"]]},
        {"attrs": 3},
        {"order": 1},
        {"attrs": [["x", {"$": "Node"}]]},
    ],
    ids=str,
)
def test_a_damaged_graph_is_refused(change: dict[str, Any]):
    value = json.loads(json.dumps(graph_to_json(graph())))
    value["nodes"][1].update(change)
    with pytest.raises(CacheError, match="stored graph"):
        graph_from_json(value)
