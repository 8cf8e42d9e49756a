"""Find the linears of a sprites model whose results 8 bits change most, and leave those exact that
are above a budget (``strop bench pictures --numerics int8``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strop.bench import report
from strop.debug.explain import explain
from strop.ir.eight_bit import NAMED
from strop.testing import eight_bit_errors

BUDGET = 0.1  # of a layer: RMS of the error over that of the result
NUM_PROMPTS = 4  # that layers are judged by
_SIZE, _STEPS = (96, 64), 20


@dataclass(frozen=True)
class LayerErrors:
    """Hold the error of each linear by its path, and what a layer may have."""

    by_path: Mapping[str, float]
    budget: float

    @property
    def above_budget(self) -> tuple[str, ...]:
        """Return the paths of layers that are to stay exact; those without a number are."""
        return tuple(path for path, error in self.by_path.items() if not error <= self.budget)

    def used(self, pipe: Any) -> dict[str, dict[str, float]]:
        """Return the errors of layers that run in 8 bits, and of those refused for the budget."""
        graphs = explain(pipe).graphs
        coded = {weight.removesuffix(".weight") for g in graphs for weight in g.eight_bit}
        named = {path for g in graphs for path, why in g.exact if why == NAMED}
        return {
            kind: {path: error for path, error in self.by_path.items() if path in chosen}
            for kind, chosen in (("layers", coded), ("refused", named))
        }


def errors_of(pipe: Any, numerics: str, prompts: Sequence[str], budget: float) -> LayerErrors:
    """Draw the prompts in eager, and judge the linears of the denoiser by what they are given."""
    from strop.models.sprites import evaluate

    denoiser = pipe.unet if hasattr(pipe, "unet") else pipe.transformer
    settings = evaluate.Options(steps=_STEPS)

    def draw() -> None:
        list(evaluate.draw_prompts(pipe, [*prompts], *_SIZE, settings))

    return LayerErrors(eight_bit_errors(denoiser, numerics, draw), budget)


def layer_rows(rows: Sequence[Mapping[str, Any]]) -> report.Rows:
    """Return a header, and a line for each layer of the rows in 8 bits, those with the largest
    errors first; behind them those that were refused."""
    found: report.Rows = [("model", "numerics", "layer", "error")]
    for row in rows:
        names = row["model"], row["numerics"]
        ordered = sorted(row.get("layers", {}).items(), key=lambda item: -item[1])
        found += [(*names, path, f"{error:.2%}") for path, error in ordered]
        found += [
            (*names, path, f"{error:.2%}, above the budget: exact")
            for path, error in row.get("refused", {}).items()
        ]
    return found
