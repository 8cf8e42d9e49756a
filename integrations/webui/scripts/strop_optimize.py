"""The checkbox "Strop" of the web UI, for text to picture and picture to picture."""

from __future__ import annotations

from typing import Any

import gradio as gr
from modules import scripts

try:
    import strop
except ModuleNotFoundError as missing:
    if missing.name != "strop":
        raise
    strop = None
else:
    from strop_webui.picture import Picture, install

    install()

MISSING = "Strop is not installed in the web UI's Python: pip install /path/to/strop"


class StropScript(scripts.Script):
    """This compiles the UNet for the time of each batch, where the checkbox is set."""

    def __init__(self) -> None:
        super().__init__()
        self._picture = Picture() if strop is not None else None

    def title(self) -> str:
        return "Strop"

    def show(self, is_img2img: bool) -> Any:
        return scripts.AlwaysVisible

    def ui(self, is_img2img: bool) -> list[Any]:
        """Return the checkbox, beside a line that says whether Strop is there."""
        with gr.Accordion("Strop", open=False):
            label = "Compile the UNet, once for every size, batch and LoRA"
            enabled = gr.Checkbox(value=False, label=label)
            ready = MISSING if strop is None else f"Strop {strop.__version__} is ready."
            gr.HTML(f"<p>{ready} What ran compiled is said below each picture.</p>")
        return [enabled]

    def process(self, p: Any, enabled: bool = False, *_: Any) -> None:
        """Take away what a picture that was broken off has left."""
        if self._picture is not None:
            self._picture.end()
        elif enabled:
            p.comment(MISSING)

    def process_batch(self, p: Any, enabled: bool = False, *_: Any, **__: Any) -> None:
        """Have the UNet run compiled from here on."""
        if enabled and self._picture is not None:
            self._picture.begin(p)

    def process_before_every_sampling(
        self, p: Any, enabled: bool = False, *_: Any, **__: Any
    ) -> None:
        """Take the UNet of this sampling: hires fix may have brought another checkpoint."""
        if enabled and self._picture is not None:
            self._picture.go_on(p)

    def postprocess_batch(self, p: Any, enabled: bool = False, *_: Any, **__: Any) -> None:
        """Leave the UNet as it was, and say in one line what has run."""
        if self._picture is not None:
            line = self._picture.end()
            if enabled:
                p.comment(line)

    def postprocess(self, p: Any, processed: Any, *_: Any) -> None:
        if self._picture is not None:
            self._picture.end()
