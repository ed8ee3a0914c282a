"""Parts of JPEGs that our own code decodes and resizes: against libraries' decoders, and Pillow."""

from __future__ import annotations

import io
import sys
import threading
import time
from functools import cache

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image

from images.photographs import as_jpeg, photographs
from stoker.errors import ConfigError
from stoker.images import EncodedImage, Train, decode
from stoker.images.resize import Box, cut_jpegs, jpeg_job, native, part_of, resize_part

pytestmark = pytest.mark.skipif(
    native() is None or decode.simplejpeg() is None,
    reason="built without libjpeg-turbo, or simplejpeg is not installed",
)

SIDES = st.integers(1, 400)
SAMPLINGS = st.sampled_from(["4:4:4", "4:2:2", "4:2:0", "grey"])
SHRINKS = st.sampled_from([1, 2, 4, 8])
SHARES = st.tuples(*[st.floats(0, 1)] * 4)


@cache
def photograph(number: int) -> Image.Image:
    return Image.open(io.BytesIO(photographs()[number])).convert("RGB")


def jpeg(width: int, height: int, sampling: str, quality: int, restart_rows: int) -> bytes:
    image = photograph(width % 6).crop((0, 0, width, height))
    options = {"quality": quality, "restart_marker_rows": restart_rows}
    if sampling == "grey":
        return as_jpeg(image.convert("L"), **options)
    return as_jpeg(image, subsampling=sampling, **options)


def box_of(sides: tuple[int, int], shares: tuple[float, ...]) -> Box:
    """Return a box within an image, of at least half a pixel."""
    width, height = (max(0.5, share * side) for share, side in zip(shares[2:], sides, strict=True))
    left, top = shares[0] * (sides[0] - width), shares[1] * (sides[1] - height)
    return Box(left, top, width, height)


def cut(raw: bytes, shrink: int, box: Box, size: int, context: bool = False) -> np.ndarray | None:
    image = EncodedImage(raw)
    part = part_of(image.sides(shrink), box, size, context=context)
    out = np.empty((size, size, 3), np.uint8)
    job = jpeg_job(image, shrink, part, False, out)
    return out if job is not None and cut_jpegs([job]) == [True] else None


@given(SIDES, SIDES, SAMPLINGS, st.integers(1, 100), st.integers(0, 2), SHRINKS, SHARES)
@settings(max_examples=150, deadline=None)
def test_a_part_is_that_of_the_whole_image(
    width: int,
    height: int,
    sampling: str,
    quality: int,
    restart_rows: int,
    shrink: int,
    shares: tuple[float, ...],
) -> None:
    assume(max(width, height) > 8)  # of fewer pixels simplejpeg takes fewer than it is asked for
    raw = jpeg(width, height, sampling, quality, restart_rows)
    sides = EncodedImage(raw).sides(shrink)
    box = box_of(sides, shares)
    size = 13 + width % 40
    whole, _ = EncodedImage(raw).decoded(shrink)
    for context in (False, True):
        expected = np.empty((size, size, 3), np.uint8)
        resize_part(whole, part_of(sides, box, size, context=context), False, expected)
        made = cut(raw, shrink, box, size, context)
        assert made is not None
        assert np.abs(made.astype(int) - expected).max() <= 1  # numbers round in other places


@given(SIDES, SIDES, SAMPLINGS, st.integers(1, 100), SHARES, st.integers(13, 60))
@settings(max_examples=100, deadline=None)
def test_a_part_is_pillows(
    width: int, height: int, sampling: str, quality: int, shares: tuple[float, ...], size: int
) -> None:
    raw = jpeg(width, height, sampling, quality, 0)
    box = Box(*map(int, box_of((width, height), shares)))
    box = Box(box.left, box.top, max(1, box.width), max(1, box.height))
    image = Image.open(io.BytesIO(raw)).convert("RGB")
    edges = (box.left, box.top, box.left + box.width, box.top + box.height)
    expected = np.asarray(image.crop(edges).resize((size, size), Image.Resampling.BILINEAR))
    made = cut(raw, 1, box, size)
    assert made is not None
    assert np.abs(made.astype(int) - expected).max() <= 1


def test_pixels_are_the_decoders() -> None:
    """Resized by nothing, at every place: no row or column beside the part has left a trace."""
    for sampling in ("4:4:4", "4:2:2", "4:2:0", "grey"):
        raw = jpeg(200, 120, sampling, 90, 0)
        whole, _ = EncodedImage(raw).decoded()
        for place in range(0, 80, 3):
            made = cut(raw, 1, Box(2 * place, place, 40, 40), 40)
            np.testing.assert_array_equal(
                made, whole[place : place + 40, 2 * place : 2 * place + 40]
            )


