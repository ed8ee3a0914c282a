"""The parts of a pool that need no server: addresses, frames, keys, order, breakers, queue."""

import os
import threading
import time
import traceback
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import ConfigError
from stoker.pool.pool_address import PASSWORD_VARIABLE, PoolAddress
from stoker.pool.servers import Breakers
from stoker.pool.timed_work import PoolWriter, Threads, Watch
from stoker.pool.values import (
    BUCKETS,
    HEAD_BYTES,
    LEVELS,
    OWNER_BYTES,
    SLOTS,
    PoolKeys,
    PoolOrder,
    seal,
    slot_of,
    unseal,
)
from stoker.source.packed import Packed

OWNER = b"o" * OWNER_BYTES


def as_ids(ids):
    return np.array(ids, np.uint32)


def packed(samples):
    offsets = np.cumsum([0, *map(len, samples)], dtype=np.int64)
    return Packed(np.frombuffer(b"".join(samples), np.uint8), offsets)


# --- addresses ---


def test_an_address_says_who_and_how():
    address = PoolAddress.parse("valkey://h1:7000,h2,[::1]:7001?timeout=2")
    assert address.servers == (("h1", 7000), ("h2", 6379), ("::1", 7001))
    assert (address.tls, address.timeout, address.password) == (False, 2.0, None)
    assert str(address) == "valkey://h1:7000,h2:6379,[::1]:7001"
    address = PoolAddress.parse("rediss://u:p%40s@h?ca_certs=ca.crt&check_hostname=no")
    assert (address.username, address.password, address.tls) == ("u", "p@s", True)
    assert (address.ca_certs, address.check_hostname) == ("ca.crt", False)


def test_passwords_come_from_elsewhere_and_are_shown_nowhere(monkeypatch, tmp_path):
    (tmp_path / "pw").write_text("from file\n")
    address = PoolAddress.parse(f"redis://h?password_file={tmp_path / 'pw'}")
    assert address.client_options()["password"] == "from file"
    monkeypatch.setenv(PASSWORD_VARIABLE, "from environment")
    assert PoolAddress.parse("redis://h").password == "from environment"
    address = PoolAddress.parse("redis://:secret@h")
    assert "secret" not in repr(address) + str(address)


@pytest.mark.parametrize(
    ("url", "names"),
    [
        ("http://h", "http"),
        ("h1:6379", "valkey://h1"),
        ("redis://", "names no server"),
        ("redis://u:secret@h:0", "'h:0'"),
        ("redis://h:x", "'h:x'"),
        ("redis://h:70000", "h:70000"),
        ("redis://[zz]:1", "zz"),
        ("redis://h1,,h2", "names no server"),
        ("redis://h/3", "no databases"),
        ("redis://h?db=3", "'db'"),
        ("redis://h?timeout=0", "timeout=0"),
        ("redis://h?timeout=x", "timeout=x"),
        ("redis://h?ca_certs=f", "without TLS"),
        ("redis://h?x", "options"),
        (7, "int"),
    ],
)
def test_what_is_no_address_is_refused(url, names):
    with pytest.raises(ConfigError, match="pool=") as refused:
        PoolAddress.parse(url)
    assert names in str(refused.value)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        "valkey://:hunter/2@h1",
        "valkey://user:hunter?2=3@h1",
        "valkey://user:hunter#2@h1",
        "valkey://user:hunter\u21002@h1",
        "valkey://user:[hunter2@h1",
        "valkey://hunter/2@h1?timeout=3",
        "valkey://h?hunter2",
    ],
)
def test_c9_a_password_that_cuts_the_address_is_not_shown(url):
    with pytest.raises(ConfigError, match="pool=") as refused:
        PoolAddress.parse(url)
    assert "hunter" not in "".join(traceback.format_exception(refused.value)).replace(url, "")


def test_an_option_may_have_the_sign_in_it():
    assert PoolAddress.parse("valkey://h?password_file=/a@b").password_file == "/a@b"


# --- frames ---


@given(st.lists(st.one_of(st.none(), st.binary(max_size=50)), max_size=8), st.randoms())
def test_what_was_sealed_comes_back_and_nothing_else(samples, random):
    ids = as_ids([random.randrange(2**32) for _ in samples])
    there = [k for k, sample in enumerate(samples) if sample is not None]
    values = [None] * len(samples)
    sealed = seal(ids[there], packed([samples[k] for k in there]), OWNER)
    for k, value in zip(there, sealed, strict=True):
        values[k] = value
    got, found, damaged = unseal(ids, values, OWNER)
    assert np.flatnonzero(found).tolist() == there
    assert got.data.tobytes() == b"".join(s for s in samples if s is not None)
    assert np.diff(got.offsets).tolist() == [len(s or b"") for s in samples]
    assert damaged == 0


