"""Denoise with InvokeAI's own node, whose UNet runs compiled."""

from typing import Any

from invokeai.app.invocations.denoise_latents import DenoiseLatentsInvocation
from invokeai.invocation_api import InvocationContext, LatentsOutput, invocation
from pydantic import PrivateAttr

from .compiled_unet import Attached, Status

_MODULAR = "InvokeAI's modular loop ran (USE_MODULAR_DENOISE), which this node does not know"


@invocation(
    "strop_denoise_latents",
    title="Denoise (Strop) - SD1.5, SDXL",
    tags=["latents", "denoise", "txt2img", "img2img", "strop"],
    category="latents",
    version="1.0.0",
)
class StropDenoiseInvocation(DenoiseLatentsInvocation):
    """Denoises noisy latents, with the UNet compiled by Strop"""

    _status: Status = PrivateAttr(default_factory=Status)
    _attached: Any = PrivateAttr(default=None)

    def invoke(self, context: InvocationContext) -> LatentsOutput:
        """Denoise as InvokeAI's node does, and log how many calls were compiled."""
        self._status, self._attached = Status(_MODULAR), None
        try:
            return super().invoke(context)
        finally:
            if self._attached is not None:
                self._attached.detach()
            context.logger.info(self._status.line())

    def create_pipeline(self, unet: Any, scheduler: Any) -> Any:
        """Stand in for the UNet's forward from here on: its weights are on their device, and LoRA
        is in them."""
        self._status.refusal = ""
        reason = "HiDiffusion changes the UNet" if self.hidiffusion else ""
        self._attached = Attached(unet, self._status, reason)
        return super().create_pipeline(unet, scheduler)
