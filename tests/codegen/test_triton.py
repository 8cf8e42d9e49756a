"""Generated Triton text: its values in Triton's interpreter, and the text itself."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from strop.codegen.triton import emit
from strop.codegen.triton_interpreter import interpret
from strop.errors import CodegenError
from strop.ir import interpret as judge
from strop.ir.dims import const, symbol
from strop.ir.loops import Bag, Load, LoopKernel, Schedule
from strop.ir.ops import OPS, POINTWISE, Operands, Types
from strop.ir.source import Emitted, KernelForm
from tests.codegen import kernels, triton_samples
from tests.codegen.kernels import SAMPLES, Sample, Writer, axis, index, reads, writes

F16, BF16, F32, F64, I64 = torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64
GOLDEN = Path(__file__).parents[1] / "golden" / "triton"
# A few units in the last place of what is stored. The interpreter cuts bf16 where GPUs round.
TOLERANCE = {F64: 1e-12, F32: 2e-5, F16: 2e-3, BF16: 2e-2}


def fitting(emitted: Emitted, env: Mapping[str, int]) -> list[Emitted | KernelForm]:
    """Every form of a kernel that is right for these sizes."""
    fits = [
        v
        for v in emitted.variants
        if (size := v.size.eval(env)) <= v.most and not size % v.multiple
    ]
    return [emitted, *fits]


def run(
    sample: Sample,
    tensors: Sequence[torch.Tensor],
    env: Mapping[str, int],
    splits: int = 1,
    form: Emitted | KernelForm | None = None,
) -> None:
    emitted = form or emit(sample.kernel)
    sizes = {f"s{i}": size.eval(env) for i, size in enumerate(emitted.scalars)}
    scratch = interpret(emitted.source, tensors, sizes | {"splits": splits})
    for buffer, tensor in zip(emitted.source.scratch, scratch, strict=True):
        assert not buffer.zeroed or not tensor.any(), "counters are left at zero"


def check(sample: Sample, env: Mapping[str, int], splits: int = 1, mean: float = 0.0) -> None:
    expected = sample.tensors(env, mean=mean)
    judge.run(sample.kernel, expected, env)
    tolerance = max(TOLERANCE.get(param.dtype, 0.0) for param in sample.kernel.params)
    forms = fitting(emit(sample.kernel), env)
    for form in (forms[0], forms[-1]) if len(forms) > 1 else forms:
        tensors = sample.tensors(env, mean=mean)
        run(sample, tensors, env, splits, form)
        for param, found, wanted in zip(sample.kernel.params, tensors, expected, strict=True):
            if param.is_output:
                torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
@pytest.mark.parametrize("name", SAMPLES)
def test_values(name: str, dtype: torch.dtype):
    sample = SAMPLES[name](dtype)
    if name == "casts":  # the sample itself rounds to bf16, which the interpreter cuts
        pytest.skip("see test_cast_rounds")
    splits = (1, 3, 40) if sample.kernel.schedule is Schedule.COLUMN else (1,)
    for env in sample.envs[:2]:
        for count in splits:
            check(sample, env, count)


@pytest.mark.parametrize("name", triton_samples.CONTIGUOUS)
def test_values_of_model_sizes(name: str):
    build = triton_samples.CONTIGUOUS[name]
    env = {"b": 1, "h": 1, "w": 1, "n": 1, "m": 5}
    check(build(F16, 320), env, splits=5)


@pytest.mark.parametrize("name", ["layer_norm", "softmax", "column_sum", "group_norm_stats"])
def test_double_precision(name: str):
    check(SAMPLES[name](F64), SAMPLES[name](F64).envs[1], splits=3)


@pytest.mark.parametrize("splits", [1, 3, 40])
@pytest.mark.parametrize("name", ["layer_norm", "group_norm_stats"])
def test_moments_survive_a_large_mean(name: str, splits: int):
    """E[x^2] - E[x]^2 in fp32 would lose every digit of the variance here."""
    sample = SAMPLES[name](F32)
    tensors = sample.tensors(sample.envs[1])
    tensors[0] += 3000.0
    expected = [tensor.clone() for tensor in tensors]
    judge.run(sample.kernel, expected, sample.envs[1])
    run(sample, tensors, sample.envs[1], splits)
    torch.testing.assert_close(tensors[-1], expected[-1], rtol=1e-3, atol=3e-3)


def looped_layer_norm(dtype: torch.dtype) -> Sample:
    """Moments over a symbolic number of cols, and two levels of reductions above one store."""
    m, k = symbol("m"), symbol("k")
    w = Writer(dtype)
    x = w.load(0, index(r=k, c=1))
    mean, var = w.reduce("moments", x)
    y = w.apply("div", w.apply("sub", x, mean), w.apply("sqrt", var))
    (top,) = w.reduce("amax", y)
    w.store(1, index(r=k, c=1), w.apply("sub", y, top))
    w.store(2, index(r=1), top)
    axes = (axis("r", m),), (axis("c", k, reduced=True),)
    params = reads(dtype) + writes(dtype, dtype)
    kernel = LoopKernel("looped", Schedule.ROW, *axes, params, w.take())
    return Sample(kernel, (m * k, m * k, m), ({"m": 3, "k": 4500},))


def test_moments_in_sweeps():
    sample = looped_layer_norm(F32)
    check(sample, sample.envs[0])
    check(sample, {"m": 2, "k": 7})


def test_whole_reduction_to_one_number():
    k = symbol("k")
    w = Writer(F32)
    (total,) = w.reduce("sum", w.load(0, index(c=1)))
    w.store(1, index(), total)
    params = reads(F32) + writes(F32)
    kernel = LoopKernel("total", Schedule.ROW, (), (axis("c", k, True),), params, w.take())
    check(Sample(kernel, (k, symbol("one")), ()), {"k": 5000, "one": 1})


def test_tail_uses_values_of_the_body():
    m = symbol("m")
    w = Writer(F32)
    scale = w.apply("mul", w.load(1, index(c=1)), w.literal(2.0))
    (total,) = w.reduce("sum", w.load(0, index(r=24, c=1)))
    body = w.take()
    w.store(2, index(c=1), w.apply("mul", total, scale))
    axes = (axis("r", m, True),), (axis("c", 24),)
    kernel = LoopKernel(
        "scaled", Schedule.COLUMN, *axes, reads(F32, F32) + writes(F32), body, w.take()
    )
    sample = Sample(kernel, (m * 24, symbol("c"), symbol("c")), ())
    check(sample, {"m": 9, "c": 24}, splits=2)


@pytest.mark.parametrize("name", ["softmax", "row_range", "column_extremes"])
def test_nan_propagates(name: str):
    sample = SAMPLES[name](F32)
    tensors = sample.tensors(sample.envs[1])
    tensors[0][3] = math.nan
    expected = [tensor.clone() for tensor in tensors]
    judge.run(sample.kernel, expected, sample.envs[1])
    run(sample, tensors, sample.envs[1], splits=2)
    for found, wanted in zip(tensors[1:], expected[1:], strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5, equal_nan=True)
        assert found.isnan().any()


def test_cast_rounds():
    n = symbol("n")
    w = Writer(F32)
    x = w.apply("cast", w.apply("mul", w.load(0, index(i=1)), w.literal(3.1)), dtype=F16)
    w.store(1, index(i=1), w.apply("sub", x, w.load(0, index(i=1))))
    params = reads(F32) + writes(F32)
    kernel = LoopKernel("round", Schedule.POINTWISE, (), (axis("i", n),), params, w.take())
    check(Sample(kernel, (n, n), ()), {"n": 1000})


def operands(name: str) -> tuple[list[torch.dtype], torch.dtype]:
    """Operand and result types that a row of the operator table asks for."""
    row = OPS[name]
    if row.operands is Operands.SELECT:
        return [torch.bool, F32, F32], F32
    if row.operands is Operands.TRUTH or Types.BOOL is row.types:
        return [torch.bool] * row.arity, torch.bool
    own = F32 if Types.FLOAT in row.types else I64
    return [own] * row.arity, torch.bool if row.operands is Operands.PROMOTED else own


@pytest.mark.parametrize("row", POINTWISE, ids=lambda row: row.name)
def test_every_operator(row):
    args, out = operands(row.name)
    sample = kernels.pointwise(row.name, args, out, row.attrs)
    tensors = sample.tensors({"n": 100})
    low, high = row.example
    generator = torch.Generator().manual_seed(1)
    for i, dtype in enumerate(args):
        if dtype == F32:
            tensors[i] = torch.rand(100, generator=generator) * (high - low) + low
        if dtype == I64:
            tensors[i] = torch.randint(1, 9, (100,), generator=generator)
            tensors[i][::2] *= -1 if i else 1
            tensors[i][::3] *= -1
    exact = [t.double() if t.dtype == F32 else t for t in tensors[: len(args)]]
    expected = row.reference(*exact, **row.attrs)
    run(sample, tensors, {"n": 100})
    found = tensors[-1]
    torch.testing.assert_close(found, expected.to(found.dtype), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", [F64, I64, torch.int8], ids=str)  # numpy has no ~ of uint8
def test_every_operator_in_its_other_types(dtype):
    kernel = kernels.every_row(dtype)
    n = symbol("n")
    sample = Sample(kernel, (n,) * len(kernel.params), ())
    tensors = sample.tensors({"n": 100})
    for tensor in tensors[3:6]:  # 1 to 4, fractions for floats: no division by zero
        tensor.abs_().add_(1) if dtype is not F64 else tensor.abs_().add_(1).reciprocal_()
    expected = [tensor.clone() for tensor in tensors]
    judge.run(kernel, expected, {"n": 100})
    run(sample, tensors, {"n": 100})
    for found, wanted in zip(tensors[6:], expected[6:], strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_alpha_is_a_factor():
    check(kernels.pointwise("add", [F32, F32], F32, {"alpha": -0.25}), {"n": 30})
    check(kernels.pointwise("add", [I64, I64], I64, {"alpha": 3}), {"n": 30})


@pytest.mark.parametrize(("dtype", "text"), [(F32, "libdevice.exp("), (F16, "tl.exp(")])
def test_exponentials_that_leave_in_fp32_are_cudas(dtype, text):
    """The device's power of two is 4 ulps off, which no half type shows."""
    for name in ("softmax", "timestep_embedding"):
        source = emit(SAMPLES[name](dtype).kernel).source.text
        assert text in source
        assert ("libdevice" in source) is (dtype is F32)


