"""The settings that say which timesteps are trained, how much each counts, what is predicted."""

from __future__ import annotations

from dataclasses import dataclass

from strop.train.setting import setting

SCHEMES = ("none", "logit_normal", "mode", "sigma_sqrt", "cosmap")


@dataclass(frozen=True, kw_only=True)
class NoiseSettings:
    """Hold the panel "Noise" of ``strop train -h``."""

    snr_gamma: float | None = setting(
        None,
        float,
        "Noise",
        "Weigh the loss by min-SNR with this gamma; 5 is usual.",
        above=0,
        fixed=True,
    )
    noise_offset: float = setting(
        0.0,
        float,
        "Noise",
        "Shift the noise of each channel at random by this scale; 0.1 is usual.",
        least=0,
        fixed=True,
    )
    input_perturbation: float = setting(
        0.0,
        float,
        "Noise",
        "Add more noise of this scale to the UNet's input alone; 0.1 is usual.",
        least=0,
        fixed=True,
    )
    prediction_type: str | None = setting(
        None,
        str,
        "Noise",
        "Let the UNet predict this; without it, what its scheduler says.",
        choices=("epsilon", "v_prediction", "sample"),
        fixed=True,
    )
    weighting_scheme: str | None = setting(
        None,
        str,
        "Noise",
        "Draw timesteps of flow matching like this: evenly for none, sigma_sqrt and cosmap, of "
        "which the last two weigh the loss; without it, none for Flux.1 and logit_normal for "
        "others and for ControlNets.",
        choices=SCHEMES,
        fixed=True,
    )
    logit_mean: float | None = setting(
        None,
        float,
        "Noise",
        "Draw logit_normal timesteps around this mean; 0 is usual, more trains less noise.",
        fixed=True,
    )
    logit_std: float | None = setting(
        None,
        float,
        "Noise",
        "Draw logit_normal timesteps with this deviation; 1 is usual.",
        above=0,
        fixed=True,
    )
    mode_scale: float | None = setting(
        None,
        float,
        "Noise",
        "Draw timesteps of the scheme mode this far from evenly; 1.29 is usual.",
        least=0,
        fixed=True,
    )
    timestep_shift: float | None = setting(
        None,
        float,
        "Noise",
        "Shift timesteps of flow matching to noise by this; without it, as the scheduler does.",
        above=0,
        fixed=True,
    )
    precondition_outputs: int | None = setting(
        None,
        int,
        "Noise",
        "Compare pictures (1) or velocities (0) in flow matching; without it, 1 for Stable "
        "Diffusion 3 and 0 for others.",
        least=0,
        fixed=True,
    )
    guidance_scale: float | None = setting(
        None,
        float,
        "Noise",
        "Train a Flux that reads its guidance with this one; 3.5 is usual.",
        least=0,
        fixed=True,
    )
