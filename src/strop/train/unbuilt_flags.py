"""The flags of diffusers' training scripts that Strop knows and does not build."""

from __future__ import annotations

from typing import Any

# Flags of diffusers' scripts that are known and not built -> why, and what to do.
_UPLOADS = "nothing is uploaded; run 'hf upload' on the output folder"
_FOLDERS = "models are not downloaded; give a folder ('hf download' makes one)"
_IF = "that is for DeepFloyd IF, which is not trained; leave it out"
_BIAS = "timesteps of DDPM are drawn evenly; use --snr_gamma 5 to weigh them, or leave it out"
UNBUILT: dict[str, str] = {
    "class_labels_conditioning": _IF,
    "crops_coords_top_left_h": "time ids have the place of each picture's own crop; leave it out",
    "crops_coords_top_left_w": "time ids have the place of each picture's own crop; leave it out",
    "dataset_config_name": "hub datasets are not built; download one and use --train_data_dir",
    "dream_detail_preservation": "DREAM is not built; leave it out",
    "dream_training": "DREAM is not built; leave it out",
    "hub_model_id": _UPLOADS,
    "hub_token": _UPLOADS,
    "dataset_preprocess_batch_size": "--pre_compute_text_embeddings chooses its own; leave it out",
    "enable_model_cpu_offload": "parts of the model stay on the GPU; leave it out",
    "image_column": "pictures are those that file_name names in metadata.jsonl; leave it out",
    "jsonl_for_train": "give --train_data_dir a folder whose metadata.jsonl names file_name, text"
    " and conditioning_image",
    "num_extra_conditioning_channels": "diffusers draws with latents alone; leave it out",
    "save_weight_dtype": "write --save_precision, which is the same",
    "upcast_vae": "write --vae_precision fp32, which is the same",
    "use_adafactor": "write --optimizer adafactor",
    "debug_loss": "metrics.jsonl has the loss of each step; leave it out",
    "do_edm_style_training": "EDM is not built; leave it out",
    "lora_blocks": "name the blocks in --lora_layers, as in transformer_blocks.3.attn.to_q",
    "local_rank": "launchers set LOCAL_RANK in the environment; leave it out",
    "non_ema_revision": _FOLDERS,
    "offset_noise": "write --noise_offset 0.1, which is the same",
    "push_to_hub": _UPLOADS,
    "revision": _FOLDERS,
    "skip_save_text_encoder": "the saved model is whole, so that it loads; delete the folder"
    " text_encoder afterwards",
    "text_encoder_lr": "all weights share --learning_rate",
    "adam_weight_decay_text_encoder": "all weights share --adam_weight_decay",
    "repeats": "epochs are counted in steps; use --max_train_steps",
    "text_encoder_use_attention_mask": _IF,
    "timestep_bias_begin": _BIAS,
    "timestep_bias_end": _BIAS,
    "timestep_bias_multiplier": _BIAS,
    "timestep_bias_portion": _BIAS,
    "timestep_bias_strategy": _BIAS,
    "tokenizer_max_length": "captions are padded to the tokenizer's own length; leave it out",
    "tokenizer_name": "the tokenizer is that of the model's folder; put another one there",
    "tracker_project_name": "TensorBoard has no projects; use --logging_dir",
    "validation_epochs": "validations are counted in steps; use --validation_steps",
    "validation_images": "Stable Diffusion starts from noise, not from a picture; leave it out",
    "validation_scheduler": "pictures are drawn with the model's own scheduler; leave it out",
    "variant": _FOLDERS,
}
# Flags that are taken and change nothing -> why there is nothing to do.
NEEDLESS: dict[str, str] = {
    "enable_npu_flash_attention": "attention is torch's scaled_dot_product_attention",
    "output_kohya_format": "kohya's form is always written",
    "upcast_before_saving": "what is trained is fp32, and saved in --save_precision",
    "enable_xformers_memory_efficient_attention": "attention is torch's"
    " scaled_dot_product_attention, which is fused as well",
    "foreach_ema": "averages are part of the fused step",
    "prior_generation_precision": "class pictures are drawn in the type of --mixed_precision",
    "set_grads_to_none": "gradients are None between steps anyway",
}
# Flags of both tables that take no value on a command line.
SWITCHES = frozenset(
    (
        "do_edm_style_training",
        "enable_npu_flash_attention",
        "output_kohya_format",
        "upcast_before_saving",
        "dream_training",
        "enable_model_cpu_offload",
        "enable_xformers_memory_efficient_attention",
        "foreach_ema",
        "offset_noise",
        "push_to_hub",
        "set_grads_to_none",
        "skip_save_text_encoder",
        "upcast_vae",
        "use_adafactor",
        "text_encoder_use_attention_mask",
    )
)
_JSONL = "metrics.jsonl has every number and is always written; use tensorboard, or none"
UNBUILT_VALUES: dict[tuple[str, Any], str] = {
    ("report_to", "all"): _JSONL,
    ("report_to", "comet_ml"): _JSONL,
    ("report_to", "wandb"): _JSONL,
}
