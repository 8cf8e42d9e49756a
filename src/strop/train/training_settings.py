"""The settings of the optimizer, the loss and the machine that trains."""

from __future__ import annotations

from dataclasses import dataclass

from strop.train.setting import setting

SCHEDULES = (
    "constant",
    "constant_with_warmup",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
)

OPTIMIZERS = ("adamw", "adafactor", "lion", "lamb", "novograd", "prodigy", "schedule-free")


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """Hold the panel "Training" of ``strop train -h``."""

    train_batch_size: int = setting(
        16,
        int,
        "Training",
        "Put this many pictures into a batch of each process.",
        least=1,
        fixed=True,
        per_task={"dreambooth": 4, "controlnet": 4},
    )
    num_train_epochs: int = setting(
        100,
        int,
        "Training",
        "Train for this many epochs, unless steps are given.",
        least=1,
        per_task={"dreambooth": 1, "controlnet": 1},
    )
    max_train_steps: int | None = setting(
        None, int, "Training", "Train for this many steps of the optimizer.", least=1
    )
    gradient_accumulation_steps: int = setting(
        1,
        int,
        "Training",
        "Accumulate the gradients of this many batches in a step.",
        least=1,
        fixed=True,
    )
    gradient_checkpointing: bool = setting(
        False, bool, "Training", "Compute activations twice to save memory."
    )
    blocks_to_swap: int = setting(
        0,
        int,
        "Training",
        "Keep the weights of this many blocks of a frozen UNet or transformer in the host's "
        "memory, and copy each to the GPU while the one before it is computed.",
        least=0,
    )
    learning_rate: float = setting(
        1e-4,
        float,
        "Training",
        "Train with this learning rate, after the warm-up.",
        least=0,
        fixed=True,
        per_task={"dreambooth": 5e-6, "controlnet": 5e-6},
    )
    scale_lr: bool = setting(
        False,
        bool,
        "Training",
        "Multiply the learning rate by batch size, accumulation steps and processes.",
        fixed=True,
    )
    lr_scheduler: str = setting(
        "constant",
        str,
        "Training",
        "Change the learning rate by this schedule.",
        choices=SCHEDULES,
        fixed=True,
    )
    lr_warmup_steps: int = setting(
        500,
        int,
        "Training",
        "Raise the learning rate to its value over this many steps.",
        least=0,
        fixed=True,
    )
    lr_num_cycles: int = setting(
        1, int, "Training", "Restart cosine_with_restarts this many times.", least=1, fixed=True
    )
    lr_power: float = setting(
        1.0, float, "Training", "Lower the rate by this power in polynomial.", least=0, fixed=True
    )
    optimizer: str = setting(
        "adamw",
        str,
        "Training",
        "Step by this optimizer: Strop's own AdamW, torch's Adafactor, or another one of the "
        "package pytorch-optimizer. All take the decays, the weight decay and the epsilon below.",
        choices=OPTIMIZERS,
        fixed=True,
    )
    prodigy_beta3: float | None = setting(
        None,
        float,
        "Training",
        "Average Prodigy's step size with this decay; without it, the root of adam_beta2.",
        least=0,
        fixed=True,
    )
    prodigy_decouple: bool = setting(
        True, bool, "Training", "Decay weights in Prodigy as AdamW does.", fixed=True
    )
    prodigy_use_bias_correction: bool = setting(
        True, bool, "Training", "Correct Prodigy's first averages as Adam does.", fixed=True
    )
    prodigy_safeguard_warmup: bool = setting(
        True, bool, "Training", "Leave the warm-up out of Prodigy's step size.", fixed=True
    )
    adam_beta1: float = setting(
        0.9, float, "Training", "Average gradients with this decay (AdamW).", least=0, fixed=True
    )
    adam_beta2: float = setting(
        0.999,
        float,
        "Training",
        "Average squares of gradients with this decay (AdamW).",
        least=0,
        fixed=True,
    )
    adam_weight_decay: float = setting(
        1e-2, float, "Training", "Decay weights by this (AdamW).", least=0, fixed=True
    )
    adam_epsilon: float = setting(
        1e-8, float, "Training", "Add this to AdamW's denominator.", least=0, fixed=True
    )
    use_8bit_adam: bool = setting(
        False,
        bool,
        "Training",
        "Keep AdamW's moments in 8 bits, in a quarter of their memory; numbers change a little.",
        fixed=True,
    )
    max_grad_norm: float = setting(
        1.0,
        float,
        "Training",
        "Clip gradients to this norm; 1e9 clips nothing.",
        above=0,
        fixed=True,
    )
    use_ema: bool = setting(
        False, bool, "Training", "Average the weights, and save the averages.", fixed=True
    )
    ema_decay: float = setting(
        0.9999,
        float,
        "Training",
        "Decay the averages by this factor in each step.",
        least=0,
        fixed=True,
    )
    offload_ema: bool = setting(
        False,
        bool,
        "Training",
        "Keep the averages in the host's memory: a thread copies the weights of each step there "
        "and averages them, while the training goes on.",
    )
    mixed_precision: str = setting(
        "no",
        str,
        "Training",
        "Autocast to this type, which weights that are not trained take as well.",
        choices=("no", "fp16", "bf16"),
        fixed=True,
    )
    compile_unet: bool = setting(
        False,
        bool,
        "Training",
        "Compile forward and backward passes of the UNet and a ControlNet; the first step takes "
        "longer.",
        fixed=True,
    )
    step_graph: bool = setting(
        True,
        bool,
        "Training",
        "On a GPU, capture forward pass, backward pass and update as one CUDA graph.",
    )
    allow_tf32: bool = setting(False, bool, "Training", "Multiply matrices in TF32 on a GPU.")
    deterministic: bool = setting(
        False,
        bool,
        "Training",
        "Give the same bits in every run and after a resume, also on a "
        "GPU, which gets slower. A CPU does so anyway.",
        fixed=True,
    )
    seed: int = setting(
        0, int, "Training", "Draw everything random from this seed.", least=0, fixed=True
    )
    threads: int = setting(
        0,
        int,
        "Training",
        "Use this many CPU threads; 0 takes as many as cores are free, or as the checkpoint had.",
        least=0,
    )
    device: str = setting(
        "auto",
        str,
        "Training",
        "Train on this device; auto takes a GPU if there is one.",
        choices=("auto", "cpu", "cuda"),
    )
    num_processes: int = setting(
        1,
        int,
        "Training",
        "Start this many processes on this machine, one on each GPU, and train one model with all.",
        least=1,
    )
    shard_optimizer: bool = setting(
        False,
        bool,
        "Training",
        "Keep the optimizer's state and the averages of each weight on one process alone, which "
        "steps it for all (ZeRO stage 1).",
    )
    shard_gradients: bool = setting(
        False,
        bool,
        "Training",
        "Keep the summed gradients of each weight on that process alone as well, which gets them "
        "while the backward pass goes on (ZeRO stage 2); it cuts the optimizer's state, too.",
    )
    gradient_sync: str = setting(
        "fp32",
        str,
        "Training",
        "Send gradients between processes in this number format; bf16 is half as much to send, and "
        "rounds each rank's gradients.",
        choices=("fp32", "bf16"),
        fixed=True,
    )
    max_restarts: int = setting(
        0,
        int,
        "Training",
        "Start all processes again, up to so many times, when one has died or hangs; they go on "
        "from the last checkpoint.",
        least=0,
    )
    rank_timeout: int = setting(
        600,
        int,
        "Training",
        "End a training on several processes when one waits this many seconds for another.",
        least=1,
    )
