"""Run a forward that our own trace cannot hold by torch's: all but some calls is compiled.

Our own trace has no size for what ``unique``, ``nonzero`` or a mask give. Dynamo ends its graph in
front of such a call, has torch run it, and goes on behind it, where the size is that of an
argument. Its graphs come to our backend, as those of ``torch.compile`` do. They may write into
arguments and weights, as a static cache of keys wants it, and ours may not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from strop.dispatch.fallbacks import Fallbacks
from strop.dispatch.known_dispatchers import serves_a_part
from strop.errors import StropError
from strop.frontend.formats import UnknownSizeError
from strop.frontend.functional import OutsideWriteError
from strop.frontend.silent_logs import silent
from strop.frontend.symbols import SizeOfValuesError
from strop.options import Options

if TYPE_CHECKING:
    from strop.dispatch.dynamo import AotRecord

# Of one function. Torch's own limit is 8, and its count goes over all modules whose forward is the
# same function: with diffusers that is one for most kinds of models.
MOST_TRACES = 64
USUAL = 8  # calls
_SAID = "Explanation: "
# It logs a page that advises to have numbers in graphs; a forward that is cut says so itself.
_ADVISER = "torch._dynamo.variables.tensor"
_NESTED = "nested_tensor_from_jagged"  # torch refuses it in any trace but Dynamo's


def may_be_cut(error: StropError) -> bool:
    """Tell whether a trace has failed for a size that the values of a tensor decide, or for a write
    into an argument or a weight."""
    if isinstance(error, OutsideWriteError):
        return True
    cause = error.__cause__
    if isinstance(cause, GuardOnDataDependentSymNode):
        return not _is_truth(cause.cond)
    if isinstance(cause, UnknownSizeError):
        return True
    return isinstance(error, SizeOfValuesError) or _NESTED in str(cause)


def _is_truth(asked: Any) -> bool:
    """Tell whether a branch was on whether a tensor is true, as torch asks it of a trace: that is
    no size, and the whole forward stays in eager."""
    return isinstance(asked, sympy.Eq) and asked.lhs.is_Symbol and asked.rhs == 1


class CutForward:
    """This is the forward of one module in pieces. ``graphs`` are those that served it,
    ``through_aot`` are those that write into arguments, which AOTAutograd has taken over, and
    ``breaks`` counts why Dynamo has ended a graph. ``in_a_row`` calls came here, one after the
    other, the latest for ``usual``."""

    def __init__(self, module: nn.Module, options: Options, fallbacks: Fallbacks) -> None:
        self._module, self._options, self._fallbacks = module, options, fallbacks
        self._compiled: tuple[Any, Callable[..., Any]] | None = None  # of which function
        self.graphs = dict[Any, None]()
        self.through_aot: list[AotRecord] = []
        self.in_a_row, self.usual = 0, StropError()
        self.breaks = Counter[str]()

    @property
    def explained(self) -> str:
        """Return what Dynamo says of the first call that it leaves to torch, or nothing."""
        lines = (line.strip() for text in self.breaks for line in text.splitlines())
        said = (line.removeprefix(_SAID) for line in lines if line.startswith(_SAID))
        return next(said, "")

    @property
    def is_usual(self) -> bool:
        """Tell whether calls have been refused so often, one after the other, that the next one
        need not be looked at: Dynamo has guards of its own."""
        return self.in_a_row >= USUAL

    def _note(self, refusal: StropError) -> None:
        """Note how a call has run that was refused as a whole."""
        self.in_a_row, self.usual = self.in_a_row + 1, refusal
        if reason := self._described(refusal):
            self._fallbacks.note(reason)
        else:
            self._fallbacks.note_eager(str(refusal))

    def _described(self, refusal: StropError) -> str:
        """Say how the forward runs; nothing if it is in eager."""
        if not (self.graphs or self.through_aot):
            return ""
        if not self.breaks:
            return f"Dynamo traces it: {refusal}"
        said = f" ({self.explained})" if self.explained else ""
        return f"torch runs the calls at which it is cut: {refusal}{said}"

    def may_run(self) -> bool:
        """Say whether no part has a dispatcher of its own, which Dynamo would trace through."""
        return not serves_a_part(self._module)

    def run(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        refusal: StropError,
    ) -> tuple[str, Any]:
        """Return the result of ``forward``, a call of which has come to this ``refusal``, or why
        Dynamo cannot trace it and None."""
        # To import these takes a third of a second, and few forwards are cut.
        from torch._dynamo import config as dynamo_config
        from torch._dynamo.exc import TorchDynamoException
        from torch._dynamo.utils import counters as dynamo_counters

        from strop.dispatch import dynamo

        function = getattr(forward, "__func__", forward)
        if self._compiled is None or self._compiled[0] is not function:
            options: Any = self._options  # any object reaches the backend as it is
            self._compiled = function, torch.compile(forward, backend="strop", options=options)
        known, breaks = set(dynamo.AOT_LOG.served), Counter(dynamo_counters["graph_break"])
        num_records = len(dynamo.AOT_LOG.records)
        try:
            with dynamo_config.patch(recompile_limit=MOST_TRACES), silent(_ADVISER):
                result = self._compiled[1](*args, **kwargs)
        except TorchDynamoException as error:
            cause = getattr(error, "inner_exception", error)
            return f"torch cannot trace it: {str(cause).splitlines()[0]}", None
        self.graphs |= dict.fromkeys(g for g in dynamo.AOT_LOG.served if g not in known)
        self.through_aot += dynamo.AOT_LOG.records[num_records:]
        self.breaks += Counter(dynamo_counters["graph_break"]) - breaks
        self._note(refusal)
        return "", result
