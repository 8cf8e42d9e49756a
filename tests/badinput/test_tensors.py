"""Tensors that no kernel reads, and others who look into a module: eager's result, and why."""

from __future__ import annotations

import copy
import errno
import logging
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from strop.errors import CaptureError, OptionError, UnsupportedError

from .nets import Net, X, optimized


class Tagged(Tensor):
    """A class of tensors of a user's own."""


class Same(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


UNUSUAL: dict[str, tuple[Callable[[], Tensor], str]] = {
    "sparse": (X.to_sparse, "layout torch.sparse_coo"),
    "sparse rows": (X.to_sparse_csr, "layout torch.sparse_csr"),
    "nested": (lambda: torch.nested.nested_tensor([X, X[:2]]), "a nested tensor"),
    "jagged": (lambda: torch.nested.nested_tensor([X, X[:2]], layout=torch.jagged), "NestedTensor"),
    "a class of its own": (lambda: X.as_subclass(Tagged), "a Tagged, a class of tensors"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", UNUSUAL)
def test_tensors_that_kernels_do_not_read(name: str, caplog: Any) -> None:
    make, reason = UNUSUAL[name]
    module, x = optimized(Same()), make()
    with torch.no_grad(), caplog.at_level(logging.WARNING, "strop"):
        found, wanted = [module(x) for _ in range(2)], x * 2
        assert type(found[0]) is type(wanted)
        assert found[0].layout == wanted.layout
        (message,) = caplog.messages
        assert reason in message
        torch.testing.assert_close(module(X), X * 2)  # others are compiled all the same
        with pytest.raises(UnsupportedError, match="argument is a"):
            optimized(Same(), strict=True)(x)
    assert module.forward.counters.eager_calls == 2


def test_weights_of_a_class_of_their_own() -> None:
    net = Net()
    net.lin.weight = nn.Parameter(net.lin.weight.detach().as_subclass(Tagged))
    module = optimized(net)
    with torch.no_grad():
        assert torch.equal(module(X), module.forward.eager(X))
        with pytest.raises(CaptureError, match=r"lin\.weight is a Tagged"):
            optimized(net, strict=True)(X)


def test_small_floats_go_through_without_a_check_for_nan() -> None:
    x = X.to(torch.float8_e4m3fn)
    with torch.no_grad():
        assert torch.equal(optimized(nn.Identity())(x).float(), x.float())


LOOKING: dict[str, Callable[[Any], Tensor]] = {
    "vmap": lambda m: torch.vmap(m)(X[None])[0],
    "jacobian": lambda m: torch.func.jacrev(m)(X[0]) @ X[0],
    "make_fx": lambda m: make_fx(m)(X)(2 * X),
    "trace": lambda m: torch.jit.trace(m, X)(X),
    "export": lambda m: torch.export.export(m, (X,)).module()(X),
    "compile": lambda m: torch.compile(m, backend="eager", fullgraph=True)(X),
    "copy": lambda m: copy.deepcopy(m)(X),
    "pickle": lambda m: pickle.loads(pickle.dumps(m))(X),
    "call with other weights": lambda m: torch.func.functional_call(
        m, {"lin.weight": torch.zeros(8, 8), "lin.bias": torch.ones(8)}, X
    ),
}


class Scaled(Net):
    """One kernel and no library call: goes the short way."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.lin.weight[0] + self.lin.bias)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [Net, Scaled])
@pytest.mark.parametrize("name", LOOKING)
def test_those_who_look_into_a_module_find_its_own_forward(
    name: str, kind: type[Net], caplog: Any
) -> None:
    torch._dynamo.reset()
    module, plain = optimized(kind()), kind().eval().requires_grad_(False)
    with torch.no_grad(), caplog.at_level(logging.WARNING, "strop"):
        module(X)
        torch.testing.assert_close(LOOKING[name](module), LOOKING[name](plain))
        torch.testing.assert_close(module(X), plain(X))
    assert not caplog.messages


def test_a_dump_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with torch.no_grad():
        with pytest.raises(OptionError, match=r"dump='.*file' cannot be written: File exists"):
            optimized(Net(), dump=str(tmp_path / "file"))(X)

        def full(*args: Any, **kwargs: Any) -> Any:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(Path, "write_text", full)
        with pytest.raises(OptionError, match="cannot be written: No space left on device"):
            optimized(Net(), dump=str(tmp_path / "folder"))(X)
