"""Convolutions whose pixels the tensor memory accelerator brings, where the operands lie as it
wants them and the sizes are ones for which our kernel is the faster one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from strop.kernels.box_conv import Form, Picture, form_of, picture_of, sources_of
from strop.runtime.kernels import BoundKernel, KernelLibrary
from strop.runtime.narrow_convolution import is_dense
from strop.runtime.operands import NOWHERE

OutCall = Callable[[Sequence[Tensor], Tensor], None]
Choose = Callable[[Picture], Form | None]


class _Launches(NamedTuple):
    """At one shape: the convolution, and the sum of its parts if it has some, in a tensor of so
    many numbers."""

    conv: BoundKernel
    places: tuple[int, ...]  # of each of its params among input, weights and result
    add: BoundKernel | None
    numel: int


class BoxConvolution:
    """One convolution step on one stream; ``otherwise`` does what the kernel cannot, or what the
    library does faster."""

    def __init__(self, otherwise: OutCall, kernels: KernelLibrary, stream: int, *,
                 choose: Choose = form_of, is_early: bool = False) -> None:  # fmt: skip
        self._otherwise, self._kernels, self._stream = otherwise, kernels, stream
        self._choose, self._is_early = choose, is_early
        self._bound: dict[Picture, _Launches | None] = {}

    def __call__(self, inputs: Sequence[Tensor], out: Tensor) -> None:
        x, weight, *bias = inputs
        if bias or not (is_dense(x) and is_dense(weight) and is_dense(out)):
            self._otherwise(inputs, out)
            return
        of = picture_of(x.shape, weight.shape)
        if of not in self._bound:
            self._bound[of] = self._bind(of, x.dtype)
        launches = self._bound[of]
        if launches is None:
            self._otherwise(inputs, out)
            return
        self._launch(launches, x, weight, out)

    def _launch(self, launches: _Launches, x: Tensor, weight: Tensor, out: Tensor) -> None:
        conv, places, add, numel = launches
        target = out
        if add is not None:
            target = torch.empty(numel, dtype=torch.float32, device=out.device)
        pointers = (x.data_ptr(), weight.data_ptr(), target.data_ptr())
        for param, place in enumerate(places):
            conv.set_pointer(param, pointers[place])
        conv()
        if add is not None:
            add.set_pointer(0, pointers[2])
            add.set_pointer(1, out.data_ptr())
            add()

    def _bind(self, of: Picture, dtype: torch.dtype) -> _Launches | None:
        form = self._choose(of)
        if form is None:
            return None
        sources, views = sources_of(form, of, dtype), list(form.views(of))
        self._kernels.build(sources)  # unless the program's first call has done so
        dense = [(view, _strides(view)) for view in views]
        conv = self._kernels.bind(sources[0], [NOWHERE] * len(views), form.scalars(of),
                                  self._stream, early=self._is_early, views=dense)  # fmt: skip
        add, numel = None, of.batch * of.height * of.width * of.outs
        if form.tile.split > 1:
            step = views[2][0] // form.tile.split * of.height * of.width * of.outs
            add = self._kernels.bind(sources[1], [0, 0], [numel, step], self._stream, early=True)
            numel = step * form.tile.split
        return _Launches(conv, (0, 1, 2, 0, 2)[: len(views)], add, numel)


def _strides(sizes: Sequence[int]) -> tuple[int, ...]:
    found = [1]
    for size in reversed(sizes[1:]):
        found.append(found[-1] * size)
    return tuple(reversed(found))
