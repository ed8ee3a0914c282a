"""Policies that need keys get them from the plan, with the batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.parts import number_of, numbers
from torch.utils.data import Subset

from stoker import recipes
from stoker.epoch.planner import Cursor
from stoker.pytorch import Loader, SampleDataset
from stoker.source import MemorySource


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("subset", [False, True])
def test_belady_reaches_the_share_of_the_cache(workers: int, subset: bool) -> None:
    source = MemorySource([bytes(8) for _ in range(400)])
    dataset: Any = SampleDataset(source)
    if subset:
        dataset = Subset(dataset, range(0, 400, 2))
    with Loader(
        dataset, batch_size=10, cache="30%", recipe="belady", num_workers=workers
    ) as loader:
        for _ in range(4):
            for _ in loader:
                pass
        for epoch in loader.epoch_stats[1:]:
            assert 0.27 < epoch.hit_ratio <= 0.3001


def test_with_a_cost_per_request_small_samples_stay() -> None:
    sizes = np.random.default_rng(0).integers(1, 60, 300) ** 2
    dataset = SampleDataset(MemorySource([bytes(int(size)) for size in sizes]), len)

    def hits(request_bytes: float) -> float:
        recipe = recipes.belady(request_bytes=request_bytes)
        with Loader(dataset, batch_size=10, cache="20%", recipe=recipe) as loader:
            for _ in range(4):
                for _ in loader:
                    pass
            return loader.epoch_stats[-1].hit_ratio

    assert hits(10_000) > 1.3 * hits(0)


def test_keys_are_those_of_the_policy() -> None:
    with Loader(
        SampleDataset(numbers(20), number_of), batch_size=4, cache="100%", recipe="belady"
    ) as loader:
        for _ in range(2):
            last = list(loader)[-1].numpy()
        assert loader.cache is not None
        tier: Any = loader.cache.store.tier
        following = loader._session.controller.planner.order(Cursor(2))
        places = {int(i): n for n, i in enumerate(following.ids)}
        expected = [-(following.start + places[int(i)]) for i in last]
        assert tier.arena.keys(last.astype(np.uint32)).tolist() == expected
