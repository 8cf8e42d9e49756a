"""Serve the calls of one module on several devices: each gets some of the rows.

The first piece is a call of the module as ever. Its dispatcher looks at the module in it, so what
has been found there is known before the next piece goes to a twin: modules, settings and adapters
that are others are copied first. All pieces are launched before anybody waits. Values that somebody
has written where they lie are found by sums (``known_sums``), which a GPU takes beside the first
piece; where they are others, the twins are written anew and their pieces run again.

Whatever cannot be split runs on the first device, as without ``parallel``, and ``explain`` says
why.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from strop.dispatch.dispatcher import Dispatcher
from strop.dispatch.parallel.rules import family_of
from strop.dispatch.parallel.settings import Parallel, parallel_of
from strop.dispatch.parallel.split import Call, NotSplitError, Splitter, joined
from strop.dispatch.parallel.twin import Twin, mixes_rows
from strop.dispatch.signature import is_looked_into
from strop.dispatch.unsupported_calls import unfit_call
from strop.errors import OptionError, UnsupportedError
from strop.options import Options
from strop.runtime.derived.known_sums import KnownSums
from strop.runtime.loop.denoise_loop import DenoiseLoop
from strop.wording import counted

log = logging.getLogger("strop")
Wanted = tuple[str, Sequence[str | torch.device] | None]  # a mode, and devices


class ServedTwin:
    """A twin and the dispatcher that serves it, whose denoise loop is as the module's own."""

    def __init__(self, own: Dispatcher, twin: Twin) -> None:
        twin.follow()
        self.twin, self._loop_of_own, self._loop = twin, own.loop, DenoiseLoop()
        self._number = 0
        self.dispatcher = Dispatcher(
            twin.module,
            own.options,
            name=f"{own.name} on {twin.device}",
            adapter=own.adapter,
            loop=self._loop,
        )
        vars(twin.module)["forward"] = self.dispatcher

    def follow(self) -> None:
        """Make the twin what the module is."""
        with self.dispatcher.held():
            self.twin.follow()
        self.dispatcher.look_again()

    def copy_values(self) -> None:
        with self.dispatcher.held():
            self.twin.copy_values()
        self.dispatcher.look_again()

    def run(self, call: Call, splitter: Splitter) -> Any:
        device, loop = self.twin.device, self._loop_of_own
        if loop.is_running and self._number != loop.number:
            self._number = loop.number
            # whoever changes the module changes this one through ``follow`` alone
            self._loop.begin(splitter.timesteps_on(device), has_user_code=False)
        elif not loop.is_running and self._loop.is_running:
            self._loop.end()
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            return self.dispatcher(**call)

    def leave(self) -> None:
        self.dispatcher.leave()


