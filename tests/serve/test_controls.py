"""ControlNets in A1111's interface: what is drawn, refused by name, and compiled."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from strop.api import dispatchers_of
from strop.cli import adapters, models
from strop.cli import serve as command
from strop.cli.mistakes import CommandError
from strop.cli.serve_controlnets import find_controlnets
from strop.drawing.request import PictureRequest, PictureSize
from strop.serve.limits import ServeLimits
from strop.serve.studio import Studio
from tests.control_files import write_controlnet

from .asking import RawCall, asking, encoded, opened, run
from .painters import CARD, FakePainter
from .test_masks import as_png

pytestmark = pytest.mark.filterwarnings("ignore")

TXT2IMG, IMG2IMG = "/sdapi/v1/txt2img", "/sdapi/v1/img2img"
ARGS = "alwayson_scripts.controlnet.args"
WITH_NETS = replace(CARD, controlnets=("edges", "depth"))
EDGES = Image.effect_noise((64, 32), 60).convert("RGB")
DEPTH = Image.effect_noise((80, 80), 90).convert("RGB")
START = {"init_images": [encoded(as_png(EDGES))]}
HOLE = Image.new("L", EDGES.size)
HOLE.paste(255, (0, 0, 32, 16))
MASKED = {**START, "mask": encoded(as_png(HOLE)), "mask_blur": 0, "inpainting_fill": 1}


def unit(picture: Image.Image | None = EDGES, **more: Any) -> dict[str, Any]:
    image = None if picture is None else encoded(as_png(picture))
    return {"enabled": True, "module": "none", "model": "edges", "image": image, **more}


def body(*units: Any, **more: Any) -> dict[str, Any]:
    scripts = {"ControlNet": {"args": list(units)}}
    return {"prompt": "x", "steps": 4, "seed": 5, "alwayson_scripts": scripts, **more}


def asked(given: Any, path: str = TXT2IMG, painter: FakePainter | None = None) -> Any:
    found: list[Any] = []

    async def scenario() -> None:
        async with asking(painter or FakePainter(WITH_NETS)) as server:
            found.append(await server.client.post(path, json=given))

    run(scenario)
    return found[0]


def requested(given: Any, path: str = TXT2IMG) -> PictureRequest:
    painter = FakePainter(WITH_NETS)
    answer = asked(given, path, painter)
    assert answer.status_code == 200, answer.text
    assert "ControlNet 0" in answer.json()["info"]
    return painter.batches[0].requests[0]


def test_units_as_clients_of_the_extension_send_them() -> None:
    usual = {
        "weight": 0.5, "resize_mode": "Just Resize", "low_vram": False, "threshold_a": 64,
        "guidance_start": 0.1, "guidance_end": 0.9, "mask": None, "save_detected_map": True,
    }  # fmt: skip
    old = {"input_image": encoded(as_png(DEPTH)), "guidance": 0.5, "control_mode": "Balanced"}
    off = {"enabled": False, "model": "unknown", "module": "canny"}
    given = (unit(model="edges [d14c016b]", module="None", **usual), off, {"model": "depth", **old})
    first, second = requested(body(*given, unit(weight=0))).controls
    assert (first.net, first.weight, first.begin, first.end) == ("edges", 0.5, 0.1, 0.9)
    assert (second.net, second.weight, second.begin, second.end) == ("depth", 1, 0, 0.5)
    assert first.picture.tobytes() == EDGES.resize((32, 16)).tobytes()
    cut = DEPTH.resize((32, 32), Image.Resampling.LANCZOS).crop((0, 8, 32, 24))
    assert second.picture.tobytes() == cut.tobytes()


def test_each_pass_and_each_part_of_a_picture_has_its_own() -> None:
    for option, seen in (("Both", (1, 1)), ("Low res only", (1, 0)), ("High res only", (0, 1))):
        request = requested(body(unit(hr_option=option), enable_hr=True, hr_scale=1.5))
        assert request.second is not None
        passes = (request.controls, request.second.request.controls)
        sizes = [[one.picture.size for one in controls] for controls in passes]
        assert sizes == [[(32, 16)] * seen[0], [(48, 24)] * seen[1]]
    for more, is_same in ((unit(None), True), (unit(inpaint_crop_input_image=False), False)):
        found = requested(body(more, **MASKED), IMG2IMG)
        assert found.start is not None
        assert (found.controls[0].picture.tobytes() == found.start.tobytes()) is is_same


LARGE = unit(Image.new("1", (8000, 4000)))
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"module": "canny"}, "module", "no preprocessors; take none"),
    ({"model": "None"}, "model", "it has edges, depth"),
    ({"image": None}, "image", "it is missing"),
    ({"weight": 2.1}, "weight", "not within 0 and 2"),
    ({"guidance_start": 0.5, "guidance_end": 0.5}, "guidance_start", "less than guidance_end"),
    ({"control_mode": 2}, "control_mode", "only 0 (Balanced) is built"),
    ({"resize_mode": "Resize and Fill"}, "resize_mode", "is not built; take 0"),
    ({"resize_mode": 3}, "resize_mode", "take one of 0 to 2"),
    ({"hr_option": "x"}, "hr_option", "take Both"),
    ({"mask": "x"}, "mask", "does not do that"),
    ({"input_image": "x"}, "input_image", "does not do that"),
    ({"image": {"image": "a", "mask": "b"}}, "image", "masks of units are not built"),
    ({"image": "/etc/passwd"}, "image", "it is no"),
    (LARGE, "image", "8000x4000 has more than 16775168 pixels"),
]


def test_what_is_not_built_is_refused_by_name() -> None:
    for given, field, text in REFUSED:
        answer = asked(body(unit(weight=1), {**unit(), **given}))
        assert answer.status_code in (400, 422)
        assert answer.json()["error"]["param"] == f"{ARGS}[1].{field}"
        assert text in answer.json()["error"]["message"]
    assert "start it with --controlnet" in asked(body(unit()), painter=FakePainter()).text
    assert "at most 4 units" in asked(body(*[unit()] * 5)).text
    narrow = Image.new("RGB", (1, 60_000))
    start = {"prompt": "x", "init_images": [encoded(as_png(narrow))], "resize_mode": 1}
    for answer in (asked(body(unit(narrow))), asked(start, IMG2IMG)):
        assert "a part of 1x60000 is too narrow" in answer.text
    answer = asked({"prompt": "x", "alwayson_scripts": {"ADetailer": {"args": [1]}}})
    assert (answer.status_code, "alwayson_scripts.ADetailer" in answer.text) == (422, True)


def test_hostile_units() -> None:
    strange: tuple[Any, ...] = (
        None, True, -1, 1e308, 10**400, "", "x" * 70_000, "\ud800", [], [[]], {}, {"a": {}},
        {"image": {}}, float("nan"), [{}] * 9, "edges [", [None] * 50,
    )  # fmt: skip
    names = (*unit(), "weight", "guidance", "resize_mode", "control_mode", "hr_option", "\ud800")
    bodies = [body(unit(**{name: value})) for name in names for value in strange]
    for value in strange:
        every = (value, {"controlnet": value}, {"ControlNet": {"args": value}})
        bodies += [body(value), *({"prompt": "x", "alwayson_scripts": one} for one in every)]

    async def scenario() -> None:
        async with asking(FakePainter(WITH_NETS)) as server:
            for given in bodies:
                call = RawCall(server.app, TXT2IMG, json.dumps(given).encode())
                assert 200 <= await call.run() < 500, (str(given)[:300], call.text[:300])
            for name, content in (("model_list", ["edges", "depth"]), ("version", 3)):
                answer = await server.client.get(f"/controlnet/{name}")
                assert answer.json() == {name: content}

    run(scenario)


@pytest.fixture(scope="module")
def studios(
    weighing_model: Path, cache_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Studio, Studio]]:
    """What ``strop serve --controlnet edges --controlnet depth=FOLDER`` loads, and the same with
    nothing compiled."""
    nets = tmp_path_factory.mktemp("nets")
    for seed, name in enumerate(("edges", "deep")):
        torch.manual_seed(seed)
        write_controlnet(nets / name, weighing_model)
    write_controlnet(nets / "pooled", weighing_model, global_pool_conditions=True)
    found = replace(models.find_model(str(weighing_model)), default_size=PictureSize(64, 32))
    for given, text in ((["edges"] * 2, "'edges' is no name, or taken"), (["pooled"], "means")):
        with pytest.raises(CommandError, match=text):
            find_controlnets([str(nets / name) for name in given], found)
    folders = find_controlnets([str(nets / "edges"), f"depth={nets / 'deep'}"], found)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STROP_CACHE_DIR", str(cache_folder))
        served = command.load_studio(found, torch.float32, "cpu", {}, False, 1, folders)
        eager = Studio(served.card, models.load(found, torch.float32, "cpu"))
        where = torch.device("cpu")
        eager._nets = {
            n: adapters.load_controlnet(f, torch.float32, where) for n, f in folders.items()
        }
        yield served, eager


def _graphs(studio: Studio) -> dict[str, int]:
    parts = {**dispatchers_of(studio._pipes[False])}
    parts |= {name: next(iter(dispatchers_of(net).values())) for name, net in studio._nets.items()}
    return {name: len(one.variants.all) for name, one in parts.items()}


def test_no_unit_compiles_anything_anew(studios: tuple[Studio, Studio]) -> None:
    """Requests come one after the other, then all at once; then without Strop."""
    other = unit(DEPTH, model="depth", weight=0.5, guidance_end=0.5)
    euler = {"height": 48, "sampler_name": "Euler a"}
    cases: list[tuple[str, list[Any], dict[str, Any]]] = [
        (TXT2IMG, [], {}),
        (TXT2IMG, [unit()], {}),
        (TXT2IMG, [unit(weight=0)], {}),
        (TXT2IMG, [unit(DEPTH)], {}),
        (TXT2IMG, [unit(guidance_start=0.25), other], {}),
        (TXT2IMG, [unit(), unit(DEPTH)], euler),
        (TXT2IMG, [other, unit(hr_option="Low res only")], {"enable_hr": True, "hr_scale": 1.5}),
        (TXT2IMG, [unit()], {"width": 96, "cfg_scale": 1.0}),
        (IMG2IMG, [unit(), other], START),
        (IMG2IMG, [unit(None)], MASKED),
        (TXT2IMG, [], {}),
    ]
    plain = {"prompt": "a red circle", "cfg_scale": 4.0, "width": 64, "height": 32}
    served, eager = studios

    async def drawn(studio: Studio) -> list[list[bytes]]:
        async with asking(studio, ServeLimits(most_pixels=4 * 64 * 96, most_batch=4)) as server:

            async def one(path: str, units: list[Any], more: dict[str, Any]) -> bytes:
                answer = await server.client.post(path, json=body(*units, **{**plain, **more}))
                assert answer.status_code == 200, answer.text
                return opened(answer.json()["images"][0]).tobytes()

            await one(IMG2IMG, [], START)  # which encodes
            before = _graphs(served)
            alone = [await one(*case) for case in cases]
            together = await asyncio.gather(*(one(*case) for case in cases[:8]))
            assert _graphs(served) == before
            # the UNet has one without, and one with what ControlNets add
            assert (before["edges"], before["depth"], before["unet"]) == (1, 1, 2)
            return [alone, [*together, *alone[8:]]]

    (ours, at_once), (theirs, _) = (asyncio.run(drawn(studio)) for studio in (served, eager))
    assert ours[0] == ours[2] == ours[-1]
    assert len({*ours}) == len(ours) - 2
    for found in (theirs, at_once):
        for one, wanted in zip(ours, found, strict=True):
            assert max(abs(a - b) for a, b in zip(one, wanted, strict=True)) <= 1, "of 255"
    report = served.report()
    assert {*re.findall(r"(\d+) recompiles", report)} == {"0"}
    assert all(f"\n\n{name}\n1 graph, 0 recompiles" in report for name in served._nets)
