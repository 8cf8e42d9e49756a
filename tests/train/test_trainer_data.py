"""Folders of pictures: what is read, what is named and left out, and what is refused."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image
from torch import Tensor

from strop.errors import CacheError, OptionError
from strop.train import given_settings
from strop.train.crops import Crop, pixels_of
from strop.train.data import Batch, Captions, FolderSource, Reader
from strop.train.folders import check_files, check_sizes, read_captioned, read_subject
from strop.train.objective import Objective
from strop.train.prompts import Prompts
from tests.train import trainer

TEXTS = {"a.png": "first", "b.jpg": "second", "sub/c.webp": "third"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three pictures without captions."""
    place = tmp_path / "data"
    (place / "sub").mkdir(parents=True)
    for number, name in enumerate(TEXTS):
        Image.new("RGB", (40 + number, 30), (number * 80, 9, 9)).save(place / name)
    return place


def _jsonl(folder: Path) -> None:
    rows = [json.dumps({"file_name": name, "text": text}) for name, text in TEXTS.items()]
    (folder / "metadata.jsonl").write_text("\n".join(rows) + "\n\n")


def _csv(folder: Path) -> None:
    rows = [f"{name},{text}" for name, text in TEXTS.items()]
    (folder / "metadata.csv").write_text("\n".join(["file_name,text", *rows]))


def _sidecars(folder: Path) -> None:
    for name, text in TEXTS.items():
        (folder / name).with_suffix(".txt").write_text(text + "\n")


def _per_folder(folder: Path) -> None:
    (folder / "sub" / "metadata.jsonl").write_text('{"file_name": "c.webp", "text": "third"}')
    rows = [json.dumps({"file_name": n, "text": t}) for n, t in TEXTS.items() if "/" not in n]
    (folder / "metadata.jsonl").write_text("\n".join(rows))


@pytest.mark.parametrize("write", [_jsonl, _csv, _sidecars, _per_folder])
def test_captions(write: Callable[[Path], None], folder: Path) -> None:
    write(folder)
    found = read_captioned(folder, "text")
    assert {p.name: p.captions for p in found.pictures} == {n: (t,) for n, t in TEXTS.items()}
    assert [(p.width, p.height) for p in found.pictures] == [(40, 30), (41, 30), (42, 30)]
    assert not found.bad


# Files as other programs write them -> the caption of a.png that they hold.
WRITTEN: dict[str, tuple[str, bytes, str]] = {
    "text of Windows": ("a.txt", b"\xef\xbb\xbffirst\r\n", "first"),
    "lines in a csv": (
        "metadata.csv",
        b'file_name,text\r\na.png,"one\ntwo, three"\r\n',
        "one\ntwo, three",
    ),
    "separator in a csv": (
        "metadata.csv",
        "file_name,text\na.png,one\u2028two\n".encode(),
        "one\u2028two",
    ),
    "separator in jsonl": (
        "metadata.jsonl",
        '{"file_name": "a.png", "text": "one\u2028two\x85"}\r\n'.encode(),
        "one\u2028two\x85",
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_captions_as_other_programs_write_them(name: str, tmp_path: Path) -> None:
    file, content, text = WRITTEN[name]
    Image.new("RGB", (40, 30)).save(tmp_path / "a.png")
    (tmp_path / file).write_bytes(content)
    (picture,) = read_captioned(tmp_path, "text").pictures
    assert picture.captions == (text,)


def _several(folder: Path) -> None:
    rows = [
        {"file_name": name, "text": [text, text.upper(), "all"]} for name, text in TEXTS.items()
    ]
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))


