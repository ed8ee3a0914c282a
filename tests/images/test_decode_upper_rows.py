from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from images.photographs import as_jpeg, photographs
from stoker.errors import SampleCorrupt
from stoker.images import Train, decode, decode_image
from stoker.images.decode import EncodedImage, upper_rows

WAYS: list[dict[str, Any]] = [
    {"subsampling": "4:4:4"},
    {"subsampling": "4:2:2"},
    {"subsampling": "4:2:0"},
    {"restart_marker_rows": 2},
    {"optimize": True},
    {"progressive": True},
    {"comment": b"\xff\xd8\xff\xc0\x00\x11\x08" + bytes(40) + b"\xff\xd9"},
]


def photograph(mode: str = "RGB", **options: Any) -> bytes:
    return as_jpeg(Image.open(io.BytesIO(photographs()[0])).convert(mode), **options)


@pytest.fixture(autouse=True)
def _simplejpeg() -> None:
    if decode.simplejpeg() is None:
        pytest.skip("simplejpeg is not installed: Pillow decodes whole images")


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("mode", ["RGB", "L"])
@given(rows=st.integers(1, 400), shrink=st.sampled_from([1, 2, 4, 8]))
@settings(max_examples=12, deadline=None)
def test_the_rows_are_those_of_the_whole_file(
    options: dict[str, Any], mode: str, rows: int, shrink: int
) -> None:
    raw = photograph(mode, **options)
    whole, _ = EncodedImage(raw).decoded(shrink)
    upper, _ = EncodedImage(raw).decoded(shrink, rows)
    needed = min(-(-rows // shrink), len(whole))
    assert len(upper) >= needed
    np.testing.assert_array_equal(upper[:needed], whole[:needed])


def test_rows_below_are_left_out() -> None:
    raw = photograph()
    upper, _ = EncodedImage(raw).decoded(1, 100)
    assert 100 <= len(upper) < 130
    assert len(EncodedImage(raw).decoded(1, 375)[0]) == 375


def test_a_file_that_must_be_read_to_its_end() -> None:
    raw = photograph()
    height = decode_image(raw).shape[0]
    assert upper_rows(raw, height, 100) is not None
    assert upper_rows(raw, height, height) is None
    assert upper_rows(raw + b"\0", height, 100) is None
    assert upper_rows(photograph(progressive=True), height, 100) is None
    # A scan without a frame, bytes that are no marker, and a file of its first two bytes.
    for odd in (b"\xff\xd8\xff\xda\0\4", b"\xff\xd8\0\0\0\0", b"\xff\xd8"):
        assert upper_rows(odd + b"\xff\xd9", height, 1) is None


def test_the_file_itself_stays_as_it_was() -> None:
    raw = bytearray(photograph())
    before = bytes(raw)
    EncodedImage(memoryview(raw)).decoded(1, 50)
    assert raw == before


def test_a_truncated_file_is_corrupt_whichever_rows_are_kept() -> None:
    raw = photograph()
    for length in range(700, len(raw), len(raw) // 40):
        with pytest.raises(SampleCorrupt, match="do not decode to an image"):
            EncodedImage(raw[:length]).decoded(1, 20)


def test_an_odd_file_is_read_as_pillow_reads_it() -> None:
    """Damage in the middle, at which libjpeg only warns."""
    raw = bytearray(photograph())
    middle = len(raw) // 2
    raw[middle : middle + 8] = b"\xff\xd5" * 4
    expected = np.asarray(Image.open(io.BytesIO(raw)).convert("RGB"))
    upper, _ = EncodedImage(bytes(raw)).decoded(1, 200)
    assert np.abs(np.asarray(upper)[:200].astype(int) - expected[:200]).mean() < 1
    assert Train(32)(bytes(raw), np.random.default_rng(0)).shape == (3, 32, 32)
