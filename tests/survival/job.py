"""A job as a program of its own: opens a data set's arena and does what its input says.

Each line of input is a command with ids; each gets one line of JSON. Started by test_sharing.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from stoker.policy import LRU
from stoker.store.arena import Arena
from stoker.store.registry import open_arena
from survival.payloads import NUM_IDS, packed, wrong
from survival.support import CAPACITY, die_with_parent, inode


def play(key: str, commands: Iterable[str]) -> Iterator[Any]:
    """Open the arena and yield what came of it, then one answer for each command."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        opened = open_arena(key, NUM_IDS, CAPACITY, 3000, LRU().regions(), description="a job")
    with opened:
        yield {
            "created": opened.created,
            "shared": opened.shared,
            "inode": inode(opened.arena),
            "warnings": [str(warning.message) for warning in caught],
        }
        for command in commands:
            verb, *ids = command.split()
            yield _do(opened.arena, verb, np.array(ids, np.uint32))


def _do(arena: Arena, verb: str, ids: Any) -> list[bool]:
    if verb == "put":
        return list(map(bool, arena.put_many(ids, packed(ids))))
    if verb == "get":
        got = arena.get_many(ids)
        assert not wrong(ids, got)
        return list(map(bool, got[2]))
    if verb == "wait":
        return list(map(bool, arena.wait(ids, 30)))
    assert verb == "claim"
    return list(map(bool, arena.claim(ids)))


def main() -> None:
    die_with_parent()
    for answer in play(sys.argv[1], sys.stdin):
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
