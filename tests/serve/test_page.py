"""The page: its files, its labels, its contrast, and what it does in a browser."""

from __future__ import annotations

import importlib.util
import itertools
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import strop
from strop.serve import running
from strop.serve.app import build_app
from strop.serve.guard import GuardRules
from strop.serve.service import Service
from tests.waiting import LIMIT_S

from .asking import LIMITS, asking, run
from .painters import FakePainter

PAGE = Path(strop.__file__).parent / "serve" / "page"
HTML, CSS = (PAGE / "index.html").read_text(), (PAGE / "style.css").read_text()
BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)
# Text on what lies behind it, and at least so much contrast: WCAG 2.2, AA (1.4.3 and 1.4.11).
PAIRS = (
    ("ink", "paper", 4.5),
    ("ink", "panel", 4.5),
    ("faint", "paper", 4.5),
    ("faint", "panel", 4.5),
    ("accent", "paper", 4.5),
    ("on-accent", "accent", 4.5),
    ("bad", "paper", 4.5),
    ("line", "paper", 3.0),
    ("line", "panel", 3.0),
)


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def _tags() -> list[tuple[str, dict[str, str | None]]]:
    parser = _Tags()
    parser.feed(HTML)
    return parser.found


def _themes() -> list[dict[str, str]]:
    return [
        dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block))
        for block in re.findall(r":root \{(.*?)\}", CSS, re.S)
    ]


def _luminance(colour: str) -> float:
    parts = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _contrast(first: str, second: str) -> float:
    low, high = sorted(_luminance(colour) for colour in (first, second))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize(("text", "behind", "least"), PAIRS)
def test_contrast(text: str, behind: str, least: float) -> None:
    themes = _themes()
    assert len(themes) == 2
    for theme in themes:
        assert _contrast(theme[text], theme[behind]) >= least


def test_the_judge_of_contrast_knows_black_and_white() -> None:
    assert _contrast("#000000", "#ffffff") == pytest.approx(21)
    assert _contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


def test_colours_are_those_of_the_themes() -> None:
    rest = re.sub(r":root \{.*?\}", "", CSS, flags=re.S)
    assert not re.findall(r"#[0-9a-f]{3,8}\b(?![^{]*\{)", rest)


def test_every_field_has_a_label_and_every_id_is_there_once() -> None:
    tags = _tags()
    ids = [attrs["id"] for _, attrs in tags if attrs.get("id")]
    assert len(ids) == len(set(ids))
    labels = {attrs.get("for") for tag, attrs in tags if tag == "label"}
    fields = {attrs["id"] for tag, attrs in tags if tag in ("input", "select", "textarea")}
    assert fields <= labels
    for name in ("aria-controls", "aria-labelledby"):
        assert {attrs[name] for _, attrs in tags if attrs.get(name)} <= set(ids)


def test_scripts_name_what_the_page_has() -> None:
    ids = {attrs["id"] for _, attrs in _tags() if attrs.get("id")}
    for script in PAGE.glob("*.js"):
        named = re.findall(r"(?:byId|field|getElementById)\(\"([\w-]+)\"\)", script.read_text())
        assert named
        assert set(named) <= ids | {"lora-0"}, script.name


def test_nothing_comes_from_elsewhere() -> None:
    for file in PAGE.iterdir():
        addresses = re.findall(r"https?://[^\s\"')]+", file.read_text())
        assert set(addresses) <= {"http://www.w3.org/2000/svg"}, file.name
    assert " style=" not in HTML
    assert "onclick" not in HTML


def test_every_file_is_served() -> None:
    async def scenario() -> None:
        async with asking() as asked:
            page = await asked.client.get("/")
            assert page.headers["content-type"].startswith("text/html")
            assert page.text == HTML
            named = re.findall(r'(?:href|src)="(/page/[\w.]+)"', HTML)
            scripts = [
                re.findall(r'from "(/page/[\w.]+)"', f.read_text()) for f in PAGE.glob("*.js")
            ]
            for path in {*named, *itertools.chain(*scripts)}:
                assert (await asked.client.get(path)).status_code == 200, path

    run(scenario)


in_a_browser = pytest.mark.skipif(
    BROWSER is None or importlib.util.find_spec("playwright") is None,
    reason="it wants chromium on the path, and the package playwright",
)


