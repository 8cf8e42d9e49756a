"""Define convolutional networks plainly, as papers and torchvision write them, in small."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Conv(nn.Sequential):
    """Apply convolution, batch norm and ReLU: the brick of most of them."""

    def __init__(
        self,
        inner: int,
        outer: int,
        kernel: int | tuple[int, int] = 3,
        stride: int = 1,
        groups: int = 1,
    ) -> None:
        sides = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = (sides[0] // 2, sides[1] // 2)
        super().__init__(
            nn.Conv2d(inner, outer, sides, stride, padding, groups=groups, bias=False),
            nn.BatchNorm2d(outer),
            nn.ReLU(inplace=True),
        )


def _randomised(module: nn.Module) -> None:
    """Set running statistics as after some training, instead of zeros and ones."""
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d | nn.BatchNorm3d):
            assert part.running_mean is not None
            assert part.running_var is not None
            part.running_mean.normal_(0, 0.1)
            part.running_var.uniform_(0.5, 1.5)


class Classifier(nn.Module):
    """Compute features, their mean over the picture, and classes."""

    def __init__(self, features: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.features, self.head = features, head
        _randomised(self)

    def forward(self, pixel_values: Tensor) -> Tensor:
        pooled = F.adaptive_avg_pool2d(self.features(pixel_values), 1)
        classes: Tensor = self.head(torch.flatten(pooled, 1))
        return classes


def vgg() -> nn.Module:
    """Build VGG (Simonyan and Zisserman, 2014)."""
    layers: list[nn.Module] = []
    inner = 3
    for width, depth in ((8, 1), (16, 1), (16, 2)):
        for _ in range(depth):
            layers += [nn.Conv2d(inner, width, 3, padding=1), nn.ReLU(inplace=True)]
            inner = width
        layers.append(nn.MaxPool2d(2, 2))
    head = [nn.Linear(inner, 32), nn.ReLU(True), nn.Dropout(), nn.Linear(32, 10)]
    return Classifier(nn.Sequential(*layers), nn.Sequential(*head))


class DenseBlock(nn.Module):
    def __init__(self, inner: int, growth: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(inner + i * growth),
                nn.ReLU(inplace=True),
                nn.Conv2d(inner + i * growth, 2 * growth, 1, bias=False),
                nn.BatchNorm2d(2 * growth),
                nn.ReLU(inplace=True),
                nn.Conv2d(2 * growth, growth, 3, padding=1, bias=False),
            )
            for i in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        found = [x]
        for layer in self.layers:
            found.append(layer(torch.cat(found, 1)))
        return torch.cat(found, 1)


def densenet() -> nn.Module:
    """Build DenseNet (Huang et al., 2017), in which each layer reads all before it."""
    return Classifier(
        nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1),
            DenseBlock(16, 8, 3),
            nn.BatchNorm2d(40),
            nn.ReLU(inplace=True),
            nn.Conv2d(40, 20, 1),
            nn.AvgPool2d(2, 2),
            DenseBlock(20, 8, 3),
            nn.BatchNorm2d(44),
            nn.ReLU(inplace=True),
        ),
        nn.Linear(44, 10),
    )


class Inception(nn.Module):
    """Compute four ways side by side; one of them has factorised kernels (Szegedy et al., 2015)."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.single = Conv(inner, 8, 1)
        self.factorised = nn.Sequential(Conv(inner, 8, 1), Conv(8, 8, (1, 7)), Conv(8, 8, (7, 1)))
        self.twice = nn.Sequential(Conv(inner, 8, 1), Conv(8, 8), Conv(8, 8))
        self.pooled = Conv(inner, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        pooled = self.pooled(F.avg_pool2d(x, 3, 1, 1))
        return torch.cat([self.single(x), self.factorised(x), self.twice(x), pooled], 1)


def inception() -> nn.Module:
    return Classifier(
        nn.Sequential(Conv(3, 16, stride=2), Inception(16), nn.MaxPool2d(3, 2), Inception(32)),
        nn.Linear(32, 10),
    )


class Shuffle(nn.Module):
    """Compute a ShuffleNet unit: half of the channels pass, then all are shuffled (Ma et al.,
    2018)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        half = width // 2
        self.branch = nn.Sequential(
            Conv(half, half, 1),
            nn.Conv2d(half, half, 3, 1, 1, groups=half, bias=False),
            nn.BatchNorm2d(half),
            Conv(half, half, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        kept, changed = x.chunk(2, dim=1)
        joined = torch.cat((kept, self.branch(changed)), dim=1)
        batch, channels, height, width = joined.size()
        parts = joined.view(batch, 2, channels // 2, height, width).transpose(1, 2).contiguous()
        return parts.view(batch, channels, height, width)


def shufflenet() -> nn.Module:
    units = (Conv(3, 16, stride=2), Shuffle(16), Shuffle(16), Conv(16, 32, stride=2), Shuffle(32))
    return Classifier(nn.Sequential(*units), nn.Linear(32, 10))


class Excite(nn.Module):
    """Apply squeeze and excitation (Hu et al., 2018)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(width, 8, 1), nn.Conv2d(8, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.up(F.relu(self.down(F.adaptive_avg_pool2d(x, 1))))
        return x * F.hardsigmoid(gate)


class Inverted(nn.Module):
    """Compute MobileNetV3's block (Howard et al., 2019)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, hidden, 1, bias=False),
            nn.BatchNorm2d(hidden),
            nn.Hardswish(),
            nn.Conv2d(hidden, hidden, 5, 1, 2, groups=hidden, bias=False),
            nn.BatchNorm2d(hidden),
            Excite(hidden),
            nn.Hardswish(),
            nn.Conv2d(hidden, width, 1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)  # type: ignore[no-any-return]


def mobilenet_v3() -> nn.Module:
    blocks = nn.Sequential(Conv(3, 16, stride=2), Inverted(16, 32), Inverted(16, 48))
    return Classifier(blocks, nn.Linear(16, 10))


class Segmenter(nn.Module):
    """Compute U-Net (Ronneberger et al., 2015), upwards by transposed convolutions."""

    def __init__(self, widths: Sequence[int] = (8, 16, 32)) -> None:
        super().__init__()
        pairs = list(pairwise(widths))
        self.stem = Conv(3, widths[0])
        self.down = nn.ModuleList(Conv(a, b) for a, b in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in reversed(pairs))
        self.merge = nn.ModuleList(Conv(2 * a, a) for a, _ in reversed(pairs))
        self.classes = nn.Conv2d(widths[0], 4, 1)
        _randomised(self)

    def forward(self, pixel_values: Tensor) -> Tensor:
        x, kept = self.stem(pixel_values), []
        for layer in self.down:
            kept.append(x)
            x = layer(F.max_pool2d(x, 2))
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([kept.pop(), up(x)], 1))
        classes: Tensor = self.classes(x)
        return classes


class Generator(nn.Module):
    """Generate pictures from noise as DCGAN does (Radford et al., 2015)."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.ConvTranspose2d(16, 4 * width, 4, 1, 0, bias=False),
            nn.BatchNorm2d(4 * width),
            nn.ReLU(True),
            nn.ConvTranspose2d(4 * width, width, 4, 2, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(True),
            nn.ConvTranspose2d(width, 3, 4, 2, 1),
            nn.Tanh(),
        )
        _randomised(self)

    def forward(self, noise: Tensor) -> Tensor:
        picture: Tensor = self.layers(noise[:, :, None, None])
        return picture


class WaveNet(nn.Module):
    """Apply gated dilated convolutions over time (van den Oord et al., 2016)."""

    def __init__(self, width: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv1d(1, width, 1)
        self.gated = nn.ModuleList(
            nn.Conv1d(width, 2 * width, 2, dilation=2**i) for i in range(depth)
        )
        self.mix = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(depth))
        self.head = nn.Sequential(nn.ReLU(), nn.Conv1d(width, 32, 1))

    def forward(self, input_values: Tensor) -> Tensor:
        x = self.stem(input_values[:, None])
        total = torch.zeros_like(x)
        for i, (gated, mix) in enumerate(zip(self.gated, self.mix, strict=True)):
            value, gate = gated(F.pad(x, (2**i, 0))).chunk(2, 1)
            y = mix(torch.tanh(value) * torch.sigmoid(gate))
            x, total = x + y, total + y
        levels: Tensor = self.head(total)
        return levels


class Video(nn.Module):
    """Apply convolutions over space and time (Tran et al., 2015)."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv3d(3, width, 3, (1, 2, 2), 1),
            nn.BatchNorm3d(width),
            nn.ReLU(inplace=True),
            nn.Conv3d(width, 2 * width, 3, 1, 1),
            nn.BatchNorm3d(2 * width),
            nn.ReLU(inplace=True),
        )
        self.head = nn.Linear(2 * width, 5)
        _randomised(self)

    def forward(self, frames: Tensor) -> Tensor:
        classes: Tensor = self.head(self.layers(frames).mean((2, 3, 4)))
        return classes
