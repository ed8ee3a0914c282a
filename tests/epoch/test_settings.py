"""What a user says of a cache is checked where it is said."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import stoker
from stoker import Cache
from stoker.epoch.settings import as_cache
from stoker.errors import ConfigError
from stoker.jobs import Sharing


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"memory": "120%"}, "cache='120%' is more than the whole data set"),
        ({"memory": None}, "cache=None is not a size"),
        ({"memory": True}, "cache=True is not a size"),
        ({"memory": 0.2}, "cache=0.2 is not a size: .* as a share, like"),
        ({"disk": 3}, "disk=3 is not a path"),
        ({"disk": "/nvme", "disk_size": "200%"}, "disk_size='200%' is more than the whole"),
        ({"disk": "/nvme", "disk_size": "much"}, "disk_size='much' is not a size"),
        ({"disk_size": "1%"}, "disk_size='1%' needs a directory: give disk too"),
        ({"pool": "http://h"}, "pool='http://...' is not an address"),
        ({"pool": "valkey://h", "pool_size": -1}, "pool_size=-1 is not a size"),
        ({"pool_size": "1GiB"}, "pool_size='1GiB' needs servers: give pool too"),
        ({"stage": "raw"}, "stage='raw' is not known: use 'encoded', 'decoded', or 'resized:SIDE'"),
        ({"stage": "resized:0"}, "stage='resized:0' is invalid: short_side=0: give 1"),
        ({"stage": "resized:288:101"}, "quality=101: give 1 to 100"),
        ({"stage": 288}, "stage=288 is not known"),
        ({"prefetch": "5%"}, "prefetch='5%' is a share of nothing known"),
        ({"prefetch": None}, "prefetch=None is not a size"),
        ({"fetchers": 0}, "fetchers=0 is invalid: give 1 to 64, or 'auto'"),
        ({"fetchers": True}, "fetchers=True is invalid"),
        ({"fetchers": "many"}, "fetchers='many' is invalid"),
        ({"stands_aside": 0}, "stands_aside=0 is invalid: give True or False"),
        ({"locality": "no"}, "locality='no' is invalid"),
        ({"sharing": "mine"}, "sharing='mine' is invalid"),
    ],
)
def test_bad_input(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Cache(**arguments)


def test_sizes_of_0_need_no_place() -> None:
    assert Cache(disk_size=0, pool_size=0).memory == "20%"


def test_a_size_alone_is_memory() -> None:
    for size in ("8GiB", 8 << 30, 1e9, 0):
        assert as_cache(size) == Cache(memory=size)
    whole = Cache("10%", sharing=Sharing("mine"))
    assert as_cache(whole) is whole
    with pytest.raises(ConfigError, match=r"cache=\['20%'\] is not a size"):
        as_cache(["20%"])  # type: ignore[arg-type]


def test_it_is_a_value(tmp_path: Path) -> None:
    cache = Cache("20%", disk=tmp_path, pool="valkey://user:secret@h", stage="decoded")
    assert pickle.loads(pickle.dumps(cache)) == cache
    assert hash(cache) == hash(dataclasses.replace(cache))
    assert "secret" not in repr(cache)
    with pytest.raises(dataclasses.FrozenInstanceError):
        cache.memory = 0  # type: ignore[misc]
    assert list(tmp_path.iterdir()) == []


def test_no_keyword_of_a_cache_is_one_of_a_loader_too() -> None:
    names = {field.name for field in dataclasses.fields(Cache)}
    for kind in (stoker.Loader, stoker.Feed):
        code = kind.__init__.__code__
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        assert not names & set(arguments)
        assert len(arguments) <= 23  # self included


def test_it_needs_no_torch() -> None:
    program = "import sys, stoker; stoker.Cache(); print('torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert said.stdout.strip() == "False", said.stderr
