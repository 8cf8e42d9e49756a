"""One case through one way in: what of its samples passed, and why the others did not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from tests.operators.judge import Difference, Run, differences, is_rounding, looks
from tests.operators.ledger import Counts
from tests.operators.rules import AS_AOT_EAGER, AS_TRACED, NUMBERS, SEEDED, Where, rule_for
from tests.operators.running import SEED, WAYS, Outcome, eager, gradients, without_strop
from tests.operators.samples import (
    NUDGED,
    Case,
    Sample,
    copies,
    described,
    nudged,
    operators,
    sample_of,
    samples_of,
)

NUDGES = 12
MOST_SPLITS = 8  # compiles of a case beyond the first one, to find the sample that is at fault


class TooLongError(Exception):
    """The case has used up its time."""


@dataclass
class Finding:
    """``failures``: each a sample and what is wrong with it. ``reasons``: why torch ran some."""

    counts: Counts = field(default_factory=Counts)
    reasons: Counter[str] = field(default_factory=Counter)
    rules: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    @property
    def reason(self) -> str:
        """The first that says why the case is not all passed."""
        said = self.failures or [*self.rules, *self.reasons]
        return " ".join(said[0].split())[:160] if said else ""


@dataclass(frozen=True)
class Expected:
    """What eager makes of a sample."""

    sample: Sample
    run: Run
    error: Exception | None = None
    draws: bool = False


class Check:
    """``most``: samples of one case."""

    def __init__(self, case: Case, way: str, direction: str, folder: str, most: int) -> None:
        self.case, self.way, self.folder = case, way, folder
        self.trains = direction == "backward"
        dtype = str(case.dtype).removeprefix("torch.")
        self.where = Where(case.operator, dtype, case.layout, way, direction)
        self.finding, self._splits, self._most = Finding(), MOST_SPLITS, most

    def run(self) -> Finding:
        expected = [self._expected(s) for s in samples_of(self.case, self._most)]
        good = [e for e in expected if e.error is None]
        if good:
            self._compare(good)
        for one in expected:
            if one.error is not None:
                self._check_exception(one.sample, one.error)
        return self.finding

    def _expected(self, sample: Sample) -> Expected:
        torch.manual_seed(SEED)
        try:
            run = self._eager(sample)
            torch.manual_seed(SEED + 1)
            other = self._eager(sample)
        except TooLongError:
            raise
        except Exception as error:  # whatever eager raises is what is right
            return Expected(sample, Run(None, ()), error)
        return Expected(sample, run, draws=bool(differences(other, run, None)))

    def _eager(self, sample: Sample) -> Run:
        given = self._arguments(sample)
        with self._grad():
            result = sample(*given)
            return Run(result, given, gradients([result], [given])[0] if self.trains else ())

    @contextmanager
    def _grad(self) -> Iterator[None]:
        with torch.set_grad_enabled(self.trains):
            yield

    def _arguments(self, sample: Sample) -> list[Tensor]:
        given = copies(sample.tensors)
        for tensor in given if self.trains else ():
            if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
                tensor.requires_grad_()
        return given

    def _compare(self, expected: Sequence[Expected]) -> None:
        samples = [e.sample for e in expected]
        given = [self._arguments(s) for s in samples]
        try:
            outcome = self._through(samples, given)
            runs = self._runs(outcome, given)
        except TooLongError:
            raise
        except Exception as error:  # eager raised nothing: whatever it is, it is the finding
            if not self._split(expected):
                text = str(error).strip().partition("\n")[0][:200]
                crash = Difference("crash", f"{type(error).__name__}: {text}")
                for one in expected:
                    self._note(one, [crash], Outcome([]))
            return
        if outcome.is_eager and self.way == "optimize" and self._split(expected):
            return
        wanted = self._eager_runs(expected)
        for one, run, right in zip(expected, runs, wanted, strict=True):
            exact = None if one.draws else self._exact(one.sample)
            self._note(one, differences(run, right, exact), outcome, run)

    def _through(self, samples: Sequence[Sample], given: Sequence[Sequence[Tensor]]) -> Outcome:
        flat = [t for tensors in given for t in tensors]
        with self._grad():
            return WAYS[self.way](samples, flat, self.folder)

    def _runs(self, outcome: Outcome, given: Sequence[Sequence[Tensor]]) -> list[Run]:
        found: Sequence[Sequence[Tensor | None]] = [()] * len(given)
        if self.trains:
            found = gradients(outcome.results, given)
        return [Run(*one) for one in zip(outcome.results, given, found, strict=True)]

    def _eager_runs(self, expected: Sequence[Expected]) -> list[Run]:
        """As they are, but where numbers are drawn: then all in one turn from the same seed."""
        if not any(one.draws for one in expected):
            return [one.run for one in expected]
        given = [self._arguments(one.sample) for one in expected]
        with self._grad():
            results = eager([one.sample for one in expected], given)
        return self._runs(Outcome(results), given)

    def _exact(self, sample: Sample) -> Run | None:
        try:
            return self._eager(sample.widened())
        except TooLongError:
            raise
        except Exception:  # the operator does not take fp64: then eager alone is the judge
            return None

    def _split(self, expected: Sequence[Expected]) -> bool:
        """Halves apart, so that one sample does not hide the others, while splits are left."""
        if len(expected) < 2 or self._splits < 2:
            return False
        self._splits -= 2
        half = len(expected) // 2
        self._compare(expected[:half])
        self._compare(expected[half:])
        return True

    def _note(
        self, one: Expected, found: Sequence[Difference], outcome: Outcome, run: Run | None = None
    ) -> None:
        where = replace(self.where, layout=one.sample.layout)
        rules = [rule_for(where, d, draws=one.draws) for d in found]
        wrong = [d for d, rule in zip(found, rules, strict=True) if not rule]
        if wrong and run is not None and self._is_rounding(one, run, wrong):
            found, rules, wrong = [], [], []
        if wrong and run is not None and self._is_traced(one.sample, run, wrong):
            rules, wrong = [*rules, AS_TRACED], []
        if wrong and self._is_torchs(one, wrong):
            rules, wrong = [*rules, AS_AOT_EAGER], []
        self.finding.rules.update(set(rules) - {""})
        self.finding.reasons.update(outcome.reasons)
        if wrong:
            said = "; ".join(map(str, wrong))[:300]
            self.finding.failures.append(f"{said} | {described(one.sample)}")
        kind = "failed" if wrong else "rule" if found else _kind(outcome)
        self.finding.counts += Counts(**{kind: 1})

    def _is_rounding(self, one: Expected, run: Run, wrong: Sequence[Difference]) -> bool:
        """Whether eager is as far from its own results for arguments that differ in the last place.
        Half types are computed in wider ones, which this would not see."""
        is_random = one.draws and self.case.operator not in SEEDED
        if is_random or self.case.dtype not in NUDGED or any(d.kind not in NUMBERS for d in wrong):
            return False
        moved = [self._eager(nudged(one.sample, seed)) for seed in range(NUDGES)]
        return is_rounding(run, one.run, moved)

    def _is_traced(self, sample: Sample, run: Run, wrong: Sequence[Difference]) -> bool:
        """Whether the types and strides that differ are those of torch's rules for tensors without
        numbers, of which every trace is made."""
        if any(d.kind not in ("dtype", "strides") for d in wrong):
            return False
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        given = [mode.from_tensor(tensor) for tensor in self._arguments(sample)]
        with self._grad(), mode:
            try:
                result = sample(*given)
            except Exception:  # there is no such rule
                return False
        return looks(run.result) == looks(result)

    def _is_torchs(self, one: Expected, wrong: Sequence[Difference]) -> bool:
        """Whether torch.compile differs from eager in the same ways without Strop: Dynamo and
        AOTAutograd around torch's own kernels."""
        if self.way == "optimize" and not self.trains:
            return False
        given = self._arguments(one.sample)
        try:
            with self._grad():
                outcome = Outcome(without_strop([one.sample], [given]))
            (run,) = self._runs(outcome, [given])
        except TooLongError:
            raise
        except Exception as error:  # which says something of Strop only if eager has one as well
            return one.error is not None and _exceptions_differ(error, one.error) == wrong
        if one.error is not None:
            return _exceptions_differ(None, one.error) == wrong
        kinds = {d.kind for d in differences(run, one.run, None)}
        return {d.kind for d in wrong} <= kinds

    def _check_exception(self, sample: Sample, error: Exception) -> None:
        """Eager raises: so must this way, an exception of the same type."""
        given = self._arguments(sample)
        try:
            outcome = self._through([sample], [given])
            if self.trains:
                self._runs(outcome, [given])
        except TooLongError:
            raise
        except Exception as found:  # judged here
            wrong = _exceptions_differ(found, error)
        else:
            wrong = _exceptions_differ(None, error)
        if wrong:
            self._note(Expected(sample, Run(None, ()), error), wrong, Outcome([]))
        else:
            self.finding.counts += Counts(passed=1)


