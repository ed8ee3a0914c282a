"""Sources whose samples are ranges of files: NumPy's, raw numbers, TFRecords."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.s3 import Bucket

from stoker.errors import ConfigError, SampleCorrupt, SampleNotFound, StokerError
from stoker.source import NumpySource, Source, TFRecordSource, open_source
from stoker.testing import SourceConformance

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
IN_ONE_FOLDER = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def tfrecords(records: list[bytes]) -> bytes:
    """Return a file of these records, with checksums that are not compared."""
    return b"".join(struct.pack("<QI", len(r), 1) + r + bytes(4) for r in records)


@pytest.mark.exact("TFRecord", "a source, of local files")
class TestTFRecords(SourceConformance):
    def make(self, samples: list[bytes], tmp_path: Path) -> Source:
        (tmp_path / "0.tfrecord").write_bytes(tfrecords(samples[:17]))
        (tmp_path / "1.tfrecord").write_bytes(tfrecords(samples[17:]))
        return TFRecordSource(tmp_path)


@pytest.mark.exact("TFRecord", "in S3")
class TestTFRecordsInS3(SourceConformance):
    @pytest.fixture(autouse=True)
    def _bucket(self, bucket: Bucket) -> None:
        self.bucket = bucket

    def make(self, samples: list[bytes], tmp_path: Path) -> Source:
        self.bucket.put({f"{tmp_path.name}/0.tfrecord": tfrecords(samples)})
        where = f"{self.bucket.url}/{tmp_path.name}/"
        return TFRecordSource(where, storage_options=self.bucket.options())


def test_what_tensorflow_writes_is_read(tmp_path: Path) -> None:
    tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
    records = [os.urandom(size) for size in (0, 5, 70_000)]
    with tf.io.TFRecordWriter(str(tmp_path / "x.tfrecord")) as file:
        for record in records:
            file.write(record)
    assert TFRecordSource(tmp_path / "x.tfrecord").read(range(3)) == records


def test_files_are_breaks(tmp_path: Path) -> None:
    for number, count in enumerate((0, 3, 0, 2, 4, 0)):
        (tmp_path / f"{number}.tfrecord").write_bytes(tfrecords([b"x"] * count))
    assert TFRecordSource(tmp_path).breaks.tolist() == [3, 5]


def test_large_records_are_skipped_by_the_index(tmp_path: Path) -> None:
    path = tmp_path / "x.tfrecord"
    path.write_bytes(tfrecords([bytes(8 << 20), b"a", bytes(8 << 20), b"b"]))
    source = TFRecordSource(path)
    assert source.tally.received_bytes < 20 << 20
    assert source.read([1, 3]) == [b"a", b"b"]
    assert TFRecordSource(path).tally.requests == 0  # the index is kept


def test_damaged_records_are_found(tmp_path: Path) -> None:
    good = tfrecords([b"abc", b"defg"])
    path = tmp_path / "x.tfrecord"
    for data in (good[:-1], good[:25], b"garbage" * 9):
        path.write_bytes(data)
        with pytest.raises(SampleCorrupt, match=r"x\.tfrecord"):
            TFRecordSource(path)
    path.write_bytes(b"\x1f\x8b" + bytes(30))
    with pytest.raises(ConfigError, match="compressed"):
        TFRecordSource(path)
    path.write_bytes(b"")
    with pytest.raises(ConfigError, match="0 samples"):
        TFRecordSource(path)
    with pytest.raises(SampleNotFound):
        TFRecordSource(tmp_path / "gone.tfrecord")


@IN_ONE_FOLDER
@given(st.binary(max_size=200))
def test_any_bytes_are_records_or_an_error(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.tfrecord"
    path.write_bytes(data)
    try:
        source = TFRecordSource(path, cache_index=False)
        assert [len(sample) for sample in source.read(range(len(source)))] == source.sizes.tolist()
    except StokerError:
        pass


@IN_ONE_FOLDER
@given(st.lists(st.binary(max_size=50), min_size=1, max_size=30), st.data())
def test_records_are_those_written(tmp_path: Path, records: list[bytes], data: Any) -> None:
    path = tmp_path / "x.tfrecord"
    path.write_bytes(tfrecords(records))
    ids = data.draw(st.lists(st.integers(0, len(records) - 1), max_size=20))
    source = TFRecordSource(path, cache_index=False)
    assert source.read(ids) == [records[index] for index in ids]


@pytest.mark.exact("NumPy, token files", "rows of `.npy` files as NumPy reads them")
@pytest.mark.parametrize("dtype", ["u1", "<u2", "<f4", "<i8", "?", "<c8", "<M8[s]"])
@pytest.mark.parametrize("shape", [(7,), (7, 3), (7, 2, 5)])
def test_rows_of_numpy_files(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, 2, (n, *shape[1:])).astype(dtype) for n in (7, 4)]
    for number, array in enumerate(arrays):
        np.save(tmp_path / f"{number}.npy", array)
    source = NumpySource(f"{tmp_path}/*.npy")
    both = np.concatenate(arrays)
    ids = [10, 0, 5, 6, 7]
    for index, sample in zip(ids, source.read(ids), strict=True):
        assert sample == both[index].tobytes()
        assert np.array_equal(source.decode(sample), both[index])
    assert np.array_equal(source.values(), both) and source.values().dtype == both.dtype
    assert source.name(8) == f"{tmp_path}/1.npy#1"
    assert isinstance(open_source(tmp_path / "0.npy"), NumpySource)


@pytest.mark.exact(
    "NumPy, token files", "windows of token files; numbers after the last whole one are left out"
)
def test_windows_of_a_file_of_tokens(tmp_path: Path) -> None:
    tokens = np.arange(1000, dtype=np.uint16)
    (tmp_path / "tokens.bin").write_bytes(tokens.tobytes())
    source = NumpySource(tmp_path / "tokens.bin", dtype="uint16", shape=(128,))
    assert len(source) == 7  # the last 104 are no window
    assert source.decode(source.read([3])[0]).tolist() == list(range(384, 512))
    before = source.tally.requests
    source.read(range(7))
    assert source.tally.requests == before + 1


def test_numbers_that_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    for array, message in (
        (np.zeros((3, 4), ">f4"), "big-endian"),
        (np.asfortranarray(np.zeros((3, 4))), "no rows"),
        (np.array(5), "no rows"),
        (np.zeros((0, 4)), "0 samples"),
        (np.zeros((4, 0)), "no fixed bytes"),
        (np.zeros(3, "U5"), "no fixed bytes"),
    ):
        np.save(path, array)
        with pytest.raises(ConfigError, match=message):
            NumpySource(path)
    np.save(tmp_path / "y.npy", np.zeros((3, 4)))
    np.save(path, np.zeros((3, 5)))
    with pytest.raises(ConfigError, match="different shapes"):
        NumpySource(tmp_path)
    with pytest.raises(ConfigError, match="has to have numbers"):
        NumpySource(path, dtype="u2", shape=(0,))
    for data in (b"garbage" * 20, path.read_bytes()[:-1], path.read_bytes()[:20], b""):
        path.write_bytes(data)
        with pytest.raises(SampleCorrupt, match=r"x\.npy"):
            NumpySource(path)
