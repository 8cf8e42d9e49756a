"""Random programs with their kernels compiled: many programs to one run of the C++ compiler."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from hypothesis.errors import UnsatisfiedAssumption

from strop.codegen.assemble import Signature
from strop.debug import case as cases
from strop.debug import repro
from strop.debug.case import Case
from strop.debug.failure import Failure, failure_of
from strop.debug.minify import minify
from strop.dispatch.dispatcher import Dispatcher
from strop.ir.graph import Ref
from strop.options import Options
from strop.runtime.build.loader import kernel_loader
from tests.fuzz.interpreted import interpreted
from tests.fuzz.judge import judge, optimized
from tests.fuzz.programs import Program


def check_compiled(programs: Sequence[Program], folder: str) -> int:
    """Judge each program twice: interpreted, where its graph is made, and in machine code. How
    many kernels they have."""
    made: dict[Program, Dispatcher] = {}
    with interpreted():
        for program in programs:
            with suppress(UnsatisfiedAssumption):  # rounding decides what it computes
                dispatcher = optimized(program, folder, record=True)
                judge(program, dispatcher)
                made[program] = dispatcher
    sources = [s for d in made.values() for v in d.variants.all for s in v.program.sources]
    kernel_loader("cpu", 0, folder, 0).build(sources)
    for program, dispatcher in made.items():
        dispatcher.forget_shapes()  # bound to interpreted kernels
        try:
            judge(program, dispatcher, slack=4.0)
        except Exception as error:
            error.add_note(f"{program.script}\n{minified(dispatcher, folder)}")
            raise
    return len(set(sources))


def _fails_like(first: Failure, case: Case) -> bool:
    return first.is_like(failure_of(case, cases.random_inputs(case)))


def minified(dispatcher: Dispatcher, folder: str) -> str:
    """The smallest graph that still goes wrong on random values, as ``strop minify`` leaves it."""
    for variant in dispatcher.variants.all:
        assert variant.compiled is not None
        graph = variant.compiled.imported
        assert graph is not None
        returned = tuple(Ref(i) for i in range(len(graph.outputs)))
        case = Case(
            graph, Signature(returned, variant.program.guards), "cpu", Options(cache_dir=folder)
        )
        first = failure_of(case, cases.random_inputs(case))
        if first is None:
            continue
        small = minify(case, partial(_fails_like, first))
        target = Path(tempfile.mkdtemp(prefix="strop-fuzz-"))
        script = repro.write(small, cases.random_inputs(small), str(first), target)
        return f"its minimised graph: python {script}\n{small.graph}"
    return "its graphs do not fail on other random values: see the script above"
