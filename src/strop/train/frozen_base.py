"""Replace linears beside adapters by quantised ones of torchao (int8, fp8) or bitsandbytes (nf4).

Their linears multiply by what the codes stand for, and their gradients by their inputs do the same;
the codes get no gradient. Adapters keep their own type.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from strop.errors import OptionError

_EXTRA = "pip install 'strop[quantised]'"


def quantise(module: nn.Module, kind: str) -> int:
    """Replace all linears of ``module`` that are not trained, and return their number.

    ``kind``: int8 or fp8, a code for each weight and a scale for each row; or nf4, four bits for
    each weight and a scale for 64 (https://arxiv.org/abs/2305.14314). Raises OptionError without
    the library.
    """
    frozen = [path for path, part in module.named_modules() if _is_frozen_linear(part)]
    replaced = _KINDS[kind](kind)
    for path in frozen:
        parent, _, name = path.rpartition(".")
        owner = module.get_submodule(parent)
        made = replaced(owner.get_submodule(name))
        made.register_forward_pre_hook(_cast_by_autocast)
        setattr(owner, name, made)
    return len(frozen)


def check_library(kind: str) -> None:
    """Raise OptionError if the library of this kind is missing."""
    _KINDS[kind](kind)


def _is_frozen_linear(part: nn.Module) -> bool:
    return type(part) is nn.Linear and not part.weight.requires_grad


def _cast_by_autocast(linear: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Cast what a linear is given as autocast does, which does not know these: their results would
    have another type than those of linears."""
    kind = given[0].device.type
    if not torch.is_autocast_enabled(kind):
        return given
    return tuple(x.to(torch.get_autocast_dtype(kind)) for x in given)


def _library(name: str, kind: str) -> ModuleType:
    try:
        return import_module(name)
    except ImportError as error:
        raise OptionError(
            f"--base_weights {kind} needs {name.partition('.')[0]} ({error}): {_EXTRA}"
        ) from error


def _by_torchao(kind: str) -> Callable[[nn.Module], nn.Module]:
    library = _library("torchao.quantization", kind)
    names = {"int8": "Int8WeightOnlyConfig", "fp8": "Float8WeightOnlyConfig"}
    config = getattr(library, names[kind])()

    def replaced(linear: nn.Module) -> nn.Module:
        library.quantize_(linear, config)
        return linear.requires_grad_(False)

    return replaced


def _by_bitsandbytes(kind: str) -> Callable[[nn.Module], nn.Module]:
    library = _library("bitsandbytes", kind)

    def replaced(linear: nn.Module) -> nn.Module:
        assert isinstance(linear, nn.Linear)
        weight, has_bias = linear.weight, linear.bias is not None
        made: Any = library.nn.Linear4bit(
            linear.in_features,
            linear.out_features,
            bias=has_bias,
            compute_dtype=weight.dtype,
            quant_type="nf4",
            device="meta",
        )
        codes = library.nn.Params4bit(weight.detach(), requires_grad=False, quant_type="nf4")
        # Where nothing has a gradient it would pack the codes in place for a CPU's own product.
        made.support_avx512bf16_for_cpu = False
        made.weight, made.bias = codes.to(weight.device), linear.bias  # it is coded as it moves
        quantised: nn.Module = made.train(linear.training)
        return quantised

    return replaced


_KINDS: dict[str, Callable[[str], Callable[[nn.Module], nn.Module]]] = {
    "int8": _by_torchao,
    "fp8": _by_torchao,
    "nf4": _by_bitsandbytes,
}
KINDS = tuple(_KINDS)
