"""C++ kernels against the interpreter, and their text."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from strop.codegen.cpp import emit
from strop.ir.interpret import run
from strop.ir.source import Emitted
from strop.runtime.build.cache import DiskCache
from strop.runtime.build.native import NativeFunction, NativeKernels
from tests.codegen import kernels
from tests.codegen.cpp_launch import exact_copies, launch, rms_ulp

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
GOLDEN = Path(__file__).parent.parent / "golden" / "cpp"
HEADER = Path(emit.__code__.co_filename).parent / "rt" / "vmath.h"

# One rounding on the store costs 0.2 to 0.3 ulp RMS. An fp32 kernel also rounds at each of its
# steps, independently, which adds up to less than 1 ulp over the dozen steps of these kernels.
MAX_RMS_ULP = 1.0

Built = dict[tuple[str, torch.dtype], tuple[kernels.Sample, Emitted, NativeFunction]]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    samples = {(n, d): make(d) for n, make in kernels.SAMPLES.items() for d in DTYPES}
    emitted = {key: emit(sample.kernel) for key, sample in samples.items()}
    native = NativeKernels(DiskCache(tmp_path_factory.mktemp("cache")))
    functions = native.build([e.source for e in emitted.values()])
    return {key: (samples[key], e, functions[e.source]) for key, e in emitted.items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", kernels.SAMPLES)
def test_parity(built: Built, name: str, dtype: torch.dtype):
    sample, emitted, function = built[name, dtype]
    for env in sample.envs:
        # A mean of 1 keeps sums well conditioned: their error is relative to the sum of |x|.
        tensors = sample.tensors(env, mean=1.0)
        exact = exact_copies(sample, tensors)
        run(sample.kernel, exact, env)
        launch(function, emitted, tensors, env)
        for param, got, want in zip(sample.kernel.params, tensors, exact, strict=True):
            if name == "casts":
                # fp32 and fp64 products may lie on two sides of a rounding border
                assert torch.isclose(got.double(), want.double(), rtol=0.02).all()
                assert (got != want.to(got.dtype)).double().mean() < 0.01
            elif not param.dtype.is_floating_point:
                assert torch.equal(got, want)
            elif param.is_output:
                assert rms_ulp(got, want) <= MAX_RMS_ULP, env


@pytest.mark.parametrize("name", kernels.SAMPLES)
def test_golden_text(request: pytest.FixtureRequest, name: str):
    text = emit(kernels.SAMPLES[name](torch.float32).kernel).source.text
    path = GOLDEN / f"{name}.cpp"
    if request.config.getoption("--update-golden"):
        path.write_text(text)
    assert text == path.read_text(), f"{path.name} differs; --update-golden writes it"


@pytest.mark.parametrize("name", ["group_norm_stats", "column_sum", "layer_norm", "softmax"])
def test_results_do_not_depend_on_the_number_of_threads(built: Built, name: str):
    sample, emitted, function = built[name, torch.float32]
    env = {"n": 2, "h": 40, "w": 41, "m": 999, "c": 77, "k": 200}
    results = []
    before = torch.get_num_threads()
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        tensors = sample.tensors(env)
        launch(function, emitted, tensors, env)
        results.append(tensors)
    torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_moments_of_a_large_mean(built: Built):
    """Mean 30 and deviation 0.01: E[x^2] - E[x]^2 in fp32 would have no correct digit."""
    for name, env in (("layer_norm", {"m": 20}), ("group_norm_stats", {"n": 2, "h": 30, "w": 31})):
        sample, emitted, function = built[name, torch.float32]
        tensors = sample.tensors(env)
        tensors[0].mul_(0.01).add_(30)
        tensors[1].zero_()
        if name == "group_norm_stats":
            tensors[2].zero_()
        exact = exact_copies(sample, tensors)
        run(sample.kernel, exact, env)
        launch(function, emitted, tensors, env)
        # The rounding of the mean alone shifts normalised values by 30 * 2^-25 / 0.01 = 1e-4,
        # times a weight of up to 3.
        torch.testing.assert_close(tensors[-1].double(), exact[-1], rtol=3e-4, atol=3e-4)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize(
    "name", ["softmax", "row_range", "column_extremes", "layer_norm", "group_norm_stats"]
)
def test_nan_and_infinity_go_through_reductions(built: Built, name: str, bad: float):
    sample, emitted, function = built[name, torch.float32]
    env = {"n": 2, "h": 5, "w": 9, "m": 40, "k": 200}
    for place in (0, 17, 333):
        tensors = sample.tensors(env)
        tensors[0][place] = bad
        exact = exact_copies(sample, tensors)
        run(sample.kernel, exact, env)
        launch(function, emitted, tensors, env)
        got, want = tensors[-1], exact[-1]
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got.isinf(), want.isinf())


@contextmanager
def fenced_pages() -> Iterator[int]:
    """The address of a readable page between two that kill the process when touched."""
    libc, page = ctypes.CDLL(None, use_errno=True), mmap.PAGESIZE
    memory = mmap.mmap(-1, 3 * page)
    view = (ctypes.c_char * (3 * page)).from_buffer(memory)
    start = ctypes.addressof(view)
    for fence in (start, start + 2 * page):
        assert libc.mprotect(ctypes.c_void_p(fence), page, mmap.PROT_READ * 0) == 0
    yield start + page
    for fence in (start, start + 2 * page):
        libc.mprotect(ctypes.c_void_p(fence), page, mmap.PROT_READ | mmap.PROT_WRITE)
    del view
    memory.close()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_guarded_loads_stay_in_bounds(built: Built, dtype: torch.dtype):
    """The first input ends where memory ends, the second begins where memory begins."""
    sample, emitted, function = built["cat_channels", dtype]
    env = {"m": 3}
    a, b, out = sample.tensors(env)
    with fenced_pages() as first, fenced_pages() as second:
        end = first + mmap.PAGESIZE - a.numel() * a.element_size()
        ctypes.memmove(end, a.data_ptr(), a.numel() * a.element_size())
        ctypes.memmove(second, b.data_ptr(), b.numel() * b.element_size())
        scalars = [expr.eval(env) for expr in emitted.scalars]
        function.bind([end, second, out.data_ptr()], scalars)()
    assert torch.equal(out.view(3, 63), torch.cat([a.view(3, 40), b.view(3, 23)], 1))


def test_equal_kernels_have_equal_sources():
    first, second = (emit(kernels.layer_norm(torch.float32).kernel) for _ in range(2))
    assert first == second
    assert hash(first.source) == hash(second.source)


def test_scalars_are_the_symbolic_sizes():
    emitted = emit(kernels.group_norm_silu(torch.float32).kernel)
    assert {"h*w", "n", "320*h*w"} <= {str(expr) for expr in emitted.scalars}
    assert not any(expr.is_const for expr in emitted.scalars)
    assert len(emitted.scalars) == len(emitted.source.scalars) == len(set(emitted.scalars))


def test_the_compiler_reads_little_beside_a_kernel():
    """Headers of the C++ library take as long to read as a small kernel to compile."""
    command = ["g++", "-std=c++20", "-E", "-P", "-w", "-x", "c++", str(HEADER)]
    read = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert len(read.splitlines()) < 1000  # 4,974 with <bit>, <limits>, <new> and <type_traits>
