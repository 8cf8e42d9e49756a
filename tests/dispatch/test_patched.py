"""Classes and functions with others in their places: before ``optimize``, between calls, and from a
cache on disk that was filled without them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import diffusers.models.activations
import diffusers.models.embeddings
import diffusers.models.normalization
import pytest
import torch
from diffusers.models.attention import FeedForward
from diffusers.models.attention_processor import Attention, AttnProcessor2_0
from diffusers.models.embeddings import TimestepEmbedding
from torch import Tensor, nn
from torch.nn import functional as F

import strop
from strop.options import Options
from tests.e2e import tiny

CLOSE = {"rtol": 1e-5, "atol": 1e-5}  # fp32 sums of sixteen


class Net(nn.Module):
    """Layers of diffusers and torch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = Attention(16, heads=2, dim_head=8, processor=AttnProcessor2_0())
        self.feed = FeedForward(16, activation_fn="gelu")
        self.time = TimestepEmbedding(16, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.feed(self.attention(x)))
        phases = diffusers.models.embeddings.get_timestep_embedding(x[0, :, 0], 16)
        return F.silu(self.time(y)) + phases


class Half(FeedForward):
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(*args, **kwargs) * 0.5


class OtherNet(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 3


class Other(AttnProcessor2_0):
    pass


class OtherNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def _scaled(usual: Callable[..., Any]) -> Callable[..., Any]:
    def scaled(*args: Any, **kwargs: Any) -> Any:
        return usual(*args, **kwargs) * 0.7

    return scaled


# owner and name of what is replaced
FUNCTIONS: dict[str, tuple[Any, str]] = {
    "a method of diffusers": (FeedForward, "forward"),
    "a processor's call": (AttnProcessor2_0, "__call__"),
    "another method": (Attention, "head_to_batch_dim"),
    "a method inside": (diffusers.models.activations.GELU, "gelu"),
    "a method of torch": (nn.Linear, "forward"),
    "a function of torch": (F, "gelu"),
    "a function of a library": (diffusers.models.embeddings, "get_timestep_embedding"),
    "the root's forward": (Net, "forward"),
    "the call of all modules": (nn.Module, "__call__"),
    "what that calls": (nn.Module, "_call_impl"),
}
NOT_CALLED = ("another method",)
IN_EAGER = (
    "the call of all modules",
    "what that calls",
)  # torch's own tracer takes the function that it knows


def _put(owner: Any, name: str, value: Any) -> Callable[[Net], None]:
    return lambda net: setattr(owner, name, value)


CHANGES: dict[str, Callable[[Net], None]] = {
    **{
        label: _put(owner, name, _scaled(getattr(owner, name)))
        for label, (owner, name) in FUNCTIONS.items()
    },
    "another class": lambda net: setattr(net.feed, "__class__", Half),
    "another class of the root": lambda net: setattr(net, "__class__", OtherNet),
    "another class of a layer of torch": lambda net: setattr(net.norm, "__class__", OtherNorm),
    "a method that hides another": lambda net: setattr(Other, "__call__", _scaled(KNOWN_CALL)),
    "a bound method": lambda net: setattr(net.attention.processor, "__class__", Scaling),
}
KNOWN_CALL = AttnProcessor2_0.__call__


class Scaling(Other):
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return KNOWN_CALL(self, *args, **kwargs) * 0.1


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    known = {(owner, name): vars(owner)[name] for owner, name in FUNCTIONS.values()}
    yield
    for (owner, name), value in known.items():
        setattr(owner, name, value)
    if "__call__" in vars(Other):
        del Other.__call__


def made() -> Net:
    net = Net().eval().requires_grad_(False)
    net.attention.processor = Other()
    return net


def check(module: Net, expected: Tensor) -> None:
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(module(X), expected, **CLOSE)


EARLIER = """
import torch
from torch import nn

usual = getattr(nn.Module, NAME)
setattr(nn.Module, NAME, lambda *args, **kwargs: usual(*args, **kwargs) * 0.7)

import strop

torch.manual_seed(0)
plain = nn.Sequential(nn.Linear(4, 4), nn.SiLU()).eval()
x = torch.randn(2, 4)
with torch.no_grad():
    expected = plain(x)
    strop.optimize(plain)
    for _ in range(3):
        torch.testing.assert_close(plain(x), expected)
"""


@pytest.mark.parametrize("name", ["__call__", "_call_impl"])
def test_what_was_replaced_before_strop_was_imported(name: str) -> None:
    run = [sys.executable, "-c", EARLIER.replace("NAME", repr(name))]
    subprocess.run(run, check=True, timeout=120, env={**os.environ, "STROP_STRICT": "0"})


X = torch.randn(1, 5, 16, generator=torch.manual_seed(0))


@pytest.mark.parametrize("name", [n for n in CHANGES if n not in NOT_CALLED])
def test_the_function_in_force_is_what_runs(name: str) -> None:
    """The cache on disk is shared by all of these cases: their keys must differ."""
    options = tiny.options(strict=name not in IN_EAGER)
    plain, module = made(), strop.optimize(made(), options=options)
    with torch.no_grad():
        usual = plain(X)
    check(module, usual)
    for net in (plain, module):
        CHANGES[name](net)
    with torch.no_grad():
        expected = plain(X)
    assert not torch.allclose(expected, usual), "a weak test"
    check(module, expected)
    again = made()  # with the change in force from the beginning, and with the same cache
    CHANGES[name](again)
    check(strop.optimize(again, options=options), expected)


def test_what_is_put_back_has_its_graph(tmp_path: Path) -> None:
    options = Options(cache_dir=str(tmp_path), strict=True)
    plain, module, usual = made(), strop.optimize(made(), options=options), FeedForward.forward
    for function in (usual, _scaled(usual), usual):
        FeedForward.forward = function
        with torch.no_grad():
            check(module, plain(X))
    assert module.forward.variants.num_captures <= 4  # of two functions, at two sizes each


def test_a_function_that_nothing_calls_changes_no_result(tmp_path: Path) -> None:
    module = strop.optimize(made(), options=Options(cache_dir=str(tmp_path), strict=True))
    with torch.no_grad():
        expected = module(X)
        Attention.head_to_batch_dim = _scaled(Attention.head_to_batch_dim)
        check(module, expected)


JOB = """
import sys
import torch
import strop
from strop.options import Options
from tests.dispatch import test_patched as job

folder, name = sys.argv[1:]
net = job.made()
if name:
    job.CHANGES[name](net)
with torch.no_grad():
    expected = net(job.X)
    strop.optimize(net, options=Options(cache_dir=folder, strict=True))
    torch.testing.assert_close(net(job.X), expected, **job.CLOSE)
print(net.forward.variants.num_captures)
"""


def in_a_process(folder: Path, name: str) -> int:
    """How many graphs were traced there."""
    paths = [str(Path(strop.__file__).parents[1]), str(Path(__file__).parents[2])]
    done = subprocess.run(
        [sys.executable, "-c", JOB, str(folder), name],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )
    assert not done.returncode, done.stderr
    return int(done.stdout)


def test_the_cache_on_disk_knows_functions(tmp_path: Path) -> None:
    """Plans of functions as their files define them are found again; those of others are not."""
    assert in_a_process(tmp_path, "")
    assert not in_a_process(tmp_path, "")
    assert in_a_process(tmp_path, "a method of diffusers")
    assert not in_a_process(tmp_path, "a method of diffusers")
    assert not in_a_process(tmp_path, "")


def test_keys_of_a_unet_are_the_same_in_every_process() -> None:
    """Sets among constants and addresses in texts would make them others. (Optimising a pipeline
    puts functions of ours into diffusers: this process may have other keys.)"""
    code = (
        "from tests.e2e import tiny; from strop.dispatch.module_state import ModuleState;"
        "print(ModuleState(tiny.unet()).global_guards.code)"
    )
    paths = [str(Path(strop.__file__).parents[1]), str(Path(__file__).parents[2])]
    found = set()
    for seed in ("7", "8"):
        environment = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            env=os.environ | environment,
        )
        assert not done.returncode, done.stderr
        found.add(done.stdout.split()[-1])
    assert len(found) == 1
