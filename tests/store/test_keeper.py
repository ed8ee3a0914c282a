"""The keeper's own duties; many processes are in test_registry."""

import os
import time

import pytest

from stoker.policy.lru import LRU
from stoker.store import handshake
from stoker.store.registry import open_arena
from stoker.store.runtime_dir import runtime_dir

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
            said, fds, _ = handshake.inquire(path)
            assert said.stats["entries"] == number + 1
            for fd in fds:
                fd.close()
        shared.arena.close()
        said, fds, _ = handshake.inquire(path)
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


def test_standing_by_costs_next_to_nothing():
    with open_one(), open_one():
        begin = time.process_time()
        time.sleep(1.0)
        assert time.process_time() - begin < 0.05