@pytest.mark.parametrize("name", SAMPLES)
def test_text(name: str, request: pytest.FixtureRequest):
    emitted = emit(SAMPLES[name](F16).kernel)
    source = emitted.source
    launch = [
        f"grid {' x '.join(map(str, source.grid))}, {source.num_warps} warps",
        *(f"s{i} = {size}, class {k}" for i, (size, k) in _scalars(emitted)),
        *(f"{key} = {value}" for key, value in source.constants),
        *(f"scratch {s.dtype} {s.numel}{' zeroed' * s.zeroed}" for s in source.scratch),
    ]
    text = source.text + "\n" + "".join(f"# {line}\n" for line in launch)
    path = GOLDEN / f"{name}.py"
    if request.config.getoption("--update-golden", default=False):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), f"{path.name} differs; --update-golden writes it"


def _scalars(emitted):
    return enumerate(zip(emitted.scalars, emitted.source.scalars, strict=True))


def test_text_depends_on_nothing_but_the_kernel():
    assert emit(SAMPLES["softmax"](F16).kernel) == emit(SAMPLES["softmax"](F16).kernel)


def test_bags_of_rows_are_refused():
    """A load of one row in place of all would be wrong without a word."""
    kernel = SAMPLES["silu_flat"](F32).kernel
    bag = Bag("sum", 0, const(0), symbol("n"), const(1), symbol("n"))
    body = tuple(replace(s, bag=bag) if isinstance(s, Load) else s for s in kernel.body)
    with pytest.raises(CodegenError, match="silu_flat: kernels of a CPU alone add up bags of rows"):
        emit(replace(kernel, body=body))