@given(st.binary(min_size=1, max_size=60), st.data())
def test_any_damage_is_a_miss(sample, data):
    [value] = seal(as_ids([7]), packed([sample]), OWNER)
    bit = data.draw(st.integers(0, 8 * len(value) - 1))
    flipped = bytearray(value)
    flipped[bit // 8] ^= 1 << bit % 8
    cut = value[: data.draw(st.integers(0, len(value) - 1))]
    for wrong in (bytes(flipped), cut, value + b"x", b"someone else's", b""):
        assert wrong != value
        got, found, damaged = unseal(as_ids([7]), [wrong], OWNER)
        assert (found.tolist(), damaged, got.offsets.tolist()) == ([False], 1, [0, 0])


def test_another_sample_or_data_set_is_a_miss():
    [value] = seal(as_ids([7]), packed([b"abc"]), OWNER)
    assert unseal(as_ids([7]), [value], OWNER)[1].all()
    assert not unseal(as_ids([8]), [value], OWNER)[1].any()
    assert not unseal(as_ids([7]), [value], b"x" * OWNER_BYTES)[1].any()
    assert not unseal(as_ids([7]), ["abc"], OWNER)[1].any()
    assert len(value) == HEAD_BYTES + 3
    assert zlib.crc32(b"abc").to_bytes(4, "little") in value[:HEAD_BYTES]


# --- keys ---


def test_a_slot_is_what_the_protocol_says():
    assert slot_of("123456789") == 0x31C3 % SLOTS  # the example of the cluster specification


def test_buckets_are_spread_evenly_over_the_slots():
    keys = PoolKeys("data set")
    assert (keys.slots * BUCKETS // SLOTS).tolist() == list(range(BUCKETS))
    names = keys.names(as_ids([3, 3 + BUCKETS, 4]))
    tags = [name[name.index(b"{") : name.index(b"}")] for name in names]
    assert tags[0] == tags[1] != tags[2]
    bucket = int(keys.buckets(as_ids([3]))[0])
    assert slot_of(tags[0][1:].decode()) == keys.slots[bucket]
    quarter = np.bincount(keys.buckets(as_ids(range(100, 200))) // (BUCKETS // 4))
    assert quarter.tolist() == [25, 25, 25, 25]
    assert all(name.startswith(b"stoker:") for name in names)
    assert len(set(names)) == 3


def test_no_two_data_sets_share_a_key():
    ids = as_ids(range(600))
    first, second = PoolKeys("one"), PoolKeys("two")
    assert not set(first.names(ids)) & set(second.names(ids))
    assert first.owner != second.owner
    assert first.names(ids) == PoolKeys("one").names(ids)


# --- order ---


@given(st.lists(st.floats(), min_size=1, max_size=300))
def test_lifetimes_grow_with_the_rank_of_the_key(values):
    keys = np.array(values)
    order = PoolOrder()
    order.learn(keys)
    levels = order.levels(np.arange(len(keys), dtype=np.uint32), keys)
    assert levels.max() < LEVELS
    by_key = np.argsort(np.nan_to_num(keys), kind="stable")
    ranked, sorted_keys = levels[by_key].astype(int), np.nan_to_num(keys)[by_key]
    for k in range(1, len(keys)):
        assert sorted_keys[k] == sorted_keys[k - 1] or ranked[k] >= ranked[k - 1]
    lifetimes = order.lifetimes(np.arange(LEVELS, dtype=np.uint8))
    assert lifetimes == sorted(set(lifetimes))
    assert lifetimes[0] == 24 * 3600 * 1000


def test_distinct_keys_fill_the_levels_evenly_and_so_do_equal_ones():
    ids = np.arange(6400, dtype=np.uint32)
    order = PoolOrder()
    for keys in (np.random.default_rng(0).normal(size=6400), np.zeros(6400), None):
        if keys is not None:
            order.learn(keys)
        counts = np.bincount(order.levels(ids, keys), minlength=LEVELS)
        assert counts.min() > 90
        assert counts.max() < 110


def test_only_the_share_is_worth_storing():
    order, ids = PoolOrder(), np.arange(10_000, dtype=np.uint32)
    assert order.is_worth_storing(order.levels(ids)).all()
    order.share = 0.2
    keys = np.random.default_rng(0).normal(size=len(ids))
    order.learn(keys)
    kept = order.is_worth_storing(order.levels(ids, keys))
    assert 0.19 < kept.mean() < 0.23
    assert keys[kept].min() > keys[~kept].max() - 1e-9
    order.share = 0.0
    assert not order.is_worth_storing(order.levels(ids, keys)).any()


# --- breakers ---


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_a_breaker_opens_is_probed_by_one_and_closes():
    clock = Clock()
    breakers = Breakers(clock)
    breakers.failed("a")
    breakers.failed("a")
    breakers.answered("a")
    breakers.failed("a")
    assert not breakers.is_open("a")
    breakers.failed("a", is_late=True)
    assert breakers.is_open("a")
    assert not breakers.is_open("b")
    assert (breakers.open_count, breakers.trips) == (1, 1)
    assert not breakers.may_probe("a")
    clock.now += 2  # the first pause is at most 1.5 s
    assert breakers.may_probe("a")
    assert not breakers.may_probe("a")
    assert breakers.is_open("a")
    breakers.close("a")
    assert not breakers.is_open("a")
    assert breakers.open_count == 0


def test_pauses_grow_up_to_half_a_minute_and_start_again_after_an_answer():
    clock = Clock()
    breakers = Breakers(clock)
    for expected in (1, 2, 4, 8, 16, 30, 30):
        breakers.trip("a")
        clock.now += expected * 0.49
        assert not breakers.may_probe("a")
        clock.now += expected * 1.02
        assert breakers.may_probe("a")
    breakers.close("a")
    breakers.answered("a")
    breakers.failed("a", is_late=True)
    clock.now += 1.6
    assert breakers.may_probe("a")


def test_slow_answers_open_it_too():
    breakers = Breakers(Clock())
    for _ in range(3):
        assert not breakers.is_open("a")
        breakers.answered("a", is_slow=True)
    assert breakers.is_open("a")


@pytest.mark.parametrize("away", range(0, 64, 7))
def test_no_server_of_64_shares_a_breaker_with_another(away):
    breakers = Breakers(Clock())
    names = [f"server{k}:6379" for k in range(64)]
    breakers.failed(names[away], is_late=True)
    assert [name for name in names if breakers.is_open(name)] == [names[away]]
    breakers.failed("the 65th", is_late=True)  # which takes one of theirs
    assert breakers.is_open("the 65th")
    assert breakers.open_count <= 2


def test_processes_agree_on_a_breaker_that_one_of_them_met_first():
    breakers = Breakers(Clock())
    child = os.fork()
    if child == 0:
        for name in ("x", "y", "z"):
            breakers.failed(name, is_late=name == "y")
        os._exit(0)
    os.waitpid(child, 0)
    assert [breakers.is_open(name) for name in "zyx"] == [False, True, False]


# --- threads and queue ---


def test_work_is_waited_for_only_so_long():
    threads, gate = Threads(most=1), threading.Event()
    stuck = threads.start(gate.wait)
    assert not stuck.wait(0.01)
    assert threads.start(lambda: 1) is None  # all are stuck
    gate.set()
    assert stuck.wait(60)
    failing = threads.start(lambda: 1 / 0)
    assert failing.wait(60)
    assert isinstance(failing.error, ZeroDivisionError)
    assert threads.start(lambda: 7) is not None
    threads.close()


def test_what_is_watched_is_cut_at_its_deadline_and_not_before():
    cut, came = [], threading.Event()

    def note(thing):
        cut.append(thing)
        came.set()

    watch = Watch(note)
    late = watch.begin("late", time.monotonic() + 30)
    in_time = watch.begin("in time", time.monotonic() + 30)
    soon = watch.begin("soon", time.monotonic() + 0.05)  # earlier than what the thread waits for
    assert watch.end(in_time)
    assert came.wait(60)
    assert cut == ["soon"]
    assert not watch.end(soon)
    assert watch.end(late)
    assert not watch.end(late)
    came.clear()
    watch.begin("next", time.monotonic() - 1)
    assert came.wait(60)
    assert cut == ["soon", "next"]
    watch.close()


def test_a_full_queue_refuses_and_a_failing_job_ends_nothing():
    writer, gate, done = PoolWriter(), threading.Event(), []
    assert writer.put(lambda: gate.wait(60))
    assert writer.put(lambda: done.append(1), 60 << 20)
    assert not writer.put(lambda: done.append(2), 60 << 20)
    assert writer.put(lambda: 1 / 0)
    assert writer.put(lambda: done.append(3))
    assert not writer.flush(0.01)
    gate.set()
    assert writer.flush(10)
    assert done == [1, 3]
    writer.close(1)
    assert not writer.put(lambda: done.append(4))


def test_what_can_wait_comes_last():
    writer, gate, done = PoolWriter(), threading.Event(), []
    over = threading.Event()
    writer.put(lambda: gate.wait(60))
    writer.later([lambda: done.append("stale")])
    writer.later([lambda: done.append("later"), over.set])
    writer.put(lambda: done.append("soon"))
    gate.set()
    assert over.wait(60)
    assert done == ["soon", "later"]
    writer.close(1)
