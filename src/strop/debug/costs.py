"""Count bytes and floating-point operations, and compute the time below which no implementation of
a step gets.

The bound is max(bytes / bandwidth, FLOPs / peak): each buffer once and in full, each operation at
the device's peak. It says where time must go, not where it goes. The estimate of a kernel is the
longest of what its code is known to take: the multiprocessors that have a program move the bytes
(one program moves 1/132 of what an H100 does), programs wait for memory as often as one load needs
what another has found, and instructions are issued (``working_us``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from strop.fusion.plan import Group
from strop.ir.device import Device
from strop.ir.dims import Expr, const
from strop.ir.exchange import bytes_sent
from strop.ir.graph import Node
from strop.ir.ops import OPS, Kind
from strop.ir.program import CallStep, KernelStep, Program, Step, TensorRef
from strop.ir.source import KernelSource
from strop.kernels import library
from strop.runtime.run.choices import call_of

Sizes = Mapping[str, int]
HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Machine:
    """Say what a device can do in a second."""

    device: Device
    bandwidth: float  # bytes, reads and writes together
    half_flops: float  # matrix units, dense
    single_flops: float

    def bound_us(self, num_bytes: int, flops: int, dtype: torch.dtype) -> tuple[float, str]:
        """Return the microseconds, and what they are bound by."""
        peak = self.half_flops if dtype in HALF else self.single_flops
        moving, computing = num_bytes / self.bandwidth, flops / peak
        by = "compute" if computing > moving else "bandwidth"
        return round(max(moving, computing) * 1e6, 3), by

    def occupied(self, num_programs: int) -> float:
        """Return the share of the multiprocessors that have one of so many programs; all where
        their number is unknown, as on a CPU."""
        return min(1.0, num_programs / self.device.sms) if num_programs and self.device.sms else 1.0

    def moving_us(self, num_bytes: int, num_programs: int) -> float:
        """Return the microseconds in which so many programs move the bytes."""
        return num_bytes / (self.bandwidth * self.occupied(num_programs)) * 1e6


# Bytes a second that copies reach, by the device's name. On others, they reach a share of what the
# clock and the bus of the memory allow.
COPIES = {"H100": 2.98e12, "H200": 4.3e12}
SHARE = 0.9
GUESS = 100e12, 20e12  # half and single precision, of an architecture that is not in the table
CORE_FLOPS = 48e9  # a guess: 2 x 8 lanes, fused, at 1.5 GHz under load
# A trip to memory and back under load, and what a multiprocessor holds and issues in a cycle.
TRIP_US = 0.7
MOST_WARPS, MOST_PROGRAMS, LANES = 64, 32, 128
MERGING_TRIPS = 3  # of a split kernel's last program: states, arrival, and all states back
SHORT_US = 2.0  # a kernel takes so long that has next to nothing to do
TOO_SLOW = 3  # times what was expected: such a kernel gets a line of its own


def is_too_slow(us: float, expected_us: float) -> bool:
    """Tell whether a kernel takes, or is estimated to take, far longer than expected."""
    return us > TOO_SLOW * max(expected_us, SHORT_US)


def machine(device: Device) -> Machine:
    """Describe what a GPU can do, by its record; numbers for CPUs are guesses."""
    if not device.arch:
        peak = CORE_FLOPS * torch.get_num_threads()
        return Machine(device, 20e9, peak, peak)
    copies = next(
        (rate for name, rate in COPIES.items() if name in device.name),
        SHARE * device.memory_bandwidth,
    )
    half, single = device.half_flops or GUESS[0], device.single_flops or GUESS[1]
    return Machine(device, copies, half, single)


def bytes_moved(program: Program, step: Step, sizes: Sizes) -> int:
    """Count for a kernel each buffer that it touches, once and in full, or what it looks up there;
    for a call, what it reads of each and what it makes."""
    if isinstance(step, KernelStep):
        lookups = dict(zip(step.buffers, step.lookup_sizes, strict=False))
        for number, size in step.parts:
            lookups[number] = size + (lookups.get(number) or const(0))
        return sum(
            _kernel_bytes(program, n, lookups.get(n), sizes) for n in dict.fromkeys(step.buffers)
        )
    refs = step.inputs[:1] if step.op == "exchange" else step.inputs  # others say its turn
    read = sum(_piece_bytes(program, ref, sizes) for ref in refs)
    if step.place is not None:
        return read + _piece_bytes(program, step.place, sizes)
    return read + sum(_buffer_bytes(program, n, sizes) for n in step.outputs if n >= 0)


def sent_bytes(program: Program, sizes: Sizes) -> int:
    """Count what a run sends to other processes."""
    total = 0
    for step in program.call_steps:
        if step.op == "exchange":
            attrs = dict(step.attrs)
            own = _piece_bytes(program, step.inputs[0], sizes)
            total += bytes_sent(own, attrs["how"], attrs["size"])
    return total


def num_programs(program: Program, step: Step, sizes: Sizes, sms: int) -> int:
    """Count the programs of a kernel on a device of so many multiprocessors; 0 for a library's and
    for functions in C++, which share their work out themselves."""
    if not isinstance(step, KernelStep) or not program.sources[step.kernel].grid:
        return 0
    source = program.sources[step.kernel]
    return _numel(source.grid, _arguments(source, step, sizes, sms))


def _arguments(source: KernelSource, step: KernelStep, sizes: Sizes, sms: int) -> dict[str, int]:
    names = {f"s{n}": size.eval(sizes) for n, size in enumerate(step.scalars)}
    if source.split is not None:
        names["splits"] = source.split.count(names, sms)
    return names


def working_us(program: Program, step: Step, sizes: Sizes, device: Device) -> float:
    """Return the microseconds that a kernel's programs wait for memory in turn, or issue
    instructions, whichever is longer, or those by which attention was chosen; 0 where nobody has
    counted or measured."""
    if isinstance(step, CallStep) and step.op == "attention" and device.arch:
        return _chosen_us(program, step, sizes, device)
    if not isinstance(step, KernelStep) or not device.sms:
        return 0.0
    source = program.sources[step.kernel]
    effort = source.effort
    if effort is None:
        return 0.0
    names = _arguments(source, step, sizes, device.sms)
    programs, steps = _numel(source.grid, names), effort.steps(names)
    at_once = device.sms * min(MOST_PROGRAMS, MOST_WARPS // source.num_warps)
    trips = math.ceil(programs / at_once) * math.ceil(steps / effort.ahead) * effort.trips
    trips += MERGING_TRIPS if names.get("splits", 1) > 1 else 0
    issued = programs * steps * effort.elements * effort.instructions
    return max(trips * TRIP_US, issued / (device.sms * LANES * device.clock_hz) * 1e6)


def _chosen_us(program: Program, step: CallStep, sizes: Sizes, device: Device) -> float:
    call = call_of(program, step)
    us = library.select(call, call.at(sizes), device, program.kernels_off).cost_us
    return us if math.isfinite(us) else 0.0


def _kernel_bytes(program: Program, number: int, lookups: Expr | None, sizes: Sizes) -> int:
    whole = _buffer_bytes(program, number, sizes)
    itemsize = program.buffers[number].dtype.itemsize
    return whole if lookups is None else min(whole, lookups.eval(sizes) * itemsize)


def _piece_bytes(program: Program, ref: TensorRef, sizes: Sizes) -> int:
    return _numel(ref.shape, sizes) * program.buffers[ref.buffer].dtype.itemsize


def _buffer_bytes(program: Program, number: int, sizes: Sizes) -> int:
    buffer = program.buffers[number]
    return _numel(buffer.shape, sizes) * buffer.dtype.itemsize


def _numel(shape: Iterable[Expr], sizes: Sizes) -> int:
    return math.prod(size.eval(sizes) for size in shape)


def group_flops(group: Group, sizes: Sizes) -> int:
    """Count one FLOP for each element of each arithmetic node, and for each term of a reduction."""
    return sum(_node_flops(node, sizes) for node in group.nodes)


def _node_flops(node: Node, sizes: Sizes) -> int:
    if node.kind is Kind.REDUCTION:
        return node.inputs[0].numel.eval(sizes)
    return 0 if OPS[node.op].only_moves else node.numel.eval(sizes)


def call_flops(step: CallStep, sizes: Sizes) -> int:
    """Count the multiplications and additions of an anchor; 0 for calls that nobody has counted."""
    shapes = [[size.eval(sizes) for size in ref.shape] for ref in step.inputs]
    return OPS[step.op].anchor.flops(shapes, dict(step.attrs))
