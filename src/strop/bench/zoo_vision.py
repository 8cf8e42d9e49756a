"""The zoo's networks that read images."""

from __future__ import annotations

from functools import partial

from strop.bench import zoo_bevformer as bevformer
from strop.bench import zoo_convnets as convnets
from strop.bench import zoo_fed as fed
from strop.bench import zoo_modules as own
from strop.bench.zoo_inputs import (
    BATCHES,
    CLICKS,
    CLIPS,
    IMAGES,
    LARGE_BATCHES,
    LARGE_IMAGES,
    PATCHES,
    frames,
    noise,
    pixels,
    two_pictures,
)
from strop.bench.zoo_model import SIZES, Config, ZooModel, hf

VIT: Config = {**SIZES, "intermediate_size": 64, "image_size": 32, "patch_size": 8}
SWIN: Config = {
    "image_size": 64,
    "patch_size": 4,
    "embed_dim": 16,
    "depths": (2, 2),
    "num_heads": (2, 4),
    "window_size": 4,
}
SAM: Config = {
    **{**VIT, "image_size": 64},
    "output_channels": 16,
    "window_size": 4,
    "global_attn_indexes": (1,),
    "mlp_dim": 64,
}
RESNET: Config = {"embedding_size": 16, "hidden_sizes": (16, 32, 32, 64)}


VISION: tuple[ZooModel, ...] = (
    ZooModel(
        "resnet50",
        "vision",
        hf("ResNetForImageClassification", **RESNET, depths=(3, 4, 6, 3)),
        pixels,
        IMAGES,
    ),
    ZooModel(
        "regnet",
        "vision",
        hf("RegNetForImageClassification", **RESNET, depths=(1, 2, 2, 1), groups_width=8),
        pixels,
        IMAGES,
    ),
    ZooModel(
        "convnext",
        "vision",
        hf("ConvNextForImageClassification", hidden_sizes=(8, 16, 16, 32), depths=(1, 1, 2, 1)),
        pixels,
        IMAGES,
    ),
    ZooModel(
        "convnextv2",
        "vision",
        hf("ConvNextV2ForImageClassification", hidden_sizes=(8, 16, 16, 32), depths=(1, 1, 2, 1)),
        pixels,
        IMAGES,
    ),
    ZooModel(
        "efficientnet",
        "vision",
        hf(
            "EfficientNetModel",
            width_coefficient=0.25,
            depth_coefficient=0.4,
            image_size=64,
            hidden_dim=320,
        ),
        pixels,
        LARGE_IMAGES,
    ),
    ZooModel(
        "mobilenet-v1",
        "vision",
        hf("MobileNetV1ForImageClassification", depth_multiplier=0.25),
        pixels,
        LARGE_IMAGES,
    ),
    ZooModel(
        "mobilenet-v2",
        "vision",
        hf("MobileNetV2ForImageClassification", depth_multiplier=0.35),
        pixels,
        LARGE_IMAGES,
    ),
    ZooModel("vit", "vision", hf("ViTForImageClassification", **VIT), pixels, BATCHES),
    ZooModel("deit", "vision", hf("DeiTModel", **VIT), pixels, BATCHES),
    ZooModel(
        "beit",
        "vision",
        hf("BeitModel", **VIT, use_relative_position_bias=True, use_mask_token=False),
        pixels,
        BATCHES,
    ),
    ZooModel("swin", "vision", hf("SwinModel", **SWIN), pixels, LARGE_IMAGES),
    ZooModel("swinv2", "vision", hf("Swinv2Model", **SWIN), pixels, LARGE_BATCHES),
    ZooModel(
        "segformer",
        "vision",
        hf(
            "SegformerForSemanticSegmentation",
            num_encoder_blocks=2,
            depths=(1, 1),
            sr_ratios=(4, 2),
            hidden_sizes=(16, 32),
            patch_sizes=(7, 3),
            strides=(4, 2),
            num_attention_heads=(1, 2),
            mlp_ratios=(2, 2),
            decoder_hidden_size=32,
        ),
        pixels,
        LARGE_IMAGES,
    ),
    ZooModel("dinov2", "vision", hf("Dinov2Model", **{**VIT, "mlp_ratio": 2}), pixels, BATCHES),
    ZooModel(
        "poolformer",
        "vision",
        hf("PoolFormerModel", hidden_sizes=(8, 16, 16, 32), depths=(1, 1, 1, 1)),
        pixels,
        LARGE_IMAGES,
    ),
    ZooModel(
        "yolos",
        "vision",
        hf("YolosForObjectDetection", **{**VIT, "image_size": (32, 32)}, num_detection_tokens=5),
        pixels,
        BATCHES,
    ),
    ZooModel("clip-vision", "vision", hf("CLIPVisionModel", **VIT), pixels, BATCHES),
    ZooModel("siglip-vision", "vision", hf("SiglipVisionModel", **VIT), pixels, BATCHES),
    ZooModel("vgg", "vision", convnets.vgg, pixels, IMAGES),
    ZooModel("densenet", "vision", convnets.densenet, pixels, IMAGES),
    ZooModel("inception", "vision", convnets.inception, pixels, IMAGES),
    ZooModel("shufflenet", "vision", convnets.shufflenet, pixels, IMAGES),
    ZooModel("mobilenet-v3", "vision", convnets.mobilenet_v3, pixels, IMAGES),
    ZooModel("unet-segmenter", "vision", convnets.Segmenter, pixels, IMAGES),
    ZooModel("dcgan", "vision", convnets.Generator, noise, CLICKS),
    ZooModel("video-convnet", "vision", convnets.Video, frames, CLIPS),
    ZooModel("detr", "vision", lambda: own.TinyDetr(), pixels, LARGE_IMAGES),
    ZooModel(
        "bevformer",
        "vision",
        lambda: bevformer.BevFormer(bevformer.TINY),
        partial(bevformer.bev_inputs, bevformer.TINY),
        LARGE_IMAGES,
    ),
    ZooModel("yolo", "vision", fed.Yolo, pixels, LARGE_IMAGES),
    ZooModel("esrgan", "vision", fed.Esrgan, pixels, IMAGES),
    ZooModel("rife", "vision", fed.Rife, two_pictures, IMAGES),
    ZooModel("depth-anything", "vision", fed.depth_anything, pixels, PATCHES),
    ZooModel("sam-encoder", "vision", hf("SamVisionModel", **SAM), pixels, LARGE_BATCHES),
    ZooModel("mlp-mixer", "vision", lambda: own.Mixer(), pixels, BATCHES),
)
