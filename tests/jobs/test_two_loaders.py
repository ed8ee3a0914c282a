"""Loaders of several jobs over one cache, in one process and in several."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.caches import gathered
from support.parts import number_of, numbers
from support.processes import warm
from support.waiting import await_true, train_step, until

from jobs.telling_source import TellingSource
from stoker import Cache, recipes
from stoker.jobs import Sharing
from stoker.jobs.board import Kind
from stoker.jobs.survey import survey
from stoker.pytorch import Loader, SampleDataset
from stoker.testing.sources import SlowSource

NUM = 200


def loader(recipe: Any = "belady", seed: int = 0, **options: Any) -> Loader:
    options = {"batch_size": 10, "cache": "20%", "prefetch": 0} | options
    dataset = SampleDataset(numbers(NUM), number_of)
    return Loader(dataset, recipe=recipe, seed=seed, **gathered(options))


def arena_of(one: Loader) -> Any:
    assert one.cache is not None
    return one.cache.store.tier.arena  # type: ignore[attr-defined]


def keys_of(one: Loader) -> dict[int, float]:
    arena = arena_of(one)
    ids = np.flatnonzero(arena.contains(np.arange(NUM))).astype(np.uint32)
    return dict(zip(ids.tolist(), arena.keys(ids).tolist(), strict=True))


def together(loaders: list[Loader], epochs: int, shown: Any = None) -> list[list[list[int]]]:
    """Iterate them in turn, a batch each; return the samples of each epoch of each."""
    seen: list[list[list[int]]] = [[] for _ in loaders]
    for _ in range(epochs):
        iterators: list[Iterator[Any]] = [iter(each) for each in loaders]
        for of in seen:
            of.append([])
        going = dict(enumerate(iterators))
        while going:
            for number, iterator in list(going.items()):
                batch = next(iterator, None)
                if batch is None:
                    del going[number]
                    continue
                seen[number][-1] += batch.tolist()
                if shown is not None:
                    loaders[number].observe(shown(number, batch))
    return seen


def test_alone_keys_are_those_of_the_policy() -> None:
    found = []
    for sharing in (Sharing(), Sharing(merge=False)):
        with loader(sharing=sharing) as one:
            together([one], 3)
            found.append((keys_of(one), [each.hits for each in one.epoch_stats]))
    assert found[0] == found[1]


def test_a_job_that_comes_and_goes_leaves_the_keys_of_one() -> None:
    with loader() as one:
        together([one], 1)
        with loader(seed=1) as other:
            together([one, other], 1)
        iterator = iter(one)
        for _ in range(3):
            next(iterator)
        member = one._session.setup.member
        assert member is not None
        until(lambda: not member.others)
        next(iterator)
        plan = one._session.controller.planner.plan(one._session.controller.walk.start)  # type: ignore[union-attr]
        # A copy outside keeps its key of the next access, one passed by has that after it.
        keys = keys_of(one)
        first = plan.first_use(NUM)
        for sample, key in keys.items():
            at = first[sample]
            places = [at] if at >= 40 else [at, plan.next_use[at]]
            assert key in [-(plan.start + place) for place in places], sample


def test_the_keys_of_two_jobs_are_the_sooner_next_use() -> None:
    with ExitStack() as stack:
        jobs = [stack.enter_context(loader(seed=seed)) for seed in range(2)]
        together(jobs, 2)
        board = jobs[0]._session.setup.member._board  # type: ignore[union-attr]
        assert board.kind is Kind.TIME
        assert len(board.owners()) == 2
        iterators = [iter(each) for each in jobs]
        for iterator in iterators:
            next(iterator)
        policies = [each._session.setup.policy for each in jobs]
        ids = np.arange(NUM, dtype=np.uint32)
        plans = [each._session.controller._followed for each in jobs]
        merged = [p.keys_now(ids, None, plan) for p, plan in zip(policies, plans, strict=True)]
        assert merged[0] is not None
        assert merged[1] is not None
        # Both see the same order, whoever computes it, but for the time that passes in between.
        assert np.abs((merged[0] - merged[1]) - np.median(merged[0] - merged[1])).max() < 0.5
        slots = board.owners()
        rates = board.rates(slots)
        assert (rates > 0).all(), "the pace of both is known since their first epochs"
        ahead = board.positions(slots, ids) - board.jobs["position"][slots][:, None]
        waits = (ahead / rates[:, None]).min(axis=0)
        order = np.argsort(-waits, kind="stable")
        assert np.corrcoef(np.argsort(order), np.argsort(np.argsort(merged[0])))[0, 1] > 0.99


def test_two_jobs_hit_more_together_than_alone() -> None:
    def hits(sharing: Sharing) -> float:
        with ExitStack() as stack:
            jobs = [stack.enter_context(loader(seed=seed, sharing=sharing)) for seed in range(4)]
            together(jobs, 4)
            return float(np.mean([each.epoch_stats[-1].hit_ratio for each in jobs]))

    merged, apart = hits(Sharing()), hits(Sharing(merge=False))
    assert merged > 0.35  # LRU would give .2
    assert merged > apart + 0.05


def test_each_job_gets_its_own_epoch_whole() -> None:
    with ExitStack() as stack:
        jobs = [stack.enter_context(loader(seed=seed)) for seed in range(3)]
        for epochs in together(jobs, 2):
            for epoch in epochs:
                assert sorted(epoch) == list(range(NUM))


@pytest.mark.filterwarnings("ignore:the recipe goes by validation accuracy")
@pytest.mark.parametrize("recipe", ["icache", "shade"])
def test_score_jobs_share_and_each_serves_each_sample_once(recipe: str) -> None:
    params = {"warm_up": 1, "full_every": 2, "package_bytes": 100} if recipe == "icache" else {}
    made = getattr(recipes, recipe)(**params)

    def losses(number: int, batch: Any) -> Any:
        # Two models that find opposite samples hard.
        return batch.float() + 1 if number else NUM - batch.float()

    with ExitStack() as stack:
        jobs = [stack.enter_context(loader(made, seed, epochs=4, cache="40%")) for seed in range(2)]
        seen = together(jobs, 4, losses)
        board = jobs[0]._session.setup.member._board  # type: ignore[union-attr]
        assert board.kind is Kind.SCORE
        values = board.value[board.owners()]
        known = (values > 0).all(axis=0)
        assert np.corrcoef(values[0, known], values[1, known])[0, 1] < -0.8
        if recipe == "icache":
            for epochs in seen:
                for epoch in epochs:
                    assert len(set(epoch)) == len(epoch)
        for each in jobs:
            stats = each.stats
            assert stats.bypassed == 0
            told = stats.hits + stats.substituted + stats.fetched + stats.packaged
            assert told == stats.accesses
        arena_of(jobs[0]).verify()


OTHER = """
import signal, sys
sys.path.insert(0, sys.argv[1])
from jobs.test_two_loaders import loader
one = loader(seed=7)
iterator = iter(one)
next(iterator)
print("there", flush=True)
signal.pause()
"""


def test_a_killed_job_stops_counting_and_keys_are_written_anew() -> None:
    tests = str(Path(__file__).parents[1])
    with loader() as one:
        together([one], 1)
        other = subprocess.Popen(
            [sys.executable, "-c", OTHER, tests], stdout=subprocess.PIPE, text=True
        )
        assert other.stdout is not None
        with other.stdout:
            assert other.stdout.readline() == "there\n"
            member = one._session.setup.member
            assert member is not None
            iterator = iter(one)
            next(iterator)
            assert len(member.others) == 1
            in_seconds = keys_of(one)
            other.send_signal(signal.SIGKILL)
            other.wait()
        until(lambda: not member.others)
        next(iterator)
        in_accesses = keys_of(one)
        # Times of a program seconds old are small; places in its third epoch are not.
        assert min(in_seconds.values()) > -NUM
        assert max(in_accesses.values()) <= -NUM


def test_a_probe_reads_past_the_cache_at_an_epochs_start() -> None:
    with loader("minio", cache="100%", sharing=Sharing("probed", probe=4)) as one:
        together([one], 5)
        # Of 20 batches of 10 the first 4 are read past the cache, also when all is cached.
        assert one.epoch_stats[-1].fetched == 40
        assert [each.accesses for each in one.epoch_stats] == [NUM] * 5
        [cache] = [cache for cache in survey() if cache.jobs]
        assert cache.jobs[0].name == "probed"
        assert cache.jobs[0].probed
        assert cache.jobs[0].benefit >= 1


def slow_loader(rate: float, **options: Any) -> tuple[Loader, TellingSource]:
    """A loader with prefetch over storage that gives so many samples a second."""
    source = TellingSource(numbers(600), rate)
    options = {"batch_size": 10, "cache": "20%", "seed": 3, "prefetch": "1MiB"} | options
    dataset = SampleDataset(source, number_of)
    return Loader(dataset, recipe="minio", **gathered(options)), source


def benefit_of(name: str) -> float:
    [job] = [job for cache in survey() for job in cache.jobs if job.name == name]
    return job.benefit


@pytest.mark.parametrize("num_workers", [0, 2])
def test_s4_a_probe_measures_what_the_cache_gains_and_nothing_else(
    num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the storage's own clock, which stands still while it is asked for nothing."""
    sharing, rate = Sharing("probed", probe=20), 1000.0
    one, source = slow_loader(rate, cache="40%", sharing=sharing, num_workers=num_workers)
    with one:
        together([one], 1)
        assert benefit_of("probed") >= 1
        member = one._session.setup.member
        assert member is not None
        monkeypatch.setattr(member._board, "clock", lambda: source.given.array[0] / rate)
        together([one], 2)
        hits = one.epoch_stats[-1].hits / 400  # of the 60 batches, 20 are read past the cache
        assert 0.3 < hits < 0.5
        # Workers are up to 2 batches each ahead of the block of 20 that is measured.
        within = 0.1 + 2 * num_workers / 20 / 2
        assert benefit_of("probed") == pytest.approx(1 / (1 - hits), rel=within)
        assert source.given.array[0] == one.stats.fetched, "nothing is read in vain"


