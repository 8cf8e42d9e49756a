"""Programs that random search once found to go wrong, cut down by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.interpreted import interpreted
from tests.fuzz.judge import judge, optimized
from tests.fuzz.programs import SIZES, Argument, Program

EMPTY = (SIZES, {"b": 3, "s": 0}, {"b": 0, "s": 4})


def case(
    shape: str,
    *lines: str,
    results: str,
    dtype: str = "f32",
    layout: str = "dense",
    sizes: tuple[dict[str, int], ...] = (SIZES,),
) -> Program:
    argument = Argument(tuple(shape.split()), dtype, layout)
    return Program((argument,), (), lines, tuple(results.split()), sizes)


FOUND = {
    # pieces of a cat went to the kernel whose elements one of them looks up
    "pieces_that_look_up": case(
        "b s 4",
        "v0 = F.pad(x0, (0, 1), value=1)",
        "v1 = F.layer_norm(v0, v0.shape[-1:])",
        "v2 = torch.empty_like(v1)",
        "v2[:, :, 0::2] = torch.sin(v1 + 0)[:, :, 0::2]",
        "v2[:, :, 1::2] = torch.sin(v1 + 1)[:, :, 1::2]",
        results="v2",
        sizes=(SIZES, {"b": 2, "s": 6}),
    ),
    # the guard of roll's cat, inside of softmax's own sum
    "softmax_rolled": case("4", "v0 = x0.softmax(0)", "v1 = v0.roll(1, 0) + v0", results="v1"),
    # one loop for the sums of a row and of the row before it
    "sums_of_other_rows": case(
        "b 4 s s", "v0 = F.elu(x0.sum(3, keepdim=True))", "v1 = v0.roll(1, 0)", results="v0 v1"
    ),
    "norm_of_sums": case(
        "b 4 s s",
        "v0 = x0.sum(0)",
        "v1 = F.layer_norm(v0[0:2], v0.shape[-1:])",
        "v2 = v0.roll(1, 0)",
        results="v1 v2",
    ),
    # memory that results share with arguments and each other, where eager keeps them apart
    "times_one": case("b s", "v0 = x0 * 1", "v1 = x0 / 1", results="v0 v1 x0"),
    "equal_but_for_a_factor_of_one": case("b s", "v0 = x0 * 2", "v1 = x0 * 1 * 2", results="v0 v1"),
    "slice_that_undoes_a_stack": case(
        "b s", "v0 = torch.stack([x0, x0])", "v1 = v0.select(0, 0)", results="v1 v0"
    ),
    "padding_of_nothing": case("s 6", "v0 = F.pad(x0, (0, 0), value=1)", results="v0"),
    "cropping": case("s 6", "v0 = F.pad(x0, (-1, 0))", results="v0"),
    # and the other way round
    "view_of_a_copy": case(
        "2*s", "v0 = F.pad(x0, (0, 0), value=1)", "v1 = v0.unflatten(0, (-1, 2))", results="v1 v0"
    ),
    "written_through_a_view": case(
        "b s 4",
        "v0 = torch.tanh(x0)",
        "v1 = v0.permute(1, 2, 0)",
        "v2 = v1.mul_(0.5)",
        results="v2 x0 v0 v1",
    ),
    "written_through_a_view_behind": case(
        "b s 4",
        "v0 = torch.tanh(x0)",
        "v1 = v0.permute(1, 2, 0)",
        "v2 = v1.mul_(0.5)",
        results="v0 v2",
    ),
    "element": case("4", "v0 = x0.select(0, -1)", results="v0"),
    "part_of_a_reduction": case(
        "b s 4", "v0 = x0.amax(2)", "v1 = v0.select(0, -1)", results="v1 v0"
    ),
    "argument_with_gaps": case("b s", "v0 = x0 * 2", results="x0 v0", layout="every_second"),
    # a write into a view of an argument that is the argument
    "written_through_a_permutation": case(
        "b s", "v0 = x0.permute(0, 1)", "v1 = v0.add_(1)", results="v1"
    ),
    # sizes below zero
    "all_but_the_first": case("b s 4", "v0 = x0[:, 1:] * 2", results="v0", sizes=EMPTY),
    # no element to load, and none to find the largest of
    "padding_of_the_empty": case("s", "v0 = F.pad(x0, (1, 1), value=1)", results="v0", sizes=EMPTY),
    "views_of_a_sum_of_the_empty": case(
        "s 6",
        "v0 = x0.sum((0,))",
        "v1 = v0.unflatten(0, (-1, 3))",
        "v2 = v1.amax(0)",
        results="v1 v0 v2",
        dtype="i64",
        sizes=EMPTY,
    ),
    "products_of_nothing": case(
        "b s", "v0 = torch.tanh(x0)", "v1 = v0 @ v0.transpose(-1, -2)", results="v1", sizes=EMPTY
    ),
    "all_of_the_empty": case("b s", "v0 = x0.all(1)", results="v0", dtype="bool", sizes=EMPTY),
}


@pytest.mark.parametrize("name", FOUND)
def test_found(name: str, tmp_path: Path) -> None:
    with interpreted():
        judge(FOUND[name], optimized(FOUND[name], str(tmp_path), record=True))


OTHER = (SIZES, {"b": 2, "s": 9}, {"b": 1, "s": 1})
IN_TRITON = {
    # columns of halves were summed as halves
    "columns_of_halves": case(
        "b s 4", "v0 = x0.sum(0)", "v1 = torch.tanh(v0)", results="v1", dtype="f16"
    ),
    # kept dims between reduced ones had no kernel, their modules ran in eager
    "kept_and_reduced_dims_of_any_size": case(
        "b 4 s s", "v0 = x0.sum((0, 3))", results="v0", sizes=OTHER
    ),
    "halves_on_both_sides": case(
        "b 4 s s",
        "v0 = torch.var_mean(x0, (0, 3), correction=0)",
        "v1, v2 = v0",
        "v3 = x0.mean((0, 2, 3))",
        results="v1 v2 v3",
        dtype="f16",
        sizes=OTHER,
    ),
    # 1 - 2 / (1 + exp(2 * x)) of small numbers
    "tanh_of_small_numbers": case(
        "b s", "v0 = torch.tanh(x0 * 0.001)", "v1 = torch.tanh(x0 * 1e-9)", results="v0 v1"
    ),
    # fractions as bounds of whole numbers made these fractions
    "bounded_whole_numbers": case(
        "b s", "v0 = F.hardtanh(x0, -2.5, 2.5)", "v1 = v0 ^ x0", results="v1", dtype="i64"
    ),
    "whole_numbers_on_both_sides": case(
        "b 4 s s",
        "v0 = (x0 * 3).sum((0, 3))",
        "v1 = x0.amax((0, 3))",
        results="v0 v1",
        dtype="i64",
        sizes=OTHER,
    ),
}


@pytest.mark.parametrize("name", IN_TRITON)
def test_found_in_triton(name: str, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    with interpreted(triton=True):
        dispatcher = optimized(IN_TRITON[name], str(tmp_path), record=True)
        judge(IN_TRITON[name], dispatcher, slack=2.0)
    assert not dispatcher.counters.fallbacks
