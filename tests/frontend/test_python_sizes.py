"""int, min and max of a traced module: symbolic for sizes, Python's own for everything else."""

from __future__ import annotations

import builtins
import sys

import pytest
from torch import nn

from strop.frontend.python_sizes import symbolic_builtins


class Module(nn.Module):
    pass


HERE = vars(sys.modules[__name__])


def test_names_are_there_while_tracing_and_gone_after() -> None:
    with symbolic_builtins(Module()), symbolic_builtins(Module()):
        assert HERE["int"] is not builtins.int
    assert not {"int", "min", "max"} & HERE.keys()


def test_other_values_meet_what_python_has() -> None:
    with symbolic_builtins(Module()):
        assert int("17", 8) == 15
        assert int(2.9) == 2
        assert isinstance(3, int)
        assert issubclass(bool, int)
        assert int == int  # noqa: E721
        assert {int: "number"}[builtins.int] == "number"
        assert min([3, 1], key=lambda x: -x) == 3
        assert max((x for x in (1, 5, 2)), default=0) == 5
        assert min(4, 2.5) == 2.5
        with pytest.raises(ValueError, match="empty"):
            max([])
