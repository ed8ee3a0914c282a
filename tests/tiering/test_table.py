"""The table against the C header, against a reference model, and how much memory it takes."""

from __future__ import annotations

import os
import shutil
import subprocess
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.tiering import layout
from stoker.tiering import table as table_module
from stoker.tiering.layout import State
from stoker.tiering.table import Settings, Table, TierPaths

HEADER = Path(__file__).parents[2] / "shim" / "table.h"
STRUCTURES = {
    "string": layout.STRING,
    "source": layout.SOURCE,
    "tier": layout.TIER,
    "entry": layout.ENTRY,
    "table": layout.HEADER,
    "row": layout.ROW,
    "shard": layout.SHARD,
    "ring": layout.RING,
    "counters": layout.COUNTERS,
}
LIMITS = Settings(0, 8 << 20, 16 << 20, 3_000, 2_000)


@pytest.fixture
def table(tmp_path: Path) -> Table:
    places = [TierPaths(tmp_path / f"c{i}", tmp_path / f"p{i}", 40 + i) for i in range(2)]
    return Table(tmp_path / "table", [tmp_path], tmp_path.stat(), places, LIMITS)


def test_layout_is_the_compilers(tmp_path: Path) -> None:
    lines = [f'printf("{name} %zu\\n", sizeof(struct stoker_{name}));' for name in STRUCTURES]
    for name, dtype in STRUCTURES.items():
        lines += [
            f'printf("{name}.{field} %zu\\n", offsetof(struct stoker_{name}, {field}));'
            for field in dtype.names or ()
        ]
    constants = {
        "STOKER_TABLE_VERSION": layout.VERSION,
        "STOKER_REQUEST_MAGIC": layout.REQUEST_MAGIC,
        "STOKER_MAX_SOURCES": layout.MAX_SOURCES,
        "STOKER_MAX_TIERS": layout.MAX_TIERS,
        "STOKER_BUCKETS": layout.BUCKETS,
        "STOKER_SHARDS": layout.SHARDS,
        "STOKER_MARKS": layout.MARKS,
        "STOKER_RING_BYTES": layout.RING_BYTES,
        **{f"STOKER_{state.name}": int(state) for state in layout.State},
        **{f"STOKER_{kind.name}": int(kind) for kind in layout.Kind},
    }
    lines += [f'printf("{name} %u\\n", (unsigned){name});' for name in constants]
    lines += ['printf("request %zu\\n", sizeof(struct stoker_request));']
    lines += ['puts(STOKER_TABLE_MAGIC " " STOKER_COUNTERS_MAGIC);']
    program = f'#include <stdio.h>\n#include "{HEADER}"\nint main(void) {{ {"".join(lines)} }}\n'
    (tmp_path / "show.c").write_text(program)
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    assert compiler, "a C compiler builds the shim"
    command = [compiler, "-std=c11", "-o", tmp_path / "show", tmp_path / "show.c"]
    subprocess.run(command, check=True)
    said = subprocess.run([tmp_path / "show"], check=True, capture_output=True, text=True).stdout
    *numbers, magics = said.splitlines()
    expected = {name: dtype.itemsize for name, dtype in STRUCTURES.items()}
    for name, dtype in STRUCTURES.items():
        for field in dtype.names or ():
            expected[f"{name}.{field}"] = layout.offset_of(dtype, field)
    expected |= constants | {"request": layout.REQUEST.size}
    assert {name: int(value) for name, value in map(str.split, numbers)} == expected
    assert magics.encode() == layout.TABLE_MAGIC + b" " + layout.COUNTERS_MAGIC


class Reader:
    """Looks files up as the shim does, in the file alone."""

    def __init__(self, path: Path) -> None:
        self.file = np.memmap(path, np.uint8, "r")
        self.header = self.file[:4096].view(layout.HEADER)[0]

    def entry(self, number: int) -> np.void:
        at = int(self.header["entries_offset"]) + 128 * number
        entry: np.void = self.file[at : at + 128].view(layout.ENTRY)[0]
        return entry

    def path(self, number: int) -> bytes:
        entry = self.entry(number)
        at = int(self.header["arena_offset"]) + int(entry["path_offset"])
        assert self.file[at + int(entry["path_length"])] == 0
        return self.file[at : at + int(entry["path_length"])].tobytes()

    def index(self, name: str) -> np.ndarray:  # type: ignore[type-arg]
        log2 = int(self.header[f"{name}_index_log2"])
        at = int(self.header[f"{name}_index_offset"]) + (4 << log2)
        return self.file[at : at + (4 << log2)].view(np.uint32)

    def find(self, path: bytes) -> int | None:
        index, code = self.index("path"), zlib.crc32(path, 0)
        log2 = int(self.header["path_index_log2"])
        slot = (code * 0x9E3779B1 % 2**32) >> (32 - log2)
        while number := int(index[slot]):
            if int(self.entry(number - 1)["hash"]) == code and self.path(number - 1) == path:
                return number - 1
            slot = (slot + 1) % len(index)
        return None

    def find_copy(self, ino: int, dev: int) -> int | None:
        index, log2 = self.index("copy"), int(self.header["copy_index_log2"])
        slot = (ino * 0x9E3779B97F4A7C15 % 2**64) >> (64 - log2)
        while number := int(index[slot]):
            entry = self.entry(number - 1)
            tier = self.header["tiers"][int(entry["tier"])]
            if int(entry["copy_ino"]) == ino and int(tier["dev"]) == dev:
                return number - 1
            slot = (slot + 1) % len(index)
        return None


