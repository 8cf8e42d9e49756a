"""Build components of tiny pipelines: models with random weights, tokenizers made in memory,
schedulers.

Widths are small and equal where they can be, so that different pipelines share compiled kernels.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn

Parts = dict[str, Any]  # components by the name that a pipeline's constructor gives them

WIDTH = 32  # of a prompt's embeddings
WORDS = 16  # tokens of a prompt
HEADS: dict[str, Any] = {"attention_head_dim": 16, "num_attention_heads": 2}  # of a transformer
LENGTH = {"max_sequence_length": 16}  # what calls of its pipeline say


def diffusers(kind: str, **config: Any) -> Any:
    """Return a class of diffusers from its configuration; a model among them in eval mode."""
    module, _, name = f"diffusers.{kind}".rpartition(".")
    made = getattr(importlib.import_module(module), name)(**config)
    return made.eval() if isinstance(made, nn.Module) else made


def transformers(kind: str, **config: Any) -> Any:
    """Return a model of transformers in eval mode, from the words of its own configuration
    class."""
    model = getattr(importlib.import_module("transformers"), kind)
    return model(model.config_class(**config)).eval()


def processor(kind: str, **config: Any) -> Any:
    return getattr(importlib.import_module("transformers"), kind)(**config)


def stir(module: nn.Module, seed: int = 1) -> None:
    """Draw weights that begin as a constant, such as the zeros behind a ControlNet: as they are,
    whole branches would have no influence on the result."""
    generator = torch.Generator().manual_seed(seed)
    for weight in module.parameters():
        if weight.is_floating_point() and weight.numel() and bool((weight == weight.max()).all()):
            noise = 0.05 * torch.randn(weight.shape, generator=generator, device="cpu")
            weight.data.add_(noise.to(weight))


# UNets and what belongs to them

UNET: dict[str, Any] = {
    "sample_size": 8,
    "in_channels": 4,
    "out_channels": 4,
    "cross_attention_dim": WIDTH,
    "block_out_channels": (16, 32),
    "layers_per_block": 1,
    "attention_head_dim": 2,
    "norm_num_groups": 4,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}
XL: dict[str, Any] = {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2),
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "cross_attention_dim": 2 * WIDTH,
    "projection_class_embeddings_input_dim": WIDTH + 6 * 8,
    "attention_head_dim": (2, 4),
}
REFINER: dict[str, Any] = XL | {
    "cross_attention_dim": WIDTH,
    "projection_class_embeddings_input_dim": WIDTH + 5 * 8,
}


def unet(**changes: Any) -> Any:
    return diffusers("UNet2DConditionModel", **(UNET | changes))


def controlnet(kind: str = "ControlNetModel", **changes: Any) -> Any:
    left_out = ("sample_size", "out_channels", "up_block_types")
    config = {name: value for name, value in UNET.items() if name not in left_out}
    return diffusers(kind, **(config | {"conditioning_embedding_out_channels": (8, 16)} | changes))


def vae(**changes: Any) -> Any:
    config: dict[str, Any] = {
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "latent_channels": 4,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
        "block_out_channels": (8, 16),
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "sample_size": 32,
    }
    return diffusers("AutoencoderKL", **(config | changes))


def flow_vae(**changes: Any) -> Any:
    """Build the autoencoder that pipelines of flow matching expect."""
    config = {
        "shift_factor": 0.06,
        "scaling_factor": 1.5,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
    }
    return vae(**(config | changes))


# Text encoders


def embeds(seed: int = 5) -> Tensor:
    """Return what a text encoder would make of a prompt."""
    return torch.randn(1, WORDS, WIDTH, generator=torch.Generator().manual_seed(seed))


# Pipelines that clean prompts with a package that is not there get the prompt as embeddings.
EMBEDDED: dict[str, Any] = {
    "prompt": None,
    "negative_prompt": None,
    "prompt_embeds": embeds,
    "negative_prompt_embeds": lambda: embeds(6),
}
TEXT: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
CAUSAL: dict[str, Any] = TEXT | {
    "vocab_size": 600,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def clip(kind: str = "CLIPTextModel", **changes: Any) -> Any:
    config = TEXT | {
        "vocab_size": 514,
        "max_position_embeddings": WORDS,
        "projection_dim": WIDTH,
        "bos_token_id": 512,
        "eos_token_id": 513,
        "pad_token_id": 513,
    }
    return transformers(kind, **(config | changes))


def clip_vision(kind: str = "CLIPVisionModelWithProjection", **changes: Any) -> Any:
    config = TEXT | {"image_size": 32, "patch_size": 8, "projection_dim": WIDTH}
    return transformers(kind, **(config | changes))


def t5(kind: str = "T5EncoderModel", **changes: Any) -> Any:
    config = {
        "vocab_size": 300,
        "d_model": WIDTH,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 2,
        "num_heads": 4,
        "decoder_start_token_id": 0,
    }
    return transformers(kind, **(config | changes))


def causal(kind: str, **changes: Any) -> Any:
    """Return a language model whose states a transformer reads: Gemma, Llama, Qwen."""
    return transformers(kind, **(CAUSAL | changes))


# Tokenizers: every byte or letter is a token


def _byte_symbols() -> list[str]:
    """Return the printable stand-in of each byte, as GPT-2's byte-level BPE assigns them."""
    visible = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(256, 512))
    return [chr(byte if byte in visible else next(hidden)) for byte in range(256)]


