"""Ragged features of torchrec: one graph for all lengths, and eager where that does not hold."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import strop
from strop.errors import OutOfRangeError

torchrec = pytest.importorskip("torchrec", reason="torchrec and fbgemm-gpu-cpu are not installed")

KEYS = ["user", "item", "shop"]
ROWS = 50


class Ranker(nn.Module):
    """Dense features and pooled rows of one table for each key; the last one has two features."""

    def __init__(self, *, is_weighted: bool = False, dtype: Any = None) -> None:
        super().__init__()
        kind, names = torchrec.PoolingType, [["user"], ["item"], ["shop", "item"]]
        poolings = [kind.SUM, kind.SUM if is_weighted else kind.MEAN, kind.SUM]
        tables = [
            torchrec.EmbeddingBagConfig(
                name=f"t{n}",
                embedding_dim=8 * (n + 1),
                num_embeddings=ROWS,
                feature_names=features,
                pooling=poolings[n],
                data_type=dtype or torchrec.modules.embedding_configs.DataType.FP32,
            )
            for n, features in enumerate(names)
        ]
        self.tables = torchrec.EmbeddingBagCollection(tables=tables, is_weighted=is_weighted)
        self.top = nn.Linear(8 + 16 + 24 + 24 + 4, 1)

    def forward(self, dense: Tensor, features: Any) -> Tensor:
        found: Tensor = self.top(torch.cat([dense, self.tables(features).values()], 1))
        return found


def jagged(batch: int, seed: int, *, most: int = 5, by: str = "lengths", weighted: bool = False):  # type: ignore[no-untyped-def]
    drawn = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, most + 1, (len(KEYS) * batch,), generator=drawn)
    ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=drawn)
    weights = torch.rand(len(ids), generator=drawn) if weighted else None
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    how = {"lengths": lengths} if by == "lengths" else {"offsets": offsets}
    return torchrec.KeyedJaggedTensor(KEYS, ids, weights, **how)


def pair(**how: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    module = Ranker(**how).eval()
    plain = copy.deepcopy(module)
    strop.optimize(module)
    return module, plain


def fallbacks(module: nn.Module) -> list[str]:
    return list(strop.explain(module).components[0].fallbacks)


@pytest.mark.parametrize("by", ["lengths", "offsets"])
@pytest.mark.parametrize("is_weighted", [False, True], ids=["alone", "weighted"])
def test_one_graph_for_all_lengths(by: str, is_weighted: bool) -> None:
    module, plain = pair(is_weighted=is_weighted)
    with torch.no_grad():
        for batch, seed in ((6, 1), (9, 2), (6, 3), (64, 4)):
            dense = torch.randn(batch, 4)
            features = jagged(batch, seed, by=by, weighted=is_weighted)
            torch.testing.assert_close(module(dense, features), plain(dense, features))
    report = strop.explain(module).components[0]
    assert not report.fallbacks
    assert len(report.graphs) == 1


def test_a_collection_by_itself() -> None:
    plain = Ranker().eval().tables
    module: Any = strop.optimize(copy.deepcopy(plain))
    with torch.no_grad():
        for batch, seed in ((6, 1), (9, 2)):
            features = jagged(batch, seed)
            found, expected = module(features), plain(features)
            assert found.keys() == expected.keys()
            torch.testing.assert_close(found.values(), expected.values())
    assert strop.explain(module).num_graphs == 1
    assert not fallbacks(module)


def test_features_without_ids_and_single_rows() -> None:
    module, plain = pair()
    with torch.no_grad():
        for batch, most in ((5, 0), (1, 5), (1, 0), (5, 1)):
            dense, features = torch.randn(batch, 4), jagged(batch, batch, most=most)
            torch.testing.assert_close(module(dense, features), plain(dense, features))
    assert not fallbacks(module)


def test_tables_in_fp16() -> None:
    """Their rows are added up in fp32, so that a sum is rounded once."""
    module, plain = pair(dtype=torchrec.modules.embedding_configs.DataType.FP16)
    dense, features = torch.randn(6, 4), jagged(6, 1)
    with torch.no_grad():
        torch.testing.assert_close(
            module(dense, features), plain(dense, features), rtol=2e-3, atol=2e-3
        )
    assert not fallbacks(module)


def test_new_rows_are_seen() -> None:
    module, plain = pair()
    dense, features = torch.randn(6, 4), jagged(6, 1)
    with torch.no_grad():
        module(dense, features)
        for each in (module, plain):
            each.tables.embedding_bags["t1"].weight.mul_(2)
        torch.testing.assert_close(module(dense, features), plain(dense, features))


def test_ids_beyond_the_table_are_named() -> None:
    module, _ = pair()
    features = jagged(6, 1)
    with torch.no_grad():
        module(torch.randn(6, 4), features)
        features.values()[-1] = ROWS
        with pytest.raises(OutOfRangeError):
            module(torch.randn(6, 4), features)


def test_what_is_not_compiled_says_why() -> None:
    module, plain = pair()
    dense, features = torch.randn(6, 4), jagged(6, 1)
    torch.testing.assert_close(module(dense, features), plain(dense, features))  # with gradients
    (why,) = fallbacks(module)
    assert "gradients are enabled" in why

    class Cuts(Ranker):
        def forward(self, dense: Tensor, features: Any) -> Tensor:
            return dense.sum() + features["item"].values().sum()

    module = Cuts().eval()
    strop.optimize(module)
    with torch.no_grad():
        expected = dense.sum() + features["item"].values().sum()
        torch.testing.assert_close(module(dense, jagged(6, 1)), expected)
    (why,) = fallbacks(module)
    assert "how many ids a feature of a KeyedJaggedTensor has" in why


def test_hooks_of_a_table_run() -> None:
    module, _ = pair()
    called: list[int] = []
    module.tables.embedding_bags["t0"].register_forward_hook(lambda *_: called.append(1))
    with torch.no_grad():
        module(torch.randn(6, 4), jagged(6, 1))
    assert called
