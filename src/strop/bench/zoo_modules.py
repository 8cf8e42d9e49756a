"""Define modules plainly for the zoo, where no library at hand has the architecture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Method(nn.Module):
    """Call one method of a module as a forward: half of an autoencoder."""

    def __init__(self, owner: nn.Module, method: str) -> None:
        super().__init__()
        self.owner, self.method = owner, method

    def forward(self, sample: Tensor) -> Any:
        return getattr(self.owner, self.method)(sample)


class WithCache(nn.Module):
    """Run a causal language model; keys and values of each layer come and go as tensors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, cache: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        from transformers import DynamicCache

        past = DynamicCache(list(zip(cache[::2], cache[1::2], strict=True)))
        found = self.model(input_ids=input_ids, past_key_values=past, use_cache=True)
        layers = found.past_key_values.layers
        return found.logits, [t for layer in layers for t in (layer.keys, layer.values)]


class Tagger(nn.Module):
    """Compute an embedding, two bidirectional recurrent layers, and classes for each token."""

    def __init__(self, recurrent: Callable[..., nn.Module], width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(99, width)
        self.recurrent = recurrent(width, width, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, 9)

    def forward(self, input_ids: Tensor) -> Tensor:
        found, _ = self.recurrent(self.embedding(input_ids))
        classes: Tensor = self.head(found)
        return classes


class Encoder(nn.Module):
    """Apply torch's own transformer layers."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(99, width)
        layer = nn.TransformerEncoderLayer(width, 4, 64, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        found: Tensor = self.layers(self.embedding(input_ids))
        return found


class DLRM(nn.Module):
    """Embeddings and a dense tower meet in pairwise products (Naumov et al., 2019)."""

    def __init__(self, width: int = 16, num_tables: int = 5, rows: int = 50) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(rows, width, mode="sum") for _ in range(num_tables)
        )
        self.bottom = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, width), nn.ReLU())
        pairs = (num_tables + 1) * num_tables // 2
        self.top = nn.Sequential(nn.Linear(pairs + width, 32), nn.ReLU(), nn.Linear(32, 1))
        index = torch.tril_indices(num_tables + 1, num_tables + 1, -1)
        self.pairs: Tensor
        self.register_buffer("pairs", index, persistent=False)

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        bottom = self.bottom(dense)
        bags = [table(sparse[:, i : i + 1]) for i, table in enumerate(self.tables)]
        features = torch.stack([bottom, *bags], 1)
        products = features @ features.mT
        crossed = products[:, self.pairs[0], self.pairs[1]]
        return torch.sigmoid(self.top(torch.cat([bottom, crossed], 1)))


class Mixer(nn.Module):
    """Compute MLP-Mixer (Tolstikhin et al., 2021)."""

    def __init__(self, width: int = 32, patches: int = 16, depth: int = 2) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 8, 8)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * depth))
        self.over_patches = nn.ModuleList(_mlp(patches, 24) for _ in range(depth))
        self.over_channels = nn.ModuleList(_mlp(width, 64) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = self.stem(pixel_values).flatten(2).transpose(1, 2)
        for i, (patches, channels) in enumerate(
            zip(self.over_patches, self.over_channels, strict=True)
        ):
            x = x + patches(self.norms[2 * i](x).transpose(1, 2)).transpose(1, 2)
            x = x + channels(self.norms[2 * i + 1](x))
        classes: Tensor = self.head(x.mean(1))
        return classes


def _mlp(width: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


class TinyDetr(nn.Module):
    """Compute DETR in its shortest form (Carion et al., 2020): backbone, transformer, queries."""

    def __init__(self, width: int = 32, num_queries: int = 6, num_classes: int = 7) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inner, outer in ((3, 8), (8, 16), (16, 32), (32, width)):
            layers += [nn.Conv2d(inner, outer, 3, 2, 1), nn.BatchNorm2d(outer), nn.ReLU()]
        self.backbone = nn.Sequential(*layers)
        self.transformer = nn.Transformer(width, 4, 1, 1, 64, batch_first=True)
        self.classes, self.boxes = nn.Linear(width, num_classes + 1), nn.Linear(width, 4)
        self.queries = nn.Parameter(torch.rand(num_queries, width))
        self.rows = nn.Parameter(torch.rand(50, width // 2))
        self.columns = nn.Parameter(torch.rand(50, width // 2))

    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
        features = self.backbone(pixel_values)
        height, width = features.shape[-2:]
        position = torch.cat(
            [
                self.columns[:width].unsqueeze(0).expand(height, -1, -1),
                self.rows[:height].unsqueeze(1).expand(-1, width, -1),
            ],
            -1,
        ).flatten(0, 1)
        queries = self.queries.expand(features.shape[0], -1, -1)
        found = self.transformer(position + 0.1 * features.flatten(2).transpose(1, 2), queries)
        return {"classes": F.softmax(self.classes(found), -1), "boxes": self.boxes(found).sigmoid()}
