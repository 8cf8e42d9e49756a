"""Define networks that people feed to compilers beside diffusion, plainly, for the zoo."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def _conv(ins: int, outs: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(ins, outs, 3, stride, 1)


class DenseBlock(nn.Module):
    """Joins all that was computed before to each convolution's input, and adds a share of it."""

    def __init__(self, width: int, growth: int, depth: int = 4) -> None:
        super().__init__()
        widths = [width + number * growth for number in range(depth + 1)]
        self.grow = nn.ModuleList(_conv(each, growth) for each in widths[:-1])
        self.last = _conv(widths[-1], width)

    def forward(self, x: Tensor) -> Tensor:
        found = [x]
        for conv in self.grow:
            found.append(F.leaky_relu(conv(torch.cat(found, 1)), 0.2))
        added: Tensor = x + 0.2 * self.last(torch.cat(found, 1))
        return added


class Esrgan(nn.Module):
    """Computes ESRGAN's generator (Wang et al., 2018): dense blocks, then twice as many pixels
    along each side, two times."""

    def __init__(self, width: int = 16, growth: int = 8, blocks: int = 2) -> None:
        super().__init__()
        self.first = _conv(3, width)
        self.body = nn.Sequential(
            *(nn.Sequential(*(DenseBlock(width, growth) for _ in range(3))) for _ in range(blocks))
        )
        self.after = _conv(width, width)
        self.up = nn.ModuleList(_conv(width, width) for _ in range(2))
        self.wide, self.last = _conv(width, width), _conv(width, 3)

    def forward(self, pixel_values: Tensor) -> Tensor:
        first = self.first(pixel_values)
        x = first + self.after(self.body(first))
        for conv in self.up:
            x = F.leaky_relu(conv(F.interpolate(x, scale_factor=2.0)), 0.2)
        found: Tensor = self.last(F.leaky_relu(self.wide(x), 0.2))
        return found


