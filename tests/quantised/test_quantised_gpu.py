"""Quantised weights on a GPU: values, CUDA graphs, and no weight kept in full."""

import pytest
import torch
from diffusers.models.embeddings import get_timestep_embedding
from torch import nn

import strop
from strop.api import optimize_module
from strop.dispatch.adapter import Adapter
from strop.frontend import composed_tensors
from strop.frontend.clones import clone_structure
from strop.frontend.composed_tensors import CodesInMemory
from strop.options import Options
from strop.runtime.loop.denoise_loop import DenoiseLoop
from strop.runtime.run import growing_memory
from tests.quantised import stand_ins
from tests.quantised.stand_ins import LINEARS, Dynamic, Net, quantised

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
KINDS = ("ByOperators", "ByFunctions", "Dynamic", "Nested", "Blocks", "Stated")


@pytest.fixture(autouse=True)
def classes_are_known(monkeypatch):
    start = f"{stand_ins.__name__}."
    known = {
        f"{start}Blocks": CodesInMemory("as_tensor"),
        f"{start}Stated": CodesInMemory("", ("state",)),
    }
    monkeypatch.setattr(composed_tensors, "_WITH_MEMORY", known)


@pytest.mark.parametrize("name", KINDS)
def test_values(name, tmp_path):
    torch.manual_seed(0)
    kind = getattr(stand_ins, name)
    with torch.device("cuda"):
        module = quantised(kind, Net(linear=LINEARS.get(kind, nn.Linear)))
    eager = clone_structure(module)
    strop.optimize(module, options=Options(cache_dir=str(tmp_path), strict=True))
    with torch.inference_mode():
        for rows in (32, 32, 32, 64, 24):
            x = torch.randn(rows, 64, device="cuda")
            bound = (
                {"rtol": 1e-2, "atol": 2e-2} if kind is Dynamic else {"rtol": 1e-4, "atol": 1e-4}
            )
            torch.testing.assert_close(module(x), eager(x), **bound)
    counters = module.forward.counters
    assert counters.eager_calls == 0
    assert counters.replays
    assert strop.explain(module).num_graphs == 1


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_floats_of_8_bits(dtype, tmp_path):
    class Short(nn.Module):
        def __init__(self):
            super().__init__()
            codes = torch.arange(256, device="cuda").to(torch.uint8)
            self.register_buffer("weight", codes.view(dtype).reshape(32, 8))

        def forward(self, x):
            return self.weight.to(x.dtype) + x, self.weight.t().float() * 2

    module, eager = Short().eval(), Short().eval()
    strop.optimize(module, options=Options(cache_dir=str(tmp_path), strict=True))
    x = torch.zeros(32, 8, device="cuda", dtype=torch.float16)
    for found, wanted in zip(module(x), eager(x), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    assert strop.explain(module).calls == {}


@pytest.mark.parametrize("name", ["ByOperators", "Nested", "Blocks"])
def test_a_row_or_two_are_multiplied_by_codes(name, tmp_path):
    torch.manual_seed(0)
    kind = getattr(stand_ins, name)
    with torch.device("cuda"):
        module = quantised(kind, LINEARS.get(kind, nn.Linear)(512, 256)).eval()
    eager = clone_structure(module)
    strop.optimize(module, options=Options(cache_dir=str(tmp_path), strict=True))
    with torch.inference_mode():
        for rows in (2, 1, 2, 3, 2):
            x = torch.randn(rows, 512, device="cuda")
            torch.testing.assert_close(module(x), eager(x), rtol=1e-4, atol=1e-4)
            latest = strop.explain(module).components[0].latest
            in_full = 512 * 256 * 4  # scales of blocks may be decoded by themselves
            assert (latest.decoded_bytes < in_full) == (rows < 3)
    assert module.forward.counters.eager_calls == 0


class ThirdIsTime(Adapter):
    def steady(self, skeleton):
        return (1,)

    def timestep(self, skeleton):
        return 2


class Timed(nn.Module):
    """Scales x by what a quantised linear makes of the timestep, and adds what another makes of the
    steady p."""

    def __init__(self):
        super().__init__()
        self.time, self.words = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x, p, t):
        return x * self.time(get_timestep_embedding(t, 64)) + self.words(p)


def test_a_timetable_has_what_comes_of_the_timestep(tmp_path):
    with torch.device("cuda"):
        net = quantised(stand_ins.ByOperators, Timed()).eval()
        p = torch.randn(2, 64)
        # Where torch first asked for functions that take a device while transformers had put its
        # own linspace there, as it does when it makes a model, it does not know torch's any more.
        timesteps = torch.linspace(999, 1, 12, device="cuda")
    eager, loop = clone_structure(net), DenoiseLoop()
    options = Options(cache_dir=str(tmp_path), strict=True, hoist=True)
    dispatcher = optimize_module(net, options, adapter=ThirdIsTime(), loop=loop)
    with torch.no_grad():
        for _ in range(2):
            loop.begin(timesteps)
            for t in timesteps:
                given = torch.randn(2, 64, device="cuda"), p, t.expand(2)
                torch.testing.assert_close(net(*given), eager(*given), rtol=1e-4, atol=1e-4)
            loop.end()
    assert dispatcher.counters.hoisted.num_timetables
    assert dispatcher.counters.hoisted.num_looked_up
    assert dispatcher.counters.eager_calls == 0


def test_memory(tmp_path):
    count, width = 16, 2048
    with torch.device("cuda"):
        layers = [quantised(stand_ins.ByFunctions, nn.Linear(width, width)) for _ in range(count)]
    stack = nn.Sequential(*layers).eval()
    for layer in layers:
        layer.bias = None
    strop.optimize(stack, options=Options(cache_dir=str(tmp_path), strict=True))
    x = torch.randn(16, width, device="cuda")
    before = torch.cuda.memory_allocated() + growing_memory.held_bytes(x.device)
    for _ in range(3):
        stack(x)
    torch.cuda.synchronize()
    more = torch.cuda.memory_allocated() + growing_memory.held_bytes(x.device) - before
    assert more < 6 * width * width * 4  # of 16 weights: two in each of two streams' memory
