"""Tell whether a case fails, and how: the predicate of ``strop repro``, ``minify`` and
``bisect``."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

import strop
from strop.debug import case as cases
from strop.debug.case import Case, inaccuracy, is_gross
from strop.debug.reference import evaluate, input_values, is_random
from strop.errors import OptionError, StropError
from strop.ir.graph import Node, Ref

# A compiler with a bug in it raises these. Wrong machine code may also end the process.
CRASHES = (
    StropError,
    AssertionError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    RuntimeError,
    RecursionError,
    ArithmeticError,
)
CRASH, WRONG, INACCURATE = "crash", "wrong", "inaccurate"


@dataclass(frozen=True, slots=True)
class Failure:
    """Describe a failure; ``place`` tells failures of one kind apart: the error and the function
    that raised it."""

    kind: str  # CRASH, WRONG, or INACCURATE: off by little, but more than docs/numerics.md allows
    place: str
    detail: str

    def is_like(self, other: Failure | None) -> bool:
        return other is not None and (self.kind, self.place) == (other.kind, other.place)

    def __str__(self) -> str:
        return f"{self.kind}{f' in {self.place}' if self.place else ''}: {self.detail}"


def failure_of(case: Case, arguments: Mapping[int, Tensor]) -> Failure | None:
    """Compile, build and run ``case``, and compare its results with torch's."""
    cases.torch_device(case)
    if any(map(is_random, case.graph.nodes)):
        raise OptionError(f"{case.name} draws random numbers: no two runs of it agree")
    try:
        results = cases.run(case, case.compile(), arguments)
    except CRASHES as error:
        return _crash(error)
    return wrong_results(case, [r for r in results if isinstance(r, Tensor)], arguments)


def _crash(error: BaseException) -> Failure:
    """Describe a crash by the innermost function of Strop's own."""
    root = str(Path(strop.__file__).parent)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(root)]
    where = f"{Path(frames[-1].filename).stem}.{frames[-1].name}" if frames else "torch"
    line = (str(error).splitlines() or ["no message"])[0]
    return Failure(CRASH, f"{type(error).__name__} of {where}", line)


def wrong_results(
    case: Case, results: list[Tensor], arguments: Mapping[int, Tensor]
) -> Failure | None:
    """Return the first result that is less accurate than docs/numerics.md allows."""
    outputs = [case.graph.outputs[i.index] for i in case.signature.returned if isinstance(i, Ref)]
    given = input_values(case.graph, arguments)
    eager = evaluate(outputs, given, case.env, exact=False)
    exact = evaluate(outputs, given, case.env, exact=True)
    for number, (node, actual) in enumerate(zip(outputs, results, strict=True)):
        text = inaccuracy(actual, eager[node], exact[node])
        if text:
            kind = WRONG if is_gross(actual, eager[node], exact[node]) else INACCURATE
            return Failure(kind, "", f"result {number}, {_name(node)}: {text}")
    return None


def _name(node: Node) -> str:
    return f"{node.op} of {node.origin or 'the module'}"
