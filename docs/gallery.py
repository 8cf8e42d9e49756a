"""Draw the pictures of docs/gallery.md and write the page: python docs/gallery.py

Each picture is what one command of `strop` makes with a model that ships with the repository, on a
CPU in fp32. tests/meta/test_gallery.py draws some of them again.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parent
FOLDER = DOCS / "gallery"
SAME = ("--device", "cpu", "--dtype", "fp32")  # the numbers that the pictures of the page have


@dataclass(frozen=True)
class GalleryPicture:
    """Hold the command of a picture, as words behind ``strop generate``, and what it shows."""

    name: str
    words: tuple[str, ...]
    shows: str

    @property
    def command(self) -> str:
        """Return what is typed."""
        return f"strop generate {shlex.join(self.words)} -o {self.name}.png"

    def draw(self, folder: Path) -> Path:
        """Run the command, and return the file. Raises CalledProcessError where it fails."""
        file = folder / f"{self.name}.png"
        words = ["generate", *self.words, *SAME, "-o", str(file)]
        subprocess.run([sys.executable, "-m", "strop", *words], check=True, capture_output=True)
        return file


PICTURES = (
    GalleryPicture(
        "first",
        ("a red circle above a blue square on a white background",),
        "The model's own size and number of steps.",
    ),
    GalleryPicture(
        "upright",
        ("a small green star at the top left", "--size", "64x96", "--seed", "3"),
        "Another size: no second compile, here and below.",
    ),
    GalleryPicture(
        "large",
        ("a yellow heart on a navy background", "--size", "128x128", "--seed", "5"),
        "A square of 2.7 times as many pixels.",
    ),
    GalleryPicture(
        "few-steps",
        ("a yellow heart on a navy background", "--size", "128x128", "--seed", "5", "--steps", "6"),
        "The same with 6 steps for 20.",
    ),
    GalleryPicture(
        "step-cache",
        (
            *("a yellow heart on a navy background", "--size", "128x128", "--seed", "5"),
            *("--numerics", "step_cache"),
        ),
        "The same with parts of some steps taken from earlier ones, which is less exact"
        " ([step_cache.md](step_cache.md)).",
    ),
    GalleryPicture(
        "transformer",
        ("a green ring on a white background", "--model", "sprites-dit", "--seed", "2"),
        "A transformer of Flux's kind in place of the UNet.",
    ),
    GalleryPicture(
        "eager",
        ("a red circle above a blue square on a white background", "--no-optimize"),
        "The first picture in plain torch.",
    ),
)
_BEGINNING = """\
# Gallery

Every picture here is what one command makes on a CPU with the models that ship with Strop, in fp32.
`python docs/gallery.py` draws them again and writes this page. They are shown at twice their
size.
"""
_END = """\
`strop generate ... --compare` draws with Strop and in plain torch side by side, and says how many
seconds each took. `strop serve` shows the same on a web page ([serve.md](serve.md)), `make demo`
draws a sheet of pictures ([demo.png](demo.png)), and the plots of the benchmarks are in
[results.md](results.md).
"""


def page() -> str:
    """Return docs/gallery.md."""
    parts = [_BEGINNING]
    for one in PICTURES:
        image = f'<img src="gallery/{one.name}.png" alt="{one.words[0]}" width="{width(one)}">'
        parts.append(f"{one.shows}\n\n    {one.command}\n\n{image}\n")
    return "\n".join([*parts, _END])


def width(one: GalleryPicture) -> int:
    """Return twice the width of a picture: that of ``--size``, or the model's own."""
    size = one.words[one.words.index("--size") + 1] if "--size" in one.words else "96x64"
    return 2 * int(size.partition("x")[0])


def main() -> None:
    """Draw all pictures, and write the page."""
    FOLDER.mkdir(exist_ok=True)
    for one in PICTURES:
        print(one.command)
        one.draw(FOLDER)
    (DOCS / "gallery.md").write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
