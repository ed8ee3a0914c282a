"""What is served in place of others: by whom, how often, and with which bytes and ids."""

from __future__ import annotations

import multiprocessing

import numpy as np
import pytest
from support.doubles import BrokenTier, CountingSource, check, sample_of

from stoker import _core
from stoker.errors import ConfigError, SegmentError
from stoker.policy import HighLow, Homophily, MinIO, Score, Substitution
from stoker.shared import SharedArray
from stoker.store.arena import Arena
from stoker.store.claims import Claims, Turns
from stoker.store.memory_tier import MemoryTier
from stoker.store.registry import open_arrays
from stoker.store.store import Store
from stoker.store.substitutes import OnceEach, StandIns
from stoker.store.tier import NullTier
from stoker.types import Outcome

N = 400
HIT, SUBSTITUTED, FETCHED, PACKAGED = (
    Outcome.HIT,
    Outcome.SUBSTITUTED,
    Outcome.FETCHED,
    Outcome.PACKAGED,
)
BYTES = int(sum(len(sample_of(i)) for i in range(N)))
LOW = Substitution("low_by_low", "L")
ANY = Substitution("any", "main")
LOW_BY_HIGH = Substitution("low_by_high", "L", by="H")
NEIGHBOUR = Substitution("neighbour", "homophily")


def tier_of(policy, share=0.5, **options):
    arena = Arena(N, int(BYTES * share), 24)
    arena.configure(policy.regions())
    return MemoryTier(arena, policy.regions()[0].name, **options)


def every_other_low():
    """Places where odd samples are low."""
    places = SharedArray.create(N, np.uint8)
    places.array[1::2] = HighLow.LOW
    return places


def low_store(share=0.5, **options):
    """A store of high and low samples with equal budgets for both."""
    tier = tier_of(HighLow(start=0.5), share)
    return Store(CountingSource(N), tier, places=every_other_low(), substitution=LOW, **options)


def fill(store, ids):
    """Bring samples in, uncounted and unmarked."""
    with Store(CountingSource(N), Unclosed(store.tier)) as other:
        other.serve(ids)


class Unclosed:
    """A tier that stays open."""

    def __init__(self, tier):
        self._tier = tier

    def __getattr__(self, name):
        return getattr(self._tier, name)

    def close(self):
        pass


def claims_of(num_samples=N, accesses=0):
    return open_arrays("", Claims.layout(num_samples, accesses), share=False)


def ids_of(*ids):
    return np.array(ids, np.uint32)


@pytest.fixture
def low():
    with low_store() as store:
        yield store
        store.tier.arena.verify()


def test_a_low_sample_that_is_missing_is_served_by_a_low_one(low):
    fill(low, [1, 3, 5, 2, 4])
    low.begin_epoch(0)
    served = low.serve([7, 2, 9])
    check(served, served.ids)
    assert served.outcomes.tolist() == [SUBSTITUTED, HIT, SUBSTITUTED]
    assert set(served.ids[[0, 2]]) < {1, 3, 5}
    assert low.source.reads == []
    stats = low.stats()
    assert (stats["hits"], stats["substituted"], stats["fetched"]) == (1, 2, 0)
    assert stats["accesses"] == 3
    assert stats["bytes_from_source"] == 0
    assert stats["bytes_from_cache"] == served.offsets[-1]


def test_h_sample_never_substituted(low):
    """Neither is one replaced, nor does it stand in for another, wherever it lies."""
    fill(low, range(1, 100))
    low.places.array[[1, 3, 5]] = HighLow.HIGH  # they lie in L still
    low.begin_epoch(0)
    random = np.random.default_rng(0)
    high = low.places.array == HighLow.HIGH
    substituted = 0
    for epoch in range(1, 4):
        for batch in random.permutation(N).reshape(-1, 20):
            served = low.serve(batch)
            check(served, served.ids)
            others = served.outcomes == SUBSTITUTED
            substituted += int(others.sum())
            assert not high[batch[others]].any()
            assert not high[served.ids[others]].any()
            np.testing.assert_array_equal(served.ids[high[batch]], batch[high[batch]])
        low.begin_epoch(epoch)
    assert substituted > 50


