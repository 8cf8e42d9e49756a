"""Run the optimizer behind ``FusedAdamW``, ``FusedAdam`` and ``FusedSGD``."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # torch.compiler.disable would import Dynamo now
from torch.optim import Optimizer

from strop.errors import OptionError, UnsupportedError
from strop.train import layout as layouts
from strop.train import quantized
from strop.train.cpu_step import CpuStep
from strop.train.dtensors import (
    any_dtensor,
    beside,
    group_of,
    local_gradient,
    local_of,
    local_state,
)
from strop.train.ema import EMASchedule, ParameterEMA
from strop.train.layout import Item, Layout
from strop.train.rules import UpdateRule
from strop.train.shards import group_of_shards, take_part
from strop.train.step import Memory, Request, Stepper

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_EMA = "ema"  # name of the average among the states of a parameter
_EXTRA = "strop"  # what a state dict has beside torch's keys
STATES = ("fp32", "8bit")


@dataclass(frozen=True, slots=True)
class Extras:
    """Say what the step does beside the update. All of it is off by default."""

    max_grad_norm: float | None = None
    ema_decay: float | EMASchedule | None = None
    shadow_dtype: torch.dtype | None = None
    stochastic_rounding: bool = False
    seed: int = 0
    states: str = "fp32"
    process_group: ProcessGroup | None = None

    def __post_init__(self) -> None:
        if self.max_grad_norm is not None and not self.max_grad_norm >= 0:
            raise OptionError(f"max_grad_norm is {self.max_grad_norm}: it must not be negative")
        if self.shadow_dtype not in (None, torch.float16, torch.bfloat16):
            raise OptionError(f"shadow_dtype is {self.shadow_dtype}: use float16 or bfloat16")
        if self.states not in STATES:
            known = " and ".join(map(repr, STATES))
            raise UnsupportedError(f"states={self.states!r}: {known} are built")

    @property
    def schedule(self) -> EMASchedule | None:
        given = self.ema_decay
        return given if given is None or isinstance(given, EMASchedule) else EMASchedule(given)


class FusedOptimizer(Optimizer):
    """Unscales, checks, clips, updates, averages and casts in two sweeps over device memory."""

    # torch.amp.GradScaler then sets grad_scale and found_inf, and leaves skipping to the step.
    _step_supports_amp_scaling = True
    _rule: UpdateRule

    def __init__(self, params: Any, defaults: dict[str, Any], extras: Extras) -> None:
        self._extras = extras
        schedule = extras.schedule
        self.ema = None if schedule is None else ParameterEMA(self, schedule)
        self._shards = extras.process_group
        if self._shards is None and extras.max_grad_norm is not None:
            self._shards = group_of_shards()
        self._start()
        super().__init__(params, defaults)

    def _start(self) -> None:
        self.stepper: Stepper | None = None
        self._mesh_group: ProcessGroup | None = None  # of DTensors
        self._layout: Layout | None = None
        self._order: list[int] = []
        self._repeats: tuple[tuple[tuple[int, int], ...], ...] = ()
        self._counted: set[int] = set()  # slots whose steps have been bound
        self._counts = (0, 0)
        self._shadows: dict[Tensor, Tensor] = {}
        self._checks_itself = False

    # ---- what a script reads -------------------------------------------------------------------

    @property
    def grad_norm(self) -> Tensor | None:
        """Return the norm of all gradients in the last step, unscaled, before the clip: a 0-dim
        tensor on the device that the next step overwrites. None without ``max_grad_norm``."""
        if self.stepper is None or self._extras.max_grad_norm is None:
            return None
        return self.stepper.memory.norm

    def clip_to(self, norm: float | None) -> float | None:
        """Clip to another norm from the next step on, or no more; returns the norm before."""
        before = self._extras.max_grad_norm
        self._extras = replace(self._extras, max_grad_norm=norm)
        return before

    def parameters(self) -> list[Tensor]:
        """Return the parameters of all groups, in order."""
        return [p for group in self.param_groups for p in group["params"]]

    @property
    def counts(self) -> tuple[int, int]:
        """Return the steps of the average, and the steps that drew random numbers. This waits for
        the device."""
        if self.stepper is None:
            return self._counts
        first, second = self.stepper.memory.counters.tolist()
        return first, second

    @counts.setter
    def counts(self, values: tuple[int, int]) -> None:
        self._counts = values
        if self.stepper is not None:
            self.stepper.memory.counters.copy_(torch.tensor(values))

    def average_of(self, parameter: Tensor) -> Tensor:
        """Return the moving average of a parameter, which starts as a copy of it."""
        state = self.state[parameter]
        average = local_state(parameter, state.get(_EMA))
        dense = layouts.dense(parameter)
        found = layouts.state_like(dense, average, lambda new: new.copy_(dense))
        if found is not average:
            state[_EMA] = beside(parameter, found)
        return state[_EMA]  # type: ignore[no-any-return]

    def shadow_of(self, parameter: Tensor) -> Tensor:
        """Return the low-precision copy of a parameter, which every step writes anew."""
        shadow = self._shadows.get(parameter)
        if shadow is None:
            dense = layouts.dense(parameter)
            low = torch.empty_like(dense, dtype=self._extras.shadow_dtype).copy_(dense)
            shadow = nn.Parameter(low, requires_grad=parameter.requires_grad)
            self._shadows[parameter] = shadow
        return shadow

    def shadow(self, module: nn.Module) -> nn.Module:
        """Return a twin of the module whose parameters are low-precision copies of the module's.

        Train the twin: its gradients are those that ``step`` reads, and ``step`` writes the
        module's parameters and the twin's.
        """
        if self._extras.shadow_dtype is None:
            raise OptionError("no shadow_dtype was given to the optimizer")
        mine = set(map(id, self.parameters()))
        memo: dict[int, Any] = {}
        for parameter in module.parameters():
            if id(parameter) in mine:
                memo[id(parameter)] = self.shadow_of(parameter)
            else:  # frozen
                low = parameter.detach().to(self._extras.shadow_dtype, copy=True)
                memo[id(parameter)] = nn.Parameter(low, requires_grad=False)
        return copy.deepcopy(module, memo)

    @torch.no_grad()
    def refresh_shadows(self) -> None:
        """Write all low-precision copies anew: after something else than ``step`` has changed the
        parameters."""
        for parameter, shadow in self._shadows.items():
            shadow.copy_(parameter)

    # ---- torch's interface ---------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for shadow in self._shadows.values():
            if shadow.grad is not None:
                shadow.grad = None if set_to_none else shadow.grad.detach().zero_()

    @_disable_dynamo
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run one step. ``closure`` computes the loss and the gradients anew."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._update()
        return loss

    def take_over_check(self) -> dict[torch.device, Tensor]:
        """Promise that the next step looks for NaN and inf itself, and skips. Returns the tensor
        which will then say so, for ``strop.train.GradScaler``."""
        self._checks_itself = True
        stepper = self._stepper_for(self.parameters())
        return {stepper.memory.nonfinite.device: stepper.memory.nonfinite}

    def load_numbers(self) -> None:
        """Hand learning rates and the like to steps that a graph replays."""
        if self.stepper is not None:
            self.stepper.load(self._request())

    @property
    def shadows(self) -> list[Tensor]:
        return list(self._shadows.values())

    @property
    def written(self) -> tuple[Tensor, ...]:
        """Return parameters, averages and shadows that the last step wrote."""
        return () if self._layout is None else self._layout.written

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self._check_group(self.param_groups[-1])
        self._layout = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch's optimizer does; averages are among the states, counts beside
        them."""
        found: dict[str, Any] = super().state_dict()
        steps, draws = self.counts
        return {**found, _EXTRA: {"ema_steps": steps, "draws": draws}}

    def fp32_state_dict(self) -> dict[str, Any]:
        """Return ``state_dict`` with the numbers that 8-bit states stand for: torch's optimizer,
        and one with fp32 states, load this."""
        found, owners = self.state_dict(), self.parameters()
        states = found["state"].items()
        wide = {place: quantized.unpack(dict(state), owners[place]) for place, state in states}
        return {**found, "state": wide}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state, also from the torch optimizer of the same kind."""
        every = state_dict["state"].items()
        if self._extras.states == "fp32" and any(map(quantized.is_packed, dict(every).values())):
            raise OptionError(
                "the state dict has 8-bit states: make the optimizer with states='8bit', or load "
                "what fp32_state_dict() of the other one gives"
            )
        # torch would cast codes to the type of their parameter.
        plain = {
            place: {name: value for name, value in state.items() if name not in quantized.KEYS}
            for place, state in every
        }
        super().load_state_dict({**state_dict, "state": plain})
        self._restore_precision(state_dict)
        extra = state_dict.get(_EXTRA)
        if extra is not None:
            self.counts = (extra["ema_steps"], extra["draws"])
        self.refresh_shadows()

    def _restore_precision(self, state_dict: dict[str, Any]) -> None:
        """Restore the precision of states, which torch casts to the type of their parameter."""
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for place, parameter in zip(saved, self.parameters(), strict=True):
            for name, value in state_dict["state"].get(place, {}).items():
                mine = self.state[parameter].get(name)
                if name in quantized.KEYS:
                    self.state[parameter][name] = value
                elif isinstance(value, Tensor) and mine is not None and mine.dtype != value.dtype:
                    self.state[parameter][name] = value.to(mine.device)

    def __getstate__(self) -> dict[str, Any]:
        kept = {
            "_extras": self._extras,
            "_counts": self.counts,
            "ema": self.ema,
            "_shards": self._shards,  # nobody can copy or pickle these
        }
        return {**super().__getstate__(), **kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore what pickling left out. load_state_dict calls this too, with groups and states
        only."""
        if "_extras" in state:  # a copy, or out of a pickle
            self._start()
        counts, shadows = state.get("_counts", self.counts), self._shadows
        super().__setstate__(state)
        self.stepper, self._layout = None, None
        self._counts, self._shadows = counts, shadows
        for group in self.param_groups:
            self._check_group(group)

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raise for what torch's optimizer can do and this one cannot."""
        for name in ("amsgrad", "differentiable"):
            if group.get(name):
                raise UnsupportedError(f"{name}=True is not built; use torch.optim")
        if any(isinstance(beta, Tensor) for beta in group.get("betas", ())):
            raise UnsupportedError("betas must be numbers; the learning rate may be a tensor")

    # ---- a step --------------------------------------------------------------------------------

    def _update(self) -> None:
        grads = self._gradients()
        owners = self.parameters()
        if owners and (self.ema is not None or any(grad is not None for grad in grads)):
            stepper = self._stepper_for(owners)
            for slot, _ in chain(*self._repeats):
                grads[slot] = None
            active = [slot for slot, grad in enumerate(grads) if grad is not None]
            present = [grad for grad in grads if grad is not None]
            layout = self._layout_of(owners, active, present)
            layout.load()
            stepper.run(layout, layout.gradients(present), self._request())
            layout.store()
            torch.autograd.graph.increment_version(layout.written)
            if self.ema is not None and len(active) < len(owners):
                idle = set(range(len(owners))).difference(active)
                self._average_idle([owners[slot] for slot in sorted(idle)], stepper.memory.weight)
            for again in self._repeats:
                self._step_again(stepper, owners, again)
        elif self._shards is not None:
            take_part(self._shards)
        self._checks_itself = False

    def _step_again(
        self, stepper: Stepper, owners: Sequence[Tensor], slots: Sequence[tuple[int, int]]
    ) -> None:
        """Step parameters that are listed once more as torch does, each once more with its
        gradient."""
        groups, items, grads = self._groups(), list[Item](), list[Tensor]()
        for slot, first in slots:
            grad = owners[first].grad
            if grad is not None:
                items.append(self._make_item(first, groups[slot], owners[first], grad))
                grads.append(grad)
        if not items:
            return
        if self._rule.name == "sgd":  # torch looks for all buffers before the first update
            stepper.memory.steps[[item.slot for item in items]] -= 1
        layout = Layout(tuple(items), ())
        layout.load()
        stepper.run(layout, layout.gradients(grads), self._request())
        layout.store()
        torch.autograd.graph.increment_version(layout.written)

    def _gradients(self) -> list[Tensor | None]:
        """Return each gradient, which lies at a parameter, or at its shadow."""
        owners = self.parameters()
        grads = [p.grad for p in owners]
        if any_dtensor(owners):
            grads = [local_gradient(p, grad) for p, grad in zip(owners, grads, strict=True)]
        for slot, owner in enumerate(owners if self._shadows else ()):
            shadow = self._shadows.get(owner)
            if shadow is None or shadow.grad is None:
                continue
            if grads[slot] is not None:
                raise OptionError(
                    f"a parameter of shape {tuple(owner.shape)} and its shadow have a gradient "
                    "each: train the module or the twin that optimizer.shadow(module) gave"
                )
            grads[slot] = shadow.grad
        return grads

    def _average_idle(self, owners: Sequence[Tensor], weight: Tensor) -> None:
        """Update averages of parameters without a gradient, as EMAModel does."""
        for owner in owners:
            average, value = local_of(self.average_of(owner)), local_of(owner)
            if owner.requires_grad:
                average.sub_((average - value) * weight.to(average.dtype))
            else:
                average.copy_(value)

    def _request(self) -> Request:
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        found = found if isinstance(found, Tensor) and not self._checks_itself else None
        if found is not None and self._mesh_group is not None:
            raise UnsupportedError(
                "torch.amp.GradScaler asks each process about its own part of a DTensor: take "
                "strop.train.GradScaler, which asks all"
            )
        limit = self._extras.max_grad_norm
        return Request(
            numbers=tuple(self._rule.numbers(group) for group in self.param_groups),
            lr_tensors=tuple(
                (place, group["lr"])
                for place, group in enumerate(self.param_groups)
                if isinstance(group["lr"], Tensor) and group["lr"].device.type != "cpu"
            ),
            max_norm=math.inf if limit is None else limit,
            schedule=None if self.ema is None else self.ema.schedule,
            scale=scale,
            found_inf=found,
            measured=limit is not None or self._checks_itself,
            skips=found is not None or self._checks_itself,
            shards=self._shards or self._mesh_group,
        )

    def _stepper_for(self, owners: Sequence[Tensor]) -> Stepper:
        """Make the stepper when the device is known: scripts move models after making the
        optimizer."""
        device, order = owners[0].device, list(map(id, owners))
        stepper = self.stepper
        if stepper is None or stepper.memory.steps.device != device or order != self._order:
            self._mesh_group = group_of(owners)
            self._check_dtensors()
            memory = Memory.on(device, len(owners), self.counts)
            seed = self._extras.seed if self._extras.stochastic_rounding else None
            stepper = self.stepper = make_stepper(device, self._rule, memory, seed)
            self._layout, self._order, self._counted = None, order, set()
            self._repeats = _find_repeats(order)
        if self._repeats and (self._extras != Extras() or hasattr(self, "grad_scale")):
            raise UnsupportedError(
                "a parameter is listed twice in a group: list it once, as clipping, averages, "
                "8-bit states and loss scaling would count it twice"
            )
        return stepper

    def _check_dtensors(self) -> None:
        """Raise UnsupportedError for what is not built for DTensors."""
        extras = self._extras
        unbuilt = {
            "states='8bit'": extras.states != "fp32",
            "shadow_dtype (fully_shard has a MixedPrecisionPolicy)": extras.shadow_dtype
            is not None,
            "stochastic_rounding": extras.stochastic_rounding,
            "process_group": self._shards is not None,
        }
        asked = [name for name, is_asked in unbuilt.items() if is_asked]
        if self._mesh_group is not None and asked:
            raise UnsupportedError(
                f"{asked[0]} is not built for parameters that are DTensors: leave it out"
            )

    def _groups(self) -> list[int]:
        """Return the group of each slot."""
        sizes = [len(group["params"]) for group in self.param_groups]
        return [place for place, size in enumerate(sizes) for _ in range(size)]

    def _layout_of(
        self, owners: Sequence[Tensor], active: Sequence[int], grads: Sequence[Tensor]
    ) -> Layout:
        """Return the last layout, unless something in it has changed."""
        if self._layout is None or self._layout.key != self._key(owners, active, grads):
            items = self._make_items(owners, active, grads)
            self._layout = Layout(items, self._key(owners, active, grads))
        return self._layout

    def _key(
        self, owners: Sequence[Tensor], active: Sequence[int], grads: Sequence[Tensor]
    ) -> tuple[object, ...]:
        """Return what a layout was made from. Every step makes one: some 0.5 us a parameter."""
        params = [owners[slot] for slot in active]
        locals_ = params if self._mesh_group is None else [*map(local_of, params)]
        if any(grad.layout is not torch.strided for grad in grads):
            return ()  # no layout has it
        return (
            active,
            [self._rule.states(group) for group in self.param_groups],
            list(map(Tensor.data_ptr, locals_)),
            [
                id(value)
                for state in map(self.state.__getitem__, params)
                for value in state.values()
            ],
            [grad.dtype for grad in grads],
            [grad.stride() for grad in grads],
            [pointer % 16 == 0 for pointer in map(Tensor.data_ptr, grads)],
        )

    def _make_items(
        self, owners: Sequence[Tensor], active: Sequence[int], grads: Sequence[Tensor]
    ) -> tuple[Item, ...]:
        groups = self._groups()
        for slot, grad in zip(active, grads, strict=True):
            layouts.check(local_of(owners[slot]), grad, owners[0].device)
        self._bind_steps([(slot, owners[slot]) for slot in active])
        return tuple(
            self._make_item(slot, groups[slot], owners[slot], grad)
            for slot, grad in zip(active, grads, strict=True)
        )

    def _bind_steps(self, wanted: Sequence[tuple[int, Tensor]]) -> None:
        """Let the step counts of parameters be views of one array, so that one kernel counts."""
        assert self.stepper is not None
        counts = self.stepper.memory.steps
        found: dict[int, Tensor] = {}
        for slot, parameter in wanted:
            state = self.state[parameter]
            # torch's SGD counts no steps: a buffer means that there was one.
            has_stepped = state.get("momentum_buffer") is not None
            value = state.get("step", 1.0 if has_stepped else None)
            view = counts[slot]
            if isinstance(value, Tensor) and value.data_ptr() == view.data_ptr():
                continue
            if value is None and slot in self._counted:
                value = 0.0  # somebody has cleared the state
            if value is not None:
                value = torch.as_tensor(value, dtype=torch.float32, device=counts.device)
                found[slot] = value.reshape(())
            state["step"] = view
            self._counted.add(slot)
        if found:
            counts[list(found)] = torch.stack(list(found.values()))

    def _make_item(self, slot: int, group: int, owner: Tensor, grad: Tensor) -> Item:
        param = layouts.dense(owner)
        states, scales = self._states_of(owner, param, self._rule.states(self.param_groups[group]))
        average = None if self.ema is None else local_of(self.average_of(owner))
        shadow = None
        if self._extras.shadow_dtype is not None:
            shadow = self.shadow_of(owner)
            if not layouts.follows(shadow, param) or shadow.device != param.device:
                shadow.data = torch.empty_like(param, dtype=shadow.dtype)
        copies_grad = not layouts.follows(grad, param)
        return Item(
            owner=local_of(owner),
            param=param,
            grad_dtype=grad.dtype,
            states=states,
            scales=scales,
            average=average,
            shadow=None if shadow is None else shadow.detach(),
            group=group,
            slot=slot,
            copies_grad=copies_grad,
            grad_aligned=copies_grad or grad.data_ptr() % 16 == 0,
        )

    def _states_of(
        self, owner: Tensor, param: Tensor, names: Sequence[str]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return states beside a parameter's memory, made or converted where they do not fit, and
        their scales."""
        state = self.state[owner]
        if self._extras.states == "8bit" and quantized.applies(param):
            return quantized.pack(state, names, param)
        quantized.unpack(state, param)
        for name in names:
            before = local_state(owner, state.get(name))
            found = layouts.state_like(param, before, Tensor.zero_)
            if found is not before:
                state[name] = beside(owner, found)
        return tuple(local_of(state[name]) for name in names), ()


def make_stepper(
    device: torch.device, rule: UpdateRule, memory: Memory, seed: int | None
) -> Stepper:
    if device.type == "cpu":
        return CpuStep(rule, memory, seed)
    if device.type == "cuda":
        from strop.train.cuda_step import CudaStep  # needs the driver

        return CudaStep(device, rule, memory, seed)
    raise UnsupportedError(f"no fused step for the device {device}; use torch.optim")


def _find_repeats(order: Sequence[int]) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Find slots of parameters that a group lists more than once, which torch allows with a
    warning: round by round each further slot with the first one of its parameter."""
    firsts: dict[int, int] = {}
    rounds: list[list[tuple[int, int]]] = []
    seen = Counter[int]()
    for slot, owner in enumerate(order):
        first, count = firsts.setdefault(owner, slot), seen[owner]
        seen[owner] += 1
        if count:
            rounds += [[]] if count > len(rounds) else []
            rounds[count - 1].append((slot, first))
    return tuple(map(tuple, rounds))