class FlowBlock(nn.Module):
    """Finds a correction of two flows (B, 4, H, W) and a mask (B, 1, H, W), on smaller pictures."""

    def __init__(self, ins: int, width: int, scale: int) -> None:
        super().__init__()
        self.scale = scale
        self.down = nn.Sequential(_conv(ins, width, 2), nn.PReLU(width))
        self.body = nn.Sequential(
            *(nn.Sequential(_conv(width, width), nn.PReLU(width)) for _ in range(2))
        )
        self.up = nn.ConvTranspose2d(width, 5, 4, 2, 1)

    def forward(self, x: Tensor, flow: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.cat([x, flow / self.scale], 1)
        size = x.shape[-2:]
        x = F.avg_pool2d(x, self.scale) if self.scale > 1 else x
        found = self.up(self.body(self.down(x)))
        found = F.interpolate(found, size=size, mode="bilinear")
        return self.scale * found[:, :4], found[:, 4:]


def moved(picture: Tensor, flow: Tensor) -> Tensor:
    """Look each pixel of a picture (B, C, H, W) up where a flow (B, 2, H, W) in pixels says."""
    height, width = picture.shape[-2:]
    rows = torch.arange(height, device=flow.device, dtype=flow.dtype)[:, None]
    columns = torch.arange(width, device=flow.device, dtype=flow.dtype)
    across = 2 * (columns + flow[:, 0]) / (width - 1) - 1
    down = 2 * (rows + flow[:, 1]) / (height - 1) - 1
    grid = torch.stack([across, down], -1)
    return F.grid_sample(picture, grid, padding_mode="border", align_corners=True)


class Rife(nn.Module):
    """Computes the picture between two, by flows that are refined from coarse to fine (RIFE, Huang
    et al., 2020)."""

    def __init__(self, width: int = 16, scales: tuple[int, ...] = (4, 2, 1)) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(FlowBlock(3 * 4 + 1 + 4, width, scale) for scale in scales)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        flow = first.new_zeros((first.shape[0], 4, *first.shape[2:]))
        mask, one, other = flow[:, :1], first, second
        for block in self.blocks:
            more, mask_more = block(torch.cat([first, second, one, other, mask], 1), flow)
            flow, mask = flow + more, mask + mask_more
            one, other = moved(first, flow[:, :2]), moved(second, flow[:, 2:])
        share = mask.sigmoid()
        return share * one + (1 - share) * other


class CrossStage(nn.Module):
    """Sends half of the channels through short blocks and joins all of them again."""

    def __init__(self, ins: int, outs: int, depth: int = 1) -> None:
        super().__init__()
        inner = outs // 2
        self.first = Activated(ins, outs, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(Activated(inner, inner, 3), Activated(inner, inner, 3))
            for _ in range(depth)
        )
        self.last = Activated((2 + depth) * inner, outs, 1)

    def forward(self, x: Tensor) -> Tensor:
        found = [*self.first(x).chunk(2, 1)]
        for block in self.blocks:
            found.append(found[-1] + block(found[-1]))
        joined: Tensor = self.last(torch.cat(found, 1))
        return joined


class Activated(nn.Sequential):
    def __init__(self, ins: int, outs: int, side: int, stride: int = 1) -> None:
        conv = nn.Conv2d(ins, outs, side, stride, side // 2, bias=False)
        super().__init__(conv, nn.BatchNorm2d(outs), nn.SiLU())


class Yolo(nn.Module):
    """Detects objects in one pass, as YOLOv8 does: cross-stage blocks, a pyramid down and up, and
    heads that give distances to the sides of a box as a distribution over ``bins``."""

    def __init__(self, width: int = 8, classes: int = 7, bins: int = 4) -> None:
        super().__init__()
        w = [width << number for number in range(4)]
        self.stem = nn.Sequential(Activated(3, w[0], 3, 2), Activated(w[0], w[1], 3, 2))
        self.low = CrossStage(w[1], w[1])
        self.middle = nn.Sequential(Activated(w[1], w[2], 3, 2), CrossStage(w[2], w[2]))
        self.high = nn.Sequential(Activated(w[2], w[3], 3, 2), CrossStage(w[3], w[3]))
        self.pooled = Activated(4 * w[3], w[3], 1)
        self.to_middle, self.to_low = CrossStage(w[3] + w[2], w[2]), CrossStage(w[2] + w[1], w[1])
        self.bins, self.classes = bins, classes
        self.boxes = nn.ModuleList(nn.Conv2d(each, 4 * bins, 1) for each in (w[1], w[2], w[3]))
        self.scores = nn.ModuleList(nn.Conv2d(each, classes, 1) for each in (w[1], w[2], w[3]))

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
        low = self.low(self.stem(pixel_values))
        middle = self.middle(low)
        high = self._pyramid(self.high(middle))
        middle = self.to_middle(torch.cat([F.interpolate(high, scale_factor=2.0), middle], 1))
        low = self.to_low(torch.cat([F.interpolate(middle, scale_factor=2.0), low], 1))
        maps = (low, middle, high)
        boxes = [self._distances(head(x)) for head, x in zip(self.boxes, maps, strict=True)]
        scores = [head(x).flatten(2).sigmoid() for head, x in zip(self.scores, maps, strict=True)]
        return torch.cat(boxes, -1), torch.cat(scores, -1)

    def _pyramid(self, x: Tensor) -> Tensor:
        found = [x]
        for _ in range(3):
            found.append(F.max_pool2d(found[-1], 5, 1, 2))
        pooled: Tensor = self.pooled(torch.cat(found, 1))
        return pooled

    def _distances(self, x: Tensor) -> Tensor:
        """Return the mean distance to each side (B, 4, H * W), in cells."""
        shares = x.unflatten(1, (4, self.bins)).softmax(2).flatten(3)
        places = torch.arange(self.bins, device=x.device, dtype=x.dtype)
        mean: Tensor = (shares * places[:, None]).sum(2)
        return mean


class WhisperDecoder(nn.Module):
    """Decodes tokens of Whisper beside what its encoder has heard; keys and values of each layer
    come and go as tensors."""

    def __init__(self, **config: Any) -> None:
        from transformers import WhisperConfig, WhisperModel

        super().__init__()
        self.decoder = WhisperModel(WhisperConfig(**config)).decoder

    def forward(self, input_ids: Tensor, heard: Tensor, cache: list[Tensor]) -> Any:
        from transformers import DynamicCache, EncoderDecoderCache

        past = DynamicCache(list(zip(cache[::2], cache[1::2], strict=True)))
        found = self.decoder(
            input_ids=input_ids,
            encoder_hidden_states=heard,
            past_key_values=EncoderDecoderCache(past, DynamicCache()),
            use_cache=True,
        )
        layers = found.past_key_values.self_attention_cache.layers
        return found.last_hidden_state, [t for each in layers for t in (each.keys, each.values)]


def depth_anything() -> nn.Module:
    """Return Depth-Anything (Yang et al., 2024) on a tiny DINOv2, from its configuration."""
    from transformers import DepthAnythingConfig, DepthAnythingForDepthEstimation, Dinov2Config

    backbone = Dinov2Config(
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        mlp_ratio=2,
        image_size=56,
        patch_size=14,
        out_indices=[1, 2, 3, 4],
        reshape_hidden_states=False,
    )
    config = DepthAnythingConfig(
        backbone_config=backbone,
        neck_hidden_sizes=[8, 16, 32, 32],
        fusion_hidden_size=16,
        head_hidden_size=8,
        reassemble_hidden_size=32,
    )
    found: nn.Module = DepthAnythingForDepthEstimation(config)
    return found


class StaticDecode(nn.Module):
    """Decodes one token by a Llama-style model whose keys and values have a fixed place: those of
    ``most`` tokens, of which those up to ``position`` count."""

    def __init__(self, width: int = 32, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(99, width)
        self.layers = nn.ModuleList(StaticLayer(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)

    def forward(self, input_ids: Tensor, position: Tensor, cache: list[Tensor]) -> Any:
        """``input_ids`` (B, 1), ``position`` (1,), ``cache`` (2, B, heads, most, dim) of each
        layer; gives scores (B, 1, 99) and new caches."""
        x, kept = self.embedding(input_ids), []
        for layer, each in zip(self.layers, cache, strict=True):
            x, new = layer(x, position, each)
            kept.append(new)
        return self.norm(x) @ self.embedding.weight.T, kept


class StaticLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width, False), nn.Linear(width, width, False)
        self.gates, self.down = nn.Linear(width, 4 * width, False), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, position: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        parts = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind()
        turned = turned_by(torch.stack([query, key]), position)
        cache = cache.index_copy(3, position, torch.stack([turned[1], value]))
        places = torch.arange(cache.shape[3], device=x.device)
        mask = (places <= position)[None, None, None]
        found = F.scaled_dot_product_attention(turned[0], cache[0], cache[1], mask)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        gate, up = self.gates(self.norms[1](x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up), cache


def turned_by(x: Tensor, position: Tensor) -> Tensor:
    """Turn pairs of numbers (..., dim) by angles that grow with the position."""
    half = x.shape[-1] // 2
    steps = torch.arange(half, device=x.device, dtype=torch.float32) / half
    angles = position[:, None].float() * 10000.0**-steps
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    one, other = x[..., :half], x[..., half:]
    return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)
