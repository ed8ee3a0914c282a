"""MDSSource: shards as MosaicML's writer makes them, plain and compressed, and damage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.mds import COLUMNS, PACK, write
from support.s3 import Bucket

from stoker.errors import ConfigError, SampleCorrupt, SourceError, StokerError
from stoker.source import MDSSource, Source, open_source, split_parts
from stoker.testing import SourceConformance

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")

ROWS: list[dict[str, Any]] = [
    {
        "image": bytes([i]) * (i % 9),
        "label": i % 5,
        "name": f"å{i}",
        "box": np.full((2, 2), i, np.float32),
    }
    for i in range(50)
]


def in_shards(samples: list[bytes]) -> list[list[dict[str, Any]]]:
    rows = [{"x": sample, "y": number} for number, sample in enumerate(samples)]
    return [rows[:17], [], rows[17:]]


@pytest.mark.exact("MosaicML MDS", "a source, of local files")
class TestMDS(SourceConformance):
    def make(self, samples: list[bytes], tmp_path: Path) -> Source:
        return MDSSource(
            write(tmp_path, in_shards(samples), {"x": "bytes", "y": "int"}), columns="x"
        )


class TestMDSOfOneColumn(SourceConformance):
    def make(self, samples: list[bytes], tmp_path: Path) -> Source:
        source = MDSSource(write(tmp_path, in_shards(samples), {"x": "bytes"}))
        assert source.sizes_are_exact
        return source


@pytest.mark.exact("MosaicML MDS", "compressed shards too")
class TestMDSZipped(SourceConformance):
    def make(self, samples: list[bytes], tmp_path: Path) -> Source:
        columns = {"x": "bytes", "y": "int"}
        return MDSSource(write(tmp_path, in_shards(samples), columns, "gz:6"), columns="x")


@pytest.mark.exact("MosaicML MDS", "in S3")
class TestMDSInS3(SourceConformance):
    @pytest.fixture(autouse=True)
    def _bucket(self, bucket: Bucket) -> None:
        self.bucket = bucket

    def make(self, samples: list[bytes], tmp_path: Path) -> Source:
        write(tmp_path, in_shards(samples), {"x": "bytes"})
        self.bucket.put({f"{tmp_path.name}/{f.name}": f.read_bytes() for f in tmp_path.iterdir()})
        where = f"{self.bucket.url}/{tmp_path.name}/index.json"
        source = open_source(where, storage_options=self.bucket.options())
        assert isinstance(source, MDSSource)
        return source


@pytest.mark.exact("MosaicML MDS", "samples as they were written, by each compression")
@pytest.mark.parametrize("compression", [None, *PACK])
def test_samples_are_those_written(tmp_path: Path, compression: str | None) -> None:
    source = open_source(write(tmp_path, [ROWS[:20], ROWS[20:]], compression=compression))
    assert isinstance(source, MDSSource) and len(source) == 50
    order = np.random.default_rng(0).permutation(50)
    for row, sample in zip(order.tolist(), source.read(order), strict=True):
        found, expected = source.decode(sample), ROWS[row]
        assert list(found) == sorted(COLUMNS)
        assert np.array_equal(found.pop("box"), expected["box"])
        assert found == {name: expected[name] for name in found}
        if source.sizes_are_exact:
            assert source.sizes[row] == len(sample)
    assert source.sizes_are_exact == (compression is None)
    labels = MDSSource(tmp_path, columns="label")
    assert [labels.decode(sample) for sample in labels.read(range(50))] == [
        r["label"] for r in ROWS
    ]
    two = MDSSource(tmp_path, columns=["name", "image"])
    parts = {k: bytes(v) for k, v in split_parts(two.read([21])[0]).items()}
    assert parts == {"name": "å21".encode(), "image": ROWS[21]["image"]}


@pytest.mark.parametrize("compression", [None, "gz"])
def test_shards_are_breaks(tmp_path: Path, compression: str | None) -> None:
    shards = [ROWS[:20], [], ROWS[20:35], ROWS[35:]]
    assert MDSSource(write(tmp_path, shards, compression=compression)).breaks.tolist() == [20, 35]


def test_a_compressed_shard_is_unpacked_once(tmp_path: Path) -> None:
    source = MDSSource(write(tmp_path, [ROWS], compression="gz"))
    source.read([1, 40])
    requests = source.tally.requests
    source.read([2, 3])
    assert source.tally.requests == requests


def test_the_index_is_kept(tmp_path: Path) -> None:
    write(tmp_path, [ROWS])
    MDSSource(tmp_path)
    again = MDSSource(tmp_path)
    assert again.tally.requests == 0
    assert again.name(7) == f"{tmp_path}/shard.00000.mds#7"


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    source = MDSSource(write(tmp_path, [[{"x": b"payload"}]], {"x": "pkl"}))
    assert source.decode(source.read([0])[0]) == b"payload"


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    write(tmp_path, [ROWS])
    index = tmp_path / "index.json"
    good = index.read_text()
    for before, after, message in (
        ('"mds"', '"json"', "of version 2 with shards"),
        ('"version": 2', '"version": 1', "of version 1"),
        ('"samples": 50', '"samples": 51', "no MDS shard of 51"),
        ('"samples": 50', '"samples": -1', "no index"),
        ('"samples": 50', '"samples": 0', "no samples"),
        ("shard.00000.mds", "../x.mds", "outside of its folder"),
        ("[", "{", "no index"),
    ):
        index.write_text(good.replace(before, after))
        with pytest.raises((ConfigError, SampleCorrupt), match=message):
            MDSSource(tmp_path)
    index.write_text(good)
    with pytest.raises(ConfigError, match="columns='z'"):
        MDSSource(tmp_path, columns="z")
    write(tmp_path, [ROWS], compression="gz")
    index.write_text(index.read_text().replace('"gz"', '"odd"'))
    with pytest.raises(ConfigError, match="'odd', which is not known"):
        MDSSource(tmp_path)


@pytest.mark.exact("MosaicML MDS", "any damage raises an error of ours, or is harmless")
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_any_damage_is_an_error_of_ours_or_harmless(tmp_path: Path, data: st.DataObject) -> None:
    compression = data.draw(st.sampled_from([None, "gz", "zstd"]))
    for file in tmp_path.iterdir():
        file.unlink()
    write(tmp_path, [ROWS], compression=compression)
    victim = data.draw(st.sampled_from(sorted(tmp_path.iterdir())))
    content = bytearray(victim.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    del content[data.draw(st.integers(len(content) // 2, len(content))) :]
    victim.write_bytes(content)
    try:
        source = MDSSource(tmp_path, cache_index=False)
        samples, errors = source.read_each(range(len(source)))
        assert all(isinstance(error, SourceError) for error in errors.values())
        for sample in samples:
            if sample is not None:
                source.decode(sample)
    except StokerError:
        pass
