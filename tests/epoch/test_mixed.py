"""The books of the sources of a mixture."""

from __future__ import annotations

import numpy as np

from stoker.epoch.mixed import MixedSource, SourceBooks
from stoker.sampler import Mixture
from stoker.source import MemorySource
from stoker.types import Outcome

MIXTURE = Mixture(("a", "b"), (10, 5), {"a": 1, "b": 1}, 20)
SIZES = np.arange(100, 115)
NONE = np.empty(0, np.uint32)


def test_counts_and_epochs() -> None:
    books = SourceBooks(MIXTURE, 0, SIZES)
    ids = np.array([0, 9, 10, 10, 14], np.uint32)
    hit, fetched = Outcome.HIT, Outcome.FETCHED
    books.add(ids, np.array([hit, fetched, fetched, hit, Outcome.SUBSTITUTED], np.int8))
    stats = books.stats(2, NONE)
    a, b = stats["a"], stats["b"]
    assert (a.samples, a.accesses, a.hits, a.bytes, a.bytes_fetched) == (10, 2, 1, 209, 109)
    assert (b.samples, b.accesses, b.hits, b.bytes, b.bytes_fetched) == (5, 3, 1, 334, 110)
    assert (a.epochs, b.epochs) == (2, 4)
    assert a.hit_ratio == 0.5
    assert books.stats(1, np.array([1, 2, 3, 12], np.uint32))["a"].epochs == 1.3
    assert SourceBooks(MIXTURE, 0, SIZES).stats(0, NONE)["a"].hit_ratio == 0


def test_counts_continue_from_a_state() -> None:
    books, resumed = SourceBooks(MIXTURE, 0, SIZES), SourceBooks(MIXTURE, 0, SIZES)
    ids, outcomes = np.array([3, 12], np.uint32), np.array([Outcome.HIT] * 2, np.int8)
    books.add(ids, outcomes)
    resumed.add(ids[:1], outcomes[:1])
    resumed.restore(books.state())
    assert resumed.stats(0, NONE) == books.stats(0, NONE)
    resumed.add(ids, outcomes)
    assert resumed.stats(0, NONE)["b"].accesses == 2
    resumed.restore({})
    assert resumed.stats(0, NONE)["a"].accesses == 0


def test_origins() -> None:
    parts = [MemorySource([b"x"] * 10), MemorySource([b"y"] * 5)]
    source = MixedSource(parts, MIXTURE)
    assert source.names == ("a", "b")
    assert source.origins(np.array([0, 9, 10, 14], np.uint32)).tolist() == [0, 0, 1, 1]
