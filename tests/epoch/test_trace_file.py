"""Blocks of columns: the same back, whole up to where a file was cut, and nothing that is wrong."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.processes import warm

from stoker.epoch.trace_file import MAGIC, Kind, TraceReader, TraceWriter, check_continues
from stoker.errors import ConfigError

ABOUT = {"dataset": "d", "num_samples": 3, "seed": 0}
SIZES = np.array([5, 2**33, 7])
ROWS = [{"ids": np.arange(n, dtype=np.uint32), "losses": np.linspace(0, 1, n)} for n in (3, 0, 40)]
DTYPES = st.sampled_from(["u1", "i1", "u4", "i8", "f4", "f8"])


def written(path):
    writer = TraceWriter(path, ABOUT, SIZES)
    for epoch, rows in enumerate(ROWS):
        writer.append(Kind.ROWS, epoch, rows)
    writer.close()
    return path


def rows_of(path):
    with TraceReader(path) as reader:
        found = [reader.read(b) for b in reader.blocks if b.kind == Kind.ROWS]
    return [{name: column.tolist() for name, column in rows.items()} for rows in found]


EXPECTED = [{name: column.tolist() for name, column in rows.items()} for rows in ROWS]


def test_what_was_written_is_read(tmp_path):
    path = written(tmp_path / "t")
    with TraceReader(path) as reader:
        assert reader.about == ABOUT
        sizes = [reader.read(b)["sizes"].tolist() for b in reader.blocks if b.kind == Kind.SIZES]
        assert [b.epoch for b in reader.blocks if b.kind == Kind.ROWS] == [0, 1, 2]
    assert sizes == [SIZES.tolist()]
    assert rows_of(path) == EXPECTED


@settings(deadline=None, max_examples=60)
@given(st.dictionaries(st.text(min_size=1), st.tuples(DTYPES, st.binary(max_size=200)), max_size=5))
def test_any_columns(tmp_path_factory, columns):
    path = tmp_path_factory.mktemp("t") / "t"
    arrays = {}
    for name, (dtype, raw) in columns.items():
        kind = np.dtype(dtype)
        arrays[name] = np.frombuffer(raw[: len(raw) // kind.itemsize * kind.itemsize], kind)
    writer = TraceWriter(path, ABOUT, SIZES)
    writer.append(Kind.BEGIN, 9, arrays)
    writer.close()
    with TraceReader(path) as reader:
        found = reader.read(reader.blocks[-1])
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        assert found[name].tobytes() == array.tobytes()


def test_a_file_that_was_cut_anywhere_is_good_up_to_there_and_gone_on_with(tmp_path):
    whole = written(tmp_path / "whole").read_bytes()
    with TraceReader(tmp_path / "whole") as reader:
        ends = [b.end for b in reader.blocks if b.kind == Kind.ROWS]
    cut = tmp_path / "cut"
    for length in range(len(MAGIC), len(whole) + 1):
        cut.write_bytes(whole[:length])
        there = sum(end <= length for end in ends)
        assert rows_of(cut) == EXPECTED[:there]
        writer = TraceWriter(cut, ABOUT, SIZES)
        writer.append(Kind.ROWS, 7, ROWS[0])
        writer.close()
        assert rows_of(cut) == [*EXPECTED[:there], EXPECTED[0]]


def test_a_flipped_bit_gives_no_wrong_rows(tmp_path):
    whole = written(tmp_path / "t").read_bytes()
    for at in range(len(MAGIC), len(whole)):
        (tmp_path / "t").write_bytes(whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :])
        try:
            found = rows_of(tmp_path / "t")
        except ConfigError:
            continue
        assert found == EXPECTED[: len(found)]


def test_what_is_no_trace_of_ours_is_refused(tmp_path):
    path = tmp_path / "t"
    path.write_bytes(b"a file of another kind")
    with pytest.raises(ConfigError, match="no trace"):
        TraceReader(path)
    with pytest.raises(ConfigError, match="no trace"):
        TraceWriter(path, ABOUT, SIZES)
    path.write_bytes(MAGIC[:-1] + b"\x63")
    with pytest.raises(ConfigError, match="version 99"):
        TraceReader(path)
    assert check_continues(tmp_path / "nothing", ABOUT) == 0
    written(tmp_path / "ours")
    with pytest.raises(ConfigError, match="seed=0"):
        check_continues(tmp_path / "ours", ABOUT | {"seed": 1})


def write_too(path, told):
    try:
        TraceWriter(path, ABOUT, SIZES)
    except OSError as error:
        told.put(str(error))


def test_one_process_writes_at_a_time(tmp_path):
    told = warm.Queue()
    writer = TraceWriter(tmp_path / "t", ABOUT, SIZES)
    writer.append(Kind.ROWS, 0, ROWS[0])
    other = warm.Process(target=write_too, args=(tmp_path / "t", told))
    other.start()
    assert "another process" in told.get(timeout=60)
    other.join()
    writer.append(Kind.ROWS, 0, ROWS[2])
    writer.close()
    assert rows_of(tmp_path / "t") == [EXPECTED[0], EXPECTED[2]]
