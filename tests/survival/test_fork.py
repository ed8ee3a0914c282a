"""Forks in the middle of everything: parent, child and strangers stay apart and go on."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from stoker.policy import S3FIFO
from stoker.store.arena import Arena
from survival.payloads import NUM_IDS, packed, sample, wrong
from survival.support import check_nothing_is_lost, die_with_parent, holders_of, inode, new_arena

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")

# A child copies the lock of coverage's tracer as another thread holds it.
untraced = pytest.mark.skipif(sys.gettrace() is not None, reason="not beside coverage's tracer")

_FORKS = 40
_PATIENCE = 20


def _fork(child: Callable[[], None]) -> int:
    """Run ``child`` in a forked process, and return its id. It ends with status 0 if all is well.

    A child that hangs ends itself, with the stacks of its threads on stderr.
    """
    pid = os.fork()
    if pid:
        return pid
    try:
        die_with_parent()
        faulthandler.dump_traceback_later(_PATIENCE, exit=True)
        child()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def _wait(pid: int) -> None:
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _use(arena: Arena, rounds: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(rounds):
        ids = rng.integers(0, NUM_IDS, 30).astype(np.uint32)
        got = arena.get_many(ids)
        assert not wrong(ids, got)
        own = arena.claim(ids)
        arena.put_many(ids[own], [sample(id) for id in ids[own]])
        arena.abandon(ids[own])


@contextmanager
def _busy(arena: Arena, threads: int) -> Iterator[None]:
    """Have threads use an arena until the block ends."""
    over = threading.Event()
    failed: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            while not over.is_set():
                _use(arena, 5, seed)
        except BaseException as error:
            failed.append(error)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(threads)]
    for worker in workers:
        worker.start()
    try:
        yield
    finally:
        over.set()
        for worker in workers:
            worker.join()
    assert not failed


@untraced
def test_forks_of_a_parent_whose_threads_are_inside() -> None:
    arena = new_arena(S3FIFO().regions())
    memory = inode(arena)
    with _busy(arena, threads=3):
        for seed in range(_FORKS):
            children = [_fork(lambda seed=seed: _use(arena, 20, seed)) for _ in range(2)]
            _use(arena, 5, seed)
            for child in children:
                _wait(child)
    assert arena.stats()["repairs"] == 0
    check_nothing_is_lost(arena)
    arena.close()
    assert holders_of(memory) == []


@untraced
def test_forks_while_another_thread_puts() -> None:
    """The child uses at once what the other thread of its parent was changing."""
    arena = new_arena()
    over = threading.Event()
    ids = np.arange(NUM_IDS, dtype=np.uint32)
    data, offsets = packed(ids)

    def put() -> None:
        while not over.is_set():
            arena.put_many(ids, (data, offsets))

    def child() -> None:
        assert not wrong(ids, arena.get_many(ids))
        arena.put_many(ids, (data, offsets))
        assert not wrong(ids, arena.get_many(ids))
        arena.stats()

    thread = threading.Thread(target=put)
    thread.start()
    try:
        for _ in range(_FORKS):
            _wait(_fork(child))
    finally:
        over.set()
        thread.join()
    assert arena.stats()["repairs"] == 0
    check_nothing_is_lost(arena)
    arena.close()


def test_a_child_does_not_own_what_its_parent_claimed() -> None:
    with new_arena() as arena:
        assert arena.claim([1]).all()

        def child() -> None:
            assert not arena.claim([1]).any()
            arena.abandon([1])
            assert not arena.put(1, sample(1))
            assert not arena.wait([1], 0.1).any()
            assert arena.claim([2]).all()

        _wait(_fork(child))
        assert arena.put(1, sample(1))
        assert arena.claim([2]).all(), "the child is gone"


def _parent(arena: Arena, ready: int) -> None:
    """Claim, fork a child that claims on and outlives this process."""
    assert arena.claim([1, 2]).all()
    if os.fork() == 0:
        faulthandler.dump_traceback_later(_PATIENCE, exit=True)
        assert arena.claim([3, 4]).all()
        assert arena.lease([3], 1)
        os.write(ready, str(os.getpid()).encode())
        signal.pause()
    signal.pause()


def test_a_parent_that_dies_takes_only_its_own_claims_along() -> None:
    with new_arena() as arena:
        receive, ready = os.pipe()
        parent = os.fork()
        if parent == 0:
            _parent(arena, ready)
            os._exit(1)
        try:
            orphan = int(os.read(receive, 20))
            assert not arena.claim([1, 2, 3, 4]).any()
            os.kill(parent, signal.SIGKILL)
            os.waitpid(parent, 0)
            arena.reclaim()
            assert arena.stats()["reclaimed"] == 2
            assert arena.claim([1, 2, 3, 4]).tolist() == [True, True, False, False]
            os.kill(orphan, signal.SIGKILL)
            assert arena.wait([3, 4], 10).tolist() == [False, False]
            assert arena.claim([3, 4]).all()
            arena.verify()
        finally:
            os.close(receive)
            os.close(ready)


def test_a_child_goes_on_when_its_parent_closes() -> None:
    arena = new_arena()
    memory = inode(arena)
    arena.put_many([1, 2], [sample(1), sample(2)])
    closed, close = os.pipe()

    def child() -> None:
        os.read(closed, 1)
        assert arena.get(1) == sample(1).tobytes()
        _use(arena, 20, 1)
        arena.verify()
        arena.close()
        assert not [path for path in holders_of(memory) if path.startswith(f"/proc/{os.getpid()}/")]

    pid = _fork(child)
    arena.close()
    assert [path for path in holders_of(memory) if not path.startswith(f"/proc/{pid}/")] == []
    os.write(close, b".")
    _wait(pid)
    os.close(closed)
    os.close(close)
    assert holders_of(memory) == []