def test_one_of_several_captions_is_drawn(folder: Path) -> None:
    """Anew in each epoch, and by the batch's number alone."""
    _jsonl(folder)
    plain = read_captioned(folder, "text")
    _several(folder)
    found = read_captioned(folder, "text")
    assert found.pictures[1].captions == ("second", "SECOND", "all")
    assert found.digest != plain.digest
    texts = sorted({text for picture in found.pictures for text in picture.captions})
    rows = {text: row for row, text in enumerate(texts)}
    made = given_settings.make(
        "lora", {"model": "m", "train_data_dir": folder, "train_batch_size": 3}
    )
    batches = [
        FolderSource(made, 16, found.pictures, (), captions_of(rows, 8))
        .batch(number)
        .text.tensors["text_encoder"]
        .flatten()
        .tolist()
        for number in (*range(40), 7)
    ]
    assert batches[7] == batches[-1]
    counts = Counter(texts[row] for batch in batches[:40] for row in batch)
    assert set(counts) == set(texts)
    assert 25 < counts["all"] < 55
    assert all(5 < counts[text] < 25 for text in TEXTS.values())


def _whole(folder: Path) -> bytes:
    return (folder / "a.png").read_bytes()


# What lies in the folder -> how it is named.
BAD: dict[str, tuple[Callable[[Path], bytes], str]] = {
    "empty.png": (lambda folder: b"", "is empty"),
    "cut.png": (lambda folder: _whole(folder)[:70], "is damaged"),
    "cut.jpg": (lambda folder: (folder / "b.jpg").read_bytes()[:400], "is damaged"),
    "text.jpeg": (lambda folder: b"not a picture", "is damaged"),
    "flipped.png": (lambda folder: _whole(folder).replace(b"IDAT", b"IDBT"), "is damaged"),
    "notes.pdf": (lambda folder: b"%PDF", "is no picture"),
}


def test_texts_of_no_picture_are_named(folder: Path) -> None:
    """A note, and a caption whose name is misspelt; a caption in its place is not."""
    for name in TEXTS:
        (folder / name).with_suffix(".txt").write_text("a thing")
    (folder / "notes.txt").write_text("bought in May")
    (folder / "deep").mkdir()
    (folder / "deep" / "a.caption").write_text("of the picture above")
    expected = [
        ("a.caption", "is the caption of no picture"),
        ("notes.txt", "is the caption of no picture"),
    ]
    for found in (read_captioned(folder, "text"), read_subject(folder, "x")):
        assert [(bad.path.name, bad.reason) for bad in found.bad] == expected
        with pytest.raises(OptionError, match=r"notes\.txt: is the caption of no picture"):
            check_files(found, refuse=True)


def test_links_to_nothing_are_named(folder: Path) -> None:
    _jsonl(folder)
    (folder / "gone.png").symlink_to("nowhere.png")
    (folder / "a.png").unlink()
    (folder / "a.png").symlink_to("nowhere.png")
    found = read_subject(folder, "a thing")
    assert [(bad.path.name, bad.reason) for bad in found.bad] == [
        (name, "is a link to a file that does not exist") for name in ("a.png", "gone.png")
    ]
    reasons = [(bad.path.name, bad.reason) for bad in read_captioned(folder, "text").bad]
    assert reasons == [
        ("a.png", "is named in metadata.jsonl and does not exist"),
        ("gone.png", "is in no metadata file"),
    ]
    (folder / "metadata.jsonl").unlink()
    (folder / "metadata.jsonl").symlink_to("nowhere.jsonl")
    with pytest.raises(OptionError, match=r"metadata.jsonl cannot be read: .*No such file"):
        read_captioned(folder, "text")


GREYS = numpy.arange(16 * 16).reshape(16, 16)


@pytest.mark.parametrize("name", ["grey.png", "grey.tiff"])
def test_greys_of_16_bits(name: str, tmp_path: Path) -> None:
    """They have the pixels of the same picture in 8 bits."""
    Image.fromarray((GREYS * 257).astype(numpy.uint16)).save(tmp_path / name)
    Image.fromarray(GREYS.astype(numpy.uint8)).save(tmp_path / "8.png")
    with Image.open(tmp_path / name) as opened:
        assert opened.mode.startswith("I")
    (found,) = [p for p in read_subject(tmp_path, "x").pictures if p.name == name]
    pixels = pixels_of(found.path, (16, 16), Crop())
    assert torch.equal(pixels, pixels_of(tmp_path / "8.png", (16, 16), Crop()))
    assert len(pixels.unique()) == 256


