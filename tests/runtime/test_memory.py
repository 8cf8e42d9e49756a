"""The arena planner: values alive together never overlap, and the arena is as small as can be."""

from __future__ import annotations

from itertools import combinations

import torch
from hypothesis import given
from hypothesis import strategies as st

from strop import backend
from strop.codegen.assemble import Signature
from strop.options import Options
from strop.runtime.run.memory import (
    ALIGNMENT_BYTES,
    Interval,
    alive_beside,
    most_alive,
    placed,
    plan_arena,
)
from tests.e2e import tiny
from tests.frontend.tracing import trace_specs

INTERVALS = st.lists(
    st.builds(
        lambda first, length, size: Interval(first, first + length, size),
        st.integers(0, 30),
        st.integers(0, 12),
        st.integers(0, 5000),
    ),
    max_size=40,
)


def aligned(size: int) -> int:
    return -(-max(size, 1) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def bound(intervals: list[Interval]) -> int:
    """The largest sum of sizes alive at once: no arena can be smaller."""
    steps = {i.first for i in intervals}
    return max(
        (sum(aligned(i.size_bytes) for i in intervals if i.first <= s <= i.last) for s in steps),
        default=0,
    )


def assert_sound(intervals: list[Interval], offsets: list[int], total: int) -> None:
    for a, b in combinations(range(len(intervals)), 2):
        x, y = intervals[a], intervals[b]
        if x.first <= y.last and y.first <= x.last:
            assert (
                offsets[a] + x.size_bytes <= offsets[b] or offsets[b] + y.size_bytes <= offsets[a]
            )
    for interval, offset in zip(intervals, offsets, strict=True):
        assert offset % ALIGNMENT_BYTES == 0
        assert offset + interval.size_bytes <= total
    assert total >= bound(intervals)


@given(INTERVALS)
def test_values_alive_together_never_overlap(intervals: list[Interval]):
    offsets, total = plan_arena(intervals)
    assert_sound(intervals, offsets, total)


@given(INTERVALS)
def test_the_plan_is_a_function_of_the_intervals(intervals: list[Interval]):
    assert plan_arena(intervals) == plan_arena(list(intervals))


@given(INTERVALS)
def test_places_are_those_of_looking_at_all_that_is_placed(intervals: list[Interval]):
    order = sorted(range(len(intervals)), key=lambda n: -intervals[n].size_bytes)
    spans: dict[int, tuple[int, int]] = {}
    for index in order:
        (first, last, size), offset = intervals[index], 0
        for other, (begin, end) in sorted(spans.items(), key=lambda item: item[1]):
            if intervals[other].first <= last and first <= intervals[other].last:
                if offset + aligned(size) <= begin:
                    break
                offset = max(offset, end)
        spans[index] = offset, offset + aligned(size)
    offsets, total = placed(intervals, alive_beside(intervals), order)
    assert [*enumerate(offsets)] == sorted((n, begin) for n, (begin, _) in spans.items())
    assert total == max((end for _, end in spans.values()), default=0)


def test_memory_is_used_again():
    chain = [Interval(i, i + 1, 1000) for i in range(20)]
    assert plan_arena(chain)[1] == 2 * aligned(1000)
    assert plan_arena([]) == ([], 0)


def test_what_lives_long_is_placed_first_where_that_leaves_no_gap():
    """As at the end of a decoder: the result of a shortcut waits for a block."""
    sizes = [(82, 83, 4), (83, 86, 4), (86, 89, 2), (89, 90, 2), (84, 90, 2), (90, 96, 2)]
    intervals = [Interval(first, last, size << 20) for first, last, size in sizes]
    offsets, total = plan_arena(intervals)
    assert_sound(intervals, offsets, total)
    assert total == bound(intervals) == 8 << 20


@given(INTERVALS)
def test_what_is_alive_at_once(intervals: list[Interval]):
    assert most_alive(intervals) == bound(intervals)


def unet_intervals(height: int, width: int) -> list[Interval]:
    """The live ranges of the arena buffers of a UNet at one size."""
    from strop.diffusion.components import adapter_for

    module = tiny.unet()
    args = tiny.unet_args(2, 8, 8, 7)
    shapes = adapter_for(module).shapes([args[2], args[0], args[1]])
    traced = trace_specs(
        module, lambda e, x, t: module(x, t, e, return_dict=False), list(shapes.specs), shapes.hints
    )
    signature = Signature(traced.returned, traced.captured.guards)
    program = backend.compile_graph(traced.graph, signature, "cpu", Options()).program
    env = dict(traced.captured.hints) | {"h": height, "w": width}
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for position, step in enumerate(program.steps):
        touched = getattr(step, "buffers", None)
        if touched is None:
            touched = [r.buffer for r in step.inputs] + [n for n in step.outputs if n >= 0]
        for number in touched:
            first.setdefault(number, position)
            last[number] = position
    return [
        Interval(first[n], last[n], torch.Size([s.eval(env) for s in b.shape]).numel() * 4)
        for n, b in enumerate(program.buffers)
        if b.kind == "arena"
    ]


def test_a_unet_needs_no_more_than_what_is_alive_at_once():
    intervals = unet_intervals(8, 8)
    assert len(intervals) > 50
    offsets, total = plan_arena(intervals)
    assert_sound(intervals, offsets, total)
    assert total == bound(intervals)
