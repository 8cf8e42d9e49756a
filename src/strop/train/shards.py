"""Take the norm of gradients over processes that step a part of the parameters each.

``torch.distributed.optim.ZeroRedundancyOptimizer`` gives the optimizer of each process a share of
the parameters. The norm to clip to is that of all gradients, so each process hands its part of it
to the others (ZeRO-1: https://arxiv.org/abs/1910.02054, section 5).
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def group_of_shards() -> ProcessGroup | None:
    """Return the processes among which a ``ZeroRedundancyOptimizer`` that is being made, or takes
    another group of parameters, has cut these; None where there is none. It tells the optimizers
    that it makes nothing of itself, so that this looks at who has called."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    frame: FrameType | None = sys._getframe(1)
    while module is not None and frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, module.ZeroRedundancyOptimizer):
            group: ProcessGroup = caller.process_group
            return group
        frame = frame.f_back
    return None


def gathered(own: Tensor, group: ProcessGroup) -> Tensor:
    """Return the numbers of all processes, a row each, in the same order everywhere. Each of them
    has to call this, or the others wait."""
    from torch import distributed

    rows = [torch.empty_like(own) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(rows, own, group)
    return torch.stack(rows)


def take_part(group: ProcessGroup) -> None:
    """Hand the others that there is no gradient here."""
    from torch import distributed

    is_on_gpu = "nccl" in str(distributed.get_backend(group))
    device = torch.device("cuda", torch.cuda.current_device()) if is_on_gpu else "cpu"
    gathered(torch.zeros(2, dtype=torch.float64, device=device), group)
