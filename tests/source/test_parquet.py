"""ParquetSource: pages, types, files that disagree, damage; and the rows that pyarrow reads."""

from __future__ import annotations

import datetime
import io
import os
import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from support.passing import passed_on
from support.s3 import Bucket

import stoker
from stoker.errors import ConfigError, SampleCorrupt, SourceError, StokerError
from stoker.source import ParquetSource, Source, open_source, split_parts
from stoker.source.parquet import _checked
from stoker.source.parquet_index import Page
from stoker.testing import SourceConformance

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'stoker[arrow]'")
pq = pytest.importorskip("pyarrow.parquet")
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")

SMALL: dict[str, Any] = {"row_group_size": 50, "data_page_size": 256, "write_batch_size": 4}
LAYOUTS: dict[str, dict[str, Any]] = {
    "default": {},
    "pages": SMALL,
    "page index": {**SMALL, "write_page_index": True},
    "version 2": {**SMALL, "data_page_version": "2.0", "compression": "zstd"},
    "plain": {**SMALL, "use_dictionary": False, "compression": "none"},
    "checked": {**SMALL, "write_page_checksum": True},
}
ROWS = 120
TABLE = {
    "image": [{"bytes": bytes([i]) * (i % 7), "path": f"{i}.png"} for i in range(ROWS)],
    "label": [i % 10 for i in range(ROWS)],
    "caption": [None if i % 11 == 0 else f"å{i}" * (i % 3) for i in range(ROWS)],
    "box": [[float(i), 0.5] * (i % 3) for i in range(ROWS)],
    "when": [datetime.datetime(2020, 1, 1 + i % 28) for i in range(ROWS)],
    "about": [{"a": i, "b": [str(i)] * (i % 3)} if i % 5 else None for i in range(ROWS)],
    "words": [[f"w{j}" for j in range(i % 4)] for i in range(ROWS)],
    "flag": [None if i % 13 == 0 else i % 2 == 0 for i in range(ROWS)],
}


def write(path: Path, table: dict[str, Any] | Any = None, **how: Any) -> Path:
    made = pa.table(TABLE if table is None else table) if not isinstance(table, pa.Table) else table
    pq.write_table(made, path, **how)
    return path


def plain(value: Any) -> Any:
    """Return what a decoded value and one of pyarrow's are compared by."""
    if isinstance(value, dict) and set(value) == {"bytes", "path"}:
        return value["bytes"]
    if isinstance(value, np.ndarray):
        return value.tolist()
    return np.datetime64(value) if isinstance(value, datetime.datetime) else value


@pytest.mark.exact("Parquet", "a source, of local files")
class TestParquet(SourceConformance):
    def make(self, samples: list[bytes], tmp_path: Path) -> Source:
        table = {"x": pa.array(samples, pa.binary()), "y": list(range(len(samples)))}
        first = {name: column[:17] for name, column in table.items()}
        rest = {name: column[17:] for name, column in table.items()}
        write(tmp_path / "0.parquet", first, **SMALL)
        write(tmp_path / "1.parquet", rest, row_group_size=9)
        return ParquetSource(tmp_path, columns="x")


@pytest.mark.exact("Parquet", "in S3")
class TestParquetInS3(SourceConformance):
    @pytest.fixture(autouse=True)
    def _bucket(self, bucket: Bucket) -> None:
        self.bucket = bucket

    def make(self, samples: list[bytes], tmp_path: Path) -> Source:
        for number, some in enumerate((samples[:9], samples[9:])):
            path = write(tmp_path / "x", {"x": pa.array(some, pa.binary())}, **SMALL)
            self.bucket.put({f"{tmp_path.name}/{number}.parquet": path.read_bytes()})
        where = f"{self.bucket.url}/{tmp_path.name}/*.parquet"
        return ParquetSource(where, columns="x", storage_options=self.bucket.options())


@pytest.mark.exact("Parquet", "rows of every page layout as pyarrow reads them")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_those_of_pyarrow(tmp_path: Path, layout: str) -> None:
    path = write(tmp_path / "x.parquet", **LAYOUTS[layout])
    source = ParquetSource(path)
    expected = pq.read_table(path).to_pylist()
    order = np.random.default_rng(0).permutation(ROWS)
    for row, sample in zip(order.tolist(), source.read(order), strict=True):
        decoded = source.decode(sample)
        assert list(decoded) == list(TABLE)
        assert {k: plain(v) for k, v in decoded.items()} == {
            k: plain(v) for k, v in expected[row].items()
        }
    for name in TABLE:
        one = ParquetSource(path, columns=name)
        for row, sample in enumerate(one.read(range(ROWS))):
            value = plain(expected[row][name])
            found = plain(one.decode(sample))
            assert found == value or (value is None and found == "")


