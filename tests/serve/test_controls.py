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

import strop
from strop.api import dispatchers_of
from strop.cli import adapters, models, pictures, sampling
from strop.cli import serve as command
from strop.cli.mistakes import CommandError
from strop.cli.serve_controlnets import find_controlnets
from strop.drawing.request import ControlPicture, PictureRequest, PictureSize
from strop.serve.limits import ServeLimits
from strop.serve.studio import PictureBatch, Studio
from tests.control_files import write_controlnet

from .asking import RawCall, asking, encoded, opened, png, run
from .painters import CARD, FakePainter
from .test_masks import as_png

pytestmark = pytest.mark.filterwarnings("ignore")

TXT2IMG, IMG2IMG = "/sdapi/v1/txt2img", "/sdapi/v1/img2img"
ARGS = "alwayson_scripts.controlnet.args"
WITH_NETS = replace(CARD, controlnets=("edges", "depth"))
SIZE = PictureSize(64, 32)
EDGES = Image.effect_noise((64, 32), 60).convert("RGB")
DEPTH = Image.effect_noise((80, 80), 90).convert("RGB")
LANCZOS = Image.Resampling.LANCZOS


def unit(picture: Image.Image | None = EDGES, **more: Any) -> dict[str, Any]:
    known = {} if picture is None else {"image": encoded(as_png(picture))}
    return {"enabled": True, "module": "none", "model": "edges", **known, **more}


def body(*units: Any, **more: Any) -> dict[str, Any]:
    scripts = {"controlnet": {"args": list(units)}}
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
    assert "alwayson_scripts" not in answer.json()["parameters"]
    assert "ControlNet 0" in json.loads(answer.json()["info"])["extra_generation_params"]
    return painter.batches[0].requests[0]


def test_units_as_clients_of_the_extension_send_them() -> None:
    usual = {
        "weight": 0.5, "resize_mode": "Just Resize", "low_vram": False, "processor_res": 512,
        "threshold_a": 64, "guidance_start": 0.1, "guidance_end": 0.9, "control_mode": 0,
        "pixel_perfect": True, "hr_option": "Both", "mask": None, "save_detected_map": True,
    }  # fmt: skip
    old = {"input_image": encoded(as_png(DEPTH)), "guidance": 0.5, "lowvram": False}
    units = (
        unit(model="edges [d14c016b]", module="None", **usual),
        {"enabled": False, "model": "unknown", "module": "canny"},
        {"model": "depth", "control_mode": "Balanced", **old},
        unit(image={"image": encoded(png(32, 16)), "mask": None}, weight=0),
    )
    first, second = requested(body(*units)).controls  # the one of weight 0 has no effect
    assert (first.net, first.weight, first.begin, first.end) == ("edges", 0.5, 0.1, 0.9)
    assert (second.net, second.weight, second.begin, second.end) == ("depth", 1, 0, 0.5)
    assert first.picture.tobytes() == EDGES.resize((32, 16)).tobytes()
    cut = DEPTH.resize((32, 32), LANCZOS).crop((0, 8, 32, 24))
    assert second.picture.tobytes() == cut.tobytes()


def test_each_pass_sees_a_picture_of_its_size() -> None:
    twice = {"enable_hr": True, "hr_scale": 1.5}
    for option, seen in (("Both", (1, 1)), ("Low res only", (1, 0)), ("High res only", (0, 1))):
        request = requested(body(unit(hr_option=option), **twice))
        assert request.second is not None
        passes = (request.controls, request.second.request.controls)
        sizes = [[one.picture.size for one in controls] for controls in passes]
        assert sizes == [[(32, 16)] * seen[0], [(48, 24)] * seen[1]]


def test_img2img_gives_a_unit_its_own_picture_and_the_same_part_of_it() -> None:
    start = {"init_images": [encoded(as_png(EDGES))], "denoising_strength": 0.5}
    (one,) = requested(body(unit(None), **start), IMG2IMG).controls
    assert one.picture.tobytes() == EDGES.resize((32, 16), LANCZOS).tobytes()
    hole = Image.new("L", EDGES.size)
    hole.paste(255, (0, 0, 32, 16))
    part = {**start, "mask": encoded(as_png(hole)), "mask_blur": 0, "inpainting_fill": 1}
    for is_cut in (True, False):
        found = requested(body(unit(inpaint_crop_input_image=is_cut), **part), IMG2IMG)
        assert found.start is not None
        assert (found.controls[0].picture.tobytes() == found.start.tobytes()) is is_cut


