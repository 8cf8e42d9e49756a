"""Divide the tokens of each call of one module among the processes of a group:
``optimize(pipe, parallel="context")``.

Each process has a GPU and the whole model. It computes its own part of the tokens, and attention
exchanges heads for tokens before and after it, so that each process attends with some heads over
all tokens (Ulysses). diffusers knows where its transformers are to be divided (``_cp_plan``); what
its hooks and attention do is compiled as it stands (``frontend.sharded_context``).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from strop.dispatch.dispatcher import Dispatcher
from strop.errors import OptionError, ShapeError
from strop.frontend.hook_chains import is_own
from strop.frontend.sharded_context import drop_configs
from strop.options import Options
from strop.wording import counted

Wanted = tuple[str, Sequence[str | torch.device] | None]  # a mode, and devices
UNABLE = "diffusers has no plan (_cp_plan) of where its tokens can be divided"
_ALONE = """parallel='context' needs a process for each GPU, and this one is {}. Start the script by
    torchrun --nproc-per-node 2 draw.py
and have it say, before the pipeline is moved to its GPU,
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")
Then each process runs all of the script, from the same seed"""
_UNEVEN = "must be divisible by mesh size"  # in what diffusers says


class ContextDispatcher(Dispatcher):
    """This stands for the forward of a module that computes some of the tokens of each call."""

    def __init__(self, module: nn.Module, options: Options, *, wanted: Wanted, **how: Any) -> None:
        """Raises OptionError for a module that diffusers cannot divide, and without a group of
        processes."""
        self._wanted, self._size = wanted, self.check(module, wanted)
        self._sharding = Sharding(module, self._size)
        try:
            super().__init__(module, options, **how)
        except BaseException:
            self._sharding.undo()
            raise

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except AssertionError as error:
            if _UNEVEN not in str(error):
                raise
            raise ShapeError(f"{self.name} has tokens {_uneven(self._size)}") from error

    @staticmethod
    def is_able(module: nn.Module) -> bool:
        """Tell whether diffusers knows how to divide the tokens of a module."""
        return getattr(type(module), "_cp_plan", None) is not None

    @staticmethod
    def check(module: nn.Module, wanted: Wanted) -> int:
        """Return among how many processes the tokens of a module would be divided. Raises
        OptionError where they cannot be."""
        if wanted[1] is not None:
            raise OptionError(
                f"devices={wanted[1]!r}: with parallel='context' each process has one, where its"
                " model lies"
            )
        name = type(module).__name__
        if not ContextDispatcher.is_able(module):
            raise OptionError(
                f"parallel='context': {name}: {UNABLE}. It has one of the transformers of Flux,"
                " Flux 2, Wan, Qwen-Image and LTX, among others"
            )
        size = _processes()
        if not (next(module.parameters()).is_cuda or torch.accelerator.device_count()):
            raise OptionError(
                "parallel='context': the model lies on the CPU, where diffusers divides none: move"
                " it first (pipe.to('cuda'))"
            )
        heads = getattr(getattr(module, "config", None), "num_attention_heads", size)
        if heads % size:
            raise OptionError(
                f"parallel='context': {name} has {heads} heads of attention, and {size} processes"
                " cannot have as many each: start a number of processes that divides them"
            )
        own = vars(module).get("_parallel_config")
        if own is not None and own.context_parallel_config is None:
            raise OptionError(f"parallel='context': {name} is divided by weights (TensorParallel)")
        return size

    @property
    def how(self) -> Mapping[str, Any]:
        return {"kind": type(self), "wanted": self._wanted}

    @property
    def texts(self) -> Sequence[str]:
        """Say what has been divided, in lines."""
        own = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        return [f"parallel='context': tokens of {self._size} processes, and this is number {own}"]

    def leave(self) -> None:
        """Keep no hook, and no place in the module."""
        super().leave()
        self._sharding.undo()


class Sharding:
    """Have diffusers divide the tokens of a module, until this is undone. Where somebody has done
    so before, all stays as it is."""

    def __init__(self, module: nn.Module, size: int) -> None:
        self._module, self._size = module, size
        self._is_own = vars(module).get("_parallel_config") is None
        self._without = [part for part in module.modules() if "_diffusers_hook" not in vars(part)]
        if self._is_own:
            from diffusers import ContextParallelConfig

            mesh = _mesh(next(module.parameters()).device.type, size)
            divided: Any = module
            divided.enable_parallelism(config=ContextParallelConfig(ulysses_degree=size, mesh=mesh))
            hook = self._check_sizes
            self._handle = module.register_forward_pre_hook(hook, with_kwargs=True)

    def undo(self) -> None:
        """Leave the module as it was."""
        if not self._is_own:
            return
        self._handle.remove()
        from diffusers.hooks.context_parallel import remove_context_parallel

        divided: Any = self._module
        remove_context_parallel(divided, divided._cp_plan)
        drop_configs(self._module)
        for part in self._without:
            own = vars(part)
            if "_diffusers_hook" in own and not own["_diffusers_hook"].hooks:
                del own["_diffusers_hook"]
            if "forward" in own and is_own(own["forward"], part):
                del own["forward"]

    def _check_sizes(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise ShapeError for arguments whose tokens the processes cannot divide evenly: diffusers
        says neither which nor how many."""
        names = list(inspect.signature(type(module).forward).parameters)[1:]
        given = dict(zip(names, args, strict=False)) | kwargs
        for name, split in module._cp_plan.get("", {}).items():
            value = given.get(name)
            if not isinstance(value, Tensor) or value.dim() != split.expected_dims:
                continue
            if (count := value.shape[split.split_dim]) % self._size:
                raise ShapeError(f"{name} has {counted(count, 'token')}, {_uneven(self._size)}")


def _uneven(size: int) -> str:
    return (
        f"which {size} processes cannot divide evenly: choose a size of the picture, or a length of"
        f" the prompt (max_sequence_length), for which they are a multiple of {size}"
    )


def _processes() -> int:
    """Return how many processes there are. Raises OptionError if this one is alone."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        raise OptionError(_ALONE.format("in no group of processes"))
    size = distributed.get_world_size()
    if size < 2:
        raise OptionError(_ALONE.format("alone in its group"))
    return size


_kept: dict[str, tuple[Any, Any]] = {}  # by the type of device: the processes, and their mesh


def _mesh(kind: str, size: int) -> Any:
    """Return the processes as diffusers wants them, the same for all models: each new mesh would be
    another group, with memory of its own on each GPU."""
    world = torch.distributed.group.WORLD
    known = _kept.get(kind)
    if known is None or known[0] is not world:
        from torch.distributed.device_mesh import init_device_mesh

        names = ("ring", "ulysses")
        known = _kept[kind] = world, init_device_mesh(kind, (1, size), mesh_dim_names=names)
    return known[1]
