"""Weights that are packed for products on a CPU: never stale, once for all sizes, as accurate."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.training_utils import EMAModel
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

import strop
from strop.dispatch.derived_inputs import PACKED, DerivedInput
from strop.runtime.derived.packed_weights import PackedWeights
from strop.testing import assert_as_accurate_as_eager
from tests.dispatch.packing import packing_everything
from tests.e2e import tiny

DTYPES = (torch.float32, torch.bfloat16)
SIZES = ((2, 6, 10), (2, 8, 8), (3, 12, 6))
NUM_WEIGHTS = 5


@pytest.fixture(autouse=True)
def _packs_everything() -> Iterator[None]:
    with packing_everything():
        yield


class Net(nn.Module):
    """Convolutions, among them one of 1x1, which a graph has as a linear, and linears, one of which
    is added to."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 32, 3, padding=1)
        self.down = nn.Conv2d(32, 48, 3, stride=2, padding=(2, 1), bias=False)
        self.point = nn.Conv2d(48, 40, 1)
        self.up, self.out = nn.Linear(40, 72), nn.Linear(72, 40)

    def forward(self, x: Tensor) -> Tensor:
        x = self.point(self.down(self.first(x).relu()).relu())
        rows = x.flatten(2).transpose(1, 2)
        return rows + self.out(self.up(rows).relu())