REFUSED: list[tuple[dict[str, Any], int, str, str]] = [
    (unit(module="canny"), 422, "module", "no preprocessors; take none"),
    (unit(model="None"), 422, "model", "no ControlNet of that name; it has edges, depth"),
    (unit(None), 422, "image", "it is missing"),
    (unit(weight=2.1), 422, "weight", "not within 0 and 2"),
    (unit(guidance_start=0.5, guidance_end=0.5), 422, "guidance_start", "less than guidance_end"),
    (unit(guidance_end=1.5), 422, "guidance_end", "not within 0 and 1"),
    (unit(control_mode=2), 422, "control_mode", "only 0 (Balanced) is built"),
    (unit(control_mode="x"), 422, "control_mode", "take one of 0 to 2"),
    (unit(resize_mode="Resize and Fill"), 422, "resize_mode", "is not built; take 0"),
    (unit(hr_option="x"), 422, "hr_option", "take Both"),
    (unit(mask=encoded(png())), 422, "mask", "does not do that"),
    (unit(image={"image": "a", "mask": "b"}), 422, "image", "masks of units are not built"),
    (unit(image="/etc/passwd"), 400, "image", "it is no"),
    (unit(image=encoded(b"x" * 99)), 400, "image", "it is no picture"),
    (unit(Image.new("1", (8000, 4000))), 400, "image", "8000x4000 has more than 16775168 pixels"),
]  # fmt: skip


def test_what_is_not_built_is_refused_by_name() -> None:
    for given, status, field, text in REFUSED:
        painter = FakePainter(WITH_NETS)
        answer = asked(body(unit(weight=1), given), painter=painter)
        assert answer.status_code == status, answer.text
        assert answer.json()["error"]["param"] == f"{ARGS}[1].{field}"
        assert text in answer.json()["error"]["message"]
        assert not painter.batches
    assert (
        "it has none; start it with --controlnet" in asked(body(unit()), painter=FakePainter()).text
    )
    assert "at most 4 units" in asked(body(*[unit()] * 5)).text
    narrow, text = Image.new("RGB", (1, 60_000)), "a part of 1x60000 is too narrow"
    assert f"{ARGS}: {text}" in asked(body(unit(narrow))).text
    start = {"prompt": "x", "init_images": [encoded(as_png(narrow))], "resize_mode": 1}
    assert text in asked(start, IMG2IMG).text
    answer = asked({"prompt": "x", "alwayson_scripts": {"ADetailer": {"args": [1]}}})
    assert (answer.status_code, "alwayson_scripts.ADetailer" in answer.text) == (422, True)


def test_hostile_units() -> None:
    strange: tuple[Any, ...] = (
        None, True, 0, -1, 1e308, 10**400, "", "x" * 70_000, "\ud800", "\0", [], [[]], {},
        {"a": {}}, {"image": {}}, float("nan"), float("inf"), [{}] * 9, "edges [", [None] * 50,
    )  # fmt: skip
    names = (*unit(), "weight", "guidance_start", "resize_mode", "control_mode", "hr_option",
             "input_image", "\ud800")  # fmt: skip
    bodies = [body(unit(**{name: value})) for name in names for value in strange]
    for value in strange:
        every = (value, {"controlnet": value}, {"ControlNet": {"args": value}})
        bodies += [body(value), *({"prompt": "x", "alwayson_scripts": one} for one in every)]

    async def scenario() -> None:
        async with asking(FakePainter(WITH_NETS)) as server:
            for given in bodies:
                call = RawCall(server.app, TXT2IMG, json.dumps(given).encode())
                status = await call.run()
                assert 200 <= status < 500, (status, str(given)[:300], call.text[:300])
                assert status == 200 or len(call.text) < 4000
            listed = (await server.client.get("/controlnet/model_list")).json()
            assert listed == {"model_list": ["edges", "depth"]}
            assert (await server.client.get("/controlnet/version")).json() == {"version": 3}

    run(scenario)


