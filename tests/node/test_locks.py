import os

import pytest

from stoker.node.locks import try_lock, unlock


@pytest.fixture
def openings(tmp_path):
    path = tmp_path / "lock"
    path.touch()
    fds = [os.open(path, os.O_RDWR) for _ in range(2)]
    yield fds
    for fd in fds:
        os.close(fd)


def test_two_openings_in_one_process_exclude_each_other(openings):
    first, second = openings
    assert try_lock(first)
    assert try_lock(first), "the same opening again"
    assert not try_lock(second)
    unlock(first)
    assert try_lock(second)


def test_shared_locks_exclude_only_exclusive_ones(openings):
    first, second = openings
    assert try_lock(first, shared=True)
    assert try_lock(second, shared=True)
    assert not try_lock(first)
    unlock(second)
    assert try_lock(first), "from shared to exclusive in one step"
    assert not try_lock(second, shared=True)


def test_bytes_are_locked_one_by_one(openings):
    first, second = openings
    assert try_lock(first, start=3, length=1)
    assert not try_lock(second, start=3, length=1)
    assert try_lock(second, start=4, length=1)


def test_a_bad_descriptor_is_an_error():
    with pytest.raises(OSError, match="Bad file descriptor"):
        try_lock(10_000)