def clip_tokenizer(length: int = WORDS) -> Any:
    symbols = _byte_symbols()
    tokens = [*symbols, *(s + "</w>" for s in symbols), "<|startoftext|>", "<|endoftext|>"]
    ids = {token: number for number, token in enumerate(tokens)}
    return processor("CLIPTokenizer", vocab=ids, merges=[], model_max_length=length)


def t5_tokenizer(length: int = WORDS) -> Any:
    letters = [chr(code) for code in range(ord("!"), ord("~") + 1)]
    scored = [(piece, 0.0) for piece in ("<pad>", "</s>", "<unk>", "▁")]
    scored += [(letter, -2.0) for letter in letters]
    return processor("T5Tokenizer", vocab=scored, extra_ids=0, model_max_length=length)


CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>{% endfor %}"
)
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)


def qwen_tokenizer(length: int = 256) -> Any:
    tokens = [*SPECIAL, *_byte_symbols()]
    ids = {token: number for number, token in enumerate(tokens)}
    made = processor(
        "Qwen2Tokenizer",
        vocab=ids,
        merges=[],
        model_max_length=length,
        additional_special_tokens=list(SPECIAL[1:]),
    )
    made.chat_template = CHAT
    return made


def llama_tokenizer(kind: str = "LlamaTokenizer", length: int = 256) -> Any:
    special = (
        ["<pad>", "<s>", "</s>", "<unk>"]
        if kind == "LlamaTokenizer"
        else ["<pad>", "<bos>", "<eos>", "<unk>", "<mask>"]
    )
    letters = ["▁", *(chr(code) for code in range(ord("!"), ord("~") + 1))]
    ids = {token: number for number, token in enumerate([*special, *letters])}
    made = processor(kind, vocab=ids, merges=[], model_max_length=length)
    made.pad_token, made.chat_template = "<pad>", CHAT
    return made


# Schedulers


def ddim() -> Any:
    return diffusers("DDIMScheduler", steps_offset=1, clip_sample=False)


def flow(**config: Any) -> Any:
    return diffusers("FlowMatchEulerDiscreteScheduler", **config)


def image_processor() -> Any:
    """Return what turns a picture into the pixels of a CLIP vision model of 32 times 32."""
    size = {"height": 32, "width": 32}
    return processor("CLIPImageProcessorPil", crop_size=size, size={"shortest_edge": 32})