@pytest.fixture(scope="module")
def nets(weighing_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nets")
    for seed, name in enumerate(("edges", "depth")):
        torch.manual_seed(seed)
        write_controlnet(folder / name, weighing_model)
    return folder


@pytest.fixture(scope="module")
def served(weighing_model: Path, cache_folder: Path, nets: Path) -> Iterator[Studio]:
    """What ``strop serve --controlnet edges --controlnet depth`` loads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STROP_CACHE_DIR", str(cache_folder))
        found = replace(models.find_model(str(weighing_model)), default_size=SIZE)
        folders = find_controlnets([str(nets / "edges"), f"depth={nets / 'depth'}"], found)
        yield command.load_studio(found, torch.float32, "cpu", {}, False, 1, folders)


def _graphs(served: Studio) -> dict[str, int]:
    parts = {**dispatchers_of(served._pipes[False])}
    parts |= {name: next(iter(dispatchers_of(net).values())) for name, net in served._nets.items()}
    return {name: len(one.variants.all) for name, one in parts.items()}


RED = PictureRequest("a red circle", SIZE, 4, 4.0, seed=1, is_weighted=True)
PLAIN = {"prompt": RED.prompt, "seed": 1, "cfg_scale": 4.0, "width": 64, "height": 32}
LIMITS = ServeLimits(most_pixels=4 * 64 * 96, most_batch=4)


def test_no_unit_compiles_anything_anew(served: Studio, weighing_model: Path, nets: Path) -> None:
    """Over HTTP, beside a model and ControlNets that are not compiled."""
    hole = Image.new("L", EDGES.size)
    hole.paste(255, (8, 8, 40, 24))
    start = {"init_images": [encoded(as_png(DEPTH))], "denoising_strength": 0.75}
    mask = {**start, "mask": encoded(as_png(hole)), "inpaint_full_res": False}
    other = unit(model="depth", weight=0.5, guidance_end=0.5)
    cases: list[tuple[str, list[Any], dict[str, Any]]] = [
        (TXT2IMG, [], {}),
        (TXT2IMG, [unit()], {}),
        (TXT2IMG, [unit(weight=0)], {}),
        (TXT2IMG, [unit(guidance_start=0.25), other], {}),
        (TXT2IMG, [unit(), unit(DEPTH)], {"height": 48, "sampler_name": "Euler a"}),
        (TXT2IMG, [other, unit(hr_option="Low res only")], {"enable_hr": True, "hr_scale": 1.5}),
        (TXT2IMG, [unit()], {"width": 96, "height": 64, "cfg_scale": 1.0}),
        (TXT2IMG, [other], {"batch_size": 2}),
        (IMG2IMG, [unit(), other], start),
        (IMG2IMG, [unit(None)], mask),
        (TXT2IMG, [], {}),
    ]
    eager = Studio(
        served.card, models.load(models.find_model(str(weighing_model)), torch.float32, "cpu")
    )
    where = torch.device("cpu")
    eager._nets = {
        n: adapters.load_controlnet(nets / n, torch.float32, where) for n in served._nets
    }

    async def drawn(studio: Studio) -> list[bytes]:
        async with asking(studio, LIMITS) as server:
            await server.client.post(IMG2IMG, json={**PLAIN, **start})  # which encodes
            before, found = _graphs(served), []
            for path, units, more in cases:
                answer = await server.client.post(path, json=body(*units, **{**PLAIN, **more}))
                assert answer.status_code == 200, answer.text
                found.append(opened(answer.json()["images"][0]).tobytes())
            assert _graphs(served) == before
            assert (before["edges"], before["depth"]) == (1, 1)
            assert before["unet"] == 2  # without and with what ControlNets add
            return found

    ours, theirs = asyncio.run(drawn(served)), asyncio.run(drawn(eager))
    assert ours[0] == ours[2] == ours[-1]
    assert len({*ours}) == len(ours) - 2
    for one, wanted in zip(ours, theirs, strict=True):
        assert max(abs(a - b) for a, b in zip(one, wanted, strict=True)) <= 1, "of 255"
    report = served.report()
    assert {*re.findall(r"(\d+) recompiles", report)} == {"0"}
    assert all(f"\n\n{name}\n1 graph, 0 recompiles" in report for name in served._nets)


def test_a_picture_has_the_bits_of_generate(
    served: Studio, weighing_model: Path, nets: Path
) -> None:
    file = adapters.ScaledFile(Path("edges.png"), 0.7)
    added = adapters.Additions(controls=[(nets / "edges", file)], pictures={file.path: EDGES})
    loaded = models.load(models.find_model(str(weighing_model)), torch.float32, "cpu")
    pipe = strop.optimize(adapters.add_to(loaded, added, torch.float32))
    request = replace(RED, more=adapters.call_arguments(added, SIZE))
    wanted = pictures.to_picture(sampling.draw(pipe, request)).tobytes()
    batch = PictureBatch([replace(RED, controls=(ControlPicture("edges", EDGES, 0.7),))])
    assert list(served.draw(batch, lambda _: None, lambda: True).pictures) == [wanted]


def test_requests_of_other_units_at_once(served: Studio) -> None:
    """Each has the values that it has by itself."""
    units: list[list[Any]] = [[], [unit()], [unit(DEPTH)], [unit(model="depth")], [unit()] * 2]

    async def scenario() -> None:
        async with asking(served, LIMITS) as server:

            async def drawn(some: list[Any]) -> bytes:
                answer = await server.client.post(TXT2IMG, json=body(*some, **PLAIN))
                return opened(answer.json()["images"][0]).tobytes()

            alone = [await drawn(some) for some in units]
            together = await asyncio.gather(*map(drawn, units))
            for one, other in zip(alone, together, strict=True):
                assert max(abs(a - b) for a, b in zip(one, other, strict=True)) <= 1, "of 255"

    run(scenario)


def test_folders_that_cannot_be_served(weighing_model: Path, nets: Path, tmp_path: Path) -> None:
    write_controlnet(tmp_path / "pooled", weighing_model, global_pool_conditions=True)
    wanted = {
        (str(tmp_path / "absent"),): "there is no ControlNet in",
        (str(nets / "edges"),) * 2: "'edges' is no name, or taken; give NAME=",
        (str(tmp_path / "pooled"),): "takes means over the whole picture",
    }
    for given, text in wanted.items():
        with pytest.raises(CommandError, match=text):
            find_controlnets(given, models.find_model(str(weighing_model)))