@pytest.mark.parametrize("kind", [numpy.float32, numpy.int32])
def test_numbers_of_unknown_range_are_named(kind: Any, folder: Path) -> None:
    Image.fromarray((GREYS / 255).astype(kind)).save(folder / "odd.tiff")
    (bad,) = read_subject(folder, "x").bad
    assert bad.path.name == "odd.tiff"
    assert "has numbers of unknown range (PIL's mode" in bad.reason


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_named(name: str, folder: Path) -> None:
    content, reason = BAD[name]
    (folder / name).write_bytes(content(folder))
    (folder / ".hidden").write_text("left alone")
    found = read_subject(folder, "a thing")
    assert len(found.pictures) == 3
    assert [(bad.path.name, reason in str(bad)) for bad in found.bad] == [(name, True)]
    check_files(found, refuse=False)
    with pytest.raises(OptionError, match=rf"1 file without.*{name}: {reason}.*--bad_files skip"):
        check_files(found, refuse=True)


def test_files_that_metadata_does_not_fit(folder: Path) -> None:
    rows = [{"file_name": "a.png", "text": "x"}, {"file_name": "gone.png", "text": "y"}]
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = read_captioned(folder, "text")
    reasons = {bad.path.name: bad.reason for bad in found.bad}
    assert reasons == {
        "gone.png": "is named in metadata.jsonl and does not exist",
        "b.jpg": "is in no metadata file",
        "c.webp": "is in no metadata file",
    }


# What is wrong with a folder -> what the error must say.
MISTAKES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no captions": (lambda f: None, r"a.png, b.jpg, c.webp are without a caption; write a .txt"),
    "wrong column": (_jsonl, r"line 1: no text under 'words', only file_name, text"),
    "no text": (
        lambda f: (f / "metadata.jsonl").write_text('{"file_name": "a.png", "words": [1]}'),
        r"line 1: 'words' is \[1\]; write a text, or a list of texts",
    ),
    "no json": (lambda f: (f / "metadata.jsonl").write_text("{oops"), r"line 1 is no JSON"),
    "outside": (
        lambda f: (f / "metadata.jsonl").write_text('{"file_name": "../x.png", "words": "a"}'),
        r"is outside",
    ),
    "comma without quotes": (
        lambda f: (f / "metadata.csv").write_text("file_name,words\na.png,a ring, red\n"),
        r"metadata.csv, line 2 has more fields than the first line; put texts with commas in",
    ),
    "not utf-8": (
        lambda f: (f / "metadata.jsonl").write_bytes(b"\xff\xfe{"),
        r"metadata.jsonl cannot be read",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name: str, folder: Path) -> None:
    write, message = MISTAKES[name]
    write(folder)
    with pytest.raises(OptionError, match=message):
        read_captioned(folder, "words")


def test_missing_and_empty_folders(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"nowhere does not exist; give the folder"):
        read_subject(tmp_path / "nowhere", "x")
    with pytest.raises(OptionError, match=r"a.png is a file"):
        read_subject(folder / "a.png", "x")
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "x.png").write_bytes(b"")
    with pytest.raises(OptionError, match=r"holds no pictures.*x.png: is empty"):
        read_subject(empty, "x")
    with pytest.raises(OptionError, match=r"3 pictures.*a.png \(40x30\).*--allow_upscaling"):
        check_sizes(read_subject(folder, "x"), 32)
    check_sizes(read_subject(folder, "x"), 30)


