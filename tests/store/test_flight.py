"""What single flight owes when somebody is interrupted, killed or stopped."""

import multiprocessing
import os
import signal
import threading
import time

import numpy as np
import pytest
from support.doubles import CountingSource, check, lru_tier, sample_of
from support.waiting import some_time, until

from stoker.store.flight import Flight, Upstream
from stoker.store.store import Store
from store.test_memory_tier import native_tier

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
FORK = multiprocessing.get_context("fork")


def ids(*values):
    return np.array(values, np.uint32)


def test_it_reports_where_each_sample_lies():
    tier = lru_tier()
    tier.claim(ids(3))
    flight = Flight(Upstream(CountingSource(bad=[4])), tier, ids(2, 3, 4), None, 0.0)
    flight.run()
    for slot, i in enumerate((2, 3)):
        packed = flight.parts[flight.part[slot]]
        start, end = packed.offsets[flight.index[slot] :][:2]
        assert packed.data[start:end].tobytes() == sample_of(i)
    assert list(flight.errors) == [2]
    assert flight.source_seconds > 0


def test_an_interrupt_just_after_claiming_gives_the_claims_back():
    tier = lru_tier()
    claim = tier.claim

    def interrupted(wanted):
        claim(wanted)
        raise KeyboardInterrupt

    tier.claim = interrupted
    with pytest.raises(KeyboardInterrupt):
        Flight(Upstream(CountingSource()), tier, ids(1, 2), None, 0.0).run()
    assert claim(ids(1, 2)).all()


def test_waiting_can_be_interrupted():
    store = Store(CountingSource(), native_tier(100, 10_000), wait_seconds=30)
    with store:
        child = FORK.Process(target=claim_and_pause, args=(store,), daemon=True)
        child.start()
        until(lambda: is_claimed(store))
        # A test run in the background of a shell was started with the signal ignored.
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        begin = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            store.serve([1, 2])
        signal.signal(signal.SIGINT, handler)
        assert time.monotonic() - begin < 5
        child.kill()
        child.join()
        check(store.serve([2, 1]), [2, 1])
        store.tier.arena.verify()


def is_claimed(store):
    if store.tier.claim(ids(1))[0]:
        store.tier.abandon(ids(1))
        return False
    return True


def claim_and_pause(store):
    until(lambda: store.tier.claim(ids(1))[0])  # the test may be looking just now
    signal.pause()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_claimant_that_is_killed_or_stopped_costs_a_bounded_wait(how):
    with Store(CountingSource(), native_tier(100, 10_000), wait_seconds=1.0) as store:
        child = FORK.Process(target=claim_and_pause, args=(store,))
        child.start()
        until(lambda: is_claimed(store))
        os.kill(child.pid, how)
        begin = time.monotonic()
        check(store.serve([1, 2]), [1, 2])
        assert time.monotonic() - begin < 5
        child.kill()
        child.join()
        check(store.serve([1]), [1])
        assert store.serve([1, 2]).outcomes.tolist() == [0, 0]
        store.tier.arena.verify()


def serve_for_ever(store, seed):
    random = np.random.default_rng(seed)
    while True:
        wanted = random.integers(0, 1000, 32).tolist()
        check(store.serve(wanted), wanted)


def test_workers_killed_at_any_moment_leave_a_working_cache():
    with Store(CountingSource(), native_tier(1000, 10_000), wait_seconds=5) as store:
        survivor = FORK.Process(target=serve_for_ever, args=(store, 0))
        survivor.start()
        for seed in range(1, 25):
            worker = FORK.Process(target=serve_for_ever, args=(store, seed))
            worker.start()
            some_time(0.01, 0.06)
            worker.kill()
            worker.join()
        assert survivor.is_alive(), "it met wrong bytes or an error"
        survivor.kill()
        survivor.join()
        begin = time.monotonic()
        for first in range(0, 1000, 50):
            wanted = list(range(first, first + 50))
            check(store.serve(wanted), wanted)
        assert time.monotonic() - begin < 20
        stats = store.stats()
        # Who is killed while it counts a batch leaves that batch half counted.
        killed = 25 * 32
        assert abs(stats["accesses"] - stats["hits"] - stats["fetched"]) <= killed
        store.tier.arena.verify()
