"""The tests that every tier has to pass."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numpy.typing import NDArray

from stoker.shared import SharedArray
from stoker.source.packed import Packed
from stoker.store.tier import RegionTier

_NUM_IDS = 200
_CAPACITY = 20_000


def sample_of(sample_id: int) -> bytes:
    """Return the sample of an id: 1 to 400 bytes, different for each id."""
    return sample_id.to_bytes(2, "little") * (1 + sample_id * 37 % 200)


def pack_ids(ids: Sequence[int]) -> Packed:
    """Return the samples of ids, packed."""
    samples = [sample_of(i) for i in ids]
    offsets = np.cumsum([0, *map(len, samples)], dtype=np.int64)
    return Packed(np.frombuffer(b"".join(samples), np.uint8), offsets)


def as_ids(ids: Sequence[int] | range | NDArray[np.int64]) -> NDArray[np.uint32]:
    """Return ids as tiers take them."""
    return np.array(ids, np.uint32)


class TierConformance:
    """Subclass it, define :meth:`make`, and pytest runs every test of the protocol.

    ::

        class TestMyTier(TierConformance):
            def make(self, num_ids, capacity_bytes):
                return MyTier(num_ids, capacity_bytes)

    The tier must admit newcomers while there is room.
    """

    def make(self, num_ids: int, capacity_bytes: int) -> RegionTier:
        """Return an empty tier for ids below ``num_ids``, of ``capacity_bytes`` of payload."""
        raise NotImplementedError("a subclass of TierConformance has to define make")

    @pytest.fixture
    def tier(self) -> Iterator[RegionTier]:
        """The tier under test; half of all samples fit."""
        tier = self.make(_NUM_IDS, _CAPACITY)
        yield tier
        tier.close()

    def test_an_empty_tier_finds_nothing(self, tier: RegionTier) -> None:
        """Nothing is found, and the offsets say so."""
        packed, found = tier.get_many(as_ids([3, 1, 3]))
        assert not found.any()
        assert packed.offsets.tolist() == [0, 0, 0, 0]

    def test_what_was_put_comes_back_in_the_order_asked_for(self, tier: RegionTier) -> None:
        """Found and missing ones mixed, with repeats; types as promised."""
        assert tier.put_many(as_ids([5, 9, 7]), pack_ids([5, 9, 7])).tolist() == [True] * 3
        packed, found = tier.get_many(as_ids([7, 8, 5, 7]), np.arange(4.0))
        assert found.tolist() == [True, False, True, True]
        assert packed.data.dtype == np.uint8
        assert packed.offsets.dtype == np.int64
        expected = pack_ids([7, 5, 7])
        assert packed.data.tobytes() == expected.data.tobytes()
        assert np.diff(packed.offsets).tolist() == [
            len(sample_of(7)),
            0,
            *np.diff(expected.offsets[1:]),
        ]

    def test_samples_may_lie_in_memory_of_the_callers(self, tier: RegionTier) -> None:
        """They are the same where it has room for them, and where it has not."""
        wanted, expected = as_ids([7, 5, 7]), pack_ids([7, 5, 7])
        tier.put_many(as_ids([5, 7]), pack_ids([5, 7]))
        for room in (len(expected.data) - 1, len(expected.data), len(expected.data) + 9):
            into = np.full(room, 0xAA, np.uint8)
            packed, found = tier.get_many(wanted, None, into)
            assert found.all()
            assert packed.data.tobytes() == expected.data.tobytes()
            assert packed.offsets.tolist() == expected.offsets.tolist()
            if np.shares_memory(packed.data, into):
                assert into[len(packed.data) :].tolist() == [0xAA] * (room - len(packed.data))

    def test_empty_batches_are_fine(self, tier: RegionTier) -> None:
        """Every method takes no ids at all."""
        none = as_ids([])
        assert tier.put_many(none, pack_ids([])).shape == (0,)
        packed, found = tier.get_many(none)
        assert (packed.offsets.tolist(), found.shape) == ([0], (0,))
        assert tier.claim(none).shape == tier.wait(none, 0.0).shape == (0,)
        tier.abandon(none)
        tier.discard(none)
        tier.set_keys(none, np.empty(0))
        assert tier.move(none, "main").shape == tier.copies(none, "main").shape == (0,)

    def test_an_empty_sample_is_a_sample(self, tier: RegionTier) -> None:
        """Zero bytes can be cached, and are found."""
        empty = Packed(np.empty(0, np.uint8), np.zeros(2, np.int64))
        assert tier.put_many(as_ids([4]), empty).all()
        assert tier.get_many(as_ids([4]))[1].all()

    def test_put_again_is_harmless(self, tier: RegionTier) -> None:
        """A cached sample stays what it is and is reported as cached."""
        for _ in range(2):
            assert tier.put_many(as_ids([5]), pack_ids([5])).all()
        assert tier.stats()["entries"] == 1

    def test_a_sample_larger_than_the_tier_is_refused(self, tier: RegionTier) -> None:
        """It is not kept, and nothing waits or fails."""
        noise = np.random.default_rng(1).integers(0, 256, _CAPACITY + 1, np.uint8)
        large = Packed(noise, np.array([0, _CAPACITY + 1]))  # which no tier makes smaller
        assert not tier.put_many(as_ids([1]), large).any()
        assert not tier.get_many(as_ids([1]))[1].any()

    def test_the_capacity_is_never_exceeded(self, tier: RegionTier) -> None:
        """Whatever is put; and what the tier says it keeps, it keeps."""
        for first in range(0, _NUM_IDS, 20):
            ids = range(first, first + 20)
            kept = tier.put_many(as_ids(ids), pack_ids(ids))
            stats = tier.stats()
            assert stats["payload_bytes"] <= stats["capacity_bytes"] == _CAPACITY
            assert tier.get_many(as_ids(ids))[1].sum() <= kept.sum()
        everything = as_ids(range(_NUM_IDS))
        packed, found = tier.get_many(everything)
        assert found.sum() == tier.stats()["entries"] > 0
        assert packed.data.tobytes() == b"".join(sample_of(int(i)) for i in everything[found])

    def test_discarded_samples_are_gone(self, tier: RegionTier) -> None:
        """Those and no others; absent ones are passed over."""
        tier.put_many(as_ids([1, 2]), pack_ids([1, 2]))
        tier.discard(as_ids([2, 3]))
        assert tier.get_many(as_ids([1, 2]))[1].tolist() == [True, False]

    def test_lists_name_what_is_found_and_moves_keep_it(self, tier: RegionTier) -> None:
        """A move to where a sample is changes nothing; one that is not cached does not move."""
        tier.put_many(as_ids([7, 5]), pack_ids([7, 5]))
        region = next(name for name in tier.stats()["regions"] if len(tier.list(name)))
        assert tier.list(region).tolist() == [5, 7]
        first, absent = tier.copies(as_ids([7, 9]), region).tolist()
        assert first > 0 and not absent
        assert tier.move(as_ids([7, 9]), region).tolist() == [True, False]
        tier.set_keys(as_ids([5, 9]), np.array([1.0, 2.0]))
        assert tier.get_many(as_ids([5, 7]))[1].all()
        assert tier.copies(as_ids([7]), region).tolist() == [first]
        tier.discard(as_ids([7]))
        assert tier.copies(as_ids([7]), region).tolist() == [0]
        tier.put_many(as_ids([7]), pack_ids([7]))
        assert int(tier.copies(as_ids([7]), region)[0]) > first

    def test_an_unknown_region_is_empty(self, tier: RegionTier) -> None:
        """The arena may be another job's, with other regions: nothing is there, nothing fails."""
        tier.put_many(as_ids([5]), pack_ids([5]))
        assert not tier.list("nowhere").size
        assert not tier.copies(as_ids([5]), "nowhere").any()
        assert not tier.move(as_ids([5]), "nowhere").any()
        tier.resize({"nowhere": 1.0})
        assert tier.get_many(as_ids([5]))[1].all()

    def test_a_place_that_is_no_region_is_the_entrance(self, tier: RegionTier) -> None:
        """Samples are kept all the same."""
        places = SharedArray.create(_NUM_IDS, np.uint8)
        places.array[:] = 77
        tier.place_by(places)
        assert tier.put_many(as_ids([5, 6]), pack_ids([5, 6])).all()
        assert tier.get_many(as_ids([6, 5]))[0].data.tobytes() == sample_of(6) + sample_of(5)

    def test_one_claimant_each(self, tier: RegionTier) -> None:
        """Of many threads that claim at once, one gets each id; cached ids are granted to none."""
        tier.put_many(as_ids([0]), pack_ids([0]))
        start = threading.Barrier(8)

        def claim(_: int) -> NDArray[np.bool_]:
            start.wait()
            return tier.claim(as_ids(range(20)))

        with ThreadPoolExecutor(8) as pool:
            granted = np.sum(list(pool.map(claim, range(8))), axis=0)
        assert granted.tolist() == [0] + [1] * 19

    def test_claims_end_by_putting_or_abandoning(self, tier: RegionTier) -> None:
        """After that a missing id can be claimed again."""
        assert tier.claim(as_ids([1, 2])).all()
        assert not tier.claim(as_ids([1, 2])).any()
        tier.abandon(as_ids([1, 5]))
        tier.put_many(as_ids([2]), pack_ids([2]))
        tier.discard(as_ids([2]))
        assert tier.claim(as_ids([1, 2])).all()

    def test_waiting_is_bounded(self, tier: RegionTier) -> None:
        """It ends at the timeout, and at once where no claimant is at work."""
        begin = time.monotonic()
        assert not tier.wait(as_ids([1]), 30.0).any()
        tier.claim(as_ids([2]))
        assert not tier.wait(as_ids([2]), 0.05).any()
        assert time.monotonic() - begin < 10

    def test_waiting_ends_when_the_claimant_is_done(self, tier: RegionTier) -> None:
        """Published samples are there, abandoned ones are not."""
        tier.claim(as_ids([1, 2]))
        with ThreadPoolExecutor(1) as pool:
            begin = time.monotonic()
            waiting = pool.submit(tier.wait, as_ids([1, 2]), 30.0)
            time.sleep(0.05)
            tier.put_many(as_ids([1]), pack_ids([1]))
            tier.abandon(as_ids([2]))
            assert waiting.result().tolist() == [True, False]
        assert time.monotonic() - begin < 10

    def test_threads_never_see_wrong_bytes(self, tier: RegionTier) -> None:
        """Readers and writers at once, with evictions."""
        stop = time.monotonic() + 0.5

        def work(seed: int) -> None:
            random = np.random.default_rng(seed)
            while time.monotonic() < stop:
                ids = random.integers(0, _NUM_IDS, 16)
                tier.put_many(as_ids(ids), pack_ids(ids.tolist()))
                packed, found = tier.get_many(as_ids(ids[::-1].copy()))
                expected = [sample_of(int(i)) for i in ids[::-1][found]]
                assert packed.data.tobytes() == b"".join(expected)

        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(work, seed) for seed in range(4)]:
                done.result()

    def test_closing_again_is_harmless(self, tier: RegionTier) -> None:
        """The second time does nothing."""
        tier.close()
        tier.close()
