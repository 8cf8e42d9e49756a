"""Serve a module whose weights have a budget of device memory (``Options.weights_budget_bytes``).

Each weight has one place, which is where its Parameter lies: on the device, where it stays from
call to call, or in pinned memory of the host, from where each call streams it. So nothing is ever a
copy that could be older than what a user has written. ``runtime.run.stream_plan`` says which lie
where.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from strop.dispatch.budgeted_memory import BudgetedMemory
from strop.dispatch.module_state import ModuleState
from strop.dispatch.parts_offload import PartsOffload
from strop.dispatch.placed_weights import place
from strop.dispatch.weight_homes import WeightHomes
from strop.dispatch.weight_regions import Region, Regions, returned_state, uses_of
from strop.errors import OptionError
from strop.ir.program import InputSpec, Program
from strop.options import Options
from strop.runtime.run.layouts import bytes_of
from strop.runtime.run.run_order import RunOrder
from strop.runtime.run.stream_plan import (
    Block,
    StreamPlan,
    Use,
    plan_stream,
    replan,
    scattered_regions,
)
from strop.runtime.run.weight_layout import aligned
from strop.runtime.run.weight_stream import Streaming
from strop.wording import counted

DEVICES = ("cuda",)  # types of devices that a budget is for; tests add another


@dataclass(frozen=True, slots=True)
class Placed:
    """This is a program whose weights lie where the budget wants them, with what there was found
    of them."""

    program: Program
    order: RunOrder
    state: Sequence[Tensor | None]
    regions: Regions
    uses: Sequence[Use]


class WeightsBudget:
    """This keeps the weights of one module within a budget on one device."""

    def __init__(
        self,
        name: str,
        state: ModuleState,
        budget_bytes: int,
        offload: PartsOffload | None = None,
    ) -> None:
        """``offload`` says for which device, where hooks would take the weights of parts there.
        Without a budget of the user's, which is 0 then, it is as large as what these have there at
        most, and stretches to the least with which a call runs."""
        self.name, self._state, self.budget_bytes = name, state, budget_bytes
        self._offload, self._stretches = offload, not budget_bytes
        self._most_bytes = budget_bytes  # as planned last
        self._homes, self._memory = WeightHomes(), BudgetedMemory(state)
        self._resident_bytes = 0  # as planned last
        self.working_bytes = 0  # that the program bound so far that needs the most takes in a run
        self._scattered = set[int]()  # ids of weights that some program reads at several places
        self._plan: StreamPlan | None = None  # of the program that was bound last
        state.place = self._usual_place()
        state.scan()  # the structure says where weights are

    def _usual_place(self) -> torch.device | None:
        """Return where calls are expected: where weights are taken or are, or on a GPU."""
        if self._offload is not None:
            return self._offload.device
        first = next(iter(self._state.tensors), None)
        if first is not None and first.device.type in DEVICES:
            return first.device
        if "cuda" in DEVICES and torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return None

    def place_of(self, tensors: Sequence[Tensor]) -> torch.device | None:
        """Return on which device a call with these arguments runs, if that is one that has a
        budget."""
        if not tensors or self._offload is not None:
            return self._state.place
        devices = [tensor.device for tensor in tensors if tensor.device.type in DEVICES]
        return devices[0] if devices else None

    def is_away(self) -> bool:
        """Tell whether weights lie where torch could not run the module."""
        devices = {tensor.device for tensor in self._state.tensors}
        return len(devices) > 1 or (self.serves() and not devices <= {self._state.place})

    def serves(self) -> bool:
        """Tell whether calls run under the budget now: on a CPU they do not."""
        return self._state.place is not None and self._state.place.type in DEVICES

    def __str__(self) -> str:
        budget = f"weights_budget_bytes={self.budget_bytes}"
        if self._offload is not None:
            most = f"{self._offload.most_bytes / 1e6:.2f} MB"
            own = f"{self._offload.name}, by itself {most} at most, does nothing meanwhile"
            budget = own if self._stretches else f"{budget}; {own}"
        if self._plan is None:
            return f"weights: {budget}, of which no call was served yet"
        if not self.held_bytes:
            return f"weights: all on the host, until the next call ({budget})"
        kept, on = f"{self._resident_bytes / 1e6:.2f} MB stay", f"on {self._state.place}"
        if not self._plan.blocks:
            return f"weights: {kept} {on}, all of them ({budget}); {self._peak_text()}"
        streamed, slot = self._plan.streamed_bytes / 1e6, self._plan.slot_bytes / 1e6
        return (
            f"weights: {kept} {on}, {streamed:.2f} MB are streamed there in each call, in"
            f" {counted(len(self._plan.blocks), 'block')} through 2 slots of {slot:.2f} MB"
            f" ({budget}); {self._peak_text()}; without CUDA graphs, and nothing is hoisted out of"
            " loops"
        )

    def _peak_text(self) -> str:
        working = f"{self.working_bytes / 1e6:.2f} MB of working memory"
        return f"a call takes {self.peak_bytes / 1e6:.2f} MB at its peak, with {working}"

    @property
    def held_bytes(self) -> int:
        """Return the memory of the device that weights and slots take."""
        return self._resident_bytes + self._memory.slots_bytes

    @property
    def streamed_bytes(self) -> int:
        """Return what the program that was bound last copies to the device in each call."""
        return self._plan.streamed_bytes if self._plan is not None else 0

    @property
    def peak_bytes(self) -> int:
        """Return the memory of the device that calls take at their peak: weights that stay, slots,
        and working memory of the largest program. Arguments and what libraries keep are beside
        it."""
        return self.held_bytes + self.working_bytes

    # placing

    def put(
        self, program: Program, order: RunOrder, before_move: Callable[[], object]
    ) -> list[Tensor | None]:
        """Put weights where a program wants them, within the budget, and return its state
        arguments. ``before_move`` has everybody let go of them. Raises OptionError where that
        cannot be."""
        if reason := self.misfit(program):
            raise OptionError(f"weights_budget_bytes: {reason}")
        self._note_homes()
        self._unite(program.inputs)
        placed = self._found(program, order)
        if self._is_settled(placed):
            self._homes.note_put(self._state.tensors)
            return [*placed.state]
        before_move()
        self._state.release_pieces()
        plan, regions, uses = self._planned(placed), placed.regions, placed.uses
        del placed  # what it holds would keep memory that weights leave
        self._move(regions, plan, uses)
        self._homes.note_put(self._state.tensors)
        return [*self._found(program, order).state]

    def misfit(self, program: Program) -> str:
        """Say why weights of the module as it is cannot be streamed for a program of it, and what
        to do; nothing where they can."""
        out = "leave the budget out" if self._offload is None else "do without offloading"
        for name, tensor in zip(self._state.names, self._state.tensors, strict=True):
            if tensor.grad is not None:
                return f"{name} has a gradient: call zero_grad(set_to_none=True) first"
        if self._state.make_ups:
            return (
                f"{self._state.make_ups[0][0]} is a weight of another library's own class, which is"
                f" not streamed: load the model without quantisation, or {out}"
            )
        if len(self._state.effective.merged):
            return (
                "adapters other than plain LoRA need a second copy of the weights: fuse them into"
                f" the weights (fuse_lora), or {out}"
            )
        if returned_state(program):
            return (
                f"the forward of {self.name} gives back a weight or buffer, which may lie on the"
                f" host: have it give back a copy, or {out}"
            )
        return ""

    def _note_homes(self) -> None:
        """Note where weights were given. Without a budget of the user's, it follows from them."""
        self._homes.note(self._state.tensors, self._offload)
        if self._offload is not None and self._stretches:
            there = [t for t, device in self._homes.elsewhere if device.type != "cpu"]
            self.budget_bytes = self._offload.most_bytes + bytes_of(there)

    def _unite(self, inputs: Sequence[InputSpec]) -> None:
        """Take weights that are to be one piece, and lie on several devices, to the host."""
        tensors = self._state.tensors
        regions = None
        for spec in inputs[len(tensors) :]:
            parts = [tensors[index] for index in spec.merged]
            if spec.corners or len({part.device for part in parts}) < 2:
                continue
            regions = regions or Regions(tensors, ())
            for part in parts:
                number = regions.number_of(part)
                if number is not None and part.device.type != "cpu":
                    region = regions.all[number]
                    region.move(torch.empty(region.size_bytes, dtype=torch.uint8))

    def _found(self, program: Program, order: RunOrder) -> Placed:
        """Return how weights lie, in pieces that the program wants."""
        tensors = self._state.tensors
        state = place(program, tensors, self._state.tied)
        regions = Regions(tensors, [t for t in state if t is not None])
        numbers = {n: regions.number_of(t) for n, t in enumerate(state) if t is not None}
        known = {n: number for n, number in numbers.items() if number is not None}
        return Placed(program, order, state, regions, uses_of(program, order, known))

    def _is_settled(self, placed: Placed) -> bool:
        """Tell whether all weights of a program lie well, beside those of others."""
        regions, slot = placed.regions, self._memory.slot_bytes
        resident = self._memory.resident(regions)
        size = sum(aligned(regions.all[n].size_bytes) for n in resident)
        if not self._resident_bytes <= size <= self._most_bytes - 2 * slot:
            return False
        plan = replan(placed.uses, regions.sizes, resident, slot)
        if plan is None or (plan.blocks and not slot):
            return False
        streamed = (regions.all[n] for block in plan.blocks for n in block.offsets)
        return all(r.is_fixed or self._memory.is_pinned(r) for r in streamed)

    def _planned(self, placed: Placed) -> StreamPlan:
        regions = placed.regions
        fixed = {n for n, region in enumerate(regions.all) if region.is_fixed}
        here = {n for n in fixed if self._memory.is_resident(regions.all[n])}
        scattered = scattered_regions(placed.uses, regions.sizes, here) - fixed
        self._scattered.update(id(t) for n in scattered for t in regions.all[n].weights)
        for number, region in enumerate(regions.all):
            if not self._scattered.isdisjoint(map(id, region.weights)):
                here.add(number)
        away = fixed - here
        plan = plan_stream(
            placed.uses,
            regions.sizes,
            self.budget_bytes,
            here=here,
            away=away,
            stretches=self._stretches,
        )
        taken = sum(aligned(regions.all[n].size_bytes) for n in plan.resident) + 2 * plan.slot_bytes
        self._most_bytes = max(self.budget_bytes, taken)
        return plan

    # moving

    def _move(self, regions: Regions, plan: StreamPlan, uses: Sequence[Use]) -> None:
        """Take weights to where the plan has them: first those that leave the device."""
        read = dict.fromkeys(n for use in uses for n in use.regions)
        others = (n for n in range(len(regions.all)) if n not in read)
        going = [n for n in (*read, *others) if self._is_going(regions.all[n], n, n in read, plan)]
        leaves = any(self._memory.is_resident(regions.all[n]) for n in going)
        self._memory.take_home([regions.all[n] for n in going])
        self._memory.let_go(regions)
        self._memory.hold_slots(plan.slot_bytes)
        self._memory.give_to_others(of_device=leaves, of_host=bool(going))
        staying = (regions.all[number] for number in sorted(plan.resident))
        coming = [r for r in staying if not self._memory.is_resident(r) and not r.is_fixed]
        if coming:
            self._memory.make_room()
        for region in coming:
            self._memory.bring(region)
        self._memory.let_go(regions)
        resident = [regions.all[n] for n in self._memory.resident(regions)]
        self._resident_bytes = sum(aligned(region.size_bytes) for region in resident)

    def _is_going(self, region: Region, number: int, is_read: bool, plan: StreamPlan) -> bool:
        """Tell whether a region is to be taken to pinned memory."""
        if region.is_fixed or number in plan.resident:
            return False
        return self._memory.is_resident(region) or (is_read and not self._memory.is_pinned(region))

    def rest(self, forget: Callable[[], object]) -> None:
        """Take all weights to pinned memory of the host, and let go of the slots, until the next
        call. ``forget`` has everybody let go of the weights."""
        regions = Regions(self._state.tensors, ())  # it holds pieces that weights are parts of
        forget()
        self._memory.wait()
        with self._state.moved_by_us():
            self._memory.rest(regions)
        self._memory.let_go(regions)
        self._memory.drop_slots()
        self._resident_bytes = 0
        self._homes.note_put(self._state.tensors)
        self._state.merged.add([whole for region in regions.all for whole in region.wholes])
        self._memory.give_to_others(of_device=True)

    def give_back(self) -> None:
        """Take all weights to where they were given, and let go of the slots."""
        if self._homes.were_left(self._state.tensors):
            self.forget()
            return
        self._memory.wait()
        with torch.inference_mode(False), torch.no_grad():
            if self._homes.are_known:
                for region in Regions(self._state.tensors, ()).all:
                    home = self._homes.of(region)
                    if region.device.type == "meta":  # newer hooks have the weights
                        continue
                    if self._memory.is_resident(region) or region.device != home:
                        region.move(torch.empty(region.size_bytes, dtype=torch.uint8, device=home))
        self.forget()

    def forget(self) -> None:
        """Leave all weights where they are, and let go of the slots."""
        self._plan = None
        self._memory.forget()
        self._homes.forget()
        self._resident_bytes = self.working_bytes = 0

    # binding

    def bind(
        self, program: Program, order: RunOrder, state: Sequence[Tensor | None]
    ) -> tuple[list[Tensor | None], Streaming | None]:
        """Return what a program reads for its state arguments, which ``put`` has given, and what
        streams those that are not on the device."""
        placed = self._found(program, order)
        regions, slot = placed.regions, self._memory.slot_bytes
        plan = replan(placed.uses, regions.sizes, self._memory.resident(regions), slot)
        assert plan is not None  # ``put`` has seen to it
        self._plan = plan
        where = {n: (block, at) for block in plan.blocks for n, at in block.offsets.items()}
        found = [self._seen(regions, where, tensor) for tensor in state]
        if self._memory.lane is None:
            return found, None
        blocks = [self._memory.streamed(regions, block) for block in plan.blocks]
        return found, Streaming(self._memory.lane, blocks)

    def _seen(
        self, regions: Regions, where: dict[int, tuple[Block, int]], tensor: Tensor | None
    ) -> Tensor | None:
        """Return what a program reads in the place of a weight; None if it does not read it."""
        if tensor is None:
            return None
        number = regions.number_of(tensor)
        if number is None:
            return tensor.to(self._state.place)  # no element
        region = regions.all[number]
        if self._memory.is_resident(region):
            return tensor
        if number not in where:
            return None
        return region.placed(tensor).at(self._memory.part_of_slot(*where[number], region))


def budget_for(
    name: str, state: ModuleState, options: Options, offload: PartsOffload | None = None
) -> WeightsBudget | None:
    """Return what keeps the weights of a module within a budget, if ``options`` have one, or hooks
    take its weights to a GPU (``offload``)."""
    if offload is not None and offload.device.type not in DEVICES:
        return None
    budget_bytes = options.weights_budget_bytes
    if not budget_bytes and offload is None:
        return None
    return WeightsBudget(name, state, budget_bytes, offload)
