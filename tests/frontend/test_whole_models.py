"""What kept models from being one graph, each cause in a small module with eager's values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import strop
from strop.diffusion.components import adapter_for
from tests.e2e import tiny


class Holds(nn.Module):
    """Parts, and what is done with them."""

    def __init__(self, function: Callable[..., Any], *parts: nn.Module) -> None:
        super().__init__()
        self.parts, self.function = nn.ModuleList(parts), function

    def forward(self, *args: Tensor) -> Any:
        return self.function(*self.parts, *args)


def _attention() -> nn.Module:
    """torch's own layer calls linear and attention from inside a functional."""
    layer = nn.MultiheadAttention(8, 2, batch_first=True)
    return Holds(lambda own, x: own(x, x, x, need_weights=False)[0], layer)


def _heads(x: Tensor) -> Tensor:
    """Transposed, flattened and copied, as attention does: no size is compared with 1."""
    a = x.unflatten(2, (2, 4)).transpose(1, 2)
    joined = a.transpose(1, 2).reshape(x.shape[0], x.shape[1], -1)
    return joined + a.transpose(1, 2).contiguous().flatten(2) + a.permute(0, 2, 1, 3).flatten(-2)


def _grouped(q: Tensor, kv: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, kv, kv, enable_gqa=True)


def _window_mean(x: Tensor) -> Tensor:
    """Padded to whole windows: sizes that are multiples are found in two steps."""
    x = F.pad(x, (0, (4 - x.shape[2] % 4) % 4))
    y = x.view(x.shape[0], x.shape[1], x.shape[2] // 4, 4).mean(-1)
    return y.view(x.shape[0], x.shape[1], y.shape[2] // 2, 2).sum(-1)


class PythonSizes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        height, width = int(x.shape[2]), int(x.shape[3] / 2)
        least, most = min(x.shape[2:]), max(x.shape[2], 3)
        return x[:, :, : height - 2, :width] * (0 if least <= 1 or most < 3 else 1)


def _views_written(x: Tensor) -> Tensor:
    """One view is written, another read: the tensor itself changes."""
    grid = torch.sin(x)
    grid[:, 0] = grid[:, 1] + 1
    grid[..., 1:3] = x[..., :2]
    return grid.sum(1) + grid[:, 0]


def _sums(a: Tensor, b: Tensor, place: Tensor, more: Tensor) -> Tensor:
    return torch.cat([a, b], 1) * torch.cat([place, more])[None, :, None]


def _weight_norm() -> nn.Module:
    layer = nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 4, 3, groups=2), dim=2)
    return Holds(lambda own, x: own(x), layer)


CASES: dict[str, tuple[nn.Module, tuple[str, ...]]] = {
    "attention layer": (_attention(), ("b s 8",)),
    "encoder layer": (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), ("b s 8",)),
    "heads": (Holds(_heads), ("b s 8",)),
    "grouped queries": (Holds(_grouped), ("b 4 s 8", "b 2 s 8")),
    "matmul of transposed": (Holds(lambda x: x.transpose(1, 2) @ x[:, None]), ("b s 8",)),
    "rms norm": (nn.RMSNorm(8), ("b s 8",)),
    "lstm": (nn.LSTM(8, 4, 2, batch_first=True, bidirectional=True), ("b s 8",)),
    "lstm with projection": (nn.LSTM(8, 6, proj_size=4), ("s b 8",)),
    "gru": (nn.GRU(8, 4, batch_first=True), ("b s 8",)),
    "rnn": (nn.RNN(8, 4), ("s b 8",)),
    "batch norm": (nn.BatchNorm1d(4), ("b 4 t",)),
    "group norm": (nn.GroupNorm(2, 4), ("b 4 t",)),
    "conv1d": (nn.Conv1d(4, 6, 3, padding=1, dilation=2), ("b 4 t",)),
    "conv same": (nn.Conv2d(4, 6, 4, padding="same"), ("b 4 h w",)),
    "conv valid": (nn.Conv1d(4, 6, 3, padding="valid", groups=2), ("b 4 t",)),
    "conv3d": (nn.Conv3d(2, 4, 3, padding=1), ("b 2 4 h w",)),
    "transposed conv": (nn.ConvTranspose2d(4, 6, 4, 2, 1, output_padding=1), ("b 4 h w",)),
    "reflection": (nn.ReflectionPad2d(1), ("b 4 h w",)),
    "weight norm": (_weight_norm(), ("b 4 t",)),
    "distances": (Holds(lambda x, y: torch.cdist(x[0], y[0])), ("b 32 8", "b 28 8")),
    "baddbmm": (
        Holds(lambda a, x, y: torch.baddbmm(a, x, y, beta=0.5, alpha=2)),
        ("b 1 s", "b s 8", "b 8 s"),
    ),
    "python sizes": (PythonSizes(), ("b 2 h w",)),
    "windows": (Holds(_window_mean), ("b 3 8*t",)),
    "quotients": (Holds(lambda x: F.avg_pool2d(x, 4)[:, :, :2, :2].reshape(-1, 16)), ("b 4 8 11",)),
    "views written": (Holds(_views_written), ("3 5 8",)),  # torch then compares sizes with 1
    "sums": (Holds(_sums), ("b p 4", "b q 4", "p", "q")),
}
ENVS = (
    {"b": 2, "s": 5, "t": 8, "h": 6, "w": 9, "p": 3, "q": 7},
    {"b": 3, "s": 7, "t": 11, "h": 9, "w": 4, "p": 4, "q": 2},
    {"b": 1, "s": 2, "t": 16, "h": 5, "w": 7, "p": 1, "q": 5},
)


@pytest.mark.filterwarnings("ignore:Using padding='same'", "ignore:LSTM with projections")
@pytest.mark.parametrize("name", CASES)
def test_one_graph(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    module, texts = CASES[name]
    folder = str(tmp_path_factory.getbasetemp() / "kernels")
    options = tiny.options(cache_dir=folder, strict=True)
    eager = module.eval().requires_grad_(False)
    fast = strop.optimize(copy.deepcopy(eager), options=options)
    for env in ENVS:
        generator = torch.Generator().manual_seed(0)
        shapes = [[_size(part, env) for part in text.split()] for text in texts]
        args = [torch.randn(shape, generator=generator) for shape in shapes]
        with torch.no_grad():
            # fp32 sums of at most a few hundred products of numbers near 1
            torch.testing.assert_close(fast(*args), eager(*args), rtol=1e-4, atol=1e-4)
    variants = fast.forward.variants.all
    assert len(variants) == 1, [list(map(str, v.program.guards)) for v in variants]


def test_a_unet_without_a_prompt_is_told_so() -> None:
    """The forward of UNet2DConditionModel has no default for its prompt."""
    given = {
        "sample": torch.zeros(2, 4, 8, 8),
        "timestep": 1,
        "encoder_hidden_states": None,
        "class_labels": None,
    }
    _, kept = adapter_for(tiny.unet()).normalise((), given)
    assert kept.keys() == {"sample", "timestep", "encoder_hidden_states"}


def _size(part: str, env: dict[str, int]) -> int:
    factor, _, name = part.rpartition("*")
    return int(factor or 1) * (env[name] if name in env else int(name))
