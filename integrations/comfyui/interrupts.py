"""Let a user's interrupt stop a compiled model, whose layers no longer ask for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from comfy import model_management


def stop_if_interrupted() -> None:
    """Raise ComfyUI's own exception if the user has cancelled the prompt."""
    model_management.throw_exception_if_processing_interrupted()


@contextlib.contextmanager
def keep_interrupt() -> Iterator[None]:
    """Keep an interrupt that came in the middle of a trace. Whoever raises it takes it for told,
    but a trace that fails is followed by the plain call, which has to be told as well."""
    try:
        yield
    except model_management.InterruptProcessingException:
        model_management.interrupt_current_processing(True)
        raise
