"""Stand in for the model: what it draws tells which request it was, and tests say when."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from strop.drawing.request import PictureRequest, PictureSize
from strop.serve.order import ModelCard
from strop.serve.studio import BatchDone, PictureBatch, StepTold, Stopped
from tests.waiting import LIMIT_S

SIZE, LORAS = PictureSize(32, 16), ("ink", "style")
SAMPLERS = {"Euler a": ("uniform", "sgm_uniform"), "DPM++ 2M": ("karras", "simple")}
CARD = ModelCard(
    "fake", SIZE, 8, 4.0, LORAS, True, lambda text, _: (text, ""), 4, SAMPLERS, True, True
)


@dataclass
class FakePainter:
    """Draw single colours. While ``gate`` is closed a batch stays in its first step."""

    card: ModelCard = CARD
    batches: list[PictureBatch] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)
    fault: Callable[[Sequence[PictureRequest]], Exception | None] = lambda _: None
    num_stopped: int = 0

    def __post_init__(self) -> None:
        self.gate.set()

    def draw(
        self, batch: PictureBatch, tell: Callable[[StepTold], None], is_wanted: Callable[[], bool]
    ) -> BatchDone:
        self.batches.append(batch)
        total = batch.requests[0].num_steps
        for number in range(1, total + 1):
            for _ in range(int(LIMIT_S / 0.005)):
                if not is_wanted():
                    self.num_stopped += 1
                    raise Stopped
                if self.gate.wait(0.005):
                    break
            shown = {n: b"jpeg" for n, e in enumerate(batch.previews) if e and number % e == 0}
            tell(StepTold(number, total, shown if number < total else {}))
        if (error := self.fault(batch.requests)) is not None:
            raise error
        return BatchDone([coloured(request) for request in batch.requests], 0.01)

    def report(self) -> str:
        return "3 graphs"

    def notes(self, request: PictureRequest) -> Sequence[str]:
        return ["too long"] if len(request.prompt) > 1000 else []

    def chunks(self, request: PictureRequest) -> int:
        return 1 + max(request.prompt.count(","), request.negative.count(","))


def coloured(request: PictureRequest) -> bytes:
    """RGB in which a seed can be read."""
    colour = bytes((request.seed % 256, request.seed // 256 % 256, request.steps % 256))
    return colour * request.final_size.num_pixels
