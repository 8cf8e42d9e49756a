"""Run the micro-batches of steps: operation by operation, or as CUDA graphs of the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from strop.errors import CaptureError
from strop.train import recording
from strop.train.data import Batch
from strop.train.learner import Learner
from strop.train.objective import DrawnBatch, Objective
from strop.train.prompts import Prompts
from strop.train.ranks import Ranks
from strop.train.settings import Settings
from strop.train.updating import Updating
from strop.train.whole_step import StepReport, WholeStep


class StepRuns(Protocol):
    """Compute the loss of each micro-batch and its gradients, and step behind the last one."""

    @property
    def report(self) -> StepReport | None:
        """Return how often graphs were replayed, where there are any."""
        ...

    def micro_batch(self, batch: Batch, number: int, rate: float | None) -> Tensor:
        """Run the micro-batch with this number, and return its loss, detached. With the last one
        of a step comes the learning ``rate``."""
        ...

    def forget(self) -> None:
        """Drop the gradients of a step that has begun."""
        ...


class PlainRuns:
    """Implement ``StepRuns`` without a graph."""

    report = None

    def __init__(self, objective: Objective, learner: Learner, size: int) -> None:
        self.objective, self._learner, self._size = objective, learner, size

    def micro_batch(self, batch: Batch, number: int, rate: float | None) -> Tensor:
        loss = self.objective(batch, number)
        self._learner.backward(loss / self._size)
        if rate is not None:
            self._learner.average_gradients()
            self._learner.step(rate)
        return loss.detach()

    def forget(self) -> None:
        self._learner.forget_gradients()


class GraphRuns:
    """Implement ``StepRuns`` by ``compile_step``: what is drawn for a batch goes into a graph of
    forward pass, backward pass and update. Where a step cannot be captured, ``warn`` gets why, and
    steps are run without one from then on."""

    def __init__(
        self,
        objective: Objective,
        learner: Learner,
        size: int,
        updating: Updating,
        ranks: Ranks,
        warn: Callable[[str], None],
    ) -> None:
        self.objective, self._learner, self._warn = objective, learner, warn

        def loss(*, text: Any, **given: Any) -> Tensor:
            return objective.loss(DrawnBatch(text=Prompts(*text), **given))

        self._step = WholeStep(
            loss,
            updating,
            size,
            graph=True,
            averages=learner.averages if ranks.count > 1 else None,
            on_failure=self._go_on,
        )

    @property
    def report(self) -> StepReport:
        return self._step.report()

    def micro_batch(self, batch: Batch, number: int, rate: float | None) -> Tensor:
        given = _parts(self.objective.drawn(batch, number))
        if rate is None:
            return self._step(**given)
        self._learner.before_step(rate)
        loss = self._step(**given)
        self._learner.after_step()
        return loss

    def forget(self) -> None:
        self._step.forget()
        self._learner.forget_gradients()

    def _go_on(self, error: CaptureError) -> None:
        self._warn(
            f"steps are run without a CUDA graph, which is slower with small batches: {error}. "
            "--no_step_graph leaves out the attempt"
        )


def _parts(drawn: DrawnBatch) -> dict[str, Any]:
    """Return what was drawn as arguments that a step knows."""
    parts = dict(vars(drawn))
    parts["text"] = (dict(drawn.text.tensors), drawn.text.is_encoded)
    return parts


def make_runs(
    settings: Settings,
    objective: Objective,
    learner: Learner,
    ranks: Ranks,
    warn: Callable[[str], None],
) -> StepRuns:
    """Return how steps are run: on a GPU as graphs, where the optimizer is Strop's and each rank
    has the states of all weights."""
    size, updating = settings.gradient_accumulation_steps, learner.updating
    has_graphs = recording.can_record(objective.model.device)
    if settings.step_graph and has_graphs and updating is not None:
        if not settings.blocks_to_swap:
            return GraphRuns(objective, learner, size, updating, ranks, warn)
        warn(
            "steps are run without a CUDA graph, since --blocks_to_swap decides in each pass which "
            "weights to copy; --no_step_graph says so beforehand"
        )
    return PlainRuns(objective, learner, size)
