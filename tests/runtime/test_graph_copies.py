"""What is copied into a CUDA graph's memory, and out of it, and in how many launches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from strop.runtime.run.graph_copies import LARGE, MOST_ALONE, copies_of, copy_all


class Launches(TorchDispatchMode):
    """Count copies: those of one tensor, and those of several."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "copy_" in func.name():
            self.counts[func.name().removeprefix("aten::").split(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def copied(given: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]) -> Counter[str]:
    """Copy to places of these types, check them, and return the launches."""
    places = [torch.full_like(t, 9, dtype=d) for t, d in zip(given, dtypes, strict=True)]
    with Launches() as launches:
        copy_all(places, given)
    for place, tensor in zip(places, given, strict=True):
        assert torch.equal(place, tensor.to(place.dtype))
    return launches.counts


@pytest.mark.parametrize(
    ("sizes", "launches"),
    [
        ([], {}),
        ([3], {"copy_": 1}),
        ([3, 4], {"_foreach_copy_": 1}),
        ([LARGE + 1], {"copy_": 1}),
        ([LARGE + 1, 2, LARGE + 1, LARGE], {"copy_": 2, "_foreach_copy_": 1}),
        ([LARGE + 1, 2], {"copy_": 2}),
        ([LARGE + 1] * MOST_ALONE, {"copy_": MOST_ALONE}),
        ([LARGE + 1] * (MOST_ALONE + 1), {"_foreach_copy_": 1}),
    ],
)
def test_few_large_tensors_are_copied_one_by_one(
    sizes: list[int], launches: dict[str, int]
) -> None:
    given = [torch.randn(size) for size in sizes]
    assert copied(given, [torch.float32] * len(sizes)) == launches


def test_numbers_of_adapters_go_apart() -> None:
    """torch copies tensors of several types one by one."""
    numbers = [torch.tensor(float(n), dtype=torch.float64) for n in range(5)]
    given = [numbers[0], torch.randn(4), *numbers[1:], torch.randn(LARGE + 1)]
    dtypes = [torch.float64 if t.dtype is torch.float64 else torch.float16 for t in given]
    assert copied(given, dtypes) == {"_foreach_copy_": 1, "copy_": 2}


@pytest.mark.parametrize("place", [0, 3, 6])
def test_tokens_beside_a_cache_go_apart(place: int) -> None:
    """Keys and values of a decoder's layers share a launch, wherever its tokens stand."""
    given = [torch.randn(LARGE + 1).half() for _ in range(6)]
    given.insert(place, torch.arange(4))
    assert copied(given, [t.dtype for t in given]) == {"_foreach_copy_": 1, "copy_": 1}


def test_results_are_the_callers_own() -> None:
    """One, or several of several types and orders of memory, and what is no tensor."""
    dense = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    results = [dense, 7, torch.arange(3), torch.randn(1, 4).expand(3, 4), None, torch.tensor(2.0)]
    for some in ([], [7], results[:1], results[:2], results):
        found = copies_of(some)
        assert len(found) == len(some)
        for copy, result in zip(found, some, strict=True):
            if not isinstance(result, torch.Tensor):
                assert copy is result
                continue
            assert torch.equal(copy, result)
            assert copy.stride() == result.clone().stride()
            assert copy.untyped_storage().data_ptr() != result.untyped_storage().data_ptr()
