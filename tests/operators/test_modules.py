"""torch's own table of modules: each form of each, beside eager.

Source: torch.testing._internal.common_modules, which torch tests its modules with.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor

import strop
from strop.options import Options
from tests.operators.of_torch import ModuleInfo, ModuleInput, module_db

MOST_FORMS = 8  # of a module: others differ in one argument from these
TABLE = {info.name: info for info in module_db}


def forms(info: ModuleInfo, *, training: bool) -> Iterator[ModuleInput]:
    """Yield forms from the whole of the table's."""
    found = list(
        info.module_inputs_func(
            info, device="cpu", dtype=torch.float32, requires_grad=training, training=training
        )
    )
    found = [form for form in found if form.forward_input is not None]
    yield from found[:: -(-len(found) // MOST_FORMS) or 1]


def given(form: ModuleInput) -> tuple[Any, Any]:
    """Return copies of the arguments of a call."""

    def copied(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.detach().clone().requires_grad_(value.requires_grad)

    call = form.forward_input
    found: tuple[Any, Any] = pytree.tree_map(copied, (call.args, call.kwargs))
    return found


def tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def called(module: Any, arguments: tuple[Any, Any]) -> list[Tensor]:
    torch.manual_seed(1)
    return tensors(module(*arguments[0], **arguments[1]))


def compare(got: list[Tensor], expected: list[Tensor]) -> None:
    assert [t.stride() for t in got] == [t.stride() for t in expected]
    assert [t.requires_grad for t in got] == [t.requires_grad for t in expected]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4, equal_nan=True)


def backward(results: list[Tensor]) -> None:
    """Sum what has a gradient, each element times a number of its own."""
    held = [t for t in results if t.requires_grad]
    weights = [torch.linspace(0.5, 1.5, t.numel()).reshape(t.shape) for t in held]
    torch.stack([(t * w).sum() for t, w in zip(held, weights, strict=True)]).sum().backward()


def grads(module: Any, arguments: Any) -> list[Tensor | None]:
    held = [*module.parameters(), *tensors(arguments)]
    return [t.grad for t in held if t.requires_grad]


def check(module: Any, form: ModuleInput, *, training: bool, options: Options) -> None:
    """Compare a call with eager's, then its gradients and buffers, then a second call."""
    eager, fast = module, strop.optimize(copy.deepcopy(module), train=training, options=options)
    for number in range(2):
        ours, theirs = given(form), given(form)
        with torch.set_grad_enabled(training):
            expected = called(eager, theirs)
            got = called(fast, ours)
        compare(got, expected)
        if number == 0 and any(t.requires_grad for t in expected):
            backward(expected)
            backward(got)
            torch.testing.assert_close(
                grads(fast, ours), grads(eager, theirs), rtol=1e-3, atol=1e-4, equal_nan=True
            )
        torch.testing.assert_close(dict(fast.named_buffers()), dict(eager.named_buffers()))


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", TABLE)
def test_forms(name: str, training: bool, tmp_path: Path) -> None:
    info, options, checked = TABLE[name], Options(cache_dir=str(tmp_path)), 0
    warnings.simplefilter("ignore")
    for form in forms(info, training=training):
        torch.manual_seed(0)
        how = form.constructor_input
        module = info.module_cls(*how.args, **how.kwargs).train(training)
        try:
            with torch.set_grad_enabled(training):
                called(copy.deepcopy(module), given(form))
        except (RuntimeError, TypeError, ValueError):
            continue  # a form that eager refuses too
        check(module, form, training=training, options=options)
        checked += 1
    assert checked or name in {"nn.FractionalMaxPool2d", "nn.FractionalMaxPool3d"}
