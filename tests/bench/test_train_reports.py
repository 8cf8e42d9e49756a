"""``strop bench report`` and ``compare``, from results that nobody measured."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from strop.bench import compare, report, train_page, train_runs
from strop.cli import app
from strop.errors import OptionError

H100 = {"gpu": "H100", "torch": "2.11", "date": "2030-01-02T03:04:05+00:00"}
A100 = {"gpu": "A100", "torch": "2.11", "date": "2030-01-02T03:04:05+00:00"}
WORK = {"model": "sd15", "batch": 32}


def found_of(img_s: float, count: int, name: str, **more: Any) -> dict[str, Any]:
    ms = 1e3 * 32 * count / img_s
    return {
        "work": WORK,
        "note": "",
        "setup": {"compiler": "strop" if name.startswith("strop") else ""},
        "processes": count,
        "p20_ms": 0.99 * ms,
        "p50_ms": ms,
        "p80_ms": 1.01 * ms,
        "img_s": img_s,
        "img_s_series": [0.99 * img_s, img_s, 1.01 * img_s],
        "peak_bytes": 30 << 30,
        "first_s": 40.0,
        "loss": 1.0,
        "loss_ok": True,
        "split_ms": {"decode": 5.0, "copy": 1.0, "forward": 60.0, "backward": 120.0, "sync": 9.0},
        "decode_ms": 12.0,
        **more,
    }


def result_of(speeds: dict[str, float], count: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "row": "P12",
        "kind": "train",
        "title": "SD1.5 <512²>",
        "unit": "x 1 GPU",
        "must": 1.94,
        "stretch": 1.97,
        "is_tiny": False,
        "processes": count,
        "batch": None,
        "against": "diffusers",
        "environment": H100,
        "contenders": {n: found_of(s, count, n) for n, s in speeds.items()},
        **more,
    }


def put(result: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two machines, one and two GPUs, a log, and a file of another kind."""
    root = tmp_path / "runs"
    put(result_of({"strop": 100.0, "diffusers": 40.0}), root / "one.json")
    two = result_of({"strop": 195.0, "diffusers": 70.0}, 2)
    two["contenders"]["torch"] = {"work": WORK, "note": "", "skipped": "needs <a> GPU"}
    put(two, root / "two.json")
    older = {**H100, "date": "2029-01-01"}
    put(result_of({"strop": 1.0}, environment=older), root / "older.json")
    put(result_of({"strop": 50.0}, environment=A100), root / "other" / "one.json")
    put({"kind": "infer", "row": "P1"}, root / "P1.json")
    head = {"kind": "train-log", "row": "P12", "contender": "strop", "processes": 2, "batch": 32}
    lines = [head, *({"step": n, "loss": 1.0 / n, "images_per_s": 190.0} for n in (10, 20, 30))]
    half = "\n".join(map(json.dumps, lines)) + '\n{"step": 40, "lo'
    (root / "log.jsonl").write_text(half)
    return root


# runs


def test_runs_of_a_folder(folder: Path) -> None:
    runs = train_runs.read(folder)
    assert runs.older == 1
    assert [path.name for path in runs.others] == ["P1.json"]
    by_key = {(r.machine.split(",")[0], r.contender, r.processes): r for r in runs.runs}
    two = by_key["H100", "strop", 2]
    assert runs.scaling(two) == pytest.approx(1.95)
    assert runs.efficiency(two) == pytest.approx(0.975)
    assert runs.speed_up(two) == pytest.approx(195 / 70)
    assert two.spread == pytest.approx(0.02)
    assert [line["step"] for line in two.log] == [10, 20, 30]
    elsewhere = by_key["A100", "strop", 1]
    assert runs.speed_up(elsewhere) is None  # its peer ran on another machine
    assert by_key["H100", "strop", 1].img_s == 100.0  # the newest
    assert by_key["H100", "torch", 2].reason == "needs <a> GPU"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, ["2 GPUs: strop 1.95 x 1 GPU, must 1.94 reached"]),
        ({"stretch": 1.95}, ["2 GPUs: strop 1.95 x 1 GPU, stretch 1.95 reached"]),
        ({"must": 1.96}, ["2 GPUs: strop 1.95 x 1 GPU, must 1.96 missed"]),
        (
            {"unit": "x"},
            [
                "1 GPU: strop 2.50 x, stretch 1.97 reached",
                "2 GPUs: strop 2.79 x, stretch 1.97 reached",
            ],
        ),
        (
            {"unit": "img/s a GPU", "must": 98},
            [
                "1 GPU: strop 100.00 img/s a GPU, stretch 1.97 reached",
                "2 GPUs: strop 97.50 img/s a GPU, stretch 1.97 reached",
            ],
        ),
        (
            {"unit": "ms", "must": 320, "stretch": 1},
            [
                "1 GPU: strop 320.00 ms, must 320 reached",
                "2 GPUs: strop 328.21 ms, must 320 missed",
            ],
        ),
        ({"is_tiny": True}, []),
        ({"batch": 32}, []),
    ],
)
def test_verdicts(change: dict[str, Any], said: list[str], tmp_path: Path) -> None:
    for count, speeds in ((1, {"strop": 100.0, "diffusers": 40.0}), (2, {"strop": 195.0})):
        speeds = speeds if count == 1 else {**speeds, "diffusers": 70.0}
        put(result_of(speeds, count) | change, tmp_path / f"{count}.json")
    runs = train_runs.read(tmp_path)
    (group,) = runs.groups().values()
    assert train_runs.verdicts(group, runs) == said


