from __future__ import annotations

import io
import struct
import sys
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image

from stoker.errors import ConfigError, SampleCorrupt
from stoker.images import decode, decode_image, to_pil
from stoker.pytorch import ImageFolder


@pytest.fixture(params=["simplejpeg", "pillow"])
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "pillow":
        monkeypatch.setattr(decode, "simplejpeg", lambda: None)
    return str(request.param)


def test_jpeg_is_decoded_alike_by_both(jpeg: Callable[..., bytes], decoder: str) -> None:
    raw = jpeg(40, 56)
    expected = np.array(Image.open(io.BytesIO(raw)).convert("RGB"))
    pixels = decode_image(raw)
    assert (pixels.shape, pixels.dtype) == ((40, 56, 3), np.uint8)
    assert np.abs(pixels.astype(int) - expected).max() <= 4
    pixels[0] = 0  # writable


@pytest.mark.parametrize("mode", ["L", "CMYK"])
def test_jpeg_of_other_colours_becomes_rgb(decoder: str, mode: str) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (16, 8), (200, 200, 200)).convert(mode).save(buffer, "JPEG")
    pixels = decode_image(buffer.getvalue())
    assert pixels.shape == (8, 16, 3)
    assert np.abs(pixels.astype(int) - 200).max() < 5


@pytest.mark.parametrize("progressive", [False, True])
def test_every_truncation_of_a_jpeg_is_noticed(
    jpeg: Callable[..., bytes], decoder: str, progressive: bool
) -> None:
    raw = jpeg(64, 64, progressive=progressive)
    assert decode_image(raw).shape == (64, 64, 3)
    for length in [0, 1, 2, 3, 10, *range(20, len(raw), 37), len(raw) - 2, len(raw) - 1]:
        with pytest.raises(SampleCorrupt, match="do not decode to an image"):
            decode_image(raw[:length])


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "BMP"])
def test_truncation_of_other_formats_is_noticed(kind: str) -> None:
    buffer = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 255, (32, 32, 3)).astype(np.uint8)
    Image.fromarray(noise).save(buffer, kind, lossless=True)
    raw = buffer.getvalue()
    np.testing.assert_array_equal(decode_image(raw), noise)
    with pytest.raises(SampleCorrupt):
        decode_image(raw[: len(raw) // 2])


def test_garbage_is_corrupt(decoder: str) -> None:
    for raw in (b"no image at all", b"\xff\xd8\xff" + bytes(500), bytes(1000)):
        with pytest.raises(SampleCorrupt):
            decode_image(raw)


def test_what_simplejpeg_finds_odd_pillow_may_read(jpeg: Callable[..., bytes]) -> None:
    raw = jpeg()
    # Stray bytes before the next marker: libjpeg warns and goes on.
    at = raw.index(b"\xff\xdb")
    odd = raw[:at] + b"\0\0\0" + raw[at:]
    if decode.simplejpeg() is not None:
        with pytest.raises(ValueError, match=r"."):
            decode.simplejpeg().decode_jpeg(odd, strict=True)
    assert decode_image(odd).shape == (40, 56, 3)


def test_transparency_and_palettes_become_rgb() -> None:
    buffer = io.BytesIO()
    Image.new("RGBA", (4, 2), (9, 8, 7, 0)).save(buffer, "PNG")
    assert decode_image(buffer.getvalue())[0, 0].tolist() == [9, 8, 7]


def test_to_pil_shares_the_pixels() -> None:
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    image = to_pil(pixels)
    assert (image.size, image.mode) == ((4, 2), "RGB")
    np.testing.assert_array_equal(np.asarray(image), pixels)


def grey(width: int, height: int) -> bytes:
    """Return a JPEG of that size, sides multiples of 16, in 6 bits for each block of 8 x 8."""
    buffer = io.BytesIO()
    Image.new("L", (16, 16), 128).save(buffer, "JPEG")
    raw = buffer.getvalue()
    size = raw.index(b"\xff\xc0") + 5
    scan = raw.index(b"\xff\xda") + 10
    head = raw[:size] + struct.pack(">HH", height, width) + raw[size + 4 : scan]
    return head + b"\x28\xa2\x8a" * (width * height // 256) + b"\xff\xd9"


def white(width: int, height: int, kind: str) -> bytes:
    buffer = io.BytesIO()
    Image.new("1", (width, height), 1).convert("L").save(buffer, kind)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_c6_a_bomb_is_refused_before_it_takes_memory(decoder: str, kind: str) -> None:
    """A fifth more pixels than Pillow accepts; 2.4 MiB, and 618 were it decoded."""
    make = grey if kind == "JPEG" else png
    assert decode_image(grey(32, 48)).shape == (48, 32, 3)
    bomb = make(16_000, 13_504)
    tracemalloc.start()
    try:
        with pytest.raises(SampleCorrupt, match="max_pixels="):
            decode_image(bomb)
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()


def png(width: int, height: int) -> bytes:
    """Return a PNG file of that size without its pixels."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = [(b"IHDR", head), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in parts
    )


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_c6_the_limit_is_an_option(
    decoder: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = white(40, 30, kind)
    assert decode_image(raw, 1200).shape == (30, 40, 3)
    with pytest.raises(SampleCorrupt, match=r"40 x 30 has more than 1,199 pixels.*max_pixels="):
        decode_image(raw, 1199)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 599)
    with pytest.raises(SampleCorrupt, match="max_pixels="):
        decode_image(raw)
    assert decode_image(raw, 1200).shape == (30, 40, 3)
    assert Image.MAX_IMAGE_PIXELS == 599
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert decode_image(raw).shape == (30, 40, 3)


def test_c6_image_folder_has_the_option(image_root: Path) -> None:
    with pytest.raises(SampleCorrupt, match="max_pixels="):
        ImageFolder(image_root, max_pixels=63)[0]
    assert np.array(ImageFolder(image_root, max_pixels=64)[0][0]).shape == (8, 8, 3)
    with pytest.raises(ConfigError, match="max_pixels=0"):
        ImageFolder(image_root, max_pixels=0)
    with pytest.raises(ConfigError, match="beside decode="):
        ImageFolder(image_root, max_pixels=9, decode=len)


def test_pillow_may_be_half_loaded_by_another_thread(
    monkeypatch: pytest.MonkeyPatch, jpeg: Callable[..., bytes]
) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", ModuleType("PIL.Image"))
    assert decode_image(jpeg(20, 30)).ndim == 3