def test_the_bytes_of_a_sample(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet")
    images = ParquetSource(path, columns="image")
    assert images.read([5, 0]) == [bytes([5]) * 5, b""]
    source = ParquetSource(path, columns=["label", "caption", "flag"])
    parts = {k: bytes(v) for k, v in split_parts(source.read([12])[0]).items()}
    assert parts == {"label": (2).to_bytes(8, "little"), "caption": b"", "flag": b"\1"}
    assert list(split_parts(source.read([0])[0])) == ["label"]
    assert source.decode(source.read([0])[0]) == {"label": 0, "caption": None, "flag": None}


def test_targets_come_from_a_column_of_numbers(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", **SMALL)
    assert ParquetSource(path, columns="label").values().tolist() == TABLE["label"]
    for columns in ("caption", "flag", ["label", "when"], "box"):
        with pytest.raises(ConfigError, match="column"):
            ParquetSource(path, columns=columns).values()


def test_only_the_pages_of_the_rows_and_columns_are_read(tmp_path: Path) -> None:
    data = [os.urandom(1000) for _ in range(1000)]
    table = {"x": pa.array(data), "y": pa.array([os.urandom(5000) for _ in data])}
    path = write(tmp_path / "x.parquet", table, row_group_size=500, data_page_size=4000,
                 write_batch_size=1, use_dictionary=False, write_page_index=True)  # fmt: skip
    source = ParquetSource(path, columns="x")
    before = source.tally.received_bytes
    rows = [3, 700, 350]
    assert source.read(rows) == [data[row] for row in rows]
    assert source.tally.received_bytes - before < 3 * 8000
    before = source.tally.requests
    assert source.read(rows) == [data[row] for row in rows]  # kept
    assert source.tally.requests == before
    assert source.read(range(100)) == data[:100]
    assert source.tally.requests <= before + 2


def test_breaks_are_where_large_pages_begin(tmp_path: Path) -> None:
    """Each page is read once by who reads from one break to the next; small ones come together."""
    large = {"x": pa.array([os.urandom(2000) for _ in range(2500)]), "y": list(range(2500))}
    how = {"row_group_size": 1250, "write_batch_size": 50, "use_dictionary": False}
    write(tmp_path / "0.parquet", large, data_page_size=1_500_000, **how)
    write(tmp_path / "1.parquet", large, data_page_size=100_000, **how)
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    source = ParquetSource(tmp_path, kept_bytes=0)
    breaks = source.breaks.tolist()
    assert 2500 in breaks and breaks == sorted(set(breaks)) and len(breaks) < 12
    bounds = [0, *breaks, len(source)]
    before = source.tally.received_bytes
    for begin, end in pairwise(bounds):
        source.read_packed(np.arange(begin, end))
    assert source.tally.received_bytes - before < 1.1 * size
    assert len(ParquetSource(tmp_path / "0.parquet", columns="y").breaks) == 0


def test_a_shared_dictionary_makes_no_breaks(tmp_path: Path) -> None:
    values = [os.urandom(100_000) for _ in range(8)]
    table = {"x": pa.array([values[i % 8] for i in range(400)])}
    path = write(tmp_path / "x.parquet", table, write_batch_size=10, data_page_size=10,
                 dictionary_pagesize_limit=1 << 20)  # fmt: skip
    assert len(ParquetSource(path).breaks) == 0


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("write_page_index", [False, True])
def test_pages_that_do_not_refer_to_the_dictionary_are_read_without_it(
    tmp_path: Path, write_page_index: bool, version: str
) -> None:
    """Writers fill a dictionary, and go on without one: rows of one page read both."""
    data = [os.urandom(1500) for _ in range(3000)]
    path = write(tmp_path / "x.parquet", {"x": pa.array(data)}, data_page_version=version,
                 write_page_index=write_page_index)  # fmt: skip
    source = ParquetSource(path, columns="x", kept_bytes=0)
    before = source.tally.received_bytes
    samples = [bytes(source.read([row])[0]) for row in range(0, 3000, 1000)]
    assert samples == data[::1000]
    assert source.tally.received_bytes - before < 1.2 * path.stat().st_size
    assert [bytes(sample) for sample in source.read(np.arange(3000))] == data


def test_blocks_read_each_page_once(tmp_path: Path) -> None:
    data = [os.urandom(1500) for _ in range(6000)]
    path = write(tmp_path / "x.parquet", {"x": pa.array(data)}, row_group_size=3000)
    source = ParquetSource(path, kept_bytes=0)
    rows = int(np.diff(source.breaks, prepend=0, append=len(source)).max())
    recipe = f"foresight:block={rows}"
    with stoker.Feed(source, 64, cache="50%", recipe=recipe, decode_threads=2) as feed:
        for _ in range(2):
            seen = np.concatenate([batch.ids for batch in feed])
            assert sorted(seen.tolist()) == list(range(6000))
        again = [sample for batch in feed for sample in batch.data]
    assert sorted(again) == sorted(data)


def test_loading_all_before_training_does_not_decode_a_page_for_each_piece_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of 64 rows, by 16 threads, had each page decoded many times."""
    path = write(tmp_path / "x.parquet", {"x": pa.array([os.urandom(1500) for _ in range(3000)])})
    source = ParquetSource(path, kept_bytes=0)
    decoded: list[int] = []
    decode = ParquetSource._decoded

    def noted(self: ParquetSource, unit: int, *given: Any) -> Any:
        decoded.append(unit)
        return decode(self, unit, *given)

    monkeypatch.setattr(ParquetSource, "_decoded", noted)
    with stoker.Feed(source, 100, cache="100%", recipe="oracle", decode_threads=0) as feed:
        assert sum(map(len, feed)) == 3000
        assert feed.stats.hit_ratio == 1
    assert len(decoded) > 1
    assert sorted(decoded) == sorted(set(decoded))


def test_nothing_need_be_kept(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", **SMALL)
    source = ParquetSource(path, columns="label", kept_bytes=0)
    before = source.tally.requests
    assert source.read([1, 1]) == source.read([1, 1])
    assert source.tally.requests == before + 2


def test_the_index_is_kept_until_a_file_changes(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", **SMALL)
    first, again = ParquetSource(path), ParquetSource(path)
    assert again.tally.requests == 1  # the footer
    assert (again.fingerprint, again.read([7])) == (first.fingerprint, first.read([7]))
    write(path, {name: column[:60] for name, column in TABLE.items()}, **SMALL)
    changed = ParquetSource(path)
    assert len(changed) == 60 and changed.fingerprint != first.fingerprint
    with pytest.raises(SampleCorrupt, match=r"x\.parquet"):
        first.read([100])
    assert ParquetSource(path, columns="label").fingerprint != changed.fingerprint


def test_files_that_differ(tmp_path: Path) -> None:
    """A column may be nullable in one of them only; its type may not differ."""
    schema = pa.schema([pa.field("x", pa.int64(), nullable=False)])
    write(tmp_path / "0.parquet", pa.table({"x": [1, 2]}, schema=schema))
    write(tmp_path / "1.parquet", {"y": ["a"], "x": [None, 3][1:]})
    assert ParquetSource(tmp_path, columns="x").values().tolist() == [1, 2, 3]
    with pytest.raises(ConfigError, match=r"1\.parquet: columns=\['z'\]"):
        ParquetSource([tmp_path / "1.parquet"], columns=["z"])
    write(tmp_path / "2.parquet", {"x": ["text"]})
    with pytest.raises(ConfigError, match=r"'x' is text .* in .*2\.parquet"):
        ParquetSource(tmp_path, columns="x")


def test_open_source_knows_the_format(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet")
    nameless = write(tmp_path / "data")
    for where in (path, nameless, tmp_path, f"{tmp_path}/*.parquet", [path, path]):
        source = open_source(where, columns=["label", "image"])
        assert isinstance(source, ParquetSource)
    assert len(source) == 2 * ROWS
    with pytest.raises(ConfigError, match="stands for no files"):
        open_source(f"{tmp_path}/b*.parquet")


def test_names_say_file_and_row(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{number}.parquet", **SMALL) for number in range(2)]
    source = ParquetSource(paths)
    assert source.name(0) == f"{paths[0]}#0"
    assert source.name(ROWS + 60) == f"{paths[1]}#60"


def test_it_pickles_for_other_processes(tmp_path: Path) -> None:
    source = ParquetSource(write(tmp_path / "x.parquet"), columns=["image", "label"])
    assert passed_on(source).read([3]) == source.read([3])
    assert pickle.loads(pickle.dumps(source.decode))(source.read([3])[0]) == source.decode(
        source.read([3])[0]
    )


def test_damage_is_found(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", **SMALL)
    good = path.read_bytes()
    for number, (message, data) in enumerate(
        {
            "cut off": good[:-5],
            "no Parquet file": b"PAR1",
            "does not end": b"PAR1" + bytes(100),
            "encrypted": good[:-4] + b"PARE",
            "not Thrift|no sense": good[:-9] + b"\xff" + good[-8:],
        }.items()
    ):
        bad = tmp_path / f"{number}.parquet"
        bad.write_bytes(data)
        with pytest.raises((SampleCorrupt, ConfigError), match=f"{number}.parquet: .*({message})"):
            ParquetSource(bad)


def test_a_damaged_page_costs_its_rows_only(tmp_path: Path) -> None:
    data = [os.urandom(100) for _ in range(ROWS)]
    how = {**SMALL, "use_dictionary": False, "write_page_checksum": True, "write_statistics": False}
    path = write(tmp_path / "x.parquet", {"x": pa.array(data)}, **how)
    content = bytearray(path.read_bytes())
    content[content.index(data[70]) + 5] ^= 1
    path.write_bytes(content)
    samples, errors = ParquetSource(path).read_each(range(ROWS))
    assert 70 in errors and len(errors) <= 8
    assert isinstance(errors[70], SampleCorrupt) and errors[70].ids == [70]
    assert "x.parquet#70" in str(errors[70])
    assert all(samples[row] == data[row] for row in range(ROWS) if row not in errors)


CONTENT = io.BytesIO()
pq.write_table(pa.table(TABLE), CONTENT, **SMALL, write_page_index=True)


@pytest.mark.exact("Parquet", "any damage raises an error of ours, or is harmless")
@settings(
    max_examples=40,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],  # not smaller and smaller for minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.data())
def test_any_damage_is_an_error_of_ours_or_harmless(tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(CONTENT.getvalue())
    for _ in range(data.draw(st.integers(1, 4))):
        # Half of them in the footer, which is where the plan of reads comes from.
        low = data.draw(st.sampled_from([0, len(content) - 6000]))
        content[data.draw(st.integers(low, len(content) - 9))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        begin = data.draw(st.integers(0, len(content)))
        del content[begin : begin + data.draw(st.integers(0, 50))]
    path = tmp_path / "x.parquet"
    path.write_bytes(content)
    try:
        source = ParquetSource(path, cache_index=False)
        samples, errors = source.read_each(range(min(len(source), 1000)))
        assert all(isinstance(error, SourceError) for error in errors.values())
        for sample in samples:
            if sample is not None:
                source.decode(sample)
    except StokerError:
        pass


def test_a_page_without_a_first_row_is_damage() -> None:
    there, without = Page(0, 0, 10), Page(None, 10, 5)  # type: ignore[arg-type]
    with pytest.raises(SampleCorrupt, match="its pages are not those of 8 rows"):
        _checked([there, without], 8, 0, 15)


@pytest.mark.exact(
    "Parquet", "any table of numbers, bytes, text, lists and nested values as pyarrow reads it"
)
@settings(
    max_examples=20,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],  # not smaller and smaller for minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.data())
def test_any_table_is_read_as_pyarrow_reads_it(tmp_path: Path, data: st.DataObject) -> None:
    kinds = {
        "i": (pa.int32(), st.integers(-(2**31), 2**31 - 1)),
        "b": (pa.binary(), st.binary(max_size=20)),
        "s": (pa.string(), st.text(max_size=10)),
        "l": (pa.list_(pa.int16()), st.lists(st.integers(-99, 99), max_size=4)),
        "n": (pa.struct([("q", pa.list_(pa.string())), ("r", pa.int8())]),
              st.fixed_dictionaries({"q": st.lists(st.text(max_size=3), max_size=3),
                                     "r": st.integers(-9, 9)})),
    }  # fmt: skip
    rows = data.draw(st.integers(1, 60))
    table = pa.table(
        {
            name: pa.array(
                data.draw(st.lists(st.one_of(st.none(), what), min_size=rows, max_size=rows)), kind
            )
            for name, (kind, what) in kinds.items()
        }
    )
    path = tmp_path / "x.parquet"
    pq.write_table(
        table,
        path,
        row_group_size=data.draw(st.integers(1, 60)),
        data_page_size=data.draw(st.integers(1, 300)),
        write_batch_size=data.draw(st.integers(1, 10)),
        write_page_index=data.draw(st.booleans()),
        use_dictionary=data.draw(st.booleans()),
        data_page_version=data.draw(st.sampled_from(["1.0", "2.0"])),
        compression=data.draw(st.sampled_from(["none", "snappy", "zstd", "gzip"])),
    )
    try:  # pyarrow may write pages without values, at which it stops reading lists
        assume(pq.read_table(path) == table)
    except pa.ArrowInvalid:
        assume(False)
    source = ParquetSource(path, cache_index=False)
    decoded = [source.decode(sample) for sample in source.read(range(rows))]
    assert [{k: plain(v) for k, v in row.items()} for row in decoded] == table.to_pylist()


def test_an_epoch_through_the_cache(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", **SMALL)
    source = ParquetSource(path, columns=["label", "box"])
    with stoker.Feed(source, 16, decode=source.decode, cache="50%", decode_threads=2) as feed:
        for _ in range(2):
            seen = [row["label"] for batch in feed for row in batch.data]
            assert sorted(seen) == sorted(TABLE["label"])
