"""A cache that the users of a group share: who gets what, and what a hostile member can do."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import mmap
import multiprocessing
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.groups import (
    CLASSES,
    PER_CLASS,
    act_as_member,
    files_of,
    joining,
    make_folder,
    needs_group,
    proved,
    read_for,
    serving,
    told,
)
from support.users import OTHER, as_other, begin_as_other, needs_two_users
from support.waiting import until

from stoker.errors import ConfigError
from stoker.jobs import group_cache
from stoker.jobs.group_cache import GroupCache, GroupCaches
from stoker.jobs.group_files import GroupFiles, SharedFolder
from stoker.jobs.protocol import ask
from stoker.jobs.quotas import Quota
from stoker.jobs.service import Service, ServiceSettings
from stoker.pool import group_pool
from stoker.pool.group_pool import GroupPool
from stoker.source.packed import unpack
from stoker.store.tier import Found


@pytest.fixture(autouse=True)
def _leave() -> Iterator[None]:
    """Close the pools of a test when it ends."""
    yield
    for pool in list(group_pool._LIVE):
        pool.close()


THIRD = OTHER + 1
EVERY = np.arange(CLASSES * PER_CLASS, dtype=np.uint32)


@pytest.fixture
def root(place: Path) -> Path:
    """Class folders that every user can read."""
    return make_folder(place)


def whole(root: Path, found: Found) -> bool:
    """Whether what was found is what is in the files, or nothing."""
    got = unpack(*found.samples)
    return all(
        sample == (data if is_there else b"")
        for sample, data, is_there in zip(got, files_of(root).read(EVERY), found.found, strict=True)
    )


# --- sharing ---


@needs_two_users
@needs_group
def test_what_one_user_had_read_another_has_without_a_read(place: Path, root: Path) -> None:
    def first() -> None:
        found = GroupPool(place / "s.sock", files_of(root)).find(EVERY)
        assert found.found.all()
        assert found.fetched.all()
        assert whole(root, found)

    def second() -> None:
        pool = GroupPool(place / "s.sock", files_of(root))
        found = pool.find(EVERY)
        assert found.found.all()
        assert not found.fetched.any()
        assert whole(root, found)
        assert pool.stats()["pool_hits"] == len(EVERY)

    with serving(place, str(root)):
        act_as_member(OTHER, first)
        act_as_member(THIRD, second)
        assert read_for(OTHER) == len(EVERY)
        assert read_for(THIRD) == 0


@needs_group
def test_processes_that_ask_at_once_have_each_file_read_once(place: Path, root: Path) -> None:
    def member(number: int, into: Any) -> None:
        pool = GroupPool(place / "s.sock", files_of(root))
        mine = np.random.default_rng(number).permutation(EVERY)
        found = [pool.find(mine[at : at + 5]) for at in range(0, len(mine), 5)]
        assert all(each.found.all() for each in found)
        into.put(sum(int(each.fetched.sum()) for each in found))

    with serving(place, str(root)):
        context = multiprocessing.get_context("fork")
        queue = context.Queue()
        members = [context.Process(target=member, args=(n, queue)) for n in range(4)]
        for each in members:
            each.start()
        counts = [queue.get(timeout=60) for _ in members]
        for each in members:
            each.join()
        assert sum(counts) == len(EVERY)
        assert read_for(os.geteuid()) == len(EVERY)


@needs_group
def test_a_full_cache_keeps_what_it_has_and_nothing_is_read_in_vain(
    place: Path, root: Path
) -> None:
    with serving(place, f"{root}=50%"):
        pool = GroupPool(place / "s.sock", files_of(root))
        first = pool.find(EVERY)
        assert 0 < first.found.sum() < len(EVERY)
        assert np.array_equal(first.found, first.fetched)
        pool._full_until = 0.0
        again = pool.find(EVERY)
        assert np.array_equal(again.found, first.found)
        assert not again.fetched.any()
        assert read_for(os.geteuid()) == first.found.sum()
        (cache,) = told()
        assert cache["payload_bytes"] <= cache["capacity_bytes"]


@needs_group
def test_a_forked_child_has_connections_of_its_own(place: Path, root: Path) -> None:
    with serving(place, str(root)):
        pool = GroupPool(place / "s.sock", files_of(root))
        assert pool.find(EVERY[:3]).fetched.all()
        child = begin_child(
            lambda: pool.find(EVERY[:6]).fetched.tolist() == [False] * 3 + [True] * 3
        )
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert pool.find(EVERY[:9]).fetched.tolist() == [False] * 6 + [True] * 3


def begin_child(test: Any) -> int:
    child = os.fork()
    if child == 0:
        status = 1
        with contextlib.suppress(BaseException):
            status = 0 if test() else 1
        os._exit(status)
    return child


@needs_group
def test_who_forgets_it_leaves(place: Path, root: Path) -> None:
    """Its connections stayed, and counted as those of the user, until the process ended."""

    def connections() -> int:
        found = 0
        for file in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # that of looking, for one
                found += str(file.readlink()).startswith("socket:")
        return found

    with serving(place, str(root)):
        gc.collect()
        before = connections()
        pool = GroupPool(place / "s.sock", files_of(root))
        assert pool.find(EVERY).found.all()
        assert connections() > before
        del pool
        gc.collect()
        until(lambda: connections() <= before)  # the service's end, too


@needs_group
def test_files_that_were_replaced_get_a_new_cache(
    place: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_cache, "_LOOK_AGAIN", 0.0)
    with serving(place, str(root)):
        old = GroupPool(place / "s.sock", files_of(root))
        assert old.find(EVERY).found.all()
        changed = root / "class1" / "0.jpg"
        changed.write_bytes(b"x" * changed.stat().st_size)
        new = GroupPool(place / "s.sock", files_of(root))
        until(lambda: new.find(EVERY).found.all())
        assert whole(root, new.find(EVERY))


# --- who may ---


@needs_two_users
@needs_group
def test_who_is_not_in_the_group_gets_nothing(place: Path, root: Path) -> None:
    files = files_of(root)

    def stranger() -> None:
        assert not GroupPool(place / "s.sock", files).find(EVERY).found.any()

    with serving(place, str(root)):
        assert GroupPool(place / "s.sock", files).find(EVERY).found.all()
        as_other(stranger)


@needs_two_users
@needs_group
@pytest.mark.parametrize("closed", ["", "class1", "class1/3.jpg"])
def test_who_may_not_read_the_files_gets_nothing(place: Path, root: Path, closed: str) -> None:
    """Neither of the files that he may not read, nor of the others: the memory has all of them."""
    path = root / closed
    path.chmod(path.stat().st_mode & 0o770)
    os.chown(path, -1, THIRD)  # for the third user, not for the other
    files = files_of(root)

    def find() -> Found:
        return GroupPool(place / "s.sock", files).find(EVERY)

    with serving(place, str(root)):
        act_as_member(THIRD, lambda: check(find().found.all()))
        act_as_member(OTHER, lambda: check(not find().found.any()))


def check(fact: object) -> None:
    assert fact


@needs_two_users
@needs_group
def test_a_descriptor_of_a_mere_path_or_of_another_file_proves_nothing(
    place: Path, root: Path
) -> None:
    files = files_of(root)
    root.chmod(0o711)  # who is not told the names can still name one

    def answer(how: str) -> dict[str, Any]:
        with joining(place / "s.sock", files) as (connection, said):
            paths = [files.name(sample) for sample in said["prove"]]
            if how == "path":
                fds = [os.open(path, os.O_PATH) for path in paths]
            elif how == "other":
                fds = [os.open(files.name(sample ^ 1), os.O_RDONLY) for sample in said["prove"]]
            else:
                fds = [os.open(path, os.O_RDONLY) for path in paths]
            return proved(connection, fds)

    with serving(place, str(root)):
        act_as_member(OTHER, lambda: check("refused" in answer("path")))
        act_as_member(OTHER, lambda: check("refused" in answer("other")))
        act_as_member(OTHER, lambda: check("refused" not in answer("file")))


@needs_two_users
@needs_group
def test_a_second_name_of_a_file_does_not_show_that_its_folder_may_be_entered(
    place: Path, root: Path
) -> None:
    other = place / "other"
    other.mkdir()
    for file in root.rglob("*.jpg"):
        (other / f"{file.parent.name}-{file.name}").hardlink_to(file)
    files = files_of(root)

    def show_others(connection: socket.socket, said: dict[str, Any]) -> dict[str, Any]:
        paths = [Path(files.name(sample)) for sample in said["prove"]]
        names = [other / f"{path.parent.name}-{path.name}" for path in paths]
        return proved(connection, [os.open(name, os.O_RDONLY) for name in names])

    def is_let_in() -> bool:
        with joining(place / "s.sock", files) as (connection, said):
            return "refused" not in show_others(connection, said)

    root.chmod(0o750)
    with serving(place, str(root)):
        act_as_member(OTHER, lambda: check(not is_let_in()))
    root.chmod(0o755)
    with serving(place, str(root)):
        act_as_member(OTHER, lambda: check(is_let_in()))


@needs_group
def test_files_of_other_rights_and_links_are_not_kept(place: Path, root: Path) -> None:
    with serving(place, str(root)):
        files = files_of(root)
        (root / "class0" / "3.jpg").chmod(0o600)
        moved = root / "class2"
        moved.rename(place / "moved")
        moved.symlink_to(place / "moved")
        found = GroupPool(place / "s.sock", files).find(EVERY)
        expected = EVERY < 20
        expected[3] = False
        # The change of rights is known, the move is not: it changes no file.
        assert np.array_equal(found.found, expected)
        assert whole(root, found)


def test_rights_are_of_every_folder_on_the_way(root: Path) -> None:
    cache = GroupCache(root, "100%")
    try:
        assert len(cache.files.examples()) == 1
        root.joinpath("class1").chmod(0o711)
        assert cache.bring((0, 0), EVERY)[0].tolist() == [*range(10), *range(20, 30)]
    finally:
        cache.close()


def test_rights_include_access_lists(root: Path) -> None:
    file = root / "class0" / "0.jpg"
    entries = [(1, 6, 2**32 - 1), (2, 4, 4711), (4, 4, 2**32 - 1), (16, 4, 2**32 - 1)]
    acl = struct.pack("<I", 2) + b"".join(
        struct.pack("<HHI", *entry) for entry in [*entries, (32, 4, 2**32 - 1)]
    )
    before = file.stat().st_mode
    cache = GroupCache(root, "100%")
    try:
        try:
            os.setxattr(file, "system.posix_acl_access", acl)
        except OSError as error:
            pytest.skip(f"no access lists here: {error}")
        assert file.stat().st_mode == before
        assert 0 not in cache.bring((0, 0), EVERY)[0]
    finally:
        cache.close()


# --- a hostile member ---


@needs_two_users
@needs_group
def test_a_member_cannot_change_what_others_read(place: Path, root: Path) -> None:
    files = files_of(root)

    def attack() -> None:
        with joining(place / "s.sock", files) as (connection, said):
            fds = [os.open(files.name(sample), os.O_RDONLY) for sample in said["prove"]]
            memory = proved(connection, fds)["fd"]
            size = os.fstat(memory).st_size
            path = f"/proc/self/fd/{memory}"
            mapped = mmap.mmap(memory, size, mmap.MAP_SHARED, mmap.PROT_READ)
            address = ctypes.c_void_p.from_buffer_copy(struct.pack("P", address_of(mapped)))
            libc = ctypes.CDLL(None, use_errno=True)
            assert libc.mprotect(address, size, mmap.PROT_READ | mmap.PROT_WRITE) == -1
            for attempt in (
                lambda: os.pwrite(memory, b"x" * 4096, 0),
                lambda: os.ftruncate(memory, 0),
                lambda: os.posix_fallocate(memory, 0, size + 4096),
                lambda: mmap.mmap(memory, size, mmap.MAP_SHARED, mmap.PROT_WRITE),
                lambda: os.open(path, os.O_RDWR),
                lambda: os.open(path, os.O_WRONLY | os.O_TRUNC),
                lambda: os.fchmod(memory, 0o666),
                lambda: os.fchown(memory, OTHER, OTHER),
                lambda: fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
            ):
                with pytest.raises((OSError, ValueError)):
                    attempt()

    with serving(place, str(root)):
        ours = GroupPool(place / "s.sock", files)
        assert ours.find(EVERY[:10]).fetched.all()
        act_as_member(OTHER, attack)
        assert whole(root, ours.find(EVERY))


def address_of(mapped: mmap.mmap) -> int:
    """Where memory that may only be read is mapped."""
    return int(np.frombuffer(mapped, np.uint8).ctypes.data)


@needs_two_users
@needs_group
def test_locks_of_a_member_on_the_memory_hinder_nobody(place: Path, root: Path) -> None:
    """Owner slots are such locks; one that could not be taken would end all puts."""
    files = files_of(root)
    reads, writes = os.pipe()

    def hold() -> None:
        with joining(place / "s.sock", files) as (connection, said):
            fds = [os.open(files.name(sample), os.O_RDONLY) for sample in said["prove"]]
            memory = proved(connection, fds)["fd"]
            for slot in range(1024):  # every owner slot but that of the service
                lock = struct.pack("hhqqi", fcntl.F_RDLCK, 0, 2**40 + slot, 1, 0)
                with contextlib.suppress(BlockingIOError):
                    fcntl.fcntl(memory, fcntl.F_OFD_SETLK, lock)
            fcntl.flock(memory, fcntl.LOCK_SH)
            os.write(writes, b"held")
            signal.pause()

    with serving(place, str(root)):
        holder = begin_as_other(hold, groups=[65534])
        try:
            assert os.read(reads, 4) == b"held"
            found = GroupPool(place / "s.sock", files).find(EVERY)
            assert found.fetched.all()
            assert whole(root, found)
        finally:
            os.kill(holder, signal.SIGKILL)
            os.waitpid(holder, 0)


@needs_group
@pytest.mark.parametrize(
    "line",
    [
        b"garbage\n",
        b"[]\n",
        b'{"stoker": 1, "bring": [1e99]}\n',
        b'{"stoker": 1, "bring": [-1]}\n',
        b'{"stoker": 1, "bring": [30]}\n',
        b'{"stoker": 1, "bring": [[1], 2]}\n',
        b'{"stoker": 1, "bring": "all"}\n',
        b"x" * (1 << 17),
    ],
)
def test_what_makes_no_sense_ends_only_that_connection(
    place: Path, root: Path, line: bytes
) -> None:
    files = files_of(root)
    with serving(place, str(root)):
        with joining(place / "s.sock", files) as (connection, said):
            fds = [os.open(files.name(sample), os.O_RDONLY) for sample in said["prove"]]
            assert proved(connection, fds)["fd"] >= 0
            connection.settimeout(10)
            with contextlib.suppress(ConnectionError):
                connection.sendall(line)
                while connection.recv(1 << 16):
                    pass
        assert GroupPool(place / "s.sock", files).find(EVERY).fetched.all()


@needs_group
def test_one_user_cannot_take_all_connections(
    place: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_cache, "_MOST", 12)
    files = files_of(root)
    with serving(place, str(root)), contextlib.ExitStack() as silent:
        for _ in range(3):
            assert "prove" in silent.enter_context(joining(place / "s.sock", files))[1]
        assert "too many" in silent.enter_context(joining(place / "s.sock", files))[1]["refused"]
        assert "caches" in ask("list", place / "s.sock")  # who looks is counted elsewhere


@needs_group
def test_a_service_of_a_user_who_is_not_trusted_is_not_used(
    place: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_pool, "trusts_user", lambda user: user != os.geteuid())
    with serving(place, str(root)):
        assert not GroupPool(place / "s.sock", files_of(root)).find(EVERY).found.any()


# --- deaths ---


@needs_group
def test_a_member_killed_while_it_waits_harms_nobody(
    place: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, read = files_of(root), GroupFiles.read
    is_reading, may_go_on = threading.Event(), threading.Event()

    def slowly(cache: GroupFiles, sample: int) -> bytes:
        is_reading.set()
        assert may_go_on.wait(60)
        return read(cache, sample)

    monkeypatch.setattr(GroupFiles, "read", slowly)
    with serving(place, str(root)):
        child = begin_child(lambda: GroupPool(place / "s.sock", files).find(EVERY[:8]))
        assert is_reading.wait(60)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        may_go_on.set()
        pool = GroupPool(place / "s.sock", files)
        until(lambda: pool.find(EVERY).found.all())
        assert whole(root, pool.find(EVERY))


@needs_group
def test_hits_outlive_the_service_and_the_next_one_is_found(place: Path, root: Path) -> None:
    pool = GroupPool(place / "s.sock", files_of(root))
    with serving(place, str(root)):
        assert pool.find(EVERY[:20]).fetched.all()
    found = pool.find(EVERY)
    assert found.found.tolist() == (EVERY < 20).tolist()
    assert whole(root, found)
    assert pool.stats()["pool_errors"] == 1
    with serving(place, str(root)):
        until(lambda: pool.find(EVERY).found.all())
        assert whole(root, pool.find(EVERY))
        assert read_for(os.geteuid()) == len(EVERY)


def test_without_a_service_nothing_is_found_and_nothing_is_raised(place: Path, root: Path) -> None:
    begin = time.monotonic()
    assert not GroupPool(place / "s.sock", files_of(root)).find(EVERY).found.any()
    assert time.monotonic() - begin < 5


# --- containers ---

_NEW = 0x00020000 | 0x10000000 | 0x40000000 | 0x08000000 | 0x20000000
"""CLONE_NEWNS, NEWUSER, NEWNET, NEWIPC, NEWPID: what a pod has of its own."""


@needs_two_users
@needs_group
def test_a_pod_of_another_user_uses_the_cache_of_the_node(place: Path, root: Path) -> None:
    files = files_of(root)

    def in_a_pod() -> None:
        if ctypes.CDLL(None, use_errno=True).unshare(_NEW) != 0:
            os._exit(77)

        def is_served() -> bool:
            found = GroupPool(place / "s.sock", files).find(EVERY)
            return bool(found.found.all()) and whole(root, found)

        # Its first child is the one in the new process namespace.
        assert os.waitstatus_to_exitcode(os.waitpid(begin_child(is_served), 0)[1]) == 0

    with serving(place, str(root)):
        child = begin_as_other(in_a_pod, groups=[65534])
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status == 77:
            pytest.skip("namespaces are not permitted here")
        assert status == 0
        assert read_for(OTHER) == len(EVERY)


# --- quotas ---


@needs_two_users
@needs_group
def test_a_user_with_a_quota_has_no_more_read_for_him_and_hits_what_others_had_read(
    place: Path, root: Path
) -> None:
    def bounded() -> None:
        found = GroupPool(place / "s.sock", files_of(root)).find(EVERY)
        assert 0 < found.found.sum() < len(EVERY)

    def unbounded() -> None:
        assert GroupPool(place / "s.sock", files_of(root)).find(EVERY).found.all()

    def hits() -> None:
        found = GroupPool(place / "s.sock", files_of(root)).find(EVERY)
        assert found.found.all() and not found.fetched.any()

    quota = Quota(f"user={OTHER}", 8000)
    with serving(place, str(root), quotas=(quota,)) as service:
        act_as_member(OTHER, bounded)
        until(lambda: 4000 < service.holding.quotas()[0]["memory_bytes"] <= 8000)
        act_as_member(THIRD, unbounded)
        act_as_member(OTHER, hits)


def test_requests_of_a_user_at_the_same_time_do_not_exceed_his_quota(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOKER_RUNTIME_DIR", str(tmp_path / "run"))
    quota, met = Quota("user=4711", 8000), threading.Barrier(2)
    with Service(ServiceSettings(quotas=(quota,))) as service:
        cache = GroupCache(root, "100%", allow=service._allowance)
        service._groups._caches[SharedFolder(root)] = cache
        room_of = service.holding.room_of

        def room_once_both_ask(user: int) -> float:
            room = room_of(user)
            with contextlib.suppress(threading.BrokenBarrierError):
                met.wait(0.2)
            return room

        monkeypatch.setattr(service.holding, "room_of", room_once_both_ask)
        asking = [
            threading.Thread(target=cache.bring, args=((4711, 0), some))
            for some in np.split(EVERY, 2)
        ]
        for each in asking:
            each.start()
        for each in asking:
            each.join()
        assert 4000 < cache.read_for()[4711] <= 8000


# --- settings ---


@pytest.mark.parametrize("text", ["/data=", "/data=much", "/data=-1"])
def test_a_share_of_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="share"):
        SharedFolder.parse(text)


def test_a_share_needs_a_group() -> None:
    with pytest.raises(ConfigError, match="needs a group"):
        ServiceSettings(shares=(SharedFolder(Path("/data")),))


def test_what_the_service_may_not_take_is_not_shared(root: Path) -> None:
    asked: list[int] = []

    def admit(memory: int) -> bool:
        asked.append(memory)
        return False

    caches = GroupCaches([SharedFolder(root)], admit)
    caches.look()
    assert caches.told() == []
    assert caches.memory == 0
    assert asked[0] > sum(file.stat().st_size for file in root.rglob("*.jpg"))
