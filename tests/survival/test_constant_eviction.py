"""Many readers and writers on a cache that is always full: not one wrong byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.policy import LRU
from survival.board import Field
from survival.roles import claimant, reader, writer
from survival.support import Fleet, check_nothing_is_lost, holders_of, inode, new_arena

_SECONDS = 3.0  # --soak makes it more


@pytest.mark.timeout(0)
def test_eight_readers_and_four_writers(tmp_path: Path, soak: float) -> None:
    seconds = max(_SECONDS, soak)
    arena = new_arena(LRU().regions())
    memory = inode(arena)
    roles = [reader] * 6 + [claimant] * 2 + [writer] * 4
    with Fleet(arena, roles, tmp_path, start="forkserver") as fleet:
        fleet.await_start()
        fleet.watch(seconds / 2)
        arena.verify()
        fleet.watch(seconds / 2)
        fleet.finish()
        stats = arena.stats()
        assert stats["evictions"] > 10 * stats["entries"]
        assert fleet.board.total(Field.READ) > 0
        print(
            f"\n{seconds:.0f} s: {fleet.board.total(Field.READ) / seconds:.0f} samples read and "
            f"{stats['inserts'] / seconds:.0f} inserted a second, "
            f"{fleet.board.total(Field.READ_BYTES) / seconds / 1e6:.0f} MB/s read, "
            f"{stats['evictions']} evictions, {stats['torn_reads']} torn reads, "
            f"{stats['bypassed']} bypassed, slowest call {fleet.slowest() * 1e3:.1f} ms"
        )
    check_nothing_is_lost(arena)
    arena.close()
    assert holders_of(memory) == []
