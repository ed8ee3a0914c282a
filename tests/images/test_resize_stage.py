"""Photographs made smaller for the cache: what changes, and what stays to the bit."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image, ImageOps

from images.photographs import as_jpeg, photographs
from stoker.errors import ConfigError
from stoker.images import Eval, decode, decode_image
from stoker.images.resize import Resized
from stoker.source import join_parts, split_parts

FORM = Resized(288)


def photograph(number: int = 0) -> Image.Image:
    return Image.open(io.BytesIO(photographs()[number])).convert("RGB")


def opened(data: bytes | memoryview) -> Image.Image:
    return Image.open(io.BytesIO(data))


@pytest.mark.parametrize("text", ["resized:288", "resized:288:90"])
def test_a_form_has_a_name(text: str) -> None:
    assert Resized.parse(text) == FORM
    assert str(FORM) == "resized:288:90"


@pytest.mark.parametrize(
    "text", ["encoded", "resized", "resized:", "resized:-1", "resized:288:90:1"]
)
def test_other_names_are_of_no_form(text: str) -> None:
    assert Resized.parse(text) is None


@pytest.mark.parametrize("text", ["resized:0", "resized:16385", "resized:288:0", "resized:288:101"])
def test_numbers_out_of_range_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="give 1 to"):
        Resized.parse(text)


@pytest.mark.parametrize("number", range(6))
def test_a_photograph_becomes_smaller_and_looks_alike(number: int) -> None:
    data = photographs()[number]
    small = FORM(data)
    assert len(small) < 0.6 * len(data)
    before, after = opened(data), opened(small)
    assert min(after.size) == 288 and after.mode == "RGB"
    assert after.width / after.height == pytest.approx(before.width / before.height, rel=0.01)
    cut = Eval(256, 224)
    assert np.abs(cut(data).astype(int) - cut(small)).mean() < 4
    assert FORM(memoryview(data)) == small  # the same each time
    assert FORM(small) is small
    assert len(Resized(288, 60)(data)) < len(small)


@pytest.mark.parametrize("factor", [2, 4, 9])
def test_a_large_one_is_shrunk_while_it_is_decoded(factor: int) -> None:
    small = Resized(96)
    image = photograph()
    large = image.resize((factor * 128, factor * 96), Image.Resampling.LANCZOS)
    found = opened(small(as_jpeg(large)))
    assert found.size == (128, 96)
    reference = np.asarray(image.resize((128, 96), Image.Resampling.LANCZOS)).astype(int)
    assert np.abs(reference - np.asarray(found)).mean() < 5


@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize("progressive", [False, True])
def test_the_subsampling_of_colours_stays(subsampling: int, progressive: bool) -> None:
    data = as_jpeg(photograph(), subsampling=subsampling, progressive=progressive)
    header = decode.simplejpeg().decode_jpeg_header
    assert header(FORM(data))[2:] == header(data)[2:]
    assert min(opened(FORM(data)).size) == 288


@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize("short_side", [288, 150, 99, 30])
def test_no_byte_depends_on_which_decoder_there_is(
    subsampling: int, short_side: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    form, grey = Resized(short_side), as_jpeg(photograph(1).convert("L"))
    files = [as_jpeg(photograph(number), subsampling=subsampling) for number in range(3)] + [grey]
    usual = [form(data) for data in files]
    monkeypatch.setattr("stoker.images.resize.native", lambda: None)
    assert [form(data) for data in files] == usual


def test_grey_stays_grey() -> None:
    data = as_jpeg(photograph().convert("L"))
    small = FORM(data)
    assert opened(small).mode == "L" and len(small) < len(data)
    expected = np.asarray(opened(data).resize(opened(small).size, Image.Resampling.BICUBIC))
    assert np.abs(expected.astype(int) - decode_image(small)[..., 0]).mean() < 2


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_orientation_stays(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    exif[0x010E] = "a description " * 50
    data = as_jpeg(photograph(), exif=exif)
    found = opened(FORM(data))
    assert found.getexif().get(0x0112, 1) == orientation
    assert FORM(data)[:2] == b"\xff\xd8" and 0x010E not in found.getexif()
    upright = ImageOps.exif_transpose(opened(data)).resize(ImageOps.exif_transpose(found).size)
    turned = np.asarray(ImageOps.exif_transpose(found)).astype(int)
    assert np.abs(np.asarray(upright) - turned).mean() < 5
    # Neither form is turned by what decodes for training.
    assert decode_image(FORM(data)).shape[:2] == (found.height, found.width)


def test_the_orientation_is_found_behind_fill_bytes() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = as_jpeg(photograph(), exif=exif)
    filled = data[:2] + b"\xff\xff" + data[2:]  # as the standard allows before any marker
    assert opened(FORM(filled)).getexif().get(0x0112) == 6


def test_parts_of_a_sample_become_small_one_by_one() -> None:
    photographs_of = {"a.jpg": photographs()[0], "b.jpg": photographs()[1]}
    parts = {"cls": b"7", **photographs_of, "small.jpg": as_jpeg(photograph().resize((300, 200)))}
    small = split_parts(FORM(memoryview(join_parts(parts))))
    assert list(small) == list(parts)
    assert [bytes(small[name]) for name in small] == [bytes(FORM(part)) for part in parts.values()]
    unchanged = join_parts({"cls": b"7", "txt": b"no image"})
    assert FORM(unchanged) is unchanged


def saved_as(kind: str) -> bytes:
    buffer = io.BytesIO()
    photograph().save(buffer, kind)
    return buffer.getvalue()


FILES_TO_KEEP: dict[str, Callable[[], bytes]] = {
    "small": lambda: as_jpeg(photograph().resize((400, 288))),
    "one pixel wide": lambda: as_jpeg(
        Image.new("RGB", (4000, 1), "red").transpose(Image.Transpose.ROTATE_90)
    ),
    "no smaller": lambda: as_jpeg(photograph(), quality=5),
    "png": lambda: saved_as("PNG"),
    "tiff": lambda: saved_as("TIFF"),
    "cmyk": lambda: as_jpeg(photograph().convert("CMYK")),
    "truncated": lambda: photographs()[0][: len(photographs()[0]) // 2],
    "damaged": lambda: photographs()[0][:200] + bytes(500),
    "only a beginning": lambda: b"\xff\xd8\xff",
    "text": lambda: b"no image at all",
    "empty": lambda: b"",
}


@pytest.mark.parametrize("kind", FILES_TO_KEEP)
def test_what_stays_stays_to_the_bit(kind: str) -> None:
    data = FILES_TO_KEEP[kind]()
    form = Resized(288, 100) if kind == "no smaller" else FORM
    assert form(data) is data


def test_twelve_bits_a_value_stay() -> None:
    data = bytearray(photographs()[0])
    frame = data.index(b"\xff\xc0")
    data[frame + 4] = 12  # says so in the header: no decoder here takes it
    assert FORM(bytes(data)) == data


def test_images_with_too_many_pixels_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    assert FORM(photographs()[0]) is photographs()[0]


def test_damaged_metadata_say_nothing() -> None:
    data = photographs()[0]
    segment = b"Exif\0\0" + b"\xff" * 30
    size = (len(segment) + 2).to_bytes(2, "big")
    broken = data[:2] + b"\xff\xe1" + size + segment + data[2:]
    assert FORM(broken) == FORM(data)


def test_pillow_resizes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = decode_image(FORM(photographs()[0])).astype(int)
    monkeypatch.setattr("stoker.images.resize.cykooz_resizer", lambda: None)
    assert np.abs(usual - decode_image(FORM(photographs()[0]))).mean() < 1.5


def test_without_simplejpeg_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.images.resize.simplejpeg", lambda: None)
    with pytest.raises(ConfigError, match=r"simplejpeg.*pip install 'stoker\[images\]'"):
        FORM(photographs()[0])