def status(ino: int = 7, size: int = 100) -> os.stat_result:
    return os.stat_result(
        (0o100644, ino, 3, 1, 0, 0, size, 1, 2, 3),
        {"st_mtime_ns": 5, "st_atime_ns": 6, "st_ctime_ns": 7, "st_blocks": 8, "st_blksize": 9},
    )


def add(table: Table, path: bytes, state: State = State.WANTED, **more: int) -> int:
    return table.add(path, status(), state, is_link=False, seen_ns=1, **more)


def test_an_entry_is_what_it_was_made_of(table: Table, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"abc")
    number = table.add(b"dir/file", file.stat(), State.WANTED, is_link=True, seen_ns=12)
    entry, real = table.entry(number), file.stat()
    assert entry["path"] == b"dir/file" and entry["state"] is State.WANTED and entry["link"] == 1
    for name in ("dev", "ino", "mode", "nlink", "uid", "gid", "size", "blocks", "blksize"):
        assert entry[f"source_{name}"] == getattr(real, f"st_{name}")
    assert entry["source_mtime_ns"] == real.st_mtime_ns and entry["validated_ns"] == 12
    table.start_copy(number, 1, 99)
    table.set_copied(number, 2)
    table.raise_validated(number, 50)
    table.raise_validated(number, 20)
    entry = table.entry(number)
    assert (entry["state"], entry["tier"], entry["copied"]) == (State.COPYING, 1, 2)
    assert entry["validated_ns"] == 50 and entry["word"] >> 8 == 1
    reader = Reader(tmp_path / "table")
    assert reader.find(b"dir/file") == number and reader.find(b"dir/other") is None
    assert reader.find_copy(99, 41) == number and reader.find_copy(99, 40) is None
    assert bytes(reader.header["magic"]) == b"STOKERT1" and reader.header["heartbeat_ns"] > 0
    changes = reader.header["changes"]
    assert changes.sum() == 3 and changes[zlib.crc32(b"dir/file") % 64] == 3
    table.close()
    assert reader.header["heartbeat_ns"] == 0


def test_a_changed_source_takes_the_place_of_the_old_one(table: Table, tmp_path: Path) -> None:
    old = add(table, b"a", State.PLACED, tier=0, copy_ino=5)
    table.set_state(old, State.DROPPED)
    new = add(table, b"a", State.PLACED, tier=0, copy_ino=5)
    reader = Reader(tmp_path / "table")
    assert reader.find(b"a") == new == table.find(b"a")
    assert reader.find_copy(5, 40) == new, "the inode is another file's now"
    assert (
        reader.path(old) == b"a"
        and reader.entry(old)["path_offset"] == reader.entry(new)["path_offset"]
    )


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.tuples(st.binary(min_size=1, max_size=3), st.integers(1, 40), st.integers(0, 1)),
        max_size=200,
    ),
    st.integers(2, 4),
)
def test_against_a_dictionary(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[bytes, int, int]], log2: int
) -> None:
    folder = tmp_path_factory.mktemp("table")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table_module, "_FIRST_INDEX_LOG2", log2)
        places = [TierPaths(folder, folder, 40 + i) for i in range(2)]
        table = Table(folder / "table", [folder], folder.stat(), places, LIMITS)
        paths: dict[bytes, int] = {}
        copies: dict[tuple[int, int], int] = {}
        for path, ino, tier in steps:
            # An entry moves to another inode when its first copy failed.
            number = paths[path] = add(table, path)
            for which in (ino + 50, ino):
                copies = {key: value for key, value in copies.items() if value != number}
                table.start_copy(number, tier, which)
                copies[which, 40 + tier] = number
        reader = Reader(folder / "table")
        assert {path: reader.find(path) for path in paths} == paths
        assert {key: reader.find_copy(*key) for key in copies} == copies
        assert table.find(b"none") is None
        for name in ("path", "copy"):
            index = reader.index(name)
            assert np.count_nonzero(index) <= len(index) * 3 // 4
    (folder / "table").unlink()


class Recorder:
    """Notes in what order a memory is written."""

    def __init__(self, memory: Any, kind: str, log: list[str]) -> None:
        self._memory, self._kind, self._log = memory, kind, log

    def __getitem__(self, at: Any) -> Any:
        return self._memory[at]

    def __setitem__(self, at: Any, value: Any) -> None:
        self._log.append(self._kind)
        self._memory[at] = value


def test_t7_words_are_published_behind_a_fence(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a program on ARM might see an entry's number and then an entry that is not there yet."""
    log: list[str] = []
    monkeypatch.setattr(table_module, "release_fence", lambda: log.append("fence"))
    monkeypatch.setattr(table, "_words", Recorder(table._words, "word", log))
    monkeypatch.setattr(table, "_map", Recorder(table._map, "bytes", log))
    monkeypatch.setattr(table_module, "wake", lambda memory, offset: None)
    add(table, b"file", State.WANTED)
    assert log == ["bytes", "bytes", *["fence", "word"] * 3], "path, entry; count, slot, change"
    log.clear()
    table.set_state(0, State.REFUSED)
    assert log == ["fence", "word"] * 2, "state, change"


def test_memory_stays_below_200_bytes_a_file(table: Table) -> None:
    count, empty = 20_000, table.memory
    for number in range(count):
        add(table, b"%05d" % number, State.PLACED, tier=0, copy_ino=number + 1)
    assert len(table) == count
    assert (table.memory - empty) / count < 200
