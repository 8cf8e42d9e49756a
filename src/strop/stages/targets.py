"""The code generator of a device, and what of it options leave out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from strop.codegen import cpp, triton
from strop.codegen.assemble import Target, in_turn, once
from strop.ir.graph import Node
from strop.kernels import library
from strop.kernels.conv import folded_taps
from strop.lowering.generic import without_sizes
from strop.options import Options

PLANNED = frozenset(
    {  # library calls that write where they are told
        "linear",
        "linear_add",
        "matmul",
    }
)
TARGETS = {
    "cpu": Target("cpu", cpp.emit, PLANNED),
    "cuda": Target(
        "cuda",
        triton.emit,
        PLANNED | {"conv2d", "geglu", "folded_taps", "upsampled_conv2d"},
        triton.stitched,
        triton.emit_at,
        triton.stitched_at,
        in_place=True,
        own_call=library.of_node,
        families=library.families,
    ),
}


def target_for(device: str, options: Options, *, generic: bool) -> Target:
    """``generic``: its kernels have no sizes of their own. Equal kernels, of which a model has
    many, are printed once."""
    target = TARGETS[device]
    if not options.early_launch:
        target = in_turn(target)
    emit = once(target.emit)
    return replace(
        target,
        emit=without_sizes(emit) if generic else emit,
        emit_at=None if generic else target.emit_at,
        stitched=once(target.stitched),
        in_place=target.in_place and options.in_place,
        own_call=target.own_call if options.narrow_conv else folded_taps.of_node,
        families=families(device, options),
    )


def families(device: str, options: Options) -> Callable[[Node], tuple[str, ...]]:
    """Of kernels of ours that may do a library call. Some have no option to be without them."""

    def found(node: Node) -> tuple[str, ...]:
        return tuple(f for f in TARGETS[device].families(node) if getattr(options, f, True))

    return found