def test_a_wrong_loss_wins_nothing(tmp_path: Path) -> None:
    wrong = found_of(500.0, 2, "strop-shadow", weights_agree=False)
    two = result_of({"strop": 195.0}, 2)
    two["contenders"]["strop-shadow"] = wrong
    put(two, tmp_path / "2.json")
    one = result_of({"strop": 100.0, "strop-shadow": 100.0})
    put(one, tmp_path / "1.json")
    runs = train_runs.read(tmp_path)
    (group,) = runs.groups().values()
    assert train_runs.verdicts(group, runs) == ["2 GPUs: strop 1.95 x 1 GPU, must 1.94 reached"]


# the page


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_needs_nothing_beside_itself(folder: Path, tmp_path: Path) -> None:
    page, *drawn = train_page.write(train_runs.read(folder), tmp_path / "out", "Two <machines>")
    text = page.read_text()
    tags = Tags()
    tags.feed(text)
    assert not tags.open
    assert len(tags.links) == len(drawn) == 5
    assert all(link.startswith("data:image/png;base64,") for link in tags.links)
    assert not re.findall(r"https?://|<script|<link", text)
    for said in (
        "Two &lt;machines&gt;",
        "SD1.5 &lt;512²&gt;",
        "needs &lt;a&gt; GPU",
        "2 GPUs: strop 1.95 x 1 GPU, must 1.94 reached",
        "1 older run of the same kind and 1 file of other kinds",
        "H100, torch 2.11",
        "A100, torch 2.11",
        "98%",
        "12.0",
    ):
        assert said in text, said
    names = {path.name for path in drawn}
    assert {"P12_h100-torch-2-11-speed.png", "P12_a100-torch-2-11-modules.png"} <= names
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "holds no result of strop bench train"),
        ({"a.json": '{"half'}, "a.json cannot be read"),
        ({"a.json": "[1]"}, "a.json holds a list"),
        ({"a.json": '{"kind": "train"}'}, "a.json lacks 'contenders'"),
        (
            {
                "a.json": json.dumps(result_of({"strop": 1.0})),
                "b.json": json.dumps(result_of({"strop": 1.0}, unit="ms")),
            },
            "P12 is in x 1 GPU in",
        ),
        (
            {"a.json": json.dumps(result_of({"strop": 1.0})), "a.jsonl": '{"a"}\n{"b": 1}\n'},
            "a.jsonl cannot be read",
        ),
    ],
)
def test_what_cannot_be_read(files: dict[str, str], said: str, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    done = CliRunner().invoke(app, ["bench", "report", str(tmp_path)])
    assert done.exit_code == 1
    assert said in " ".join(done.output.split())
    assert not (tmp_path / "report.html").exists()


def test_a_folder_that_is_missing(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["bench", "report", str(tmp_path / "absent")])
    assert done.exit_code == 1
    assert "does not exist" in " ".join(done.output.split())


# compare


def pair(tmp_path: Path, first: Any, second: Any) -> list[str]:
    return [str(put(r, tmp_path / f"{n}.json")) for n, r in (("a", first), ("b", second))]


def verdict(tmp_path: Path, first: Any, second: Any, what: str = "ms") -> str:
    changes, _ = compare.compare(*map(Path, pair(tmp_path, first, second)))
    return next(change.verdict for change in changes if change.what == what)


@pytest.mark.parametrize(
    ("speed", "said"), [(100.0, "same"), (101.5, "same"), (95.0, "slower"), (110.0, "faster")]
)
def test_a_change_is_one_beyond_the_spread(speed: float, said: str, tmp_path: Path) -> None:
    """The series of both lie 2 % apart."""
    assert verdict(tmp_path, result_of({"strop": 100.0}), result_of({"strop": speed})) == said


def test_the_larger_spread_counts_and_half_a_percent_at_least(tmp_path: Path) -> None:
    def spread(img_s: float, share: float) -> dict[str, Any]:
        result = result_of({"strop": img_s})
        around = [img_s * (1 - share / 2), img_s, img_s * (1 + share / 2)]
        result["contenders"]["strop"]["img_s_series"] = around
        return result

    assert verdict(tmp_path, spread(100.0, 0.001), spread(92.0, 0.1)) == "same"
    assert verdict(tmp_path, spread(100.0, 0.0), spread(99.6, 0.0)) == "same"
    assert verdict(tmp_path, spread(100.0, 0.0), spread(99.3, 0.0)) == "slower"


def infer_of(p50: float, **more: Any) -> dict[str, Any]:
    contender = {"p20_ms": p50 - 0.01, "p50_ms": p50, "p80_ms": p50 + 0.01, "peak_bytes": 1 << 31}
    return {
        "row": "P1",
        "kind": "infer",
        "unit": "ms",
        "is_tiny": False,
        "measures": "step",
        "dtype": "fp16",
        "batch": 2,
        "environment": H100,
        "contenders": {"strop": {**contender, "first_s": 7.0, **more}},
    }


def test_inference_is_judged_by_its_percentiles(tmp_path: Path) -> None:
    assert verdict(tmp_path, infer_of(4.54), infer_of(4.55)) == "same"
    assert verdict(tmp_path, infer_of(4.54), infer_of(4.70)) == "slower"
    more = infer_of(4.54, peak_bytes=3 << 30)
    assert verdict(tmp_path, infer_of(4.54), more, "peak GiB") == "more"
    assert verdict(tmp_path, infer_of(4.54), infer_of(4.54), "first call s") == "not judged"


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        ({}, 0, "nothing is slower beyond noise"),
        ({"strop": found_of(80.0, 1, "strop")}, 1, "worse: strop"),
        ({"strop": {"work": WORK, "failed": "OutOfMemoryError"}}, 1, "OutOfMemoryError"),
        ({"strop": found_of(100.0, 1, "strop", loss_ok=False)}, 1, "wrong"),
        ({"torch": found_of(9.0, 1, "torch")}, 0, "new"),
    ],
)
def test_fail_on_slower(change: dict[str, Any], code: int, said: str, tmp_path: Path) -> None:
    first, second = result_of({"strop": 100.0}), result_of({"strop": 100.0})
    second["contenders"] |= change
    second["environment"] = {**H100, "torch": "2.12"}
    words = ["bench", "compare", *pair(tmp_path, first, second)]
    done = CliRunner().invoke(app, [*words, "--fail-on-slower"])
    assert done.exit_code == code, done.output
    assert said in done.output
    assert "differs: torch: 2.11 -> 2.12" in done.output
    assert CliRunner().invoke(app, words).exit_code == 0


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (infer_of(4.5), "kinds: kind is train in"),
        (result_of({"strop": 1.0}, unit="ms"), "mixed units: unit is x 1 GPU in"),
        (result_of({"strop": 1.0}, 2), "numbers of processes: processes is 1 in"),
        (result_of({"strop": 1.0}, row="P9"), "rows: row is P12 in"),
        ({"kind": "compile"}, "is no result of strop bench infer or strop bench train"),
    ],
)
def test_what_cannot_be_compared(second: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=said):
        compare.compare(*map(Path, pair(tmp_path, result_of({"strop": 1.0}), second)))


def test_the_mock_set_is_written_into_an_empty_folder(tmp_path: Path) -> None:
    words = ["bench", "mock-set", str(tmp_path / "set"), "--count", "1", "--side", "32"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "1 picture and metadata.jsonl" in " ".join(done.output.split())
    again = CliRunner().invoke(app, words)
    assert again.exit_code == 1
    assert "is not empty" in " ".join(again.output.split())


def test_a_table_names_a_gpu_that_its_first_row_does_not_have() -> None:
    first = {"title": "a step", "environment": {"gpu": "NVIDIA H100"}}
    other = {"title": "two steps", "environment": {"gpu": "NVIDIA H200"}}
    assert report.title_of(first, first) == "a step"
    assert report.title_of(other, first) == "two steps (NVIDIA H200)"
    assert report.title_of({**other, "environment": {}}, first) == "two steps (a CPU)"
