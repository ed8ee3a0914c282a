"""Listings of prefixes: paged, packed, kept on disk while they hold, and huge."""

from __future__ import annotations

import random
import resource
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker.errors import ConfigError, SourceError, SourceUnavailable
from stoker.source import ImagePrefixSource, ObjectSource, Pace, Retry

from .list_server import PAGE, ListServer

QUICK = Pace(retry=Retry(deadline=2.0, first=0.01))


@pytest.fixture
def server() -> Iterator[ListServer]:
    with ListServer([f"k/{number:05d}" for number in range(5000)]) as server:
        yield server


def list_from(server: ListServer, **how: Any) -> ObjectSource:
    return ObjectSource("s3://bucket/k", storage_options=server.options, **{"pace": QUICK, **how})


def test_an_unchanged_prefix_is_listed_once(server: ListServer) -> None:
    first = list_from(server)
    assert server.requests == 5
    again = list_from(server)
    assert server.requests == 8
    assert again.fingerprint == first.fingerprint
    assert len(again) == 5000
    assert [again.name(i) for i in (0, 4999)] == ["s3://bucket/k/00000", "s3://bucket/k/04999"]


@pytest.mark.parametrize(
    "change",
    ["first new", "last new", "many new", "first gone", "last gone", "replaced", "all gone"],
)
def test_changes_at_the_ends_are_noticed_at_once(server: ListServer, change: str) -> None:
    before = list_from(server)
    keys = list(server.keys)
    if change == "replaced":
        server.versions["k/00001"] = "v2"
    server.keys = {
        "first new": ["k/0", *keys],
        "last new": [*keys, "k/9"],
        "many new": [*keys, *(f"k/9{number:05d}" for number in range(2 * PAGE))],
        "first gone": keys[1:],
        "last gone": keys[:-1],
        "replaced": keys,
        "all gone": ["other"],
    }[change]
    if change == "all gone":
        with pytest.raises(ConfigError, match="no objects"):
            list_from(server)
        return
    after = list_from(server)
    assert after.fingerprint != before.fingerprint
    assert len(after) == len(server.keys)


def test_other_changes_are_noticed_by_chance_or_by_age(
    server: ListServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = list_from(server)
    server.versions["k/02500"] = "v2"
    monkeypatch.setattr(random, "randrange", lambda n: 3000)
    assert list_from(server).fingerprint == before.fingerprint
    monkeypatch.setattr(random, "randrange", lambda n: 2000)
    assert list_from(server).fingerprint != before.fingerprint
    server.versions["k/02500"] = "v3"
    monkeypatch.setattr(random, "randrange", lambda n: 3000)
    late = time.time() + 100
    monkeypatch.setattr(time, "time", lambda: late)
    kept = list_from(server, listing_max_age=200)
    assert list_from(server, listing_max_age=99).fingerprint != kept.fingerprint


@pytest.mark.parametrize("fault", ["replaced", "gone"])
def test_newcomer_2_the_advice_to_list_again_helps(
    server: ListServer, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr(random, "randrange", lambda n: 3000)  # not where it changes
    source = list_from(server)
    if fault == "gone":
        server.keys = [key for key in server.keys if key != "k/02500"]
    else:
        server.versions["k/02500"] = "v2"
    assert list_from(server).fingerprint == source.fingerprint
    with pytest.raises(SourceError, match="make the data set again, which lists it again"):
        source.read([2500])
    assert list_from(server).fingerprint != source.fingerprint


def test_other_places_and_questions_have_other_listings(server: ListServer) -> None:
    with ListServer(["k/a"]) as other:
        assert len(list_from(server)) == 5000
        assert len(list_from(other)) == 1
        assert len(list_from(server)) == 5000
    listed = server.requests
    list_from(server, listing_max_age=0)
    assert server.requests == listed + 5


def test_a_listing_that_breaks_off_is_taken_up(server: ListServer) -> None:
    answer = server.answer
    turns = iter(range(1000))

    def flaky(query: dict[str, str]) -> tuple[int, bytes]:
        return answer(query) if next(turns) % 2 else (503, b"")

    server.answer = flaky  # type: ignore[method-assign]
    assert len(list_from(server)) == 5000
    assert server.requests == 10


def test_a_storage_that_does_not_list_is_given_up(server: ListServer) -> None:
    server.failing = 10**6
    with pytest.raises(SourceUnavailable, match=r"s3://bucket/k/ could not be read .*503"):
        list_from(server, pace=Pace(retry=Retry(deadline=0.3)))


@pytest.mark.parametrize("key", ["k/a//b", "k/./b", "k/a\x7f"])
def test_keys_that_obstore_cannot_name_are_refused_at_once(server: ListServer, key: str) -> None:
    server.keys = [key]
    begin = time.monotonic()
    with pytest.raises(ConfigError, match="invalid path"):
        list_from(server, pace=Pace())
    assert time.monotonic() - begin < 20


class ManyKeys(Sequence[str]):
    """A million sorted keys without a million objects."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if index >= len(self):
            raise IndexError(index)
        return f"k/{index // 1000:04d}/{index:08d}.jpeg"


def test_many_keys() -> None:
    """No object per key is kept: what stays is the arrays."""
    with ListServer(ManyKeys(200_000)) as server:
        list_from(server, listing_max_age=0).close()  # whatever stays of the first listing
        before = resident_bytes()
        source = list_from(server)
        assert len(source) == 200_000
        assert source.name(165_432) == "s3://bucket/k/0165/00165432.jpeg"
        assert resident_bytes() - before < 30e6
        listed = server.requests
        again = list_from(server)
        assert server.requests == listed + 3
        assert again.fingerprint == source.fingerprint


def resident_bytes() -> int:
    """Return the private and shared memory of this process that is resident."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def test_class_folders_are_listed_at_once_and_in_torchvisions_order() -> None:
    names = [
        "b/1.jpg",
        "a/z.png",
        "a/b/1.JPG",
        "a/b-c/2.jpg",
        "a/readme.txt",
        "top.jpg",
        "a-b/x.jpg",
    ]
    with ListServer(sorted(f"k/{name}" for name in names)) as server:
        source = ImagePrefixSource("s3://bucket/k", storage_options=server.options, pace=QUICK)
        assert source.classes == ("a", "a-b", "b")
        assert [source.name(i).removeprefix("s3://bucket/k/") for i in range(len(source))] == [
            "a/z.png", "a/b/1.JPG", "a/b-c/2.jpg", "a-b/x.jpg", "b/1.jpg"
        ]  # fmt: skip
        assert source.targets.tolist() == [0, 0, 0, 1, 2]
        assert source.class_to_idx == {"a": 0, "a-b": 1, "b": 2}
        again = ImagePrefixSource("s3://bucket/k", storage_options=server.options, pace=QUICK)
        assert again.fingerprint == source.fingerprint
        assert server.requests == 1 + 3 + 3
        assert np.array_equal(again.targets, source.targets)


def test_a_prefix_without_classes_is_refused(server: ListServer) -> None:
    with pytest.raises(ConfigError, match="no objects"):
        ImagePrefixSource("s3://bucket/k", storage_options=server.options, pace=QUICK)
    server.keys = ["k/a/readme.txt"]
    with pytest.raises(ConfigError, match="no samples in class folders"):
        ImagePrefixSource("s3://bucket/k", storage_options=server.options, pace=QUICK)
    with pytest.raises(ConfigError, match="do not list"):
        ImagePrefixSource("https://host/k")
    with pytest.raises(ConfigError, match="extensions"):
        ImagePrefixSource("s3://bucket/k", extensions=".jpg")
