"""Pictures of clients: those that are too large are refused before they are decoded."""

from __future__ import annotations

import io
import struct
import tracemalloc
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from strop.serve.refused import Refused
from strop.serve.starts import from_bytes, from_text

from .asking import encoded, png

MOST = 1 << 20


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _bomb(width: int, height: int, more: bytes = b"") -> bytes:
    """A PNG of a few bytes that says that it is large, with as many zeros as fit into little."""
    header = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    data = _chunk(b"IDAT", zlib.compress(bytes(1 << 20), 9))
    return b"\x89PNG\r\n\x1a\n" + header + more + data + _chunk(b"IEND", b"")


@pytest.mark.parametrize("side", [1025, 20_000, 60_000, 2**31 - 1])
def test_a_bomb_takes_no_memory(side: int) -> None:
    data = _bomb(side, side)
    tracemalloc.start()
    try:
        with pytest.raises(Refused, match=r"pixels|damaged"):
            from_bytes(data, MOST)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_a_bomb_of_text_is_refused() -> None:
    text = _chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(80 << 20), 9))
    with pytest.raises(Refused):
        from_bytes(_bomb(8, 8, text), MOST)


@pytest.mark.parametrize("kind", ["GIF", "BMP", "TIFF", "WEBP", "PPM", "ICO", "PDF", "TGA"])
def test_other_formats_are_refused(kind: str) -> None:
    with pytest.raises(Refused, match="PNG or JPEG"):
        from_bytes(png(kind=kind), MOST)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
def test_every_kind_of_png_is_read(mode: str) -> None:
    picture = from_bytes(png(mode=mode), MOST)
    assert (picture.mode, picture.size) == ("RGB", (32, 16))


@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK"])
def test_every_kind_of_jpeg_is_read(mode: str) -> None:
    assert from_bytes(png(mode=mode, kind="JPEG"), MOST).mode == "RGB"


def test_a_turned_photograph_is_turned_back() -> None:
    target, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (32, 16)).save(target, format="JPEG", exif=exif)
    assert from_bytes(target.getvalue(), MOST).size == (16, 32)


def test_base64_may_have_the_beginning_of_an_address() -> None:
    for start in ("", "data:image/png;base64,", "data:image/jpeg;base64,"):
        assert from_text(start + encoded(png()), MOST).size == (32, 16)
    for text in ("file:///etc/passwd", "http://localhost/a.png", "/etc/passwd", "é", "data:,x"):
        with pytest.raises(Refused, match="not opened"):
            from_text(text, MOST)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(["PNG", "JPEG"]),
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=6),
    st.integers(0, 10**6),
)
def test_damaged_pictures_are_read_or_refused(
    kind: str, changes: list[tuple[int, int]], end: int
) -> None:
    data = bytearray(png(20, 12, kind=kind))
    for place, value in changes:
        data[place % len(data)] = value
    cut = bytes(data[: end % len(data) + 1]) if end % 3 == 0 else bytes(data)
    try:
        picture = from_bytes(cut, MOST)
    except Refused:
        pass
    else:
        assert picture.mode == "RGB"
        assert picture.width * picture.height <= MOST
