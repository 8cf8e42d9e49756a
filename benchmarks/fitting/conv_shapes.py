"""3x3 convolutions of SD1.5's UNet, of SDXL's and of the VAE's decoder at several sizes and
batches, and others between them: batch, height = width, channels in and out, window and stride."""

from __future__ import annotations

import random

# batch, height = width, channels in and out
SD15 = (
    (1, 320, 320),
    (2, 320, 640),
    (2, 640, 640),
    (4, 640, 1280),
    (4, 1280, 1280),
    (8, 1280, 1280),
    (8, 2560, 1280),
    (4, 2560, 1280),
    (4, 1920, 1280),
    (2, 1920, 640),
    (2, 1280, 640),
    (2, 960, 640),
    (1, 960, 320),
    (1, 640, 320),
    (1, 640, 640),
    (2, 1280, 1280),
)
SDXL = (
    (1, 320, 320),
    (2, 320, 640),
    (2, 640, 640),
    (4, 640, 1280),
    (4, 1280, 1280),
    (4, 2560, 1280),
    (4, 1920, 1280),
    (2, 1920, 640),
    (2, 1280, 640),
    (2, 960, 640),
    (1, 960, 320),
    (1, 640, 320),
    (1, 640, 640),
    (2, 1280, 1280),
)
VAE = (
    (1, 512, 512),
    (0.5, 512, 512),
    (0.25, 512, 256),
    (0.25, 256, 256),
    (0.125, 256, 128),
    (0.125, 128, 128),
    (0.25, 512, 512),
    (0.125, 256, 256),
)


def shapes() -> list[tuple[int, ...]]:
    found = [(2, 64 // down, ins, outs) for down, ins, outs in SD15]  # 512x512
    found += [(1, int(64 / up), ins, outs) for up, ins, outs in VAE]
    found += [(2, 128 // down, ins, outs) for down, ins, outs in SD15]  # 1024
    found += [(8, 64 // down, ins, outs) for down, ins, outs in SD15]
    found += [(2, 128 // down, ins, outs) for down, ins, outs in SDXL]
    found += [(2, 96 // down, ins, outs) for down, ins, outs in SD15]  # 768
    found += [(1, int(128 / up), ins, outs) for up, ins, outs in VAE]
    rng = random.Random(0)
    for _ in range(40):
        level = rng.randrange(4)
        side = rng.randrange(40, 136) // 2**level
        outs = rng.choice((320, 640, 1280)) if level < 3 else 1280
        found.append((rng.randrange(1, 9), side, 64 * rng.randrange(5, 31), outs))
    return list(dict.fromkeys((*each, 3, 1) for each in found))