def test_pixels(tmp_path: Path) -> None:
    """A picture of the right height is cropped, and nothing else."""
    rows = numpy.random.default_rng(0).integers(0, 256, (16, 24, 3), dtype=numpy.uint8)
    path = tmp_path / "p.png"
    Image.fromarray(rows).save(path)
    whole = torch.from_numpy(rows).permute(2, 0, 1) / 127.5 - 1
    for crop, left in ((Crop(0, 0), 0), (Crop(), 4), (Crop(1, 1), 8)):
        assert torch.equal(pixels_of(path, (16, 16), crop), whole[:, :, left : left + 16])
    mirrored = pixels_of(path, (16, 16), Crop(mirrored=True))
    assert torch.equal(mirrored, pixels_of(path, (16, 16), Crop()).flip(2))
    assert pixels_of(path, (8, 8), Crop()).shape == (3, 8, 8)
    turned = Image.fromarray(rows)
    turned.save(path, exif=_turned())
    assert torch.equal(pixels_of(path, (16, 16), Crop(0, 0)), whole.rot90(-1, (1, 2))[:, :16])


def _turned() -> Image.Exif:
    found = Image.Exif()
    found[0x0112] = 6  # to be shown turned clockwise
    return found


def captions_of(rows: dict[str, int], count: int) -> Captions:
    """Rows whose only token is their number."""
    return Captions(rows, Prompts({"text_encoder": torch.arange(count)[:, None]}))


def ids(batch: Batch) -> Tensor:
    return batch.text.tensors["text_encoder"][:, 0]


def _source(folder: Path, **given: Any) -> FolderSource:
    made = given_settings.make(
        "dreambooth", {"model": "m", "instance_data_dir": folder, "instance_prompt": "x", **given}
    )
    found = read_subject(folder, "x").pictures
    captions = captions_of({"x": 0}, 2)
    return FolderSource(made, 16, found, (), captions)


def test_every_epoch_has_every_picture_in_a_new_order(tmp_path: Path) -> None:
    source = _source(trainer.draw_pictures(tmp_path / "p", 7, metadata=False), train_batch_size=3)
    assert source.batches_per_epoch == 3
    orders = [source.order(epoch) for epoch in range(4)]
    assert all(sorted(order) == list(range(7)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    sizes = [len(source.batch(number)) for number in range(6)]
    assert sizes == [3, 3, 1, 3, 3, 1]
    dropped = _source(tmp_path / "p", train_batch_size=7, proportion_empty_prompts=0.4)
    drawn = Counter(int(row) for number in range(60) for row in ids(dropped.batch(number)))
    assert 0.3 < drawn[1] / drawn.total() < 0.5


def test_threads_read_the_same_batches(tmp_path: Path) -> None:
    source = _source(trainer.draw_pictures(tmp_path / "p", 7, metadata=False), train_batch_size=3)
    for workers in (0, 3):
        reader = Reader(source, 2, 9, workers)
        for number in range(2, 9):
            assert torch.equal(reader.next().pictures, source.batch(number).pictures)
        reader.close()


@pytest.mark.parametrize("mirrored", [False, True], ids=["plain", "mirrored"])
def test_caches_hold_what_would_be_computed(
    mirrored: bool, tiny_model: Path, pictures: Path, tmp_path: Path
) -> None:
    """The loss of batches with both caches is that without."""
    values: dict[str, Any] = {
        "model": tiny_model,
        "train_data_dir": pictures,
        "output_dir": tmp_path,
        "center_crop": True,
        "random_flip": mirrored,
        "proportion_empty_prompts": 0.3,
    }
    cached = {"cache_latents": True, "pre_compute_text_embeddings": True}
    losses = []
    for extra in ({}, cached, cached):
        watch = trainer.Watch()
        made = trainer.session("text-to-image", watch, **values, **extra)
        objective = Objective(made.settings, made.model, made.unet)
        losses.append([objective(made.source.batch(n), n).item() for n in range(6)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] == losses[1]
    stored = sorted((tmp_path / "cache").iterdir())
    assert [path.name.split("-")[0] for path in stored] == ["embeddings", "moments"]
    stored[1].write_bytes(stored[1].read_bytes()[:100])
    made = trainer.session("text-to-image", **values, **cached)
    with pytest.raises(CacheError, match=r"moments-.*is damaged.*delete it"):
        made.source.batch(0)