def test_each_sample_is_served_once_an_epoch_and_all_of_them(low):
    """When substitutes run out, those they displaced get their turn."""
    fill(low, range(N))
    for epoch in range(3):
        low.begin_epoch(epoch, epoch)
        order = np.random.default_rng(epoch).permutation(N)
        served = np.concatenate([low.serve(batch).ids for batch in order.reshape(-1, 25)])
        assert sorted(served) == list(range(N))
    assert low.stats()["substituted"] > 100


def test_a_sample_that_stood_in_for_another_is_replaced_too(low):
    fill(low, [1, 3])
    low.begin_epoch(0)
    first = low.serve([9])
    second = low.serve(first.ids)
    assert second.outcomes.tolist() == [SUBSTITUTED]
    assert sorted([*first.ids, *second.ids]) == [1, 3]
    # None is left: the one that was displaced comes in its own stead, and is read.
    third = low.serve(second.ids)
    assert (third.ids.tolist(), third.outcomes.tolist()) == ([9], [FETCHED])
    check(third, [9])


def test_a_sample_served_on_anothers_turn_does_not_take_its_key():
    arena = Arena(N, BYTES, 24)
    arena.configure(Score().regions())
    with Store(CountingSource(N), MemoryTier(arena), substitution=ANY) as store:
        store.serve([1], np.array([5.0]))
        store.begin_epoch(0)
        assert store.serve([9], np.array([7.0])).ids.tolist() == [1]
        served = store.serve([1], np.array([8.0]))
        assert (served.ids.tolist(), served.outcomes.tolist()) == ([9], [FETCHED])
        assert np.isneginf(arena.keys([9])).all()


def test_without_an_epoch_nothing_is_substituted(low):
    fill(low, [1, 3])
    assert low.serve([5, 7]).ids.tolist() == [5, 7]


def test_a_new_epoch_serves_all_again_and_earlier_ones_not(low):
    fill(low, [1, 3, 5])
    for epoch in (0, 1, 1, 7):
        low.begin_epoch(epoch)
        assert low.serve([11, 13, 15]).outcomes.tolist() == [SUBSTITUTED] * 3
        low.discard([11, 13, 15])
    low.begin_epoch(8, earlier=[1, 5])
    served = low.serve([17, 19])
    assert sorted(served.outcomes) == [SUBSTITUTED, FETCHED]
    assert served.ids[served.outcomes == SUBSTITUTED].tolist() == [3]


def test_a_straggler_of_an_earlier_epoch_takes_nothing_from_the_next():
    arrays = claims_of()
    served = arrays["served"]
    with low_store(claims=Claims(arrays)) as late, low_store(claims=Claims(arrays)) as early:
        for store in (late, early):
            fill(store, range(1, 60, 2))
            store.begin_epoch(0)
        early.begin_epoch(1)
        ahead = np.concatenate([early.serve(np.arange(first, first + 5)).ids for first in (1, 20)])
        marks = served.array.copy()
        behind = late.serve(np.arange(1, 60))
        check(behind, behind.ids)
        np.testing.assert_array_equal(served.array[marks == 2], 2)
        rest = early.serve(np.setdiff1d(np.arange(1, 60), np.r_[1:6, 20:25]))
        assert len({*ahead.tolist(), *rest.ids.tolist()}) == len(ahead) + len(rest)


def test_what_was_read_ahead_for_its_own_access_is_no_substitute(low):
    fresh = low.expect_prefetch()[0].array
    fill(low, [1, 3])
    fresh[1] = 1
    low.begin_epoch(0)
    served = low.serve([9, 11])
    assert sorted(served.ids[served.outcomes == SUBSTITUTED]) == [3]
    assert low.serve([1]).outcomes.tolist() == [FETCHED]  # it was, by the prefetch
    assert fresh[1] == 0


