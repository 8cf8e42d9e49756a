"""Say how accurate a compiled result has to be: as good as eager, judged by the fp64 result.

    error(x) = x - reference, over all elements
    ulp      = eps(dtype of actual) * RMS(reference): the last place of a typical element

    RMS(error(actual))  <=  1.10 * RMS(error(eager))  + 0.5 ulp
    max|error(actual)|  <=  2    * max|error(eager)|  + 2   ulp

The reference is the same computation in fp64, from the same fp64 copies of weights and inputs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from strop.errors import OptionError
from strop.ir.eight_bit import FORMATS, eight_bit_linear

RMS_FACTOR, RMS_ULPS = 1.10, 0.5
MAX_FACTOR, MAX_ULPS = 2.0, 2.0
Rule = tuple[str, Callable[[Tensor], float], float, float]  # name, measure, factor, ulps
FEW = 64  # numbers, of which chance decides the RMS of the error


def _rms(x: Tensor) -> float:
    return x.double().square().mean().sqrt().item() if x.numel() else 0.0


def _max(x: Tensor) -> float:
    return x.double().abs().max().item() if x.numel() else 0.0


RULES: tuple[Rule, ...] = (
    ("RMS", _rms, RMS_FACTOR, RMS_ULPS),
    ("maximum", _max, MAX_FACTOR, MAX_ULPS),
)


def assert_as_accurate_as_eager(
    actual: Tensor, eager: Tensor, reference64: Tensor, what: str = ""
) -> None:
    """Raises AssertionError with the figures, and with ``what`` was compared, when ``actual`` is
    worse than the rule allows.

    Non-finite elements must be those of ``eager``; errors are taken over the finite ones.
    """
    own, base, reference = _finite_parts(actual, eager, reference64)
    ulp = torch.finfo(actual.dtype).eps * _rms(reference) if own.numel() else 0.0
    _judge(own - reference, base - reference, ulp, what)


def assert_as_accurate_together(triples: Sequence[tuple[Tensor, Tensor, Tensor]]) -> None:
    """Apply the rule over several (actual, eager, reference) at once, each in units of its
    reference's RMS: of a few numbers alone chance decides who is nearer to the truth. Where there
    are fewer than ``FEW`` in all, the maximum alone counts."""
    own, base = [], []
    for actual, eager, reference64 in triples:
        a, b, reference = _finite_parts(actual, eager, reference64)
        scale = _rms(reference) or 1.0
        own.append(((a - reference) / scale).flatten())
        base.append(((b - reference) / scale).flatten())
    if own and any(x.numel() for x in own):
        eps = torch.finfo(triples[0][0].dtype).eps
        every = torch.cat(own)
        rules = RULES if every.numel() >= FEW else RULES[1:]
        _judge(every, torch.cat(base), eps, rules=rules)


def _finite_parts(
    actual: Tensor, eager: Tensor, reference64: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return all three in fp64, where eager is finite; nothing of integers, which must be equal."""
    assert reference64.dtype == torch.float64, f"the reference is {reference64.dtype}, not fp64"
    for name, other in (("eager", eager), ("reference", reference64)):
        assert actual.shape == other.shape, f"{tuple(actual.shape)}, {name} {tuple(other.shape)}"
    assert actual.dtype == eager.dtype, f"{actual.dtype}, eager {eager.dtype}"
    finite = torch.isfinite(eager)
    assert torch.equal(torch.isfinite(actual), finite), "NaN or inf in other places than eager"
    assert torch.equal(actual[~finite].nan_to_num(), eager[~finite].nan_to_num()), (
        "NaN or inf of another kind than eager"
    )
    if not actual.dtype.is_floating_point:
        assert torch.equal(actual, eager), f"{actual.dtype} results differ"
        finite = torch.zeros_like(finite)
    return actual[finite].double(), eager[finite].double(), reference64[finite]


def _judge(
    own: Tensor, base: Tensor, ulp: float, what: str = "", rules: Sequence[Rule] = RULES
) -> None:
    prefix = f"{what}: " if what else ""
    for name, of, factor, ulps in rules:
        error, eager = of(own), of(base)
        limit = factor * eager + ulps * ulp
        assert error <= limit, (
            f"{prefix}{name} error {error:.3e} is above {limit:.3e} (eager {eager:.3e},"
            f" ulp {ulp:.3e})"
        )


def psnr(image: Tensor, reference: Tensor, peak: float = 1.0) -> float:
    """Return the peak signal-to-noise ratio in dB."""
    error = _rms(image.double() - reference.double())
    return float("inf") if error == 0 else 20 * torch.tensor(peak / error).log10().item()


def eight_bit_errors(
    module: nn.Module, numerics: str, run: Callable[[], object]
) -> dict[str, float]:
    """Return the error that 8 bits cause in each linear of ``module``, by its path, for what it is
    given while ``run`` calls the module in eager: RMS(y in 8 bits - y) / RMS(y) over all calls.

    ``numerics``: "int8" or "fp8", by the rule of compiled code (``ir.eight_bit``), in plain torch
    and in fp32. Each layer gets exact inputs, so that errors do not add up from layer to layer.
    Layers whose error is too large for you are left exact by
    ``Options(numerics=("int8",), exact_layers=...)``. Raises OptionError for another format, and
    where ``run`` calls no linear.
    """
    if numerics not in FORMATS:
        raise OptionError(f"numerics={numerics!r}: expected one of {', '.join(FORMATS)}")
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def note(path: str, linear: Any, args: tuple[Tensor, ...], _: Tensor) -> None:
        x, weight = args[0].detach().float(), linear.weight.detach().float()
        bias = None if linear.bias is None else linear.bias.detach().float()
        exact = nn.functional.linear(x, weight, bias)
        error = eight_bit_linear(x, weight, bias, numerics) - exact
        for place, value in enumerate((error, exact)):
            sums[path][place] += value.double().square().sum().item()

    parts = [(path, part) for path, part in module.named_modules() if isinstance(part, nn.Linear)]
    hooks = [part.register_forward_hook(partial(note, path)) for path, part in parts]
    try:
        with torch.no_grad():
            run()
    finally:
        for hook in hooks:
            hook.remove()
    if not sums:
        raise OptionError(f"run called no linear of this {type(module).__name__}")
    return {path: (error / exact) ** 0.5 if exact else 0.0 for path, (error, exact) in sums.items()}