@contextmanager
def opened_page(painter: FakePainter, secret: str = "") -> Iterator[tuple[Any, list[str], Any]]:
    """A phone with the page of a server, what it complains of, and what ends the server."""
    from playwright.sync_api import sync_playwright

    listening = running.bound("127.0.0.1", 0)
    service = Service(painter, LIMITS)
    app = build_app(service, GuardRules(secret))
    server = running.PictureServer(running.config_of(app), service)
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()

    def end() -> None:
        if thread.is_alive():
            server.handle_exit(2, None)
            server.handle_exit(2, None)  # at once
        thread.join(LIMIT_S)
        listening.close()

    try:
        with sync_playwright() as started:
            browser = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 360, "height": 740}, color_scheme="dark")
            said: list[str] = []
            page.on(
                "console",
                lambda m: said.append(m.text) if m.type in ("error", "warning") else None,
            )
            page.on("pageerror", lambda error: said.append(str(error)))
            page.goto(running.address_of(listening))
            yield page, said, end
            browser.close()
    finally:
        end()
    assert not thread.is_alive()


@in_a_browser
@pytest.mark.filterwarnings("ignore")
def test_in_a_browser() -> None:
    """Under the server's own content policy: draw by keyboard, look, read the report."""
    from playwright.sync_api import expect

    painter = FakePainter()
    with opened_page(painter) as (page, said, _):
        expect(page.locator("#model")).to_contain_text("fake")
        page.fill("#prompt", "a cat")
        page.keyboard.press("Control+Enter")
        expect(page.locator("#gallery li")).to_have_count(1)
        expect(page.locator("#status")).to_be_in_viewport()
        page.locator("#gallery button").focus()
        page.keyboard.press("Enter")
        expect(page.locator("#parameters")).to_contain_text("a cat")
        page.keyboard.press("Escape")
        page.select_option("#sampler", "Euler a")
        page.select_option("#schedule", "sgm_uniform")
        page.select_option("#brackets", "weights")
        page.fill("#prompt", "a (cat:1.2)")
        page.click("#go")
        expect(page.locator("#gallery li")).to_have_count(2)
        request = painter.batches[-1].requests[0]
        assert (request.prompt, request.is_weighted) == ("a (cat:1.2)", True)
        assert (request.sampler, request.schedule) == ("Euler a", "sgm_uniform")
        page.select_option("#sampler", "")
        page.select_option("#brackets", "")
        page.locator("#gallery button").first.click()
        page.click("#reuse")
        expect(page.locator("#schedule")).to_have_value("sgm_uniform")
        expect(page.locator("#brackets")).to_have_value("weights")
        page.locator("#tab-draw").focus()
        page.keyboard.press("ArrowRight")
        expect(page.locator("#report")).to_contain_text("3 graphs")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        assert not said


@in_a_browser
@pytest.mark.filterwarnings("ignore")
def test_a_browser_is_told_of_a_server_that_ends() -> None:
    from playwright.sync_api import expect

    painter = FakePainter()
    painter.gate.clear()
    with opened_page(painter) as (page, _, end):
        page.fill("#prompt", "a cat")
        page.click("#go")
        expect(page.locator("#cancel")).to_be_enabled()
        end()
        expect(page.locator("#status")).to_have_class("bad")
        page.click("#go")
        expect(page.locator("#status")).to_contain_text("The server does not answer")
        expect(page.locator("#go")).to_be_enabled()


@in_a_browser
@pytest.mark.filterwarnings("ignore")
def test_a_browser_is_asked_for_a_token_and_can_leave() -> None:
    from playwright.sync_api import expect

    with opened_page(FakePainter(), "a-token-of-22-letters") as (page, _, _end):
        expect(page.locator("#ask")).to_be_visible()
        page.fill("#token", "wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#token-wrong")).to_contain_text("That was not the token")
        page.keyboard.press("Escape")
        expect(page.locator("#status")).to_contain_text("asks for a token")
        expect(page.locator("#ask")).not_to_be_visible()
        page.reload()
        page.fill("#token", "a-token-of-22-letters")
        page.keyboard.press("Enter")
        expect(page.locator("#model")).to_contain_text("fake")