def test_what_comes_after_a_search_that_found_nothing_is_found():
    class Listing(MemoryTier):
        """Counts searches."""

        def list(self, region):
            listed.append(region)
            return super().list(region)

    listed, now = [], [0.0]
    policy = HighLow(start=0.5)
    arena = Arena(N, BYTES, 24)
    arena.configure(policy.regions())
    shared = {"places": every_other_low(), "substitution": LOW, "clock": lambda: now[0]}
    with Store(CountingSource(N), Listing(arena, "H"), **shared) as store:
        fill(store, [1])
        store.begin_epoch(0)
        assert store.serve([9]).outcomes.tolist() == [SUBSTITUTED]
        found = []
        for sample in (11, 13, 15):  # the first is put after its search: the second's can find it
            now[0] += 1
            found.append(store.serve([sample]).outcomes.tolist()[0])
        searches = len(listed)
        assert found == [FETCHED] * 3 and searches == 4
        arena.limit(1)  # nothing more is put
        for sample in (17, 19, 21):
            now[0] += 1
            assert store.serve([sample]).outcomes.tolist() == [FETCHED]
        assert len(listed) == searches + 1  # for what the last one had put
        arena.limit(BYTES)
        fill(store, [33])
        now[0] += 1
        assert store.serve([23]).ids.tolist() == [33]


