import multiprocessing
import os
import signal
import threading
from pathlib import Path

import pytest

from stoker.errors import ConfigError
from stoker.shared import private_arrays
from stoker.store.counters import Counters

METHODS = ("fork", "spawn", "forkserver")


def add_and_wait(counters, ready, amount):
    for _ in range(100):
        counters.add(hits=amount)
    ready.put(True)
    if amount == 7:
        signal.pause()


def test_it_sums_what_was_added():
    counters = Counters(["hits", "seconds"])
    counters.add(hits=2, seconds=0.5)
    counters.add(hits=1)
    assert counters.totals() == {"hits": 3, "seconds": 0.5}


def test_a_private_table_counts_for_its_process():
    with private_arrays():
        counters = Counters(["hits"])
    counters.add(hits=2)
    assert counters.totals() == {"hits": 2}


def test_threads_lose_nothing():
    counters = Counters(["hits"])
    threads = [
        threading.Thread(target=lambda: [counters.add(hits=1) for _ in range(5000)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters.totals() == {"hits": 20_000}


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("method", METHODS)
def test_processes_count_into_one_table_and_counts_survive_them(method):
    context = multiprocessing.get_context(method)
    counters, ready = Counters(["hits"]), context.SimpleQueue()
    counters.add(hits=1)
    amounts = (1, 2, 7)
    children = [context.Process(target=add_and_wait, args=(counters, ready, a)) for a in amounts]
    for child in children:
        child.start()
    for _ in children:
        ready.get()
    children[-1].kill()
    for child in children:
        child.join()
    assert counters.totals() == {"hits": 1001}


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_rows_of_ended_processes_are_used_again():
    context = multiprocessing.get_context("fork")
    counters, ready = Counters(["hits"], rows=2), context.SimpleQueue()
    counters.add(hits=1)
    for _ in range(5):
        child = context.Process(target=add_and_wait, args=(counters, ready, 1))
        child.start()
        child.join()
    assert counters.totals() == {"hits": 501}


def test_a_child_does_not_hold_its_parents_row():
    counters = Counters(["hits"], rows=1)
    started, go_on = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:  # takes the row, forks, and ends before its own child does
        counters.add(hits=1)
        if os.fork() == 0:
            os.close(go_on[1])
            os.write(started[1], b"x")
            os.read(go_on[0], 1)
        else:
            os.read(started[0], 1)
        os._exit(0)
    os.waitpid(child, 0)
    counters.add(hits=1)  # a warning here would be an error
    for fd in (*go_on, *started):
        os.close(fd)
    assert counters.totals() == {"hits": 2}


def test_without_a_free_row_a_process_warns_and_counts_for_itself():
    first = Counters(["hits"], rows=1)
    first.add(hits=1)
    second = object.__new__(Counters)
    second.__setstate__(first.__getstate__())
    with pytest.warns(RuntimeWarning, match="missing from the shared statistics: all 1 rows"):
        second.add(hits=5)
    assert first.totals() == {"hits": 1}
    assert second.totals() == {"hits": 6}


def test_collected_counters_close_their_descriptors():
    before = sum(1 for _ in Path("/proc/self/fd").iterdir())
    for _ in range(3):
        Counters(["hits"]).add(hits=1)
    assert sum(1 for _ in Path("/proc/self/fd").iterdir()) == before


def test_bad_arguments_are_refused():
    for fields, rows in (([], 1), (["a", "a"], 1), (["a"], 0)):
        with pytest.raises(ConfigError, match="give distinct names"):
            Counters(fields, rows)
    with pytest.raises(KeyError):
        Counters(["hits"]).add(misses=1)
