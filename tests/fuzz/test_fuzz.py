"""Random programs: strop against eager, judged by fp64.

Most run with interpreted kernels, which costs a tenth of a second; some are compiled, many at
once. ``make test`` takes always the same ones, ``make fuzz`` others each time.
"""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, note, settings

from tests.fuzz.compiled import check_compiled
from tests.fuzz.interpreted import interpreted
from tests.fuzz.judge import judge, optimized
from tests.fuzz.operators import CODED, STITCHED
from tests.fuzz.programs import Program
from tests.fuzz.strategy import programs

# of the nightly target; 0: those of every day
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))
FUZZ = settings(
    max_examples=EXAMPLES or 150,
    derandomize=not EXAMPLES,
    deadline=None,
    database=None,
    print_blob=False,
    suppress_health_check=list(HealthCheck),
)
NUM_COMPILED = EXAMPLES // 10 or 72
NUM_INTERPRETED = EXAMPLES // 20 or 60  # by Triton, which is slow
BATCH = 24  # programs to a run of the compiler

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*degrees of freedom"),
    pytest.mark.timeout(6 * 3600 if EXAMPLES else 1200),
]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


def judge_interpreted(program: Program, folder: str) -> None:
    try:
        with interpreted():
            judge(program, optimized(program, folder, record=True))
    except Exception:
        note(program.script)
        raise


@FUZZ
@given(program=programs() | programs(kinds=("f32",), moves=STITCHED, most_lines=9))
def test_random_programs(program: Program, folder: str) -> None:
    judge_interpreted(program, folder)


CODED_PROGRAMS = programs(
    kinds=("f32", "f32", "f16", "bf16", "i8", "i8", "i64"), moves=CODED, most_lines=8
)


@settings(FUZZ, max_examples=EXAMPLES // 4 or 100)
@given(program=CODED_PROGRAMS)
def test_random_programs_with_codes_and_bags(program: Program, folder: str) -> None:
    judge_interpreted(program, folder)


def test_codes_and_bags_are_drawn() -> None:
    texts: list[str] = []

    @settings(FUZZ, max_examples=150, phases=[Phase.generate])
    @given(program=CODED_PROGRAMS)
    def collect(program: Program) -> None:
        kinds = {each.dtype for each in program.arguments}
        texts.append(f"{program.source} {sorted(kinds)}")

    collect()
    wanted = ("'i8'", "'bf16'", "_int_mm", "embedding_bag", "_add(0")
    counts = {text: sum(text in each for each in texts) for text in wanted}
    assert min(counts.values()) >= 3, counts


def test_random_programs_compiled(folder: str) -> None:
    drawn: list[Program] = []

    @settings(FUZZ, max_examples=NUM_COMPILED, phases=[Phase.generate])
    @given(program=programs() | programs() | CODED_PROGRAMS)
    def collect(program: Program) -> None:
        drawn.append(program)

    collect()
    num_kernels = sum(check_compiled(batch, folder) for batch in batched(drawn, BATCH))
    assert num_kernels > NUM_COMPILED / 2


def test_random_programs_in_triton(folder: str) -> None:
    """Its interpreter cuts bf16 where GPUs round, and numpy has no ~ of uint8. A GPU leaves bags to
    torch."""
    pytest.importorskip("triton")

    @settings(FUZZ, max_examples=NUM_INTERPRETED, phases=[Phase.generate])
    @given(program=programs(kinds=("f32", "f32", "f16", "i64", "bool")))
    def check(program: Program) -> None:
        assume("bf16" not in program.source and "embedding_bag" not in program.source)
        try:
            with interpreted(triton=True):
                judge(program, optimized(program, folder, record=True), slack=4.0)
        except Exception:
            note(program.script)
            raise

    check()


def batched(items: list[Program], size: int) -> list[list[Program]]:
    return [items[i : i + size] for i in range(0, len(items), size)]
