"""The settings that say which pictures and captions a training reads, and how."""

from __future__ import annotations

from dataclasses import dataclass

from strop.train.setting import CONTROL, SUBJECTS, TRAINERS, setting

FILTERS = ("nearest", "box", "bilinear", "hamming", "bicubic", "lanczos")


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Hold the panel "Data" of ``strop train -h``."""

    train_data_dir: str = setting(
        "",
        str,
        "Data",
        "Train on the pictures of this folder, with metadata.jsonl or with a .txt beside each.",
        tasks=TRAINERS,
    )
    dataset_name: str = setting(
        "",
        str,
        "Data",
        "Train on 'sprites': drawings of the built-in generator, which are new in every step.",
        tasks=TRAINERS,
        fixed=True,
    )
    caption_column: str = setting(
        "text", str, "Data", "Read captions from this key of metadata.jsonl.", tasks=TRAINERS
    )
    conditioning_image_column: str = setting(
        "conditioning_image",
        str,
        "Data",
        "Read the file of each picture's conditioning picture from this key of metadata.jsonl, or "
        "from this key with _file_name at its end.",
        tasks=CONTROL,
    )
    conditioning_data_dir: str = setting(
        "",
        str,
        "Data",
        "Take conditioning pictures from this folder, by the names of the pictures.",
        tasks=CONTROL,
    )
    max_train_samples: int | None = setting(
        None, int, "Data", "Use at most this many pictures.", tasks=TRAINERS, least=1
    )
    mask_data_dir: str = setting(
        "",
        str,
        "Data",
        "Learn each picture where the mask of its name in this folder is white, and not where it "
        "is black.",
    )
    instance_data_dir: str = setting(
        "", str, "Data", "Train on the pictures of the subject in this folder.", tasks=SUBJECTS
    )
    instance_prompt: str = setting(
        "", str, "Data", "Teach the model that this text means the subject.", tasks=SUBJECTS
    )
    with_prior_preservation: bool = setting(
        False,
        bool,
        "Data",
        "Also train on pictures of the subject's class that the model drew before.",
        tasks=SUBJECTS,
        fixed=True,
    )
    class_data_dir: str = setting(
        "",
        str,
        "Data",
        "Read pictures of the class from this folder; missing ones are drawn with "
        "the class prompt.",
        tasks=SUBJECTS,
    )
    class_prompt: str = setting(
        "", str, "Data", "Draw the pictures of the class with this text.", tasks=SUBJECTS
    )
    num_class_images: int = setting(
        100, int, "Data", "Have this many pictures of the class.", tasks=SUBJECTS, least=1
    )
    sample_batch_size: int = setting(
        4, int, "Data", "Draw this many pictures of the class at once.", tasks=SUBJECTS, least=1
    )
    prior_loss_weight: float = setting(
        1.0,
        float,
        "Data",
        "Multiply the loss of the class pictures by this.",
        tasks=SUBJECTS,
        least=0,
        fixed=True,
    )
    resolution: int | None = setting(
        None,
        int,
        "Data",
        "Resize and crop pictures to squares of this side; without it, of the model's own.",
        least=8,
        fixed=True,
    )
    aspect_buckets: bool = setting(
        False,
        bool,
        "Data",
        "Show pictures in shapes near their own, of the resolution's area, with one shape in each "
        "batch.",
        tasks=TRAINERS,
        fixed=True,
    )
    center_crop: bool = setting(
        False,
        bool,
        "Data",
        "Crop in the middle, not at random.",
        fixed=True,
        per_task={"controlnet": True},
    )
    random_flip: bool = setting(
        False, bool, "Data", "Mirror half of the pictures, at random.", fixed=True
    )
    image_interpolation_mode: str = setting(
        "lanczos", str, "Data", "Resize pictures with this filter.", choices=FILTERS, fixed=True
    )
    proportion_empty_prompts: float = setting(
        0.0,
        float,
        "Data",
        "Leave out this share of the captions, so that guidance works.",
        least=0,
        fixed=True,
    )
    bad_files: str = setting(
        "skip",
        str,
        "Data",
        "Skip empty, damaged and other files after naming them, or refuse to start.",
        choices=("skip", "refuse"),
    )
    allow_upscaling: bool = setting(
        False,
        bool,
        "Data",
        "Also take pictures that are smaller than the resolution, and enlarge them.",
    )
    cache_latents: bool = setting(
        False,
        bool,
        "Data",
        "Encode pictures once, and keep mean and variance of their latents on disk.",
        fixed=True,
    )
    pre_compute_text_embeddings: bool = setting(
        False, bool, "Data", "Encode captions once, and keep their embeddings on disk.", fixed=True
    )
    cache_dir: str = setting(
        "",
        str,
        "Data",
        "Keep latents and embeddings in this folder; without it, in OUTPUT_DIR/cache.",
    )
    dataloader_num_workers: int = setting(
        0, int, "Data", "Read pictures ahead in this many threads.", least=0
    )
