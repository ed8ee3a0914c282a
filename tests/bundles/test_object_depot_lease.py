"""One at a time, whatever the clocks, the storage and the processes do."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.bundles.object_depot import Lease, LeaseKeeper, Seen, Version

RENEW, EXPIRY = 10.0, 60.0


class Storage:
    """Objects in memory, whose answers are lost when ``fails`` says so."""

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, int]] = {}
        self.fails: list[str] = []
        self.writes = 0

    def look(self, key: str) -> Seen | None:
        if self._fault() is not None:
            raise OSError("gone")
        if key not in self.objects:
            return None
        content, number = self.objects[key]
        return Seen(content, {"e_tag": str(number)})

    def replace(self, key: str, content: bytes, version: Version | None) -> Version | None:
        fault = self._fault()
        if fault == "request":
            raise OSError("gone")
        there = None if key not in self.objects else {"e_tag": str(self.objects[key][1])}
        if there != version:
            return None
        self.writes += 1
        self.objects[key] = content, self.writes
        if fault == "answer":  # asked again, as clients do
            return None
        return {"e_tag": str(self.writes)}

    def _fault(self) -> str | None:
        return self.fails.pop() if self.fails else None


class Careless(Storage):
    """One that takes every write, whatever it is to replace."""

    def replace(self, key: str, content: bytes, version: Version | None) -> Version | None:
        self.writes += 1
        self.objects[key] = content, self.writes
        return {"e_tag": str(self.writes)}


class World:
    """Some processes with clocks that do not agree, and what time it really is."""

    def __init__(self, storage: Storage, offsets: list[float]) -> None:
        self.now = 0.0
        self.leases = [self.lease(storage, f"{n:02x}", offset) for n, offset in enumerate(offsets)]

    def lease(self, storage: Storage, holder: str, offset: float = 0.0) -> Lease:
        def sleep(seconds: float) -> None:
            self.now += seconds

        return Lease(
            storage,
            "key",
            holder,
            renew=RENEW,
            expiry=EXPIRY,
            clock=lambda: self.now + offset,
            sleep=sleep,
        )

    @property
    def holding(self) -> int:
        return sum(lease.is_held for lease in self.leases)


steps = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from(["acquire", "acquire", "renew", "renew", "release", "wait"]),
        st.floats(0.1, 45.0),
        st.sampled_from([None, None, None, "request", "answer"]),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(offsets=st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=3), steps=steps)
def test_s11_never_two_hold_it(
    offsets: list[float], steps: list[tuple[int, str, float, str | None]]
) -> None:
    storage = Storage()
    world = World(storage, offsets)
    for who, what, seconds, fault in steps:
        lease = world.leases[who]
        storage.fails = [] if fault is None else [fault]
        try:
            if what == "acquire" and not lease.is_held:
                lease.try_acquire()
            elif what == "renew":
                lease.renew()
            elif what == "release":
                lease.release()
            else:
                world.now += seconds
        except OSError:
            pass
        assert world.holding <= 1


def test_s11_who_stops_giving_signs_of_life_is_followed_and_knows_it() -> None:
    world = World(Storage(), [0.0, 5000.0])
    first, second = world.leases
    first.acquire()
    first.check()
    began = world.now
    second.acquire()
    assert began + EXPIRY <= world.now <= began + EXPIRY + RENEW
    with pytest.raises(BlockingIOError, match="another job"):
        first.check()
    assert not first.renew()
    second.check()


def test_s11_who_is_alive_keeps_it() -> None:
    storage = Storage()
    world = World(storage, [0.0, -77.0])
    first, second = world.leases
    first.acquire()
    assert not second.try_acquire()
    world.now += RENEW
    assert first.renew()
    with pytest.raises(BlockingIOError, match="another job keeps its packages"):
        second.try_acquire()
    for _ in range(20):
        world.now += RENEW
        assert first.renew()
        first.check()


def test_what_was_given_back_is_had_at_once_and_so_is_ones_own() -> None:
    storage = Storage()
    world = World(storage, [0.0, 0.0])
    first, second = world.leases
    first.acquire()
    first.release()
    first.release()
    second.acquire()
    again = world.lease(storage, "01")  # a process started in place of the second
    again.acquire()
    assert world.now == 0.0
    assert not second.renew()


def test_a_storage_that_heeds_no_condition_is_noticed() -> None:
    storage = Careless()
    world = World(storage, [0.0, 0.0])
    first, second = world.leases
    assert first._write(None) and second._write(None)
    assert not first.renew()
    assert second.renew()


def test_an_object_that_was_removed_is_made_again() -> None:
    storage = Storage()
    [lease] = World(storage, [0.0]).leases
    lease.acquire()
    storage.objects.clear()
    assert lease.renew()
    assert storage.objects
    lease.check()


def test_a_keeper_gives_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage()
    world = World(storage, [0.0, 0.0])
    first, second = world.leases
    first.acquire()
    keeper = LeaseKeeper(first, every=0.001)
    while storage.writes < 5:
        assert first.is_held
    keeper.close()
    keeper.close()
    assert not first.is_held
    assert second.try_acquire()
