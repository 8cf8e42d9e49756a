"""Hold every number that shapes the sprites models and trains their autoencoder.

`FULL` is the model that ships; `TINY` runs the same code in seconds. How UNet and text encoder are
trained is said in `examples/sprites.yaml`, and how the transformer of sprites-dit is, in
`examples/sprites-dit.yaml`.
"""

from dataclasses import asdict, dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class NetworkSettings:
    """Hold the sizes of the networks, under the names that diffusers and transformers give them."""

    vae_channels: tuple[int, ...] = (32, 64, 64)
    vae_layers: int = 1
    vae_groups: int = 16
    latent_channels: int = 4
    unet_channels: tuple[int, ...] = (64, 96, 128)
    unet_layers: int = 1
    unet_heads: tuple[int, ...] = (2, 3, 4)
    unet_groups: int = 32
    text_width: int = 128
    text_layers: int = 4
    text_heads: int = 4
    text_length: int = 24


@dataclass(frozen=True)
class DitSettings:
    """Hold the sizes of the transformer of sprites-dit, a Flux in miniature.

    Attributes:
        double_blocks: Blocks with weights of their own for text and for picture.
        single_blocks: Blocks with the same weights for both, after the double ones.
        heads: Heads of each attention.
        head_dim: Channels of each head.
        rotary_dims: Channels of each head that turn with a token's index, row and column.
        seed: Of all weights.
    """

    double_blocks: int = 2
    single_blocks: int = 4
    heads: int = 3
    head_dim: int = 64
    rotary_dims: tuple[int, int, int] = (8, 28, 28)
    seed: int = 1


@dataclass(frozen=True)
class NoiseSettings:
    """Hold the noise schedule; it is written into the folder, where training and sampling read it.

    Zero terminal signal with v-prediction lets flat white and black backgrounds come out flat
    (Lin et al. 2023, "Common Diffusion Noise Schedules and Sample Steps are Flawed").
    """

    steps: int = 1000
    beta_start: float = 0.00085
    beta_end: float = 0.012
    beta_schedule: str = "scaled_linear"
    prediction_type: str = "v_prediction"
    timestep_spacing: str = "trailing"


@dataclass(frozen=True)
class VaeTraining:
    """Say how the autoencoder is trained.

    Attributes:
        batch: 96x64 pictures of a step; other sizes scale by area.
        steps: Steps of the whole training. The autoencoder that ships had no fixed number, but
            5.5 minutes on one H100.
        learning_rate: Rate between the warm-up and the cosine down to zero.
        warmup: Steps in which the rate grows.
        weight_decay: AdamW's.
        betas: AdamW's.
        clip: Norm to which gradients are clipped.
        edge_weight: Weight of the differences between neighbouring pixels.
        kl_weight: Weight of the KL term.
        ema: Decay of the average of the weights, which is what is written.
        statistics: Pictures of every size whose latents are brought to unit variance.
        seed: Of all weights and pictures.
    """

    batch: int = 256
    steps: int = 6000
    learning_rate: float = 1e-3
    warmup: int = 200
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.99)
    clip: float = 1.0
    edge_weight: float = 0.5
    kl_weight: float = 3e-4
    ema: float = 0.998
    statistics: int = 256
    seed: int = 1


@dataclass(frozen=True)
class Settings:
    """Hold all settings of one model."""

    network: NetworkSettings = field(default_factory=NetworkSettings)
    noise: NoiseSettings = field(default_factory=NoiseSettings)
    vae: VaeTraining = field(default_factory=VaeTraining)

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as plain nested dictionaries, for JSON."""
        return asdict(self)


FULL = Settings()

TINY = Settings(
    network=NetworkSettings(
        vae_channels=(16, 16, 16),
        vae_groups=8,
        unet_channels=(16, 16, 16),
        unet_heads=(2, 2, 2),
        unet_groups=8,
        text_width=32,
        text_layers=1,
        text_heads=2,
    ),
    vae=replace(VaeTraining(), batch=2, steps=5, warmup=2, statistics=2),
)

DIT = DitSettings()

TINY_DIT = DitSettings(
    double_blocks=1, single_blocks=1, heads=2, head_dim=16, rotary_dims=(4, 6, 6)
)

NAMED: dict[str, Settings] = {"full": FULL, "tiny": TINY}
