"""Choose where a product on a CPU has its weight packed, once for each content of the weight.

oneDNN's products want weights in blocks of their own, and put them there in each call. A packed
weight is a derived input: ``runtime.derived.packed_weights`` makes it, and makes it anew when the
bits of the weight are others, which each call looks at. Both ways were measured
(``tuned.packed_cpu``); a weight is packed where that saves more than it takes.
"""

from __future__ import annotations

import math

import torch

from strop.ir.device import Device
from strop.kernels.kernel import NEVER, Call, Kernel, Problem
from strop.kernels.packed import fingerprint
from strop.kernels.packed.costs import CONV, Work, case_of
from strop.kernels.tuned.packed_cpu import CASES

NAME = "packed_weights"
PLAIN_NAME = "weights_as_they_lie"
OPS = ("linear", "linear_add", CONV)
WEIGHT = 1  # the operand
# How many times as fast a packed product has to be by what was measured, as the memory has its
# worth too, and a program without calls of a library runs without a walk over its steps. Linears of
# smaller weights, 1.1 times as fast by themselves, were slower in models, and so were convolutions.
LEAST_GAINS = {CONV: 1.1, "linear": 1.15, "linear_add": 1.15}
LEAST_BYTES = {CONV: 64 << 10, "linear": 1 << 20, "linear_add": 1 << 20}


def plain_supports(call: Call, device: Device) -> str:
    if not device.isa:
        return "runs on CPUs with AVX2 or AVX-512"
    if case_of(call.op, call.dtype, device.isa, CASES) is None:
        return f"was not measured with {str(call.dtype).removeprefix('torch.')} on {device.isa}"
    return ""


def supports(call: Call, device: Device) -> str:
    if reason := plain_supports(call, device):
        return reason
    if (sizes := call.known(WEIGHT)) is None:
        return "wants weights of a known size"
    if math.prod(sizes) * call.dtype.itemsize < LEAST_BYTES[call.op]:
        return f"is for weights from {LEAST_BYTES[call.op] >> 10} KiB on"
    if call.op == CONV and (call.attr("dilation"), call.attr("groups")) != ((1, 1), 1):
        return "was not measured with dilations or groups"
    return "" if torch.backends.mkldnn.is_available() else "is oneDNN's, which torch lacks here"


def _times_us(problem: Problem, device: Device) -> tuple[float, float]:
    if not all(map(math.prod, problem.shapes)):
        return 0.0, NEVER
    case = case_of(problem.op, problem.dtype, device.isa, CASES)
    assert case is not None  # ``supports`` says so
    return case.times_us(Work.of(problem))


def plain_us(problem: Problem, device: Device) -> float:
    return _times_us(problem, device)[0]


def packed_us(problem: Problem, device: Device) -> float:
    return LEAST_GAINS[problem.op] * _times_us(problem, device)[1]


ROW = Kernel(NAME, OPS, supports, packed_us, beside=(fingerprint.source(),))
PLAIN = Kernel(PLAIN_NAME, OPS, plain_supports, plain_us)
