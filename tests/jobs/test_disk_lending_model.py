"""Disk caches under a service, in any order of steps: what must hold whenever they have settled."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stoker.jobs import held as held_module
from stoker.jobs.holding import Asker, Holding
from stoker.jobs.quotas import Quota
from stoker.policy.baselines import LRU
from stoker.store.arena import payload_within
from stoker.store.disk import CacheDir, DiskMeta, file_bytes, open_disk
from stoker.store.registry import SharedArena

NUM, SIZE = 200, 10_000
WHOLE = file_bytes(DiskMeta("data", NUM, NUM * SIZE, SIZE))
LEAST = file_bytes(DiskMeta("data", NUM, NUM * SIZE, SIZE), 0)
DISK = 2 * WHOLE
SLACK = 50_000  # a page for each cache and 0.2 % of it
QUOTAS = {
    "ann": Quota("ann", disk=WHOLE, disk_most=DISK),
    "bob": Quota("bob", disk=WHOLE // 2, disk_most=DISK),
    "cat": Quota("cat", disk=WHOLE // 3, disk_most=WHOLE // 2, priority=1),
    "dan": Quota("dan", disk=WHOLE // 5),  # asks for more than it may have: never gets any
}
NAMES = [*QUOTAS, "eve"]  # who has no quota
SEEDS = st.integers(0, 2**16)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs are idle when they have ended, and what did not change is asked again at once."""
    monkeypatch.setattr(held_module, "are_idle", lambda *_: False)
    monkeypatch.setattr(held_module, "_SOON", 0.0)
    monkeypatch.setattr(held_module, "_STUCK", 0.0)


class Lending(RuleBasedStateMachine):
    """Jobs come, fill their caches and go, the service is restarted, folders are removed."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.before = os.environ["STOKER_RUNTIME_DIR"]
        os.environ["STOKER_RUNTIME_DIR"] = f"{self.folder.name}/run"
        self.running: dict[str, SharedArena] = {}
        self.service = self._new_service()

    def teardown(self) -> None:
        for name in list(self.running):
            self.end(name)
        self.service.close()
        os.environ["STOKER_RUNTIME_DIR"] = self.before
        self.folder.cleanup()

    @rule(name=st.sampled_from(NAMES))
    def begin(self, name: str) -> None:
        if name in self.running:
            return
        place, meta = self._place(name), DiskMeta(name, NUM, NUM * SIZE, SIZE)
        room = self.service.admit_disk(str(place.path), WHOLE, Asker(name), LEAST)
        quota = QUOTAS.get(name)
        if room is not None:
            assert quota is None or quota.disk_most is None, "who borrows begins with little"
            return
        assert name != "dan"
        granted = self.service.granted_on_disk(str(place.path))
        assert granted is not None
        limit = payload_within(granted, NUM * SIZE, partial(file_bytes, meta))
        self.running[name] = open_disk(place, meta, LRU().regions(), keep_free=0, limit_bytes=limit)
        self.service.look()

    @rule(name=st.sampled_from(NAMES), seed=SEEDS, count=st.integers(1, NUM))
    def fill(self, name: str, seed: int, count: int) -> None:
        if name in self.running:
            ids = [(seed + i) % NUM for i in range(count)]
            self.running[name].arena.put_many(ids, [_sample(name, i) for i in ids])

    @rule(name=st.sampled_from(NAMES))
    def end(self, name: str) -> None:
        if name in self.running:
            self.running.pop(name).close()

    @rule()
    def restart(self) -> None:
        self.service.close()
        self.service = self._new_service()

    @precondition(lambda self: self.running)
    @rule()
    def balance_once(self) -> None:
        self.service.look()
        self.service.balance_disk()

    @rule(name=st.sampled_from(NAMES))
    def remove(self, name: str) -> None:
        self.service.look()
        if name not in self.running:
            shutil.rmtree(self._place(name).path, ignore_errors=True)

    @rule()
    def settle(self) -> None:
        seen: list[dict[str, int]] = [{}]
        while len(seen) < 2 or seen[-1] != seen[-2]:
            assert len(seen) < 100, f"no end of it: {seen[-4:]}"
            self.service.look()
            self.service.balance_disk()
            seen.append(dict(self._taken()))
        taken = seen[-1]
        assert sum(taken.values()) <= DISK + SLACK
        for name, size in taken.items():
            assert abs(self._on_disk(name) - size) <= SLACK, "the service counts what is so"
        hungry = [name for name in self.running if self._is_full(name)]
        for name in hungry:
            right = QUOTAS[name].disk or 0 if name in QUOTAS else 0
            assert taken[name] >= min(right, WHOLE) - SLACK, f"{name} has less than its right"
        for name in hungry:
            most = QUOTAS[name].on_disk.bound if name in QUOTAS else 0
            if taken[name] < min(WHOLE, most) - SLACK:  # it lacks some, so none is left
                assert sum(taken.values()) >= DISK - SLACK, f"{taken}"
                unused = [other for other in taken if other not in self.running]
                lent = [other for other in unused if other in QUOTAS]
                assert all(taken[other] <= LEAST + SLACK for other in lent), "it was idle"

    @invariant()
    def what_is_read_is_right(self) -> None:
        for name, opened in self.running.items():
            opened.arena.verify()
            for i in range(0, NUM, 7):
                found = opened.arena.get(i)
                assert found is None or bytes(found) == _sample(name, i)
            assert opened.arena.stats()["corrupt"] == 0
            assert opened.arena.stats()["corrupt"] == 0

    def _new_service(self) -> Holding:
        service = Holding(disk=DISK, quotas=tuple(QUOTAS.values()))
        service.look()
        return service

    def _place(self, name: str) -> CacheDir:
        return CacheDir(Path(self.folder.name, name))

    def _on_disk(self, name: str) -> int:
        file = self._place(name).segment
        return file.stat().st_blocks * 512 if file.exists() else 0

    def _taken(self) -> Iterator[tuple[str, int]]:
        for path, size in self.service._sizes_on_disk().items():
            if self._on_disk(Path(path).name):
                yield Path(path).name, size

    def _is_full(self, name: str) -> bool:
        stats = self.running[name].arena.stats()
        return bool(stats["payload_bytes"] >= 0.75 * stats["limit_bytes"])


def _sample(name: str, number: int) -> bytes:
    return bytes([NAMES.index(name) + 1, number]) * (SIZE // 2)


TestLending = Lending.TestCase
TestLending.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
