"""Mixtures of sources in a Feed."""

from __future__ import annotations

from typing import Any

import pytest

import stoker
from stoker import Feed
from stoker.errors import ConfigError
from stoker.mixing import MixedSource
from stoker.source import MemorySource


def by_epoch(epoch: int) -> dict[str, float]:
    return {"a": 1, "b": epoch}


def mixture(weights: Any = None) -> MixedSource:
    parts = {
        "a": MemorySource([bytes([i]) for i in range(60)]),
        "b": MemorySource([bytes([100 + i]) for i in range(10)]),
    }
    return stoker.mix(parts, weights or {"a": 3, "b": 1}, epoch_samples=40)


def first(raw: bytes) -> int:
    return raw[0]


def negative(raw: bytes) -> int:
    return -raw[0]


def test_sources_are_mixed_and_decoded_each_by_its_own() -> None:
    source = mixture()
    with Feed(source, 8, decode={"a": first, "b": negative}, cache="50%") as feed:
        for _ in range(3):
            for batch in feed:
                assert ((batch.data < 0) == (source.origins(batch.ids) == 1)).all()
        counts = feed.source_stats
    assert (counts["a"].epochs, counts["b"].epochs) == (1.5, 3)
    assert (counts["a"].bytes, counts["b"].accesses) == (90, 30)


def test_resumes_with_another_number_of_ranks_and_threads() -> None:
    def feed_of(**options: Any) -> Feed:
        return Feed(mixture(by_epoch), 4, decode=first, cache="50%", **options)

    with feed_of() as feed:
        expected = [[int(i) for batch in feed for i in batch.ids] for _ in range(3)]
    with feed_of(decode_threads=0) as feed:
        list(feed)
        begun = iter(feed)
        begin = [int(i) for _ in range(4) for i in next(begun).ids]
        state = feed.state_dict()
    assert begin == expected[1][:16]
    halves = []
    for rank in range(2):
        with feed_of(rank=rank, world_size=2) as feed:
            feed.load_state_dict(state)
            halves.append([int(i) for batch in feed for i in batch.ids])
    assert halves == [expected[1][16::2], expected[1][17::2]]


def test_the_end_of_an_epoch_is_a_new_pass_of_none() -> None:
    with Feed(mixture(by_epoch), 40, decode=first, cache=0) as feed:
        whole = [batch.data.tolist() for _ in range(3) for batch in feed]
    a = [value for epoch in whole for value in epoch if value < 100]
    assert len(a) == 40 + 20 + 13 or len(a) == 40 + 20 + 14
    assert sorted(a[:60]) == list(range(60))


def test_bad_input_raises() -> None:
    with pytest.raises(ConfigError, match="one for each source"):
        Feed(mixture(), 8, decode={"a": first})
    with pytest.raises(ConfigError, match="has none"):
        Feed(MemorySource([b"x"]), 8, decode={"a": first})
    with pytest.raises(ConfigError, match="leave out shuffle"):
        Feed(mixture(), 8, shuffle=False)
