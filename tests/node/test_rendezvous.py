"""A participant's own duties; many processes are in test_registry."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from support.waiting import until

from stoker.node import rendezvous
from stoker.node.runtime_dir import runtime_dir
from stoker.policy.baselines import LRU
from stoker.store.registry import open_arena

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


@pytest.fixture(autouse=True)
def own_runtime_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("STOKER_RUNTIME_DIR", str(tmp_path / "runtime"))


def open_one():
    return open_arena("data", 100, 1 << 20, 100, LRU().regions())


def test_it_announces_the_counters_of_the_moment():
    with open_one() as shared:
        path = next(runtime_dir().glob("*.sock"))
        for number in range(3):
            assert shared.arena.put(number, b"x")
            said, fds, _ = rendezvous.inquire(path)
            assert said.stats["entries"] == number + 1
            for fd in fds:
                fd.close()
        shared.arena.close()
        said, fds, _ = rendezvous.inquire(path)
        assert said.stats == {}
        for fd in fds:
            fd.close()


def test_a_child_neither_answers_nor_counts():
    shared = open_one()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)
        shared.close()
        os._exit(0)
    shared.close()
    assert [path.name for path in runtime_dir().iterdir()] == [".stoker"]
    with open_one() as again:
        assert again.created
        os.close(write)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert len(list(runtime_dir().iterdir())) == 4, "the child took them away"
    os.close(read)


def test_files_removed_under_it_do_no_harm():
    shared = open_one()
    for path in runtime_dir().iterdir():
        path.unlink()
    with open_one() as other:
        assert other.created
        shared.close()
        with open_one() as third:
            assert not third.created


def test_who_stands_in_a_crowd_keeps_its_place(monkeypatch):
    """Who asked again after a second was answered in vain, which made the crowd wait longer."""
    answered = []

    def answer_slowly(*arguments):
        time.sleep(0.1)
        answered.append(really_answer(*arguments))

    really_answer = rendezvous.answer
    with open_one() as shared, ThreadPoolExecutor(20) as crowd:
        monkeypatch.setattr(rendezvous, "answer", answer_slowly)
        joined = list(crowd.map(lambda _: open_one(), range(20)))
        assert not any(each.created for each in joined)
        assert len(answered) == len(joined)
        for each in joined:
            each.close()
        assert shared.arena.verify() is None


def test_standing_by_costs_next_to_nothing(monkeypatch):
    """The one who answers sleeps until it is asked; the other only looks now and then."""
    looks = []

    really_look = rendezvous.Participant._take_over

    def look(participant):
        looks.append((threading.get_native_id(), time.monotonic()))
        return really_look(participant)

    def slept():
        """Whether the one who answers was not awake while the other looked three times."""
        switches, end = switches_of(answering), len(looks) + 3
        until(lambda: len(looks) >= end)
        return switches_of(answering) == switches

    before = set(threading.enumerate())
    with open_one():
        [answering] = set(threading.enumerate()) - before
        monkeypatch.setattr(rendezvous.Participant, "_take_over", look)
        with open_one():
            until(slept)  # as soon as it has answered the other, who joined just now
    who, when = zip(*looks, strict=True)
    assert len(set(who)) == 1 and answering.native_id not in who
    # By the clock of poll, which counts milliseconds.
    assert np.diff(when).min() > rendezvous._TAKEOVER - 0.01


def switches_of(thread):
    """Return how often a thread has gone to sleep."""
    lines = Path(f"/proc/self/task/{thread.native_id}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt"))
