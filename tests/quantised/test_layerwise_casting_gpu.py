"""Layerwise casting on a GPU: values, CUDA graphs, moves, and no weight kept in full."""

import pytest
import torch
from diffusers.hooks import apply_layerwise_casting
from torch import nn

import strop
from strop.options import Options
from strop.runtime.run import growing_memory
from tests.quantised.stand_ins import Net
from tests.quantised.test_layerwise_casting import BF16, E4M3, E5M2, F16, F32, Pixels, agree, cast

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
TYPES = [(E4M3, BF16), (E5M2, F16), (E4M3, F32), (BF16, F32), (F16, BF16)]


def pair(kind, storage=E4M3, compute=BF16, device="cuda"):
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(cast(kind().to(device), storage, compute))
    return made


@pytest.mark.parametrize(("storage", "compute"), TYPES, ids=str)
def test_values(storage, compute, tmp_path):
    module, eager = pair(Net, storage, compute)
    strop.optimize(module, options=Options(cache_dir=str(tmp_path), strict=True))
    with torch.inference_mode():
        for rows in (32, 32, 32, 64, 2, 1, 24):
            agree(module, eager, eager, torch.randn(rows, 64, device="cuda").to(compute))
    counters = module.forward.counters
    assert counters.eager_calls == 0
    assert counters.replays
    assert strop.explain(module).num_graphs == 1
    assert {p.dtype for p in module.parameters()} == {storage, compute}


@pytest.mark.parametrize(("storage", "compute"), [(E4M3, BF16), (E5M2, F16)], ids=str)
def test_all_kinds_of_layers(storage, compute, tmp_path):
    module, eager = pair(Pixels, storage, compute)
    strop.optimize(module, options=Options(cache_dir=str(tmp_path), strict=True))
    with torch.inference_mode():
        for count, height, width in ((2, 8, 8), (2, 8, 8), (1, 16, 8)):
            x = torch.randn(count, 8, height, width, device="cuda").to(compute)
            agree(module, eager, eager, x, torch.arange(count, device="cuda"))
    assert module.forward.counters.eager_calls == 0


def test_a_write_and_a_move_are_seen_behind_a_graph(tmp_path):
    module, eager = pair(Net)
    strop.optimize(module, options=Options(cache_dir=str(tmp_path), strict=True))
    x = torch.randn(32, 64, device="cuda").to(BF16)
    with torch.inference_mode():
        for _ in range(3):
            agree(module, eager, eager, x)
        for net in (module, eager):
            net.a.weight.data.copy_(net.a.weight.data.float().neg())
        agree(module, eager, eager, x)
        for net in (module, eager):
            net.to("cpu").to("cuda")
        for _ in range(3):
            agree(module, eager, eager, x)
    assert module.forward.counters.eager_calls == 0


def test_memory(tmp_path):
    count, width = 16, 2048
    with torch.device("cuda"):
        stack = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))
    stack = stack.eval().requires_grad_(False).to(BF16)
    apply_layerwise_casting(stack, E4M3, BF16)
    strop.optimize(stack, options=Options(cache_dir=str(tmp_path), strict=True))
    x = torch.randn(64, width, device="cuda").to(BF16)
    torch.cuda.synchronize()
    device = x.device  # other modules of this process may hold such memory, too
    before = torch.cuda.memory_allocated() + growing_memory.held_bytes(device)
    for _ in range(3):
        stack(x)
    torch.cuda.synchronize()
    more = torch.cuda.memory_allocated() + growing_memory.held_bytes(device) - before
    assert more < 6 * width * width * 2  # of 16 weights: two in each of two streams' memory
