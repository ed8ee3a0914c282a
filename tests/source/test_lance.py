"""LanceSource: rows as Lance takes them, versions, object stores, and damage."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.s3 import Bucket

from stoker.errors import ConfigError, SampleCorrupt, SampleNotFound, SourceError, SourceUnavailable
from stoker.source import LanceSource, Source, open_source, split_parts
from stoker.testing import SourceConformance

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'stoker[lance]'")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
    pytest.mark.skipif(
        importlib.util.find_spec("lance") is None,
        reason="pylance is not installed: pip install 'stoker[lance]'",
    ),
]
ROWS = 60
IN_A_FILE = 20


def table() -> Any:
    rows = range(ROWS)
    vectors = [np.full(4, row, np.float32) for row in rows]
    return pa.table(
        {
            "image": pa.array([bytes([row]) * (row % 9) for row in rows], pa.binary()),
            "label": pa.array([row % 7 for row in rows], pa.int64()),
            "text": pa.array([None if row % 11 == 3 else f"å{row}" for row in rows]),
            "vector": pa.array(vectors, pa.list_(pa.float32(), 4)),
            "nested": pa.array([{"a": row, "b": [{"c": str(row)}]} for row in rows]),
        }
    )


def write(path: Path, of: Any = None, **how: Any) -> Path:
    import lance  # not in processes that run other tests: it is large

    how = {"max_rows_per_file": IN_A_FILE, **how}
    lance.write_dataset(table() if of is None else of, str(path), **how)
    return path


def opened(path: Path) -> Any:
    import lance

    return lance.dataset(str(path))


@pytest.mark.exact("Lance", "a source, of local files")
class TestLance(SourceConformance):
    def make(self, samples: list[bytes], tmp_path: Path) -> Source:
        return LanceSource(write(tmp_path / "x", pa.table({"x": pa.array(samples, pa.binary())})))


@pytest.mark.exact("Lance", "in S3")
def test_rows_in_an_object_store(tmp_path: Path, bucket: Bucket) -> None:
    path = write(tmp_path / "x.lance")
    files = (file for file in path.rglob("*") if file.is_file())
    bucket.put({f"x.lance/{file.relative_to(path)}": file.read_bytes() for file in files})
    where, options = f"{bucket.url}/x.lance", bucket.options()
    source = open_source(where, columns="label", storage_options=options)
    assert isinstance(source, LanceSource)
    assert source.values().tolist() == [row % 7 for row in range(ROWS)]
    assert source.fingerprint == LanceSource(path, columns="label").fingerprint
    for file in (path / "data").iterdir():
        bucket.delete(f"x.lance/data/{file.name}")
    with pytest.raises(SampleNotFound):
        source.read([1])


@pytest.mark.exact("Lance", "rows as Lance takes them, of the version that was opened")
def test_rows_are_those_of_lance(tmp_path: Path) -> None:
    path = write(tmp_path / "folder")
    dataset = opened(path)
    dataset.delete("label = 5")
    dataset = opened(path)
    expected = dataset.to_table().to_pylist()
    source = open_source(path)
    assert isinstance(source, LanceSource) and len(source) == len(expected) < ROWS
    write(path, mode="append")
    order = np.random.default_rng(0).integers(0, len(source), 200)  # with repetitions
    for row, sample in zip(order.tolist(), source.read(order), strict=True):
        found, row_expected = source.decode(sample), expected[row]
        assert found.pop("vector").tolist() == row_expected["vector"]
        assert found.pop("text") == row_expected["text"]
        assert found == {name: row_expected[name] for name in found}
    labels = LanceSource(path, columns="label", version=dataset.version)
    assert labels.values().tolist() == [row["label"] for row in expected]
    assert labels.breaks.tolist() == [IN_A_FILE - 3, 2 * IN_A_FILE - 5]
    assert len(LanceSource(path)) == len(expected) + ROWS
    assert LanceSource(path, version=1).fingerprint != source.fingerprint
    two = LanceSource(path, columns=["text", "image"], version=1)
    parts = {name: bytes(part) for name, part in split_parts(two.read([3])[0]).items()}
    assert parts == {"image": bytes([3]) * 3}, "a null has no part"
    assert two.name(3).endswith("folder#3")


def test_a_forked_child_reads(tmp_path: Path) -> None:
    source = LanceSource(write(tmp_path / "x"), columns="label")
    source.read([1])
    child = os.fork()
    if child == 0:
        os._exit(0 if source.read([5]) == [np.int64(5).tobytes()] else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.exact("Lance", "damage to its files costs their rows only, with an error of ours")
@pytest.mark.parametrize("damage", ["cut", "empty", "zeros", "gone"])
def test_damage(tmp_path: Path, damage: str) -> None:
    path = write(tmp_path / "x.lance")
    dataset = opened(path)
    (file,) = dataset.get_fragments()[1].data_files()
    victim = path / "data" / file.path
    content = victim.read_bytes()
    half = len(content) // 2
    source = LanceSource(path, columns=["image", "label"])
    if damage == "gone":
        victim.unlink()
    else:
        left = {"cut": content[:16], "empty": b"", "zeros": bytes(half) + content[half:]}
        victim.write_bytes(left[damage])
    samples, errors = source.read_each([1, 25, 45, 25])
    assert sorted(errors) == [1, 3] and samples[1] is None
    kind = SampleNotFound if damage == "gone" else SampleCorrupt
    assert all(isinstance(error, kind) and error.ids == [25] for error in errors.values())
    for row, sample in ((1, samples[0]), (45, samples[2])):
        assert sample is not None and source.decode(sample)["label"] == row % 7
    with pytest.raises(SourceError, match="#25"):
        source.read([1, 25])


def test_a_store_that_does_not_answer(tmp_path: Path, bucket: Bucket) -> None:
    options = bucket.options(endpoint="http://127.0.0.1:9")
    with pytest.raises((ConfigError, SourceUnavailable)):
        LanceSource(f"{bucket.url}/x.lance", storage_options=options)


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "x.lance")
    (tmp_path / "garbage.lance").write_bytes(b"garbage" * 500)
    for where in ("gone.lance", "garbage.lance"):
        with pytest.raises(ConfigError, match=where):
            open_source(tmp_path / where)
    with pytest.raises(ConfigError, match="version 99"):
        LanceSource(path, version=99)
    with pytest.raises(ConfigError, match="columns='z'"):
        LanceSource(path, columns="z")
    with pytest.raises(ConfigError, match="holds text"):
        LanceSource(path, columns="text").values()
    opened(path).delete("true")
    with pytest.raises(ConfigError, match="has 0 rows"):
        LanceSource(path)
    blob = pa.field("blob", pa.large_binary(), metadata={"lance-encoding:blob": "true"})
    blobs = pa.table([pa.array([b"x"], pa.large_binary())], schema=pa.schema([blob]))
    with pytest.raises(ConfigError, match="'blob' is of blobs"):
        LanceSource(write(tmp_path / "blobs", blobs))
