"""A Loader or Feed that is closed and dropped leaves no descriptor, without a garbage collection.

Trainings switch that off or put it off; what waits for it would be 50 descriptors a Loader.
"""

from __future__ import annotations

import gc
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker.feed import Feed
from stoker.source.held import MemorySource

RECIPES = ("foresight:repeat=2", "shade", "icache", "impact", "spidercache", "quiver", "lru")


def opened() -> Counter[str]:
    """Return what is open in this process, by kind."""
    found: Counter[str] = Counter()
    for each in Path("/proc/self/fd").iterdir():
        if each.is_symlink():
            found[str(each.readlink()).split(":[")[0]] += 1
    return found


def train(source: MemorySource, kind: str, recipe: str) -> None:
    """Make one, go through two epochs, close it, forget it."""
    made: Any
    if kind == "Feed":
        made = Feed(source, 32, cache="20%", recipe=recipe)
    else:
        torch = pytest.importorskip("torch", reason="torch is not installed")
        from stoker.pytorch import Loader, SampleDataset

        data = SampleDataset(
            source, lambda raw: torch.frombuffer(bytearray(raw), dtype=torch.int32)
        )
        made = Loader(data, 32, cache="20%", recipe=recipe, num_workers=int(kind == "workers"))
    with made:
        for _ in range(2):
            assert sum(len(batch[0]) if kind != "Feed" else len(batch) for batch in made) > 0


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::UserWarning")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", ["Feed", "Loader", "workers"])
def test_nothing_stays_open(kind: str, recipe: str) -> None:
    source = MemorySource([np.full(400, i, np.int32).tobytes() for i in range(300)])
    train(source, kind, recipe)  # what is made once per process
    gc.collect()
    gc.disable()
    try:
        before = opened()
        train(source, kind, recipe)
        assert opened() - before == Counter()
    finally:
        gc.enable()
