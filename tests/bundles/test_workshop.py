"""Repacking and loading, step by step, against a real arena and a real directory."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest
from bundles_bench import MIN_BYTES, NUM, SAMPLES, SIZES, Bench, CountingDepot

from stoker.bundles.workshop import Epoch, Loaded
from stoker.errors import SourceUnavailable
from stoker.source.held import MemorySource
from stoker.testing.sources import FaultySource

ALL = np.ones(NUM, np.bool_)
NONE = np.zeros(NUM, np.bool_)


def every_third() -> np.ndarray:
    low = NONE.copy()
    low[::3] = True
    return low


def test_packages_fill_the_region_and_no_further(bench: Bench) -> None:
    bench.begin(ALL)
    bench.settle()
    held = int(SIZES[bench.cached].sum())
    assert 2 * MIN_BYTES <= held <= 3 * MIN_BYTES
    assert np.array_equal(np.flatnonzero(bench.packaged), bench.cached)
    assert bench.count("package_bytes") == held
    bench.arena.verify()


def test_package_read_is_one_read(bench: Bench) -> None:
    bench.begin(ALL)
    seen = NONE.copy()
    while True:
        bench.settle()
        fresh = bench.cached[bench.served.array[bench.cached] < bench.stamp]
        if not fresh.size:
            break
        bench.serve(fresh)
        assert not seen[fresh].any()
        seen[fresh] = True
    assert seen.all()  # every sample came
    assert bench.count("package_reads") == bench.count("packages_built") > 10
    # The last package is filled up from the one before, which may have to be read for that.
    assert len(bench.depot.reads) - bench.count("package_reads") == bench.count("repack_reads") <= 1
    assert bench.source.reads.tolist() == [1] * NUM  # and was read once for its package
    assert bench.count("rebuild_reads") == NUM


def test_nothing_unserved_leaves_for_a_package(bench: Bench) -> None:
    bench.begin(ALL)
    bench.settle()
    before = bench.cached
    bench.serve(before[: len(before) // 2])
    bench.settle()
    assert np.isin(before[len(before) // 2 :], bench.cached).all()
    assert len(np.setdiff1d(bench.cached, before)) > 0


def test_a_region_of_one_package_waits_for_its_last_sample(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "p", low_bytes=MIN_BYTES + int(SIZES.max()) - 1)
    bench.begin(ALL)
    bench.settle()
    by_size = bench.cached[np.argsort(SIZES[bench.cached])]
    last = by_size[-2:]
    bench.serve(by_size[:-2])
    bench.settle()
    assert bench.count("package_reads") == 1
    bench.serve(last)
    bench.settle()
    assert bench.count("package_reads") == 2
    bench.close()


def test_repacking_reads_packages_and_not_the_source(bench: Bench) -> None:
    bench.begin(ALL)
    drain(bench)
    reads, packages = bench.source.reads.sum(), bench.count("packages_built")
    filled_up = bench.count("repack_reads")
    bench.begin(ALL)
    drain(bench)
    assert bench.source.reads.sum() == reads
    assert 0 < bench.count("repack_reads") - filled_up <= packages + 1  # each once


def drain(bench: Bench) -> None:
    """Serve everything of low importance, as it comes."""
    while True:
        bench.settle()
        fresh = bench.cached[bench.served.array[bench.cached] < bench.stamp]
        if not fresh.size:
            return
        bench.serve(fresh)


def test_samples_of_high_importance_drop_out(bench: Bench) -> None:
    bench.begin(ALL)
    drain(bench)
    bench.begin(every_third())
    drain(bench)
    served = np.flatnonzero(bench.served.array == bench.stamp)
    assert np.isin(np.flatnonzero(every_third()), served).all()
    homes = bench.workshop._catalogue.homes
    assert set(np.flatnonzero(homes).tolist()) == set(np.flatnonzero(every_third()).tolist())
    # What is of no use has left the depot, and nothing else.
    assert len(bench.depot.names()) == len(np.unique(homes[homes > 0]))
    assert not bench.packaged[~every_third()].any()


def test_the_missed_come_first(bench: Bench) -> None:
    bench.begin(every_third())
    drain(bench)
    missed = NONE.copy()
    missed[[1, 4, 7, 100]] = True  # in no package yet
    bench.begin(ALL, missed)
    bench.serve(bench.cached)
    bench.settle()
    assert bench.arena.contains(np.flatnonzero(missed)).all()


def test_missed_and_served_later_is_not_missed(bench: Bench) -> None:
    bench.begin(ALL)
    bench.settle()
    served, never = bench.cached[:3], np.setdiff1d(np.arange(NUM), bench.cached)[:3]
    bench.serve(served)
    missed = NONE.copy()
    missed[served] = missed[never] = True
    bench.arena.discard(np.arange(NUM))
    bench.begin(ALL, missed)
    first = bench.workshop._to_build[0]
    assert np.isin(never, first).all()
    assert np.array_equal(np.sort(first[:3]), never)


def test_all_high_or_none_low(bench: Bench) -> None:
    bench.begin(NONE)
    bench.settle()
    assert bench.cached.size == 0
    assert bench.count("packages_built") == 0
    assert bench.source.reads.sum() == 0


def test_fewer_low_samples_than_a_package(bench: Bench) -> None:
    low = NONE.copy()
    low[[5, 6, 7]] = True
    bench.begin(low)
    bench.settle()
    assert bench.cached.tolist() == [5, 6, 7]
    assert bench.count("packages_built") == 1


def test_what_others_claimed_or_cached_is_left_to_them(bench: Bench) -> None:
    low = NONE.copy()
    low[:20] = True
    ids = np.arange(20, dtype=np.uint32)
    from stoker.store.arena import Arena

    with Arena.attach(bench.arena.handle) as other:
        assert other.claim(ids[:5]).all()
        bench.arena.put_many(ids[5:8], [SAMPLES[n] for n in range(5, 8)], None, "H")
        bench.begin(low)
        bench.settle()
        assert not bench.arena.contains(ids[:5]).any()
        assert not bench.packaged[:8].any()
        assert bench.packaged[8:20].all()
        other.abandon(ids[:5])


def test_what_the_cache_refuses_is_not_flagged(bench: Bench) -> None:
    bench.begin(ALL)
    bench.settle()
    before = bench.cached
    bench.arena.lease(before, 0)  # as if somebody still copied them
    bench.serve(before)
    while bench.workshop.load() is Loaded.DONE:
        pass
    flagged = np.flatnonzero(bench.packaged)
    assert np.array_equal(flagged, bench.cached)
    bench.arena.verify()


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "gone", "foreign"])
def test_a_damaged_package_is_built_again(bench: Bench, damage: str) -> None:
    bench.begin(ALL)
    while bench.workshop.build():
        pass
    victims = sorted(bench.path.glob("*.pkg"))
    other = victims[0].read_bytes()
    for victim in victims:
        whole = bytearray(victim.read_bytes())
        if damage == "flip":
            whole[len(whole) // 2] ^= 1
            victim.write_bytes(whole)
        elif damage == "cut":
            victim.write_bytes(whole[:-1])
        elif damage == "empty":
            victim.write_bytes(b"")
        elif damage == "gone":
            victim.unlink()
        elif victim is not victims[0]:
            victim.write_bytes(other)
    drain(bench)
    assert (bench.served.array == bench.stamp).all()
    lost = bench.count("packages_lost")
    assert lost == len(victims) - (damage == "foreign")


def test_a_package_is_lost_while_another_is_built(bench: Bench) -> None:
    bench.begin(ALL)
    assert bench.workshop.build()
    for victim in bench.path.glob("*.pkg"):
        victim.unlink()
    build = bench.workshop._builder.build

    def meanwhile(ids: np.ndarray) -> object:
        bench.workshop._builder.build = build  # type: ignore[method-assign]
        assert bench.workshop.load() is Loaded.LOST
        return build(ids)

    bench.workshop._builder.build = meanwhile  # type: ignore[method-assign,assignment]
    drain(bench)
    assert (bench.served.array == bench.stamp).all()
    assert bench.count("packages_built") == bench.count("package_reads") + 1


@pytest.mark.parametrize("change", ["before", "after"])
def test_an_epoch_begins_while_a_package_is_built(bench: Bench, change: str) -> None:
    bench.begin(ALL)
    build = bench.workshop._builder.build

    def meanwhile(ids: np.ndarray) -> object:
        bench.workshop._builder.build = build  # type: ignore[method-assign]
        built = build(ids) if change == "after" else None
        bench.stamp += 1
        bench.low = every_third()
        bench.workshop.begin(Epoch(bench.stamp - 1, bench.stamp, bench.low), NONE)
        return built or build(ids)

    bench.workshop._builder.build = meanwhile  # type: ignore[method-assign,assignment]
    drain(bench)
    assert np.array_equal(np.flatnonzero(bench.served.array == bench.stamp), np.arange(0, NUM, 3))


def test_a_damaged_package_is_rebuilt_from_the_source_when_repacked(bench: Bench) -> None:
    bench.begin(ALL)
    drain(bench)
    bench.arena.discard(np.arange(NUM))
    for victim in bench.path.glob("*.pkg"):
        victim.write_bytes(victim.read_bytes()[:100])
    bench.begin(ALL)
    drain(bench)
    assert (bench.served.array == bench.stamp).all()
    # A few packages were still open from before.
    assert set(bench.source.reads.tolist()) <= {1, 2}
    assert bench.source.reads.sum() > 1.5 * NUM
    assert bench.count("packages_lost") > 10


def test_another_run_finds_the_packages(bench: Bench) -> None:
    bench.begin(ALL)
    drain(bench)
    bench.arena.discard(np.arange(NUM))
    bench.workshop = bench.another()
    (bench.path / f"{bench.job.group}-0123.pkg").write_bytes(b"left half written by hand")
    bench.workshop.adopt()
    reads = bench.source.reads.sum()
    bench.begin(ALL)
    drain(bench)
    assert bench.source.reads.sum() == reads
    assert (bench.served.array == bench.stamp).all()
    assert f"{bench.job.group}-0123.pkg" not in bench.depot.names()


def test_another_data_set_does_not_see_them(bench: Bench) -> None:
    bench.begin(ALL)
    drain(bench)
    mine = set(bench.depot.names())
    changed = Bench(bench.path, source=type(bench.source)(MemorySource([*SAMPLES[:-1], b"new"])))
    assert changed.job.group != bench.job.group
    changed.workshop.adopt()
    changed.begin(ALL)
    changed.settle()
    assert changed.count("rebuild_reads") > 0
    assert set(bench.depot.names()) == mine
    changed.close()


def test_an_epoch_gone_on_with_leaves_out_what_was_served(bench: Bench) -> None:
    bench.begin(ALL)
    bench.served.array[:250] = bench.stamp + 1
    bench.begin(ALL)
    bench.settle()
    assert bench.cached.size
    assert (bench.cached >= 250).all()


def test_a_full_depot_gives_up_its_oldest(bench: Bench) -> None:
    bench.begin(ALL)
    drain(bench)
    before = bench.depot.names()
    refuse_once(bench.depot)
    bench.begin(ALL)
    drain(bench)
    assert (bench.served.array == bench.stamp).all()
    assert not set(before) & set(bench.depot.names())


def refuse_once(depot: CountingDepot) -> None:
    publish = depot.publish

    def full(name: str, pieces: object) -> None:
        depot.publish = publish  # type: ignore[method-assign]
        raise OSError(errno.ENOSPC, "full")

    depot.publish = full  # type: ignore[method-assign,assignment]


def test_a_depot_that_stays_full_loses_nothing_but_packages(bench: Bench) -> None:
    bench.begin(ALL)
    bench.depot.error = OSError(errno.ENOSPC, "full")
    for _ in range(3):
        with pytest.raises(OSError, match="full"):
            bench.workshop.build()
    assert bench.workshop.load() is None
    bench.depot.error = None
    drain(bench)
    assert (bench.served.array == bench.stamp).all()


def test_a_storage_that_gives_up_is_asked_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "p")
    real = bench.source.read_packed

    def down(ids: object) -> object:
        raise SourceUnavailable("down")

    bench.source.read_packed = down  # type: ignore[method-assign,assignment]
    bench.begin(ALL)
    with pytest.raises(SourceUnavailable):
        bench.workshop.build()
    bench.source.read_packed = real  # type: ignore[method-assign]
    drain(bench)
    assert (bench.served.array == bench.stamp).all()
    bench.close()


def test_samples_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    bad = {3, 50, 299}
    bench = Bench(
        tmp_path / "p",
        source=FaultySource(MemorySource(SAMPLES), always=dict.fromkeys(bad, "not_found")),
    )
    bench.begin(ALL)
    drain(bench)
    unserved = np.flatnonzero(bench.served.array < bench.stamp)
    assert set(unserved.tolist()) == bad
    bench.begin(ALL)
    assert not np.isin(sorted(bad), np.concatenate(list(bench.workshop._to_build))).any()
    bench.close()


def test_l_cache_never_below_one_package_while_training(bench: Bench) -> None:
    bench.begin(ALL)
    bench.arena.resize_region("L", MIN_BYTES // 2)
    assert bench.workshop.build()
    assert bench.workshop.load() is Loaded.TOO_LARGE
    assert bench.depot.reads == []
    bench.arena.resize_region("L", 2 * MIN_BYTES)
    assert bench.workshop.load() is Loaded.DONE
    bench.arena.verify()


def test_loading_did_not_end_for_good_while_memory_was_lent(bench: Bench) -> None:
    bench.begin(ALL)
    bench.arena.limit(MIN_BYTES // 2)
    assert bench.workshop.build()
    assert bench.workshop.load() is Loaded.NO_ROOM
    bench.arena.limit(bench.arena.capacity_bytes)
    assert bench.workshop.load() is Loaded.DONE
    bench.arena.verify()
