"""What leaves a CUDA graph's memory."""

from __future__ import annotations

import torch

from strop.runtime.run.cuda_graphs import copies_of


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