def made(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return Net().eval().requires_grad_(False).to(dtype)


def optimized(module: nn.Module, folder: Path, **more: Any) -> Any:
    options = tiny.options(cache_dir=str(folder), strict=True, **more)
    return strop.optimize(module, options=options)


def picture(size: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
    batch, height, width = size
    g = torch.Generator().manual_seed(batch + height)
    return torch.randn(batch, 4, height, width, generator=g).to(dtype)


def row(module: nn.Module) -> DerivedInput | None:
    (component,) = strop.explain(module).components
    return component.derived_of(PACKED)


def num_made(module: nn.Module) -> int:
    found = row(module)
    assert found is not None
    return found.num_made


def written(change: Callable[[Tensor], object]) -> Callable[[Any], None]:
    def apply(module: Any) -> None:
        with torch.no_grad():
            for own in module.parameters():
                change(own)

    return apply


def scaled(module: Any) -> dict[str, Tensor]:
    return {name: value * 0.7 for name, value in module.state_dict().items()}


def by_numpy(own: Tensor) -> None:
    bits = own.detach().view(torch.int16 if own.itemsize == 2 else torch.int32).numpy()
    np.bitwise_xor(bits, np.array(1 << (8 * own.itemsize - 1)).astype(bits.dtype), out=bits)


def one_bit(own: Tensor) -> None:
    bits = own.data.view(-1).view(torch.int16 if own.itemsize == 2 else torch.int32)
    bits[-1] ^= 1 << (8 * own.itemsize - 4)  # of the exponent of the last number


def moved(own: Tensor) -> None:
    own.data = own.data * 1.1


def replaced(module: Any) -> None:
    for part in module.modules():
        for name, own in list(part.named_parameters(recurse=False)):
            setattr(part, name, nn.Parameter(own.detach() * 1.3, requires_grad=False))


def converted(module: Any) -> None:
    dtype = module.up.weight.dtype
    module.double().to(dtype)


def by_an_optimizer(module: Any) -> None:
    module.requires_grad_(True)
    for own in module.parameters():
        own.grad = torch.ones_like(own)
    torch.optim.SGD(module.parameters(), lr=0.01).step()
    module.zero_grad()
    module.requires_grad_(False)


def by_ema(module: Any) -> None:
    average = EMAModel(module.parameters())
    for shadow in average.shadow_params:
        shadow.mul_(0.9)
    average.copy_to(module.parameters())


CHANGES: dict[str, Callable[[Any], Any]] = {
    "in place": written(lambda own: own.mul_(-1.2)),
    "through .data": written(lambda own: own.data.mul_(0.6)),
    "rows that change places, through .data": written(lambda own: own.data.copy_(own.flip(0))),
    "one bit through .data": written(one_bit),
    "every sign, by NumPy": written(by_numpy),
    "other .data": written(moved),
    "new Parameters": replaced,
    "load_state_dict": lambda module: module.load_state_dict(scaled(module)),
    "load_state_dict(assign=True)": lambda module: module.load_state_dict(
        scaled(module), assign=True
    ),
    "an optimizer": by_an_optimizer,
    "a moving average": by_ema,
    "another type and back": converted,
    "channels-last": lambda module: module.to(memory_format=torch.channels_last),
}
STAYS = ("another type and back", "channels-last")  # the values do


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_reads_the_weight_as_it_is(dtype: torch.dtype, tmp_path: Path) -> None:
    """Whoever has changed it, the result is bit by bit that of a module compiled afterwards."""
    module, x = optimized(made(dtype), tmp_path), picture(SIZES[0], dtype)
    plain = made(dtype)
    before = module(x)
    for name, change in CHANGES.items():
        change(module)
        change(plain)
        found = module(x)
        assert torch.equal(found, before) == (name in STAYS), name
        assert torch.equal(found, module(x)), name
        fresh = optimized(copy.deepcopy(plain), tmp_path)
        if name not in STAYS:  # where convolutions sum in another order
            assert torch.equal(found, fresh(x)), name
        before = found
    assert module.forward.counters.eager_calls == 0
    assert strop.explain(module).num_graphs == 2, "results of channels-last weights lie so"


def test_it_is_packed_once_for_all_sizes_and_counted(tmp_path: Path) -> None:
    module = optimized(made(), tmp_path)
    for size in (*SIZES, *SIZES):
        module(picture(size, torch.float32))
    found = row(module)
    assert found is not None
    assert (found.count, found.num_made) == (NUM_WEIGHTS, NUM_WEIGHTS)
    weights = [own for own in module.parameters() if own.dim() > 1]
    least = sum(own.nbytes for own in weights)
    assert least <= found.size_bytes == found.beside_bytes <= 10 * least  # of few channels: padded
    report = strop.explain(module)
    assert report.num_graphs == 1
    assert str(found) in str(report)
    kernels = [choice.kernel for choice in report.components[0].graphs[0].choices]
    assert set(kernels) == {"packed_weights"}
    with torch.no_grad():
        module.down.weight[0, 0, 0, 0] += 1
    module(picture(SIZES[0], torch.float32))
    assert num_made(module) == NUM_WEIGHTS + 1


def test_the_users_weights_stay_as_they_are(tmp_path: Path) -> None:
    module = made()
    before = {n: (p, p.data_ptr(), p.stride(), p.clone()) for n, p in module.named_parameters()}
    optimized(module, tmp_path)(picture(SIZES[0], torch.float32))
    for name, own in module.named_parameters():
        parameter, address, strides, value = before[name]
        assert own is parameter
        assert (own.data_ptr(), own.stride()) == (address, strides)
        assert torch.equal(own, value)
    assert list(module.state_dict()) == list(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_as_accurate_as_eager(dtype: torch.dtype, tmp_path: Path) -> None:
    module, plain = optimized(made(dtype), tmp_path), made(dtype)
    exact = made(dtype).double()
    for size in SIZES:
        x = picture(size, dtype)
        assert_as_accurate_as_eager(module(x), plain(x), exact(x.double()), str(size))


def test_products_that_are_not_packed(tmp_path: Path) -> None:
    """By the user's wish, and with groups: nothing is held."""

    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 8, 3, groups=2)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x)

    x = picture(SIZES[0], torch.float32)
    for module, off in (
        (Grouped().eval().requires_grad_(False), ()),
        (made(), ("packed_weights",)),
    ):
        expected = copy.deepcopy(module)(x)
        found = optimized(module, tmp_path, kernels_off=off)
        torch.testing.assert_close(found(x), expected, rtol=1e-4, atol=1e-5)
        assert row(found) is None


@pytest.mark.parametrize("lora", ["merged", "unmerged"])
def test_adapters(lora: str, tmp_path: Path) -> None:
    """Loaded, scaled, switched off, fused, taken back, unloaded: as eager does."""
    eager, names = made(), ["first", "down", "up", "out"]
    config = LoraConfig(r=3, lora_alpha=6, target_modules=names, init_lora_weights=False)
    fast, x = optimized(made(), tmp_path, lora=lora), picture(SIZES[0], torch.float32)

    def layers(module: Any) -> list[Any]:
        return [part for part in module.modules() if hasattr(part, "base_layer")]

    def add(module: Any) -> None:
        torch.manual_seed(3)
        inject_adapter_in_model(config, module, "a")

    def unload(module: Any) -> None:
        for name in names:
            setattr(module, name, getattr(module, name).base_layer)

    steps: list[Callable[[Any], object]] = [
        add,
        lambda module: [layer.set_scale("a", 0.4) for layer in layers(module)],
        lambda module: [layer.lora_B["a"].weight.data.mul_(2) for layer in layers(module)],
        lambda module: [layer.enable_adapters(False) for layer in layers(module)],
        lambda module: [layer.enable_adapters(True) for layer in layers(module)],
        lambda module: [layer.merge() for layer in layers(module)],
        lambda module: [layer.unmerge() for layer in layers(module)],
        unload,
    ]
    with torch.no_grad():
        for number, step in enumerate(steps):
            step(eager)
            step(fast)
            for _ in range(2):
                torch.testing.assert_close(
                    fast(x),
                    eager(x),
                    rtol=1e-3,
                    atol=1e-4,
                    msg=lambda m, number=number: f"step {number}: {m}",
                )


def test_it_goes_with_the_program_that_reads_it(tmp_path: Path) -> None:
    module = optimized(made(), tmp_path)
    module(picture(SIZES[0], torch.float32))
    held: PackedWeights = module.forward.state.packed
    assert len(held) == NUM_WEIGHTS
    strop.restore(module)
    gc.collect()
    assert (len(held), held.size_bytes) == (0, 0)


def test_threads_share_what_is_packed(tmp_path: Path) -> None:
    module, x = optimized(made(), tmp_path), picture(SIZES[0], torch.float32)
    for round_number in range(3):
        with torch.no_grad():
            module.up.weight.data.mul_(1.5)
        results: list[Tensor] = []

        def call(results: list[Tensor] = results) -> None:
            results.extend(module(x) for _ in range(4))

        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(results) == 16
        assert all(torch.equal(result, results[0]) for result in results), round_number
        with torch.no_grad():
            torch.testing.assert_close(results[0], restored(module)(x), rtol=1e-4, atol=1e-5)


def restored(module: Any) -> Any:
    plain = made()
    plain.load_state_dict(module.state_dict())
    return plain


def test_numbers_of_threads(tmp_path: Path) -> None:
    module, x = optimized(made(), tmp_path), picture((2, 64, 64), torch.float32)
    full, plain = torch.get_num_threads(), made()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            torch.testing.assert_close(module(x), plain(x), rtol=1e-4, atol=1e-5)
    finally:
        torch.set_num_threads(full)
