"""Step parameters that are DTensors, of which each process has a part (FSDP2's ``fully_shard``).

A sweep reads and writes plain memory: the part that lies here. States are DTensors beside their
parameters, so that ``torch.distributed.checkpoint`` saves them and cuts them anew.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from strop.errors import OptionError, UnsupportedError
from strop.wording import counted

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_MODULE = "torch.distributed.tensor"  # whoever has a DTensor has imported it


def is_dtensor(tensor: object) -> bool:
    kind = getattr(sys.modules.get(_MODULE), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def any_dtensor(tensors: Sequence[Tensor]) -> bool:
    kind = getattr(sys.modules.get(_MODULE), "DTensor", None)
    return kind is not None and any(isinstance(tensor, kind) for tensor in tensors)


def local_of(tensor: Tensor) -> Tensor:
    """Return the memory of this process, detached; a plain tensor is all its own."""
    if not is_dtensor(tensor):
        return tensor
    found: Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    return found.detach()


def beside(owner: Tensor, local: Tensor) -> Tensor:
    """Return a state with this memory: it has the parts that its parameter has."""
    if not is_dtensor(owner):
        return local
    given: Any = owner
    made: Tensor = type(given.data).from_local(
        local,
        given.device_mesh,
        given.placements,
        run_check=False,
        shape=given.shape,
        stride=given.stride(),
    )
    return made


def local_state(owner: Tensor, value: Tensor | None) -> Tensor | None:
    """Return the memory of a state, if there is one. Raises OptionError for one that is not cut as
    its parameter is."""
    if value is None or not is_dtensor(owner):
        return value
    given: Any = value
    if not is_dtensor(value) or given.placements != owner.placements:  # type: ignore[attr-defined]
        raise OptionError(
            f"a state of a DTensor of shape {tuple(owner.shape)} is not cut as it is: load states "
            "by torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
        )
    return local_of(value)


def local_gradient(owner: Tensor, grad: Tensor | None) -> Tensor | None:
    """Return what of a DTensor's gradient lies here, if there is one. Raises UnsupportedError for
    one that is cut otherwise than its parameter."""
    if grad is None:
        return None
    is_cut_alike = is_dtensor(grad) and is_dtensor(owner)
    if not is_cut_alike or grad.placements != owner.placements:  # type: ignore[attr-defined]
        raise UnsupportedError(
            f"a gradient of shape {tuple(grad.shape)} is not cut as its parameter is: fused "
            "optimizers read those of fully_shard"
        )
    return local_of(grad)


def group_of(parameters: Sequence[Tensor]) -> ProcessGroup | None:
    """Return the processes that have the other parts of these parameters; None for plain tensors.

    Raises UnsupportedError where only some are DTensors, and for DTensors that are cut along more
    than one dim of their mesh, as the norm of all gradients would count parts twice.
    """
    cut = [parameter for parameter in parameters if is_dtensor(parameter)]
    if not cut:
        return None
    if len(cut) < len(parameters):
        raise UnsupportedError(
            f"{len(cut)} of {counted(len(parameters), 'parameter')} are DTensors: call "
            "fully_shard on the whole model, or make one fused optimizer for these and one for the "
            "others"
        )
    places = {(p.device_mesh, _shard_dim(p)) for p in cut}  # type: ignore[attr-defined]
    if len(places) > 1:
        raise UnsupportedError(
            "parameters are cut over different meshes: make a fused optimizer for each, without "
            "max_grad_norm, or shard all over one mesh"
        )
    mesh, dim = places.pop()
    group: ProcessGroup = mesh.get_group(dim)
    return group


def _shard_dim(parameter: Any) -> int:
    """Return the dim of the mesh along which a parameter is cut; along others it is repeated."""
    cut = [dim for dim, place in enumerate(parameter.placements) if place.is_shard()]
    repeated = sum(place.is_replicate() for place in parameter.placements)
    if len(cut) != 1 or repeated != len(parameter.placements) - 1:
        raise UnsupportedError(
            f"a DTensor with the placements {parameter.placements}: fused optimizers take those of "
            "fully_shard, cut along one dim of their mesh; use torch.optim for others"
        )
    return int(cut[0])