def _kind(outcome: Outcome) -> str:
    return "opaque" if outcome.reasons or outcome.is_eager else "passed"


def _exceptions_differ(found: Exception | None, wanted: Exception) -> list[Difference]:
    """Nothing if one is of the other's type."""
    if isinstance(found, type(wanted)) or isinstance(wanted, type(found)):
        return []
    if found is None:
        return [Difference("exception", f"none for {type(wanted).__name__}: {wanted}"[:200])]
    return [Difference("exception", f"{type(found).__name__} for {type(wanted).__name__}")]


def errors_of(operator: str) -> list[Sample]:
    """Torch's samples that an operator must refuse."""
    op = operators()[operator]
    if op.error_inputs_func is None:
        return []
    return [sample_of(op.op, given.sample_input) for given in op.error_inputs("cpu")]


def check_errors(operator: str, way: str, folder: str) -> Finding:
    """The samples that eager refuses."""
    check = Check(Case(operator, torch.float32, "errors"), way, "forward", folder, 0)
    for sample in errors_of(operator):
        expected = check._expected(sample)
        if expected.error is not None:
            check._check_exception(sample, expected.error)
    return check.finding


def check(case: Case, way: str, direction: str, folder: str, most: int) -> Finding:
    if case.layout == "errors":
        return check_errors(case.operator, way, folder)
    return Check(case, way, direction, folder, most).run()


def applies(case: Case, direction: str) -> bool:
    """Whether torch's table has such a case."""
    op: Any = operators()[case.operator]
    if direction == "backward":
        return bool(op.supports_autograd) and case.dtype in op.supported_backward_dtypes("cpu")
    return case.dtype in op.supported_dtypes("cpu")
