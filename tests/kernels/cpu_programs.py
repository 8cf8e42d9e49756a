"""Run a module compiled for a CPU while its weights change, as tests of its kernels do."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import strop
from strop.options import Options
from strop.testing import assert_as_accurate_as_eager


def run_while_weights_change(
    kind: type[nn.Module], dtype: torch.dtype, inputs: Iterable[Tensor], folder: Path
) -> tuple[nn.Module, Any]:
    """Compare results with eager's at each input, behind writes that nobody counts. Return the
    module, and the first of what its program is bound to."""
    module, plain = (kind().to(dtype).eval() for _ in range(2))
    exact = kind().double().eval()
    strop.optimize(module, options=Options(cache_dir=str(folder), strict=True))
    dispatcher: Any = module.forward
    with torch.no_grad():
        for x in inputs:
            for weight in module.parameters():
                weight.data.add_(0.01)
            state = {name: t.clone() for name, t in module.state_dict().items()}
            plain.load_state_dict(state)
            exact.load_state_dict(state)
            found = module(x)
            assert_as_accurate_as_eager(found, plain(x), exact(x.double()))
            assert torch.equal(found, module(x))
    return module, dispatcher.shapes.entries[0].bounds[0]
