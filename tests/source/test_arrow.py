"""ArrowSource: IPC files, streams and Feather, with dictionaries and compression; damage."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.s3 import Bucket

from stoker.errors import ConfigError, SampleCorrupt, SourceError, StokerError
from stoker.source import ArrowSource, Source, open_source
from stoker.testing import SourceConformance

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'stoker[arrow]'")
feather = pytest.importorskip("pyarrow.feather")
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")

ROWS = 90
TABLE = pa.table(
    {
        "image": [{"bytes": bytes([i]) * (i % 7), "path": None} for i in range(ROWS)],
        "label": [i % 10 for i in range(ROWS)],
        "kind": pa.array([f"k{i % 3}" for i in range(ROWS)]).dictionary_encode(),
        "vector": pa.array([[i, i + 1] for i in range(ROWS)], pa.list_(pa.float32(), 2)),
        "when": pa.array([datetime.datetime(2020, 1, 1 + i % 28) for i in range(ROWS)]),
        "about": [{"a": i, "b": [str(i)]} if i % 5 else None for i in range(ROWS)],
        "view": pa.array([None if i % 9 == 0 else f"v{i}" * 9 for i in range(ROWS)]).cast(
            pa.string_view()
        ),
    }
)


def write(path: Path, table: Any = TABLE, form: str = "file", rows: int = 16, **how: Any) -> Path:
    """Write batches of ``rows`` rows."""
    options = pa.ipc.IpcWriteOptions(**how)
    make = pa.ipc.new_stream if form == "stream" else pa.ipc.new_file
    with make(path, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


FORMS: dict[str, dict[str, Any]] = {
    "file": {},
    "stream": {"form": "stream"},
    "zstd": {"compression": "zstd"},
    "lz4": {"compression": "lz4", "form": "stream"},
}


@pytest.mark.exact("Arrow IPC, Feather", "a source, of local files")
class TestArrow(SourceConformance):
    def make(self, samples: list[bytes], tmp_path: Path) -> Source:
        table = pa.table({"x": pa.array(samples, pa.binary())})
        write(tmp_path / "0.arrow", table.slice(0, 17), rows=5)
        write(tmp_path / "1.arrow", table.slice(17), "stream")
        return ArrowSource(tmp_path)


@pytest.mark.exact("Arrow IPC, Feather", "in S3")
class TestArrowInS3(SourceConformance):
    @pytest.fixture(autouse=True)
    def _bucket(self, bucket: Bucket) -> None:
        self.bucket = bucket

    def make(self, samples: list[bytes], tmp_path: Path) -> Source:
        table = pa.table({"x": pa.array(samples, pa.large_binary()), "y": range(len(samples))})
        data = write(tmp_path / "x.arrow", table, rows=7).read_bytes()
        self.bucket.put({f"{tmp_path.name}/x.arrow": data})
        where = f"{self.bucket.url}/{tmp_path.name}/x.arrow"
        return open_source(where, columns="x", storage_options=self.bucket.options())


def plain(value: Any) -> Any:
    if isinstance(value, dict) and set(value) == {"bytes", "path"}:
        return value["bytes"]
    if isinstance(value, np.ndarray):
        return value.tolist()
    return np.datetime64(value) if isinstance(value, datetime.datetime) else value


@pytest.mark.exact("Arrow IPC, Feather", "rows as pyarrow reads them")
@pytest.mark.parametrize("form", FORMS)
def test_rows_are_those_of_pyarrow(tmp_path: Path, form: str) -> None:
    source = ArrowSource(write(tmp_path / "x.arrow", **FORMS[form]))
    expected = TABLE.to_pylist()
    order = np.random.default_rng(0).permutation(ROWS)
    for row, sample in zip(order.tolist(), source.read(order), strict=True):
        decoded = source.decode(sample)
        assert {k: plain(v) for k, v in decoded.items()} == {
            k: plain(v) for k, v in expected[row].items()
        }
    labels = ArrowSource(tmp_path / "x.arrow", columns="label")
    assert labels.values().tolist() == TABLE["label"].to_pylist()
    vectors = ArrowSource(tmp_path / "x.arrow", columns="vector").values()
    assert vectors.shape == (ROWS, 2) and vectors.dtype == np.float32


def test_feather_is_recognised(tmp_path: Path) -> None:
    table = TABLE.drop(["kind", "view"])
    for name in ("x.feather", "nameless"):
        feather.write_feather(table, str(tmp_path / name), chunksize=16)
        source = open_source(tmp_path / name, columns="label")
        assert isinstance(source, ArrowSource)
        assert source.values().tolist() == TABLE["label"].to_pylist()


def test_files_of_datasets_are_streams(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"n": list(range(50))}).save_to_disk(tmp_path)
    assert ArrowSource(f"{tmp_path}/*.arrow").values().tolist() == list(range(50))


def test_a_batch_is_read_once_for_all_its_rows(tmp_path: Path) -> None:
    source = ArrowSource(write(tmp_path / "x.arrow"), columns=["label", "when"])
    before = source.tally.requests
    source.read(range(16))
    source.read([3, 4])
    assert source.tally.requests == before + 1


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "x.arrow")
    write(tmp_path / "y.arrow", TABLE.select(["label"]))
    with pytest.raises(ConfigError, match=r"y\.arrow has another schema"):
        ArrowSource(tmp_path)
    with pytest.raises(ConfigError, match="columns='z'"):
        ArrowSource(path, columns="z")
    nested = pa.table({"x": pa.array([["a"]], pa.list_(pa.string()))})
    nested = nested.cast(pa.schema([("x", pa.list_(pa.dictionary(pa.int32(), pa.string())))]))
    with pytest.raises(ConfigError, match="with a dictionary inside"):
        ArrowSource(write(tmp_path / "nested", nested))
    good = path.read_bytes()
    for data in (good[:50], good[: len(good) // 2], b"garbage" * 20, b"", b"ARROW1\0\0"):
        path.write_bytes(data)
        with pytest.raises(SampleCorrupt, match=r"x\.arrow"):
            ArrowSource(path)
    path.write_bytes(b"FEA1" + bytes(100))
    with pytest.raises(ConfigError, match="version 1"):
        ArrowSource(path)
    with pytest.raises(ConfigError, match="0 rows"):
        ArrowSource(write(path, TABLE.slice(0, 0)))


def test_a_column_with_a_name_that_is_no_text_is_damage(tmp_path: Path) -> None:
    path = write(tmp_path / "x.arrow", pa.table({"a_name_of_its_own": [1, 2]}), rows=2)
    path.write_bytes(path.read_bytes().replace(b"a_name_of_its_own", b"a_name_of_\xffts_own"))
    with pytest.raises(SampleCorrupt, match="has no schema"):
        ArrowSource(path)


@pytest.mark.exact("Arrow IPC, Feather", "any damage raises an error of ours, or is harmless")
@settings(
    max_examples=40,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.data())
def test_any_damage_is_an_error_of_ours_or_harmless(tmp_path: Path, data: st.DataObject) -> None:
    path = write(tmp_path / "x.arrow", TABLE.drop(["view"]), rows=30)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        source = ArrowSource(path)
        samples, errors = source.read_each(range(min(len(source), 1000)))
        assert all(isinstance(error, SourceError) for error in errors.values())
        for sample in samples:
            if sample is not None:
                source.decode(sample)
    except StokerError:
        pass