class ParallelDispatcher(Dispatcher):
    """This stands for the forward of a module, and gives twins of it some rows of each call."""

    def __init__(self, module: nn.Module, options: Options, *, wanted: Wanted, **how: Any) -> None:
        """``wanted`` is the mode with the devices, if these are given. Raises OptionError for a
        module of which nobody knows the rows, and devices that are not there."""
        self._wanted, self.parallel = wanted, self.check(module, wanted)
        super().__init__(module, options, **how)
        family, home = family_of(module), self.parallel.devices[0]
        assert family is not None
        parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
        self._lead, self._names = family.lead, [p.name for p in parameters]
        self.twins: list[ServedTwin] = []
        self.num_split, self._alone = 0, Counter[str]()
        self._splitter = Splitter(self.parallel.devices, self.loop)
        self._here = Splitter([home] * len(self.parallel.devices), self.loop)
        self._sums = KnownSums(home)
        self._followed: Any = None  # what the twins are copies of, as the dispatcher knows it
        self._unfollowed: tuple[Any, str] = (None, "")  # why there can be no twins of that
        self._checked_loop = 0
        self._turn = threading.RLock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.has_left or is_looked_into():
            return self.run_plain(args, kwargs)
        with self._turn:
            try:
                call, sizes = self._cut(args, kwargs)
                pieces = self._splitter.pieces(call, sizes)
            except NotSplitError as error:
                self._note_alone(str(error))
                return super().__call__(*args, **kwargs)
            try:
                return joined(self._results(call, pieces, sizes), sizes, self.parallel.devices[0])
            except NotSplitError as error:  # none of our families gives such a result
                self._unfollowed = self._known(), str(error)
                self._note_alone(str(error))
                return super().__call__(*args, **kwargs)

    @staticmethod
    def is_able(module: nn.Module) -> bool:
        """Tell whether it is known which arguments of a module have a row for each picture."""
        return family_of(module) is not None

    @staticmethod
    def check(module: nn.Module, wanted: Wanted) -> Parallel:
        """Return over which devices calls of a module would be split. Raises OptionError for one of
        which nobody knows how, and for devices that are not there."""
        if family_of(module) is None:
            raise OptionError(
                f"parallel={wanted[0]!r}: nothing says which arguments of a"
                f" {type(module).__name__} have a row for each picture"
            )
        home = next((weight.device for weight in module.parameters()), torch.device("cpu"))
        return parallel_of(*wanted, home)

    @property
    def how(self) -> Mapping[str, Any]:
        return {"kind": type(self), "wanted": self._wanted}

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Meanwhile no other thread's call is looked at, nor under way on any device."""
        with self._turn, super().held():
            yield

    @property
    def served_twins(self) -> Mapping[str, Dispatcher]:
        """Return what serves the twins, by their devices."""
        return {
            f"{place} on {served.twin.device}": served.dispatcher
            for place, served in enumerate(self.twins, 2)
        }

    @property
    def alone(self) -> Mapping[str, int]:
        return self._alone

    @property
    def texts(self) -> list[str]:
        """Say what has been split and copied, in lines."""
        found = [f"{self.parallel}: {counted(self.num_split, 'call')} split"]
        found += [
            f"on {self.parallel.devices[0]} alone {n}x: {why}" for why, n in self._alone.items()
        ]
        for served in self.twins:
            twin, copies = served.twin, counted(served.twin.num_copies, "time")
            found.append(
                f"copy on {twin.device}: {twin.size_bytes / 1e6:.2f} MB of weights, copied {copies}"
            )
        return found

    def leave(self) -> None:
        """Keep no twin, and no place in the module."""
        with self._turn:
            self._forget_twins()
            super().leave()

    # splitting

    def _cut(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call, tuple[int, ...]]:
        """Return the arguments by their names, and how many rows each device gets. Raises
        NotSplitError where the call runs on the first device alone."""
        call = dict(zip(self._names, args, strict=False)) | kwargs
        lead = call.get(self._lead)
        if len(call) < len(args) + len(kwargs) or not isinstance(lead, Tensor) or not lead.dim():
            raise NotSplitError(f"it has no tensor {self._lead}, which would say how many rows")
        reason = self.parallel.refusal(lead.shape[0]) or self._not_able(lead, call)
        if reason:
            raise NotSplitError(reason)
        return call, self.parallel.sizes(lead.shape[0])

    def _not_able(self, lead: Tensor, call: Call) -> str:
        """Say why such a call cannot be split as the module is now, or nothing."""
        home = self.parallel.devices[0]
        if lead.device != home:
            return f"{self._lead} lies on {lead.device}"
        if reason := unfit_call(self.module) or self._unfit():
            return reason
        if self.state.effective.rows is not None:
            return "strop.lora_rows gives rows adapters of their own"
        if torch.is_grad_enabled() and lead.requires_grad:
            return "an argument requires a gradient"
        if home.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return "the caller captures a CUDA graph"
        if self._unfollowed[0] is not None and self._unfollowed[0] == self._known():
            return self._unfollowed[1]
        if self._is_undisturbed:
            return ""
        if any(weight.device != home for weight in self.module.parameters()):
            return f"its weights do not all lie on {home} now"
        return mixes_rows(self.module)

    @property
    def _is_undisturbed(self) -> bool:
        """Say whether everything has been looked at in the denoise loop that runs, twins too, and
        nobody can have changed anything since."""
        return self._look.is_undisturbed and self._checked_loop == self.loop.number

    def _note_alone(self, reason: str) -> None:
        if reason not in self._alone:
            log.warning("%s runs on %s alone: %s", self.name, self.parallel.devices[0], reason)
        self._alone[reason] += 1

    # running

    def _results(self, call: Call, pieces: Sequence[Call], sizes: Sequence[int]) -> list[Any]:
        """Return the result of each piece."""
        is_settled, since = self._is_undisturbed, self._sums.mark()
        before = dict(self.counters.fallbacks)
        first = super().__call__(**pieces[0])
        reason = self._fallback_since(before)
        followed = self._followed
        reason = reason or self._refusal_to_follow(len(sizes) - 1)
        if reason:  # nothing says that a twin would do the same
            self._note_alone(reason)
            others = self._here.pieces(call, sizes)[1:]
            return [first, *(super(ParallelDispatcher, self).__call__(**one) for one in others)]
        results = self._run_twins(pieces[1:])
        if not is_settled:
            has_copied = followed is not self._followed
            if not has_copied and self._sums.differs(self._watched(), since):
                self._copy_values()
                results = self._run_twins(pieces[1:])
            self._checked_loop = self.loop.number if self.loop.is_running else 0
        self.num_split += 1
        return [first, *results]

    def _run_twins(self, pieces: Sequence[Call]) -> list[Any]:
        both = zip(self.twins, pieces, strict=False)
        return [served.run(piece, self._splitter) for served, piece in both]

    def _fallback_since(self, before: Mapping[str, int]) -> str:
        """Say why a call ran otherwise than by a program, or nothing."""
        counts = self.counters.fallbacks.items()
        return next((why for why, count in counts if count != before.get(why, 0)), "")

    # twins

    def _known(self) -> Any:
        """Return what changes whenever the dispatcher has found the module to be another one, or
        has written weights with adapters in them."""
        state = self.state
        return state.num_scans, state.effective.num_writes, state.turned.values

    def _refusal_to_follow(self, count: int) -> str:
        """Have so many twins at least that are what the module is, or say why there are none."""
        known = self._known()
        try:
            if self._followed != known:
                for served in self.twins:
                    served.follow()
            while len(self.twins) < count:
                device = self.parallel.devices[len(self.twins) + 1]
                self.twins.append(
                    ServedTwin(self, Twin(self.module, self.parallel.devices[0], device))
                )
                self._followed = None
        except UnsupportedError as error:
            self._forget_twins()
            self._unfollowed = known, str(error)
            return str(error)
        if self._followed != known:
            self._sums.note(self._watched())
            self._followed = known
        return ""

    def _copy_values(self) -> None:
        for served in self.twins:
            served.copy_values()
        self._sums.note(self._watched())

    def _watched(self) -> list[Tensor]:
        return self.twins[0].twin.sources

    def _forget_twins(self) -> None:
        while self.twins:
            self.twins.pop().leave()
        self._followed, self._checked_loop = None, 0
        self._sums.forget()
        self._splitter.forget()
        self._here.forget()
