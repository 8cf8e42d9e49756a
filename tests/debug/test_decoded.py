"""Explain says how much of quantised weights is decoded."""

import torch
from torch import nn

import strop
from strop.debug.decoded import decoded_bytes, most_decoded_bytes
from strop.options import Options
from tests.fusion.test_coded_products import COLUMNS, DEPTH, Coded, compiled
from tests.quantised.stand_ins import ByOperators, quantised

WIDTH, COUNT = 64, 4
IN_FULL = WIDTH * WIDTH * 4


def test_weights_give_their_memory_back(tmp_path):
    stack = quantised(ByOperators, nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(COUNT))))
    strop.optimize(stack.eval(), options=Options(cache_dir=str(tmp_path), strict=True))
    with torch.no_grad():
        stack(torch.randn(5, WIDTH))
    report = strop.explain(stack)
    (graph,) = report.graphs
    assert graph.decoded_bytes == COUNT * IN_FULL
    assert IN_FULL <= graph.most_decoded_bytes <= 2 * IN_FULL
    assert f"decodes {COUNT * IN_FULL / 1e6:.2f} MB of weights kept in another type a call" in str(
        report
    )


def test_nothing_is_decoded_of_plain_weights(tmp_path):
    plain = strop.optimize(nn.Linear(8, 8).eval(), options=Options(cache_dir=str(tmp_path)))
    with torch.no_grad():
        plain(torch.randn(3, 8))
    (graph,) = strop.explain(plain).graphs
    assert graph.decoded_bytes == graph.most_decoded_bytes == 0
    assert "decodes" not in str(strop.explain(plain))


def test_a_few_rows_decode_nothing_into_memory():
    program = compiled(Coded("int8"))
    assert decoded_bytes(program, {"b": 1}) == 0
    assert decoded_bytes(program, {"b": 3}) == most_decoded_bytes(program, {"b": 3})
    assert decoded_bytes(program, {"b": 3}) == COLUMNS * DEPTH * 2
