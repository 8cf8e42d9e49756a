"""A target is the code generator of a device, without what options leave out of it."""

from __future__ import annotations

from dataclasses import replace

from strop.codegen import cpp, triton
from strop.codegen.assemble import Target, in_turn, once
from strop.ir.ops import planned_on
from strop.kernels import library
from strop.lowering.generic import without_sizes
from strop.options import Options, check_names

TARGETS = {
    "cpu": Target("cpu", cpp.emit, planned_on("cpu")),
    "cuda": Target(
        "cuda",
        triton.emit,
        planned_on("cuda"),
        triton.stitched,
        triton.emit_at,
        triton.stitched_at,
        in_place=True,
    ),
}


def target_for(device: str, options: Options, *, generic: bool) -> Target:
    """Return the target of a device under these options. Where it is ``generic``, its kernels have
    no sizes of their own. Equal kernels, of which a model has many, are printed once.

    Raises OptionError where ``options.kernels_off`` names a kernel that does not exist.
    """
    check_names(options.kernels_off, library.MAY_BE_OFF, "kernel to switch off:")
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
        kernels_off=options.kernels_off,
    )
