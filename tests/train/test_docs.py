"""The Python of docs/training.md runs as it stands, from top to bottom."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from strop.cli import app

TEXT = (Path(__file__).parents[2] / "docs" / "training.md").read_text()


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("diffusers")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", TEXT, re.S | re.M)
    assert len(blocks) == 7
    exec(compile("\n".join(blocks), "docs/training.md", "exec"), {"__name__": "page"})
    assert (tmp_path / "unet_ema" / "config.json").exists()
    assert (tmp_path / "unet" / "config.json").exists()


# Later flags win: what makes each command of the page a matter of a second.
TINY = (
    "--resolution 32 --max_train_steps 2 --checkpointing_steps 2 --train_batch_size 1 "
    "--num_class_images 2 --validation_inference_steps 1 --device cpu --threads 1"
)


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # of diffusers
@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # of norms under autocast
def test_the_commands_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tiny_model: Path,
    tiny_dit: Path,
    folders: dict[str, Path],
    deep: dict[str, Path],
) -> None:
    from tests.train import trainer

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("strop.models.sprites.WEIGHTS", tiny_model)
    shutil.copytree(tiny_model, "stable-diffusion-v1-5")
    shutil.copytree(tiny_dit, "runs/sprites-dit-start")
    for name, family in {"sdxl-base": "sdxl", "sd3-medium": "sd3"}.items():
        shutil.copytree(folders[family], name)
    shutil.copytree(deep["flux"], "flux-dev")
    Path("examples").mkdir()
    for file in (Path(__file__).parents[2] / "examples").glob("*.yaml"):
        # Compiling takes a minute, and is tested in test_trainer_flow.py.
        text = file.read_text().replace("compile_unet: true", "compile_unet: false")
        (Path("examples") / file.name).write_text(text)
    for name in ("pictures", "dog", "edges"):
        trainer.draw_pictures(tmp_path / name, 2)
    shutil.copy(tmp_path / "edges" / "0.png", "circle.png")
    (tmp_path / "train.yaml").write_text(re.findall(r"^```yaml\n(.*?)^```", TEXT, re.S | re.M)[0])
    blocks = "".join(re.findall(r"^```bash\n(.*?)^```", TEXT, re.S | re.M)).replace("\\\n", " ")
    blocks = blocks.replace("--blocks_to_swap 40", "--blocks_to_swap 4")  # of five
    commands = [line for line in blocks.splitlines() if line.startswith("strop train")]
    assert len(commands) == 13
    # Several processes are started in test_trainer_ranks.py.
    monkeypatch.setattr("strop.train.launch.launch", lambda words, *given: 0)
    threads = torch.get_num_threads()
    for command in commands:
        task = shlex.split(command)[2]
        known = CliRunner().invoke(app, ["train", task, "-h"]).output
        extra = [flag for flag in re.findall(r"--\S+ \S+", TINY) if flag.split()[0] in known]
        words = shlex.split(command)[1:] + shlex.split(" ".join(extra))
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, f"{command}\n{done.output}"
    torch.set_num_threads(threads)
    for output in ("tuned", "my-dog", "sprites-tuned"):
        assert (tmp_path / output / "model_index.json").exists()
    for output in ("sdxl-adapters", "flux-adapters", "flux-swapped"):
        assert (tmp_path / output / "pytorch_lora_weights.safetensors").exists()
    assert (tmp_path / "by-edges" / "config.json").exists()
    for output in ("adapters", "from-yaml"):
        assert (tmp_path / output / "kohya_lora_weights.safetensors").exists()
