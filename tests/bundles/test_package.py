"""The format: what was written comes back, and nothing else is taken for it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.bundles.package import (
    LEAST_HEAD,
    Package,
    decode,
    decode_ids,
    encode,
    head_bytes,
    stamp_of,
    stamp_of_files,
)
from stoker.errors import SegmentError
from stoker.source import FileSource
from stoker.source.packed import Packed, pack

STAMP = stamp_of("fingerprint", 1000)

samples_by_id = st.dictionaries(st.integers(0, 999), st.binary(max_size=200), max_size=30)


def made(samples: dict[int, bytes]) -> Package:
    ids = np.array(list(samples), np.uint32)
    return Package(ids, Packed(*pack(list(samples.values()))))


def whole(samples: dict[int, bytes], stamp: bytes = STAMP) -> bytes:
    return b"".join(encode(made(samples), stamp))


@given(samples_by_id)
def test_what_was_written_comes_back(samples: dict[int, bytes]) -> None:
    data = whole(samples)
    found = decode(data, STAMP, 1000)
    assert found.ids.tolist() == list(samples)
    bounds = found.samples.offsets
    for place, sample in enumerate(samples.values()):
        assert found.samples.data[bounds[place] : bounds[place + 1]].tobytes() == sample
    length = head_bytes(data[:LEAST_HEAD])
    assert decode_ids(data[:length], STAMP, 1000).tolist() == list(samples)


@given(samples_by_id, st.data())
def test_any_changed_byte_is_noticed(samples: dict[int, bytes], data: st.DataObject) -> None:
    damaged = bytearray(whole(samples))
    place = data.draw(st.integers(0, len(damaged) - 1))
    damaged[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(SegmentError):
        decode(bytes(damaged), STAMP, 1000)


@given(samples_by_id, st.data())
def test_any_cut_is_noticed(samples: dict[int, bytes], data: st.DataObject) -> None:
    complete = whole(samples)
    length = data.draw(st.integers(0, len(complete) - 1))
    with pytest.raises(SegmentError):
        decode(complete[:length], STAMP, 1000)
    with pytest.raises(SegmentError):
        decode(complete + b"\0", STAMP, 1000)


def test_a_part_of_a_larger_buffer_is_written_from_its_own_beginning() -> None:
    large = made({1: b"one", 2: b"two", 3: b"three"})
    part = Package(large.ids[1:], Packed(large.samples.data, large.samples.offsets[1:]))
    assert b"".join(encode(part, STAMP)) == whole({2: b"two", 3: b"three"})


def test_s12_packages_of_files_that_were_rebuilt_are_of_no_use(tmp_path: Path) -> None:
    path = tmp_path / "a"
    stamps = []
    for content in (b"1", b"2"):
        path.write_bytes(content)
        os.utime(path, ns=(10**18, 10**18))
        stamps.append(stamp_of_files(FileSource([path])))
    assert stamps[0] != stamps[1] == stamp_of_files(FileSource([path]))


@pytest.mark.parametrize(
    "other", [stamp_of("another", 1000), stamp_of("fingerprint", 1001)], ids=["content", "length"]
)
def test_another_data_set_is_foreign(other: bytes) -> None:
    with pytest.raises(SegmentError, match="another data set"):
        decode(whole({1: b"x"}, other), STAMP, 1000)


def test_a_foreign_file_is_none() -> None:
    with pytest.raises(SegmentError, match="not a package"):
        decode(b"PK\3\4" + bytes(500), STAMP, 1000)


def test_sound_checksums_do_not_make_sense_of_ids() -> None:
    with pytest.raises(SegmentError, match="no sense"):
        decode(whole({1: b"x", 700: b"y"}), STAMP, 700)
    twice = Package(np.array([4, 4], np.uint32), Packed(*pack([b"x", b"y"])))
    with pytest.raises(SegmentError, match="no sense"):
        decode(b"".join(encode(twice, STAMP)), STAMP, 1000)
