"""The ring of requests against a model: in order, none twice, none that nobody left."""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.tiering import layout
from stoker.tiering.layout import (
    COUNTERS,
    REQUEST,
    REQUEST_MAGIC,
    RING,
    RING_BYTES,
    Kind,
    Ring,
    create_counters,
    offset_of,
)

HEAD, TAIL, WORDS = (offset_of(RING, name) for name in ("head", "tail", "words"))


class Program:
    """Leaves requests as the shim does, and stops in the middle where it is told to."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._map = memoryview(mmap.mmap(file.fileno(), 0))[COUNTERS.itemsize :]

    def _number(self, at: int) -> int:
        return int(struct.unpack_from("=Q", self._map, at)[0])

    def leave(
        self, path: bytes, *, killed: bool = False, magic: int = REQUEST_MAGIC
    ) -> bytes | None:
        message = REQUEST.pack(magic, Kind.OPENED, 0, len(path), 0, zlib.crc32(path)) + path
        size = -(-(8 + len(message)) // 8) * 8
        head = self._number(HEAD)
        if head - self._number(TAIL) > RING_BYTES - size:
            return None
        struct.pack_into("=Q", self._map, HEAD, head + size)
        if not killed:
            for place, byte in enumerate(struct.pack("=Q", head + 1) + message):
                self._map[WORDS + (head + place) % RING_BYTES] = byte
        return message


@pytest.fixture
def file(tmp_path: Path) -> Path:
    create_counters(tmp_path / "counters")
    return tmp_path / "counters"


@settings(max_examples=30, deadline=None)
@given(
    begin=st.integers(0, 2 * RING_BYTES // 8),
    steps=st.lists(st.one_of(st.binary(max_size=4096), st.integers(0, 5)), max_size=40),
)
def test_all_arrive_in_order_around_the_end(
    tmp_path_factory: pytest.TempPathFactory, begin: int, steps: list[bytes | int]
) -> None:
    file = tmp_path_factory.mktemp("ring") / "counters"
    create_counters(file)
    with file.open("r+b") as content:
        for field in (HEAD, TAIL):
            content.seek(COUNTERS.itemsize + field)
            content.write(struct.pack("=Q", 8 * begin))
    ring, program = Ring(file), Program(file)
    left: list[bytes] = []
    for step in steps:
        if isinstance(step, bytes):
            message = program.leave(step)
            assert message is not None
            left.append(message)
        else:
            assert ring.take(step) == left[:step]
            left = left[step:]
    assert ring.take(1000) == left and ring.is_empty()


def test_a_full_ring_takes_no_more(file: Path) -> None:
    ring, program = Ring(file), Program(file)
    count = 0
    while program.leave(b"x" * 4000) is not None:
        count += 1
    assert (count - 1) * 4000 < RING_BYTES
    assert len(ring.take(10**6)) == count
    assert program.leave(b"again") is not None


def test_a_program_that_is_killed_while_it_writes_holds_nobody_up(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring, program = Ring(file), Program(file)
    now = 100.0
    monkeypatch.setattr(layout.time, "monotonic", lambda: now)
    first = program.leave(b"first")
    program.leave(b"killed", killed=True)
    program.leave(b"behind it")
    assert ring.take(10) == [first]
    now += 0.9
    assert ring.take(10) == [] and not ring.is_empty()
    now += 0.2
    assert ring.take(10) == [] and ring.is_empty(), "what came behind is asked for again"
    last = program.leave(b"last")
    assert ring.take(10) == [last]


def test_garbage_is_not_believed(file: Path) -> None:
    ring, program = Ring(file), Program(file)
    program.leave(b"garbage", magic=7)
    assert ring.take(10) == [] and ring.is_empty()
    with file.open("r+b") as content:
        content.seek(COUNTERS.itemsize + WORDS)
        content.write(os.urandom(RING_BYTES))
        content.seek(COUNTERS.itemsize + HEAD)
        content.write(os.urandom(8))
    for _ in range(10):
        ring.take(10)
