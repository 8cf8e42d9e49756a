"""What else begins with the first run of a program, and when."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from strop.dispatch.entry_runner import EntryRunner
from strop.options import Options


@pytest.mark.parametrize("compiled", [object(), None], ids=["compiled", "from disk"])
def test_kernels_for_other_sizes_take_no_time_from_a_run_that_has_its_own(compiled: Any) -> None:
    """Where compilers have just been at work they go on beside it; where all came from disk, this
    process would do both at once."""
    told: list[str] = []

    class Runner(EntryRunner):
        def __init__(self) -> None:
            self._options = Options(check_finite=False)
            self._counters: Any = SimpleNamespace(launches=0)

        def _bound_for(self, entry: Any, stream: int) -> Any:
            return SimpleNamespace(run=lambda *_: told.append("run"), num_launches=3)

        def _where(self, *_: Any) -> tuple[()]:
            return ()

        def _returned(self, *_: Any) -> Any:
            return "result"

    later = SimpleNamespace(start=lambda: told.append("later"))
    variant = SimpleNamespace(compiled=compiled, specs=(), later=later)
    entry: Any = SimpleNamespace(uses=1, variant=variant)
    assert Runner()._run_bound(entry, [], 0, None) == "result"
    assert told == (["run", "later"] if compiled is None else ["later", "run", "later"])
    entry.uses, told[:] = 2, []
    Runner()._run_bound(entry, [], 0, None)
    assert told == ["run"]


def test_what_few_need_is_not_loaded() -> None:
    """Dynamo and AOTAutograd take a third of a second and more."""
    code = "import sys, strop.api\nprint(sorted({'torch._dynamo', 'torch._functorch.aot_autograd',"
    code += " 'torch._inductor', 'networkx', 'triton', 'diffusers'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
