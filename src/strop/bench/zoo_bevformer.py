"""Define BEVFormer (Li et al., 2022, arXiv:2203.17270) plainly, from its description.

Cameras around a car are seen by a ResNet and a feature pyramid. Queries that lie on a grid of the
ground look at their own history (temporal self-attention), and at the cameras that see them
(spatial cross-attention); both sample few places, which they choose, by ``grid_sample``. Object
queries then read boxes from the ground.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NEAREST = 0.1  # metres before a camera


@dataclass(frozen=True, slots=True)
class BevConfig:
    """Hold the sizes of a model: the defaults are those of BEVFormer-small with a ResNet-50. There
    are as many ``points`` as ``pillars``, one beside each."""

    width: int = 256
    heads: int = 8
    layers: int = 3
    bev: int = 150  # queries along a side of the ground
    cameras: int = 6
    pillars: int = 4  # heights at which a query looks for itself in a camera
    points: int = 4  # places that a head samples of each level
    blocks: tuple[int, ...] = (3, 4, 6, 3)  # of the ResNet
    stem: int = 64
    levels: int = 3  # of the pyramid
    hidden: int = 512
    objects: int = 900
    decoder_layers: int = 6
    classes: int = 10
    reach: float = 51.2  # metres from the car to the edge of the ground
    low: float = -5.0
    high: float = 3.0


TINY = BevConfig(
    width=32,
    heads=4,
    layers=1,
    bev=6,
    cameras=2,
    pillars=2,
    points=2,
    blocks=(1, 1, 1, 1),
    stem=8,
    levels=2,
    hidden=64,
    objects=5,
    decoder_layers=1,
    classes=3,
)


# ---- pictures ----------------------------------------------------------------------------------


class Bottleneck(nn.Module):
    """Adds three convolutions to their input (He et al., 2015), the stride in the second."""

    def __init__(self, ins: int, inner: int, stride: int) -> None:
        super().__init__()
        outs = 4 * inner
        self.narrow = _conv(ins, inner, 1)
        self.wide = _conv(inner, inner, 3, stride)
        self.last = _conv(inner, outs, 1)
        self.skip = _conv(ins, outs, 1, stride) if stride > 1 or ins != outs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        inner = self.wide(self.narrow(x).relu()).relu()
        added: Tensor = self.last(inner) + self.skip(x)
        return added.relu()


def _conv(ins: int, outs: int, side: int, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(ins, outs, side, stride, side // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outs))


class Backbone(nn.Module):
    """Returns a pyramid of ``levels`` maps of ``width`` channels, of the last stages of a ResNet:
    each half as large as the one before, the last 1/32 of the picture."""

    def __init__(self, config: BevConfig) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, config.stem, 7, 2, 3, bias=False), nn.BatchNorm2d(config.stem), nn.ReLU()
        )
        ins, stages = config.stem, []
        for number, count in enumerate(config.blocks):
            inner = config.stem << number
            first = Bottleneck(ins, inner, 2 if number else 1)
            rest = [Bottleneck(4 * inner, inner, 1) for _ in range(count - 1)]
            stages.append(nn.Sequential(first, *rest))
            ins = 4 * inner
        self.stages = nn.ModuleList(stages)
        self.levels = config.levels
        widths = [4 * config.stem << number for number in range(len(config.blocks))]
        self.sides = nn.ModuleList(
            nn.Conv2d(width, config.width, 1) for width in widths[-config.levels :]
        )
        self.smooth = nn.ModuleList(
            nn.Conv2d(config.width, config.width, 3, padding=1) for _ in self.sides
        )

    def forward(self, pixels: Tensor) -> list[Tensor]:
        x = F.max_pool2d(self.stem(pixels), 3, 2, 1)
        maps = []
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        pairs = zip(self.sides, maps[-self.levels :], strict=True)
        sides = [side(each) for side, each in pairs]
        for number in range(len(sides) - 1, 0, -1):
            wider = F.interpolate(sides[number], size=sides[number - 1].shape[-2:])
            sides[number - 1] = sides[number - 1] + wider
        return [smooth(side) for smooth, side in zip(self.smooth, sides, strict=True)]


# ---- attention ---------------------------------------------------------------------------------


def sampled(
    values: Sequence[Tensor],
    sizes: Sequence[tuple[int, int]],
    references: Tensor,
    offsets: Tensor,
    weights: Tensor,
) -> Tensor:
    """Return weighted sums of samples (B, Q, heads * dim).

    ``values`` has (B, H * W, heads, dim) of each level, ``offsets`` (B, Q, heads, levels, points,
    2) in pixels from the references (B, Q, points or 1, 2), which are from 0 to 1, and ``weights``
    (B, Q, heads, levels, points).
    """
    batch, count, heads, _, points, _ = offsets.shape
    width_of_head, total = values[0].shape[-1], None
    for level, (value, (height, width)) in enumerate(zip(values, sizes, strict=True)):
        own = offsets[:, :, :, level]
        moved = torch.stack([own[..., 0] / width, own[..., 1] / height], -1)
        places = 2 * (references[:, :, None] + moved) - 1
        grid = places.transpose(1, 2).reshape(batch * heads, count, points, 2)
        images = value.permute(0, 2, 3, 1)
        images = images.reshape(batch * heads, width_of_head, height, width)
        found = F.grid_sample(images, grid, align_corners=False)
        shares = weights[:, :, :, level].transpose(1, 2)
        part = (found * shares.reshape(batch * heads, 1, count, points)).sum(-1)
        total = part if total is None else total + part
    assert total is not None, "there is a level"
    return total.reshape(batch, heads * width_of_head, count).transpose(1, 2)


class Deformable(nn.Module):
    """Reads a few places beside reference points (Zhu et al., 2020, arXiv:2010.04159)."""

    def __init__(self, config: BevConfig, levels: int, width_of_queries: int = 0) -> None:
        super().__init__()
        self.heads, self.levels, self.points = config.heads, levels, config.points
        asked, count = width_of_queries or config.width, config.heads * levels * config.points
        self.value = nn.Linear(config.width, config.width)
        self.offsets = nn.Linear(asked, 2 * count)
        self.shares = nn.Linear(asked, count)
        self.out = nn.Linear(config.width, config.width)

    def forward(
        self,
        queries: Tensor,
        sources: Sequence[Tensor],
        sizes: Sequence[tuple[int, int]],
        references: Tensor,
    ) -> Tensor:
        """``queries`` are (B, Q, C), ``sources`` (B, H * W, C) of each level, ``references`` (B, Q,
        points or 1, 2) from 0 to 1."""
        batch, count, _ = queries.shape
        values = [self.value(x).unflatten(-1, (self.heads, -1)) for x in sources]
        offsets = self.offsets(queries).view(batch, count, self.heads, self.levels, self.points, 2)
        shares = self.shares(queries).view(batch, count, self.heads, -1).softmax(-1)
        shares = shares.view(batch, count, self.heads, self.levels, self.points)
        found: Tensor = self.out(sampled(values, sizes, references, offsets, shares))
        return found


class TemporalAttention(nn.Module):
    """Lets each query look at the ground before and now, near itself; the mean of both counts."""

    def __init__(self, config: BevConfig) -> None:
        super().__init__()
        self.before = Deformable(config, 1, 2 * config.width)
        self.now = Deformable(config, 1, 2 * config.width)

    def forward(self, queries: Tensor, history: Tensor, side: int, references: Tensor) -> Tensor:
        both, sizes = torch.cat([history, queries], -1), [(side, side)]
        before: Tensor = self.before(both, [history], sizes, references)
        now: Tensor = self.now(both, [queries], sizes, references)
        return (before + now) / 2


class SpatialAttention(nn.Module):
    """Lets each query look at the places of its pillar in each camera; the mean of the cameras that
    see it counts."""

    def __init__(self, config: BevConfig) -> None:
        super().__init__()
        self.cameras = config.cameras
        self.attention = Deformable(config, config.levels)

    def forward(
        self,
        queries: Tensor,
        sources: Sequence[Tensor],
        sizes: Sequence[tuple[int, int]],
        places: Tensor,
        seen: Tensor,
    ) -> Tensor:
        """``places`` are (B * cameras, Q, pillars, 2), ``seen`` (B, cameras, Q, 1)."""
        repeated = queries.repeat_interleave(self.cameras, 0)
        found = self.attention(repeated, sources, sizes, places)
        of_cameras = found.unflatten(0, (-1, self.cameras)) * seen
        mean: Tensor = of_cameras.sum(1) / seen.sum(1).clamp(min=1)
        return mean


# ---- the model ---------------------------------------------------------------------------------


class EncoderLayer(nn.Module):
    def __init__(self, config: BevConfig) -> None:
        super().__init__()
        self.temporal, self.spatial = TemporalAttention(config), SpatialAttention(config)
        self.norms = nn.ModuleList(nn.LayerNorm(config.width) for _ in range(3))
        self.hidden = _hidden(config)

    def forward(
        self,
        queries: Tensor,
        history: Tensor,
        side: int,
        references: Tensor,
        cameras: tuple[Sequence[Tensor], Sequence[tuple[int, int]], Tensor, Tensor],
    ) -> Tensor:
        x = self.norms[0](queries + self.temporal(queries, history, side, references))
        x = self.norms[1](x + self.spatial(x, *cameras))
        found: Tensor = self.norms[2](x + self.hidden(x))
        return found


class DecoderLayer(nn.Module):
    """Lets objects look at each other, and at the ground beside where they are thought to be."""

    def __init__(self, config: BevConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.look = Deformable(config, 1)
        self.norms = nn.ModuleList(nn.LayerNorm(config.width) for _ in range(3))
        self.hidden = _hidden(config)

    def forward(self, x: Tensor, ground: Tensor, side: int, places: Tensor) -> Tensor:
        parts = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(*parts.unbind())
        x = self.norms[0](x + self.out(found.transpose(1, 2).flatten(2)))
        x = self.norms[1](x + self.look(x, [ground], [(side, side)], places))
        result: Tensor = self.norms[2](x + self.hidden(x))
        return result


def _hidden(config: BevConfig) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(config.width, config.hidden), nn.ReLU(), nn.Linear(config.hidden, config.width)
    )


class BevFormer(nn.Module):
    """Computes where objects are around a car.

    A call has pictures (B, cameras, 3, H, W), matrices (B, cameras, 4, 4) from metres around the
    car to pixels times depth, and the ground of the call before (B, bev * bev, width). It gives
    the new ground, scores (B, objects, classes) and boxes (B, objects, 10).
    """

    def __init__(self, config: BevConfig) -> None:
        super().__init__()
        self.config = config
        self.backbone = Backbone(config)
        self.queries = nn.Parameter(torch.randn(config.bev**2, config.width))
        self.positions = nn.Parameter(torch.randn(config.bev**2, config.width))
        self.of_level = nn.Parameter(torch.randn(config.levels, config.width))
        self.of_camera = nn.Parameter(torch.randn(config.cameras, config.width))
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.layers))
        self.objects = nn.Parameter(torch.randn(config.objects, config.width))
        self.places = nn.Linear(config.width, 2)
        self.decoder = nn.ModuleList(DecoderLayer(config) for _ in range(config.decoder_layers))
        self.scores = nn.Linear(config.width, config.classes)
        self.boxes = nn.Linear(config.width, 10)
        middles = (torch.arange(config.bev) + 0.5) / config.bev
        rows, columns = torch.meshgrid(middles, middles, indexing="ij")
        self.ground: Tensor
        self.pillars: Tensor
        self.register_buffer("ground", torch.stack([columns, rows], -1).view(-1, 2))
        self.register_buffer("pillars", self._pillars(config))

    def _pillars(self, config: BevConfig) -> Tensor:
        """Return points (Q, pillars, 4) in metres, and a 1."""
        flat = (2 * self.ground - 1) * config.reach
        heights = torch.linspace(config.low, config.high, config.pillars)
        points = torch.ones(len(flat), config.pillars, 4)
        points[..., :2], points[..., 2] = flat[:, None], heights
        return points

    def forward(self, pixels: Tensor, matrices: Tensor, history: Tensor) -> tuple[Tensor, ...]:
        batch, _, _, height, width = pixels.shape
        maps = self.backbone(pixels.flatten(0, 1))
        sizes = [(each.shape[2], each.shape[3]) for each in maps]
        sources = [
            each.flatten(2).transpose(1, 2)
            + self.of_level[level]
            + self.of_camera.repeat(batch, 1)[:, None]
            for level, each in enumerate(maps)
        ]
        places, seen = self._in_cameras(matrices, height, width)
        queries = (self.queries + self.positions).expand(batch, -1, -1)
        references = self.ground[None, :, None].expand(batch, -1, -1, -1)
        side = self.config.bev
        for layer in self.layers:
            queries = layer(queries, history, side, references, (sources, sizes, places, seen))
        objects = self.objects.expand(batch, -1, -1)
        at = self.places(objects).sigmoid()[:, :, None]
        for each in self.decoder:
            objects = each(objects, queries, side, at)
        return queries, self.scores(objects), self.boxes(objects)

    def _in_cameras(self, matrices: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
        """Return where pillars are in pictures (B * cameras, Q, pillars, 2), and whether a camera
        sees any of a pillar (B, cameras, Q, 1)."""
        points = torch.einsum("bcij,qpj->bcqpi", matrices, self.pillars)
        across, down, depth = points[..., 0], points[..., 1], points[..., 2]
        flat = torch.stack([across / width, down / height], -1)
        places = (flat / depth.clamp(min=NEAREST)[..., None]).clamp(-1, 2)
        inside = (depth > NEAREST) & ((places > 0) & (places < 1)).all(-1)
        return places.flatten(0, 1), inside.any(-1, keepdim=True).to(places.dtype)


def bev_inputs(config: BevConfig, batch: int, height: int, width: int) -> dict[str, Tensor]:
    """Return what a call has, with pictures of noise."""
    return {
        "pixels": torch.randn(batch, config.cameras, 3, height, width),
        "matrices": camera_matrices(batch, config.cameras, height, width),
        "history": torch.randn(batch, config.bev**2, config.width),
    }


def camera_matrices(batch: int, cameras: int, height: int, width: int) -> Tensor:
    """Return matrices (B, cameras, 4, 4) of cameras that look all around, each 70 degrees wide."""
    focal = width / 2 / math.tan(math.radians(35))
    found = torch.zeros(batch, cameras, 4, 4)
    for camera in range(cameras):
        turn = 2 * math.pi * camera / cameras
        ahead = torch.tensor([math.cos(turn), math.sin(turn), 0.0, 0.0])
        right = torch.tensor([math.sin(turn), -math.cos(turn), 0.0, 0.0])
        down = torch.tensor([0.0, 0.0, -1.0, 1.5])
        found[:, camera, 0] = focal * right + width / 2 * ahead
        found[:, camera, 1] = focal * down + height / 2 * ahead
        found[:, camera, 2] = ahead
        found[:, camera, 3, 3] = 1.0
    return found