@pytest.mark.parametrize("compute", [0.0, 0.01025])
def test_s4_the_estimate_counts_what_is_read_ahead_and_stays(compute: float) -> None:
    """Fast loops wait for storage; the slow one did, until the cache made up for it."""
    rate = 400.0
    sharing = Sharing("measured")
    one, source = slow_loader(rate, cache="25%", sharing=sharing, num_workers=1, batch_size=5)
    with one:
        seen = []
        for epoch in range(3):
            began = time.monotonic()
            for number, _ in enumerate(one):
                train_step(compute)
                if epoch == 2 and number % 20 == 19:
                    seen.append(benefit_of("measured"))
            batch_seconds = (time.monotonic() - began) / 120
        # The storage is never faster than that, and never busier than all the time.
        least, most = 5 / rate / batch_seconds, 1 / (1 - one.epoch_stats[-1].hit_ratio)
        assert all(0.9 * least <= benefit <= 1.1 * most for benefit in seen), (least, seen, most)
        assert one.cache is not None
        totals = one.cache.store.totals

        def read() -> float:
            counted = totals()
            return float(counted["read"] + counted["read_ahead"])

        # What is on its way as the loop ends has been given, and is counted once it is there.
        assert await_true(lambda: read() == source.given.array[0]), (read(), source.given.array[0])
        counted = totals()
        assert counted["read_ahead"] > 0
        assert counted["ahead_seconds"] >= 0.99 * counted["read_ahead"] / rate


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("recipe", ["quiver", "icache"])
def test_s2_samples_read_past_the_cache_are_served_in_the_epoch(recipe: str, workers: int) -> None:
    made = recipes.icache(parts="iis+hc+lc", warm_up=9, package_bytes=100)
    made = made if recipe == "icache" else recipes.get(recipe)
    options: dict[str, Any] = {"sharing": Sharing(probe=4), "cache": "40%", "num_workers": workers}
    with loader(made, **options) as one:
        for _ in range(5):
            seen = [(batch.tolist(), one.observe(batch.float())) for batch in one]
            assert sorted(i for batch, _ in seen for i in batch) == list(range(NUM))
        assert one.stats.substituted


