"""C++ kernels for AArch64, by a cross compiler and in an emulator, against those of x86-64."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import strop
from strop.bench.zoo import ZOO
from strop.codegen.cpp import emit
from strop.ir.source import Emitted
from strop.options import Options
from strop.runtime.build.cache import DiskCache
from strop.runtime.build.loader import BuiltAtOnce
from strop.runtime.build.native import NativeKernels
from tests.codegen import kernels, test_cpp_ops, test_cpp_random
from tests.codegen.cpp_launch import launch, rms_ulp
from tests.codegen.emulated import ARM_TARGETS, EmulatedKernels, Machine, needs_emulator
from tests.kernels import test_code_sums as sums
from tests.kernels import test_cpu_attention as attention

pytestmark = needs_emulator
USUAL = "aarch64-v8.6"
# Results of two processors differ by the order of sums and by what is fused: fp64 by most, in which
# a vector has the fewest lanes and its sums are the longest.
MOST_RMS_ULP = {torch.float32: 2.0, torch.float64: 16.0, torch.bfloat16: 1.0}
all_targets = pytest.mark.parametrize("target", ARM_TARGETS)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    made = Machine(tmp_path_factory.mktemp("machine"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> NativeKernels:
    return NativeKernels(DiskCache(tmp_path_factory.mktemp("here")))


class Arm:
    """The kernels of each target, built once in this module."""

    def __init__(self, folder: Path, machine: Machine) -> None:
        self.machine = machine
        self._of = {name: EmulatedKernels(folder, name, machine) for name in ARM_TARGETS}

    def __call__(self, target: str) -> EmulatedKernels:
        self.machine.forget()
        return self._of[target]


@pytest.fixture(scope="module")
def arm(tmp_path_factory: pytest.TempPathFactory, machine: Machine) -> Arm:
    return Arm(tmp_path_factory.mktemp("kernels"), machine)


def compare(
    emulated: EmulatedKernels,
    here: NativeKernels,
    samples: list[tuple[kernels.Sample, Emitted]],
    num_envs: int = 2,
) -> None:
    """Run each kernel on both processors, with the same operands."""
    sources = [emitted.source for _, emitted in samples]
    theirs, ours = emulated.build(sources), here.build(sources)
    for sample, emitted in samples:
        for env in sample.envs[:num_envs]:
            emulated.machine.forget()
            wanted, found = (sample.tensors(env, mean=1.0) for _ in range(2))
            launch(ours[emitted.source], emitted, wanted, env)
            launch(theirs[emitted.source], emitted, found, env)
            for param, got, want in zip(sample.kernel.params, found, wanted, strict=True):
                if sample.kernel.name.startswith("random"):  # rounding is the other tests' concern
                    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9, equal_nan=True)
                elif not param.is_output or not got.dtype.is_floating_point:
                    assert torch.equal(got, want), (sample.kernel.name, env)
                elif sample.kernel.name == "casts":
                    assert torch.isclose(got.double(), want.double(), rtol=0.02).all()
                else:
                    same = got.isfinite() & want.isfinite()
                    assert torch.equal(got[~same].isnan(), want[~same].isnan())
                    ulp = rms_ulp(got[same], want[same].double())
                    assert ulp <= MOST_RMS_ULP[got.dtype], (sample.kernel.name, env)


def sampled(names: list[str], dtype: torch.dtype) -> list[tuple[kernels.Sample, Emitted]]:
    found = [kernels.SAMPLES[name](dtype) for name in names]
    return [(sample, emit(sample.kernel)) for sample in found]


FEW = ["geglu", "layer_norm", "softmax", "column_extremes", "cat_channels", "casts"]


def test_some_kernels_give_what_they_give_here(arm: Arm, here: NativeKernels) -> None:
    compare(arm(USUAL), here, sampled(FEW, torch.float32))


def random_kernels(seeds: Iterable[int]) -> list[tuple[kernels.Sample, Emitted]]:
    made = [test_cpp_random.Builder(seed).build(f"random_{seed}") for seed in seeds]
    return [(sample, emit(sample.kernel)) for sample in made]


def test_sums_of_rows_that_fill_no_vector(arm: Arm, here: NativeKernels) -> None:
    """g++ 12 makes sums and marks of NaN of these two wrong where it may turn lanes off."""
    compare(arm("aarch64-sve"), here, random_kernels((19, 37)), 3)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@all_targets
def test_all_samples(target: str, dtype: torch.dtype, arm: Arm, here: NativeKernels) -> None:
    compare(arm(target), here, sampled([*kernels.SAMPLES], dtype), 4)


@pytest.mark.nightly
@all_targets
def test_random_kernels(target: str, arm: Arm, here: NativeKernels) -> None:
    compare(arm(target), here, random_kernels(range(60)), 3)


@pytest.mark.nightly
@all_targets
def test_every_row_of_the_operator_table(target: str, arm: Arm) -> None:
    emulated = arm(target)
    rows = {case: test_cpp_ops.sample_of(test_cpp_ops.ROWS[case[0]], case[1]) for case in OPERATORS}
    emulated.build([emit(sample.kernel).source for sample in rows.values()])
    for name, dtype in OPERATORS:
        emulated.machine.forget()
        test_cpp_ops.test_value(emulated, name, dtype)  # against torch in fp64
        if dtype in test_cpp_ops.FLOATS:
            test_cpp_ops.test_nan_and_infinity(emulated, name, dtype)


OPERATORS = test_cpp_ops.CASES


# ---- kernels written by hand -------------------------------------------------------------------


def check_code_sums(emulated: EmulatedKernels, shapes: list[tuple[int, int, int]]) -> None:
    for rows, columns, depth in shapes:
        emulated.machine.forget()
        x, weight = sums.codes(rows, depth), sums.codes(columns, depth)
        found = sums.ours(emulated, x, weight)
        assert torch.equal(found, sums.exact(x, weight)), (rows, columns, depth)
    x, weight = (torch.full((n, 1000), -128, dtype=torch.int8) for n in (7, 65))
    assert torch.equal(sums.ours(emulated, x, weight), sums.exact(x, weight))
    x, weight, zeros = sums.codes(7, 37), sums.codes(20, 37), torch.randint(-128, 129, (20,))
    emulated.machine.forget()
    wanted = ((x.long() - 100) @ (weight.long() - zeros[:, None]).t()).int()
    assert torch.equal(sums.ours_less(emulated, x, weight, 100, zeros), wanted)


@pytest.mark.parametrize("target", ["aarch64-v8.2", "aarch64-v8.6"])
def test_products_of_codes(target: str, arm: Arm) -> None:
    check_code_sums(arm(target), [(7, 37, 66), (1, 1, 1), (26, 17, 9), (25, 64, 127), (3, 33, 64)])


@pytest.mark.nightly
@all_targets
def test_products_of_codes_of_all_sizes(target: str, arm: Arm) -> None:
    shapes = [(rows, 37, 66) for rows in range(1, 52)]
    shapes += [(7, columns, depth) for columns in sums.COLUMNS for depth in sums.DEPTHS]
    check_code_sums(arm(target), [*shapes, (26, 300, 4099)])


def check_attention(emulated: EmulatedKernels, dtype: torch.dtype, count: int) -> None:
    """All together are as accurate as eager."""
    random.seed(3)
    torch.manual_seed(3)
    found = []
    for _ in range(count):
        emulated.machine.forget()
        operands, how = attention.random_call(70, dtype)
        found.append(
            (
                attention.ours(emulated, operands, **how),
                attention.torchs(operands, **how),
                attention.exact(operands, **how),
            )
        )
    attention.assert_as_accurate_together(found)


@pytest.mark.parametrize("dtype", attention.DTYPES, ids=str)
def test_attention(dtype: torch.dtype, arm: Arm) -> None:
    check_attention(arm(USUAL), dtype, 6)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", attention.DTYPES, ids=str)
@all_targets
def test_attention_at_random(target: str, dtype: torch.dtype, arm: Arm) -> None:
    check_attention(arm(target), dtype, 60)


# ---- models ------------------------------------------------------------------------------------


class EmulatedLoader(BuiltAtOnce, EmulatedKernels):
    """Loads the kernels of a model, which then run in the emulator."""

    counts = (0, 0)

    def watch(self, sources):
        return lambda: 0

    def splits(self, split, sizes):
        raise AssertionError("C++ kernels cut their reductions themselves")


def check_model(
    module: nn.Module, call: dict, loader: EmulatedLoader, patch: pytest.MonkeyPatch
) -> None:
    patch.setattr("strop.dispatch.variants.kernel_loader", lambda *_: loader)
    patch.setattr(loader.machine, "always_looks", True)
    before = loader.machine.num_runs
    with torch.no_grad():
        wanted = torch.utils._pytree.tree_leaves(module(**call))
        exact = [x for x in wanted if isinstance(x, torch.Tensor)]
        strop.optimize(module, options=Options(strict=True))
        found = torch.utils._pytree.tree_leaves(module(**call))
    for got, want in zip((x for x in found if isinstance(x, torch.Tensor)), exact, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    assert loader.machine.num_runs > before


@pytest.mark.nightly
@pytest.mark.parametrize("model", ZOO, ids=lambda model: model.name)
def test_a_model_of_the_zoo(
    model, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.forget()
    monkeypatch.setenv("STROP_CACHE_DIR", str(tmp_path))
    loader = EmulatedLoader(tmp_path / "kernels", USUAL, machine)
    check_model(model.made(), model.given(model.sizes.first[0]), loader, monkeypatch)
