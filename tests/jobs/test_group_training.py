"""Trainings whose samples come from a cache that a group shares."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.groups import act_as_member, needs_group, read_for, serving
from support.users import OTHER, needs_two_users

import stoker
from stoker.errors import ConfigError
from stoker.pytorch import Loader

COUNT = 24


@pytest.fixture
def root(place: Path) -> Path:
    """Images whose number is their colour."""
    for number in range(COUNT):
        folder = place / "data" / f"class{number % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), (10 * number, 0, 0)).save(folder / f"{number:02}.png")
    return place / "data"


def colour(image: Any) -> int:
    return int(np.asarray(image)[0, 0, 0])


def loader(place: Path, root: Path, **options: Any) -> Loader:
    data = stoker.ImageFolder(root, colour)
    memory = options.pop("memory", "20%")
    prefetch = options.pop("prefetch", 0)
    cache = stoker.Cache(memory, pool=f"unix:{place}/s.sock", prefetch=prefetch, stands_aside=False)
    return Loader(data, 4, cache=cache, **options)


def colours(loader: Loader) -> list[int]:
    return sorted(int(each) for images, _ in loader for each in images)


ALL = [10 * number for number in range(COUNT)]


@needs_two_users
@needs_group
@pytest.mark.parametrize("memory", ["20%", 0])
def test_two_users_train_and_each_file_is_read_once(
    place: Path, root: Path, memory: int | str
) -> None:
    def other() -> None:
        os.environ["STOKER_RUNTIME_DIR"] = tempfile.mkdtemp()
        with loader(place, root, memory=memory) as theirs:
            assert colours(theirs) == ALL
            assert theirs.stats.fetched == 0
            assert theirs.stats.hits == COUNT

    with serving(place, str(root)):
        with loader(place, root, memory=memory) as ours:
            assert colours(ours) == ALL
            assert (ours.stats.fetched, ours.stats.hits) == (COUNT, 0)
            assert colours(ours) == ALL
            assert (ours.stats.fetched, ours.stats.hits) == (COUNT, COUNT)
        act_as_member(OTHER, other)
        assert read_for(OTHER) == 0


@needs_group
def test_workers_and_processes_that_read_ahead_ask_too(place: Path, root: Path) -> None:
    with serving(place, str(root)):
        with loader(place, root, prefetch="1MiB", num_workers=2) as first:
            assert colours(first) == ALL
            assert first.stats.fetched == COUNT
        with loader(place, root, prefetch="1MiB", num_workers=2) as second:
            assert colours(second) == ALL
            assert second.stats.fetched == 0
            assert second.stats.pool_hits > 0


@needs_group
def test_what_does_not_fit_a_training_reads_itself(place: Path, root: Path) -> None:
    with serving(place, f"{root}=50%"):
        for _ in range(2):
            with loader(place, root, memory=0) as each:
                assert colours(each) == ALL
                assert colours(each) == ALL


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"pool_size": "1GiB"}, "is up to the service"),
        ({"stage": "decoded"}, "files as they are"),
        ({"pool": "unix:run/s.sock"}, "is no address"),
    ],
)
def test_what_a_group_cannot_share_is_refused(
    root: Path, options: dict[str, str], why: str
) -> None:
    data = stoker.ImageFolder(root, colour)
    with pytest.raises(ConfigError, match=why):
        Loader(data, 4, cache=stoker.Cache(**({"pool": "unix:/run/s.sock"} | options)))
