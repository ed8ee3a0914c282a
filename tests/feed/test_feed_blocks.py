"""Blocks through a feed: what is read of one stays in the cache until it is due."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import stoker
from stoker.source import FileSource, NumpySource, ParquetSource, Source

NUM, EPOCHS = 20_000, 3


def in_pages(folder: Path) -> Source:
    """Rows in row groups that blocks of 512 end with."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    column = pa.array([bytes(64 + row % 32) for row in range(NUM)], pa.binary())
    pq.write_table(pa.table({"x": column}), folder / "rows.parquet", row_group_size=512)
    return ParquetSource(folder / "rows.parquet", columns="x")


def in_an_array(folder: Path) -> Source:
    np.save(folder / "rows.npy", np.zeros((NUM, 64), np.int32))
    return NumpySource(folder / "rows.npy")


def in_files(folder: Path) -> Source:
    files = [folder / f"{number}.bin" for number in range(NUM // 4)]
    for number, file in enumerate(files):
        file.write_bytes(bytes(64 + number % 32))
    return FileSource(files)


@pytest.mark.parametrize(
    ("make", "block", "cache"),
    [
        (in_pages, 512, "20%"),
        (in_pages, 512, "50%"),
        (in_an_array, 32, "10%"),
        (in_an_array, 512, "20%"),
        (in_files, 256, "20%"),
    ],
)
def test_no_block_is_read_twice_while_batches_served_are_still_leased(
    make, block: int, cache: str, tmp_path: Path
) -> None:
    """With four batches of 128 under way eviction once found 256 leased samples in its way, and
    took any: blocks of 512 were read 1.16 times."""
    source = make(tmp_path)
    with stoker.Feed(
        source,
        128,
        decode_threads=2,
        decode="packed",
        cache=stoker.Cache(cache, stands_aside=False),
        recipe=f"foresight:block={block}",
        epochs=EPOCHS,
    ) as feed:
        for _ in range(EPOCHS):
            assert sum(len(batch) for batch in feed) == len(source)
        stats = feed.stats
    assert stats.hits > 0 and stats.bypassed == 0
    twice = stats.read + stats.read_ahead - stats.fetched
    assert 0 <= twice <= 0.03 * stats.accesses
