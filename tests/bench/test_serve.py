"""``strop bench serve``: what counts as lost or wrong, which musts hold, and that it runs."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from strop.bench import serve, serve_soak
from strop.bench.load_report import verdicts
from strop.bench.serve import ServePlan, ServeRounds
from strop.bench.serve_soak import Soaked, SoakPlan, SoakRound
from strop.drawing.request import PictureSize
from strop.errors import StropError


def _answer(number: int, colour: int, status: int = 200, refused: int = 0) -> dict[str, Any]:
    target = io.BytesIO()
    Image.new("RGB", (2, 2), (colour,) * 3).save(target, format="PNG")
    png = base64.b64encode(target.getvalue()).decode()
    made = {"number": number, "status": status, "seconds": 1.0, "refused": refused}
    return made | {"png": png if status == 200 else ""}


def _rounds(answers: list[dict[str, Any]], seconds: float = 1.0) -> ServeRounds:
    rounds = ServeRounds()
    expected = [bytes((10 * number,)) * 12 for number in range(4)]
    for name in ("server", "overload"):
        found = {"answers": answers, "seconds": seconds, "cpu_s": 0.5}
        serve._note(rounds, found, expected, name)
    rounds.offline_s.append(1.0)
    rounds.cpu_s["offline"].append(0.5)
    return rounds


GOOD = [_answer(number, 10 * number) for number in range(4)]
PLAN = ServePlan(pictures=4, rounds=1)


@pytest.mark.parametrize(
    ("answers", "seconds", "holds"),
    [
        (GOOD, 1.0, [True, True, True]),
        ([_answer(0, 2), *GOOD[1:]], 1.0, [True, True, True]),
        (GOOD, 1.2, [False, True, True]),
        (GOOD[1:], 1.0, [True, False, True]),
        ([_answer(0, 0, 429), *GOOD[1:]], 1.0, [True, False, True]),
        ([_answer(0, 3), *GOOD[1:]], 1.0, [True, True, False]),
    ],
)
def test_musts(answers: list[dict[str, Any]], seconds: float, holds: list[bool]) -> None:
    result = serve._result(PLAN, _rounds(answers, seconds), {"date": "2030-01-02T03:04:05"})
    assert [must["holds"] for must in result["musts"]] == holds
    assert len(verdicts(result)) == 3
    assert result["pictures_a_second"]["server"]["samples"] == [round(4 / seconds, 4)]


def test_a_picture_of_another_size_is_wrong() -> None:
    assert serve._is_wrong(_answer(0, 0)["png"], bytes(13))


def test_pictures_are_mixed_and_have_seeds_of_their_own() -> None:
    requests = ServePlan(pictures=8).requests
    assert [request.seed for request in requests] == list(range(8))
    assert len({request.size for request in requests}) == 4


SOAK = SoakPlan(requests=40, rounds=4)
MB = 1_000_000


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        ({}, []),
        ({"num_lost": 1}, [0]),
        ({"num_wrong": 2}, [1]),
        ({"memory_bytes": 640 * MB}, [2]),
        ({"memory_bytes": 610 * MB}, []),
    ],
    ids=str,
)
def test_musts_of_a_soak(change: dict[str, int], missed: list[int]) -> None:
    """Memory is compared with that behind the second round: the first ones allocate."""
    made = [
        SoakRound(1.0, [1.0] * 10, 1, 0, 0, memory * MB, is_disk_full=False)
        for memory in (300, 600, 600, 600)
    ]
    for name, value in change.items():
        setattr(made[-1], name, value)
    found = serve_soak._result(SOAK, Soaked(made, 0, 0), {"date": "2030-01-02T03:04:05"})
    assert [place for place, must in enumerate(found["musts"]) if not must["holds"]] == missed
    assert len(serve_soak.rows_of(found)) == 5


@pytest.mark.parametrize(("waiting", "code", "missed"), [(2, 0, 3), (0, -9, 4), (0, 1, 4)])
def test_a_server_that_ends_badly_misses(waiting: int, code: int, missed: int) -> None:
    made = [SoakRound(1.0, [1.0], 0, 0, 0, MB, is_disk_full=False)] * 4
    found = serve_soak._result(SOAK, Soaked(made, waiting, code), {"date": "2030-01-02T03:04:05"})
    assert [must["holds"] for must in found["musts"]].index(False) == missed


def test_a_soak_of_a_model_that_is_not_there(tmp_path: Path) -> None:
    plan = SoakPlan(8, 2, 1, 2, model=str(tmp_path / "none"))
    with pytest.raises(StropError, match="has not started; run 'strop serve"):
        serve_soak.run(plan, torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_soak_hangs_up_and_fills_the_disk(
    tiny_model: Path, cache_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STROP_CACHE_DIR", str(cache_folder))
    plan = SoakPlan(24, 6, 1, 2, hang_up_every=4, model=str(tiny_model))
    result = serve_soak.run(plan, torch.device("cpu"))
    lost, wrong, _, waiting, code = (must["value"] for must in result["musts"])
    assert (lost, wrong, waiting, code) == (0, 0, 0, 0)
    assert [one["is_disk_full"] for one in result["rounds"]] == [False, True]
    assert [one["hung_up"] for one in result["rounds"]] == [3, 3]
    assert serve_soak.written(result, tmp_path, torch.device("cpu")).is_file()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_it_runs(
    tiny_model: Path, cache_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from strop.models import sprites

    monkeypatch.setattr(sprites, "WEIGHTS", tiny_model)
    monkeypatch.setenv("STROP_CACHE_DIR", str(cache_folder))
    sizes = (PictureSize(64, 32), PictureSize(32, 64))
    plan = ServePlan(6, 12, 1, 1, 4, overload_room=2, sizes=sizes)
    result = serve.run(plan, torch.device("cpu"))
    assert [must["value"] for must in result["musts"][1:]] == [0, 0]
    file = serve.written(result, tmp_path, torch.device("cpu"))
    assert file.name.startswith("serve-sprites_cpu_")
    kept = json.loads(file.read_text())
    assert {"p20", "p80", "samples"} <= kept["ratio"].keys()
    assert kept["environment"]["commit"] is not None