def test_only_the_job_that_came_first_arranges_the_cache() -> None:
    made = recipes.icache(warm_up=1, full_every=2, package_bytes=100)
    with ExitStack() as stack:
        first = stack.enter_context(loader(made, 0, epochs=3, cache="40%"))
        second = stack.enter_context(loader(made, 1, epochs=3, cache="40%"))
        iter(first)
        iter(second)
        members = [each._session.setup.member for each in (first, second)]
        assert [member.arranges for member in members if member is not None] == [True, False]
        first.close()
        second_member = members[1]
        assert second_member is not None
        until(lambda: second_member.arranges)


def read_slowly(source: SlowSource) -> None:
    with Loader(SampleDataset(source, number_of), 10, cache=Cache("100%", prefetch=0)) as one:
        for _ in one:
            pass


def test_a_job_killed_while_another_waits_for_what_it_reads() -> None:
    source = SlowSource(numbers(20), latency=1.5, tail=0.0)
    other = warm.Process(target=read_slowly, args=(source,))
    other.start()
    until(source.reads.sum)  # it has claimed a batch and reads it
    assert other.is_alive()
    killer = threading.Timer(0.5, other.kill)
    with Loader(SampleDataset(source, number_of), 10, cache=Cache("100%", prefetch=0)) as one:
        iterator = iter(one)
        killer.start()
        got = [batch.tolist() for batch in iterator]
    killer.join()
    other.join()
    assert other.exitcode == -signal.SIGKILL
    assert sorted(i for batch in got for i in batch) == list(range(20))
    assert one.stats.bypassed == 0
    # Both have the same seed, so the first batch was claimed by the dead job and read again.
    assert source.reads[got[0]].tolist() == [2] * 10
    assert source.reads[got[1]].tolist() == [1] * 10