def test_what_a_search_offers_is_drawn_from_all_that_are_free():
    class Full(NullTier):
        def list(self, region):
            return np.arange(40_000, dtype=np.uint32)

    claims = Claims(open_arrays("", Claims.layout(40_000, 0), share=False))
    claims.begin(0, 0, np.arange(8_000, dtype=np.uint32))
    offered = OnceEach(Full(), "main", claims, clock=lambda: 0.0).offer(claims.stamp)
    assert len(offered) == len(np.unique(offered)) == 8_000  # a quarter of them
    assert offered.min() >= 8_000
    for some in (offered, offered[:2_000]):  # those that are used first, too
        shares = np.bincount(some // 8_000)[1:] / len(some)
        assert shares == pytest.approx([0.25] * 4, abs=0.04)


def test_what_became_important_meanwhile_is_no_substitute(low):
    fill(low, [1, 3, 5])
    low.begin_epoch(0)
    assert low.serve([9]).outcomes.tolist() == [SUBSTITUTED]
    low.places.array[[1, 3, 5]] = HighLow.HIGH
    assert low.serve([11]).outcomes.tolist() == [FETCHED]


def test_a_substitute_that_another_process_claims_first_is_left_to_it():
    class Racing(MemoryTier):
        """Another process serves the first of all candidates while they are copied."""

        def get_many(self, ids, keys=None, into=None):
            got = super().get_many(ids, keys, into)
            if np.isin(ids, [1, 3, 5]).all():
                _core.mark_once(served.array, ids[:1], 1)
                taken.append(int(ids[0]))
            return got

    taken, arrays = [], claims_of()
    served = arrays["served"]
    policy = HighLow(start=0.5)
    arena = Arena(N, BYTES, 24)
    arena.configure(policy.regions())
    shared = {"places": every_other_low(), "substitution": LOW, "claims": Claims(arrays)}
    with Store(CountingSource(N), Racing(arena, "H"), **shared) as store:
        fill(store, [1, 3, 5])
        taken.clear()
        store.begin_epoch(0)
        got = store.serve([9, 11, 13])
        check(got, got.ids)
        assert taken
        assert not set(taken) & set(got.ids.tolist())
        assert len(set(got.ids.tolist())) == 3


def test_a_batch_may_repeat_an_id(low):
    fill(low, range(1, 40, 2))
    low.begin_epoch(0)
    served = low.serve([1, 1, 101, 101, 101])
    check(served, served.ids)
    assert len(set(served.ids)) == 5
    assert served.outcomes.tolist() == [HIT] + [SUBSTITUTED] * 4


def serve_part(store, part, results):
    found = [store.serve(batch) for batch in part]
    for served in found:
        check(served, served.ids)
    results.put([(s.ids.tolist(), s.outcomes.tolist()) for s in found])


def store_of(kind):
    if kind == "low_by_low":
        return low_store(0.6)
    return Store(CountingSource(N), tier_of(MinIO()), substitution=ANY)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize(
    ("kind", "method", "processes"),
    [("low_by_low", "fork", 8), ("any", "fork", 8), ("low_by_low", "spawn", 2)],
)
def test_substitute_never_served_twice_an_epoch(kind, method, processes):
    """Eight processes, iCache's L-cache and Quiver: every sample once, with its own bytes."""
    context = multiprocessing.get_context(method)
    with store_of(kind) as store:
        fill(store, np.random.default_rng(9).permutation(N))
        for epoch in range(2):
            store.begin_epoch(epoch, 5)
            order = np.random.default_rng(epoch).permutation(N).reshape(processes, -1, 5)
            results = context.Queue()
            workers = [
                context.Process(target=serve_part, args=(store, part, results)) for part in order
            ]
            for worker in workers:
                worker.start()
            batches = [batch for _ in workers for batch in results.get(timeout=120)]
            for worker in workers:
                worker.join(60)
            served = np.concatenate([ids for ids, _ in batches])
            outcomes = np.concatenate([outcomes for _, outcomes in batches])
            assert sorted(served) == list(range(N))
            assert (outcomes == SUBSTITUTED).sum() > 20
        stats = store.stats()
        assert stats["accesses"] == 2 * N
        assert stats["hits"] + stats["substituted"] + stats["fetched"] == 2 * N
        store.tier.arena.verify()


def test_two_stores_that_share_the_claims_agree():
    """Ranks of one job: what one has served the other does not serve."""
    arrays, shared = claims_of(), {"places": every_other_low(), "substitution": LOW}
    tier = tier_of(HighLow(start=0.5))
    with (
        Store(CountingSource(N), tier, claims=Claims(arrays), **shared) as first,
        Store(CountingSource(N), tier.attached(), claims=Claims(arrays), **shared) as second,
    ):
        fill(first, range(1, 60, 2))
        for store in (first, second):
            store.begin_epoch(0)
        order = np.random.default_rng(1).permutation(np.arange(1, N, 2)).reshape(-1, 4)
        got = [(first, second)[turn % 2].serve(batch).ids for turn, batch in enumerate(order)]
        assert sorted(np.concatenate(got)) == list(range(1, N, 2))
        np.testing.assert_array_equal(np.flatnonzero(arrays["served"].array), np.arange(1, N, 2))


# --- by neighbour ---


@pytest.fixture
def spider():
    policy = Homophily(importance=0.5)
    tier = tier_of(policy, 0.3, overflow=policy.overflow)
    with Store(CountingSource(N), tier, substitution=NEIGHBOUR) as store:
        yield store
        store.tier.arena.verify()


def test_a_key_sample_serves_for_its_neighbours_as_often_as_needed(spider):
    spider.serve([1, 2, 3])
    near, degrees = [ids_of(), ids_of(10, 11, 12), ids_of(20)], np.array([0, 3, 1])
    assert spider.keep_key_sample(ids_of(1, 2, 3), degrees, near.__getitem__) == 2
    assert spider.tier.list("homophily").tolist() == [2]
    for _ in range(2):
        served = spider.serve([10, 2, 20, 12, 11])
        check(served, served.ids)
        assert served.ids.tolist() == [2, 2, 20, 2, 2]
        assert served.outcomes[[0, 1, 3, 4]].tolist() == [SUBSTITUTED, HIT, *[SUBSTITUTED] * 2]
    # Not again: it is there; the next one of the batch that is cached enters.
    assert spider.keep_key_sample(ids_of(1, 2, 3), degrees, near.__getitem__) == 3
    spider.discard([10, 20])
    assert spider.serve([20]).ids.tolist() == [3]


def test_only_cached_samples_with_neighbours_become_key_samples(spider):
    spider.serve([1])
    near = [ids_of(), ids_of(10, 11)]
    assert spider.keep_key_sample(ids_of(1, 5), np.array([0, 2]), near.__getitem__) is None
    assert spider.serve([10, 11]).ids.tolist() == [10, 11]


def test_what_the_importance_region_refuses_can_still_become_a_key_sample(spider):
    keys = np.full(N, 5.0)
    for first in range(0, 200, 4):
        batch = np.arange(first, first + 4)
        spider.serve(batch, keys[batch])
    passing = spider.tier.list("transit")
    assert passing.size
    sample = passing[-1:]
    kept = spider.keep_key_sample(sample, np.array([1]), lambda _: ids_of(399))
    assert kept == sample[0]
    assert spider.serve([399]).ids.tolist() == [kept]


def test_a_key_sample_that_left_the_queue_serves_no_more(spider):
    spider.serve([1, 2])
    spider.keep_key_sample(ids_of(2), np.array([1]), lambda _: ids_of(10))
    assert spider.tier.move(ids_of(2), "importance", np.array([9.0])).all()
    served = spider.serve([10])
    assert (served.ids.tolist(), served.outcomes.tolist()) == ([10], [FETCHED])
    spider.stand_ins.serves.array[11] = 1 << 32 | N  # no sample
    assert spider.serve([11]).ids.tolist() == [11]


# --- packages ---


def test_what_came_with_a_package_is_counted_as_such():
    packaged = SharedArray.create(N, np.uint8)
    with low_store(packaged=packaged) as store:
        fill(store, [1, 3, 5])
        packaged.array[[1, 3, 7]] = 1
        store.begin_epoch(0)
        served = store.serve([1, 5, 2])
        assert served.outcomes.tolist() == [PACKAGED, HIT, FETCHED]
        assert store.serve([9]).outcomes.tolist() == [SUBSTITUTED]
        assert store.serve([7]).outcomes.tolist() == [FETCHED]  # it had left, and was read
        assert packaged.array[7] == 0
        stats = store.stats()
        assert (stats["packaged"], stats["hits"], stats["fetched"]) == (1, 1, 2)
        assert stats["accesses"] == sum(
            stats[name] for name in ("hits", "packaged", "fetched", "substituted")
        )


def test_what_came_with_a_package_counts_as_such_though_it_leaves_while_the_batch_waits():
    packaged = SharedArray.create(N, np.uint8)
    with low_store(packaged=packaged) as store:
        fill(store, [1, 3])
        packaged.array[[1, 3]] = 1
        store.begin_epoch(0)
        read = store.source.read_packed

        def read_late(ids):
            store.tier.discard(ids_of(1))  # as the packager does with what was served
            packaged.array[1] = 0
            return read(ids)

        store.source.read_packed = read_late
        assert store.serve([1, 2]).outcomes.tolist() == [PACKAGED, FETCHED]


# --- the rest ---


def test_a_hit_changes_no_key_where_keys_are_scores():
    for follows, key in ((True, 1.0), (False, 2.0)):
        with Store(CountingSource(N), tier_of(HighLow()), follows_scores=follows) as store:
            store.serve([4], np.array([1.0]))
            store.serve([4], np.array([2.0]))
            assert store.tier.arena.keys([4]).tolist() == [key]


def test_samples_move_to_their_places(low):
    policy = HighLow(start=0.5)
    fill(low, range(300))
    before = {name: low.tier.list(name) for name in ("H", "L")}
    low.places.array[:] = HighLow.LOW
    promoted = before["L"][::3]
    low.places.array[promoted] = HighLow.HIGH
    keys = np.zeros(N)
    keys[promoted[:10]] = 1e9
    low.rearrange(policy.regions(), keys.take)
    assert set(promoted[:10]) <= set(low.tier.list("H"))
    assert not np.isin(promoted, low.tier.list("L")).any()  # what H refused has left
    assert len(low.tier.list("L")) >= len(before["L"]) - len(promoted)
    low.tier.arena.verify()


@pytest.mark.parametrize("method", ["list", "copies", "get_many", "place_by", "move"])
def test_a_failing_cache_degrades_to_reading_what_was_asked_for(method):
    class Broken(MemoryTier):
        def _fail(self, *args):
            raise SegmentError("broken")

    setattr(Broken, method, Broken._fail)
    policy = HighLow(start=0.5)
    arena = Arena(N, BYTES, 24)
    arena.configure(policy.regions())
    with pytest.warns(RuntimeWarning, match="bypassed"):
        tier = Broken(arena, "H")
        store = Store(CountingSource(N), tier, places=every_other_low(), substitution=LOW)
        store.begin_epoch(0)
        for _ in range(2):
            check(store.serve([1, 2, 3]), [1, 2, 3])
        store._tier.copies(ids_of(1), "L")
        store._tier.move(ids_of(1), "L")
    assert store.stats()["bypassed"]
    store.close()


def test_without_a_cache_nothing_is_substituted():
    for tier in (NullTier(), BrokenTier("get_many")):
        store = Store(CountingSource(N), tier, places=every_other_low(), substitution=LOW)
        store.begin_epoch(0)
        if isinstance(tier, BrokenTier):
            with pytest.warns(RuntimeWarning, match="bypassed"):
                check(store.serve([1, 3]), [1, 3])
        check(store.serve([1, 3]), [1, 3])


def test_arrays_that_are_missing_or_wrong_are_refused():
    source, tier = CountingSource(N), NullTier()
    with pytest.raises(ConfigError, match="needs places"):
        Store(source, tier, substitution=LOW)
    with pytest.raises(ConfigError, match="serves of shape"):
        Store(source, tier, substitution=NEIGHBOUR, stand_ins=StandIns.create(N + 1))
    with pytest.raises(ConfigError, match="places of shape"):
        Store(source, tier, places=SharedArray.create(N + 1, np.uint8))
    with pytest.raises(ConfigError, match="served of shape"):
        Store(source, tier, substitution=ANY, claims=Claims(claims_of(N + 1)))


# --- low by high ---


@pytest.fixture
def by_high():
    tier = tier_of(HighLow(start=0.5))
    made = Store(CountingSource(N), tier, places=every_other_low(), substitution=LOW_BY_HIGH)
    with made as store:
        yield store
        tier.arena.verify()


def test_a_low_sample_that_is_missing_is_served_by_a_high_one(by_high):
    fill(by_high, [1, 3, 2, 4, 6])
    by_high.begin_epoch(0)
    served = by_high.serve([7, 1, 2, 9, 11])
    check(served, served.ids)
    assert served.outcomes.tolist() == [SUBSTITUTED, HIT, HIT, SUBSTITUTED, SUBSTITUTED]
    assert set(served.ids[[0, 3, 4]]) <= {2, 4, 6}
    assert by_high.source.reads == []
    assert by_high.serve([2, 4, 6]).outcomes.tolist() == [HIT] * 3, "each has its turn as well"
    assert by_high.serve([8]).outcomes.tolist() == [FETCHED], "no high sample is replaced"


def test_high_ones_stand_in_as_often_as_needed_and_all_of_them(by_high):
    fill(by_high, [2, 4, 6])
    by_high.begin_epoch(0)
    missing = np.arange(1, N, 2)
    served = by_high.serve(missing).ids
    assert sorted(set(served)) == [2, 4, 6]
    assert np.bincount(served)[[2, 4, 6]].min() > len(missing) / 6


def test_without_high_ones_or_before_the_first_epoch_it_is_read(by_high):
    assert by_high.serve([7]).outcomes.tolist() == [FETCHED]
    by_high.begin_epoch(0)
    assert by_high.serve([9]).outcomes.tolist() == [FETCHED]


def test_high_ones_that_left_the_cache_do_not_stand_in(by_high):
    fill(by_high, [2, 4])
    by_high.begin_epoch(0)
    assert by_high.serve([7]).outcomes.tolist() == [SUBSTITUTED]
    by_high.discard([2, 4])
    served = by_high.serve([9, 11])
    check(served, [9, 11])
    assert served.outcomes.tolist() == [FETCHED] * 2


def test_what_came_in_since_the_epoch_began_stands_in_from_the_next_on(by_high):
    fill(by_high, [2])
    for epoch in range(2):
        by_high.begin_epoch(epoch)
        drawn = set(by_high.serve(np.arange(1, 101, 2)).ids)
        assert drawn == ({2} if epoch == 0 else {2, 4})
        fill(by_high, [4])


def test_low_ones_served_themselves_are_known_to_packages_and_turns_are_logged(by_high):
    claims = claims_of(accesses=4)
    fill(by_high, [1, 2])
    tier, places = Unclosed(by_high.tier), every_other_low()
    shared = {"places": places, "substitution": LOW_BY_HIGH, "claims": Claims(claims)}
    with Store(CountingSource(N), tier, **shared) as store:
        store.begin_epoch(0)
        turns = Turns(store.stamp, np.arange(4))
        assert store.serve([1, 7, 2, 9], turns=turns).ids.tolist() == [1, 2, 2, 2]
        assert np.flatnonzero(store.claims.served.array).tolist() == [1]
        assert store.claims.logged(0, 4, 0.0).tolist() == [1, 7, 2, 9]


def test_low_by_high_needs_places():
    with pytest.raises(ConfigError, match="low_by_high substitution needs places"):
        Store(CountingSource(N), tier_of(HighLow()), substitution=LOW_BY_HIGH)