def test_what_others_must_decode() -> None:
    image, box = photograph(0), Box(3, 3, 40, 40)
    whole = as_jpeg(image)
    tables = whole.index(b"\xff\xdb")
    assert cut(whole, 1, box, 20) is not None
    others = [
        as_jpeg(image, progressive=True),
        as_jpeg(image.convert("CMYK")),
        whole[:-2],
        whole + b"\0",
        whole[:tables] + b"\0\0\0" + whole[tables:],
        whole[:3000] + b"\xff\xd5" * 8 + whole[3016:],
    ]
    assert [cut(raw, 1, box, 20) for raw in others] == [None] * len(others)
    assert cut(whole, 1, Box(0, 0, 200, 200), 5) is None  # too many pixels to add up


def test_what_the_module_itself_refuses() -> None:
    library, raw, out = native(), as_jpeg(photograph(0)), np.empty((8, 8, 3), np.uint8)
    sides, seen = photograph(0).size, (0, 0, 20, 20)
    for shrink, window, box in (
        (3, seen, (0, 0, 20, 20)),
        (1, (0, 0, 5000, 20), (0, 0, 20, 20)),
        (1, (9, 0, 9, 20), (9, 0, 1, 20)),
        (1, seen, (0, 0, float("nan"), 20)),
        (1, seen, (0, -4, 20, 20)),
    ):
        with pytest.raises(ConfigError, match=r"."):
            library.cut_jpegs([(raw, sides, shrink, window, box, False, out)])
    good = (raw, sides, 1, seen, (0, 0, 20, 20), False)
    with pytest.raises(ValueError, match="square"):
        library.cut_jpegs([(*good, out), (*good, out[:4])])
    other = (raw, (sides[0] + 1, sides[1]), *good[2:])
    assert library.cut_jpegs([(*good, out), (*other, out)]) == [True, False]
    assert library.cut_jpegs([]) == []
    out.flags.writeable = False
    for wrong in (out.astype(float), out[..., :2], out):
        with pytest.raises(RuntimeError, match="cast"):
            library.cut_jpegs([(*good, wrong)])
    for wrong_job in ((), good, ("text", *good[1:], out), (*good[:3], (-1, 0, 9, 9), *good[4:])):
        with pytest.raises((RuntimeError, TypeError, ValueError)):
            library.cut_jpegs([wrong_job])


def test_what_decoding_a_whole_image_refuses() -> None:
    library, raw, (width, height) = native(), as_jpeg(photograph(0)), photograph(0).size
    out = np.empty((height, width, 3), np.uint8)
    for shrink, pixels in ((1, out[1:]), (1, out[:0]), (2, out), (0, out)):
        with pytest.raises(ValueError, match="size of the image"):
            library.decode_jpeg(raw, (width, height), shrink, pixels)
    third = np.empty((-(-height // 3), -(-width // 3), 3), np.uint8)
    with pytest.raises(ConfigError, match="1, 2, 4 or 8"):
        library.decode_jpeg(raw, (width, height), 3, third)
    with pytest.raises(TypeError):
        library.decode_jpeg(raw, (width, height), 1, out[:, ::-1])
    assert not library.decode_jpeg(raw[:-9], (width, height), 1, out)
    assert not library.decode_jpeg(raw, (width, height - 1), 1, out[1:])


def test_any_strides_are_written() -> None:
    raw, transform = as_jpeg(photograph(1)), Train(16, layout="hwc")
    expected = transform(raw, np.random.default_rng(2))
    for out in (
        np.zeros((16, 32, 6), np.uint8)[:, ::2, 1:4],
        np.zeros((3, 16, 16), np.uint8).transpose(2, 1, 0),
    ):
        np.testing.assert_array_equal(transform(raw, np.random.default_rng(2), out), expected)


def test_other_threads_run_meanwhile() -> None:
    """One call without the GIL, for which a thread that counts does not stand still."""
    raw = as_jpeg(photograph(0).resize((3000, 2400)), quality=95)
    image, out = EncodedImage(raw), np.empty((2400, 2400, 3), np.uint8)
    part = part_of((3000, 2400), Box(0, 0, 3000, 2400), 2400)
    counted, stop = [0], threading.Event()

    def count() -> None:
        while not stop.is_set():
            counted[0] += 1
            time.sleep(1e-4)

    before = sys.getswitchinterval()
    sys.setswitchinterval(60)  # the GIL is given away by nothing but a call that releases it
    other = threading.Thread(target=count)
    try:
        job = jpeg_job(image, 1, part, False, out)
        assert job is not None
        other.start()
        seen = counted[0]
        assert cut_jpegs([job]) == [True]
        assert counted[0] > seen
    finally:
        stop.set()
        sys.setswitchinterval(before)
        other.join()
