"""The Loader gives what torch's DataLoader would, and says how."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.images import NUM_IMAGES
from support.parts import (
    dict_collate,
    ids_in,
    images,
    number_of,
    numbers,
    to_tensor,
    with_noise,
)
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import stoker
from stoker import Cache
from stoker.errors import ConfigError, SegmentError
from stoker.pytorch import Loader, SampleDataset
from stoker.types import Outcome


def loader_of(count: int = 100, **arguments: Any) -> Loader:
    dataset = SampleDataset(numbers(count), number_of, targets=np.arange(count) * 2)
    return Loader(dataset, **{"cache": "50%", "batch_size": 16, **arguments})


def epoch_ids(loader: Loader) -> list[int]:
    return [i for batch, _ in loader for i in batch.tolist()]


def test_it_is_a_torch_loader_and_three_lines_are_enough(image_root: Path) -> None:
    dataset = stoker.ImageFolder(image_root, transform=to_tensor)
    with stoker.Loader(dataset, batch_size=16, cache="50%") as loader:
        assert isinstance(loader, DataLoader)
        assert (loader.batch_size, loader.dataset, len(loader)) == (16, dataset, 4)
        for images_, targets in loader:
            assert images_.shape[1:] == (8, 8, 3)
            assert targets.tolist() == [i // 20 for i in ids_in(images_)]


def test_newcomer_7_the_loader_says_what_it_is(image_root: Path) -> None:
    dataset = stoker.ImageFolder(image_root, transform=to_tensor)
    with stoker.Loader(dataset, batch_size=16, cache="50%") as loader:
        shown = repr(loader)
        assert shown == repr(loader)
    assert f"ImageFolder {image_root}: {NUM_IMAGES} samples" in shown
    assert "recipe foresight; cache" in shown
    assert "(50%), in batches of 16 by 0 workers" in shown
    part = Subset(SampleDataset(numbers(100), number_of), range(30))
    assert "SampleDataset: 30 of 100 samples" in repr(Loader(part, cache=0))
    assert "; no cache, in batches" in repr(Loader(part, cache=0))
    assert "decoded, in batches" in repr(Loader(dataset, cache=Cache(stage="decoded")))


def test_newcomer_6_the_stats_say_whether_training_waits() -> None:
    with loader_of() as loader:
        assert str(loader.stats) == loader.stats.summary
        for _ in range(2):
            epoch_ids(loader)
        stats = loader.stats
        assert stats.workers == 0
        assert stats.data_bytes == sum(numbers(100).sizes)
        each = [epoch.epoch_seconds for epoch in loader.epoch_stats]
        assert min(each) > 0
        assert stats.epoch_seconds == pytest.approx(sum(each))
        assert str(stats).split("\n") == [stats.summary, stats.verdict]
        assert stats.verdict.startswith("training waits ")


def test_every_sample_once_an_epoch_in_a_new_order_that_the_seed_decides() -> None:
    with loader_of() as loader, loader_of() as again, loader_of(seed=1) as other:
        first, second = epoch_ids(loader), epoch_ids(loader)
        assert sorted(first) == sorted(second) == list(range(100))
        assert first != second
        assert [epoch_ids(again), epoch_ids(again)] == [first, second]
        assert epoch_ids(other) != first


def test_set_epoch_chooses_the_order_and_an_abandoned_iterator_uses_its_epoch_up() -> None:
    with loader_of() as loader:
        orders = [epoch_ids(loader) for _ in range(3)]
        loader.set_epoch(0)
        assert next(iter(loader))[0].tolist() == orders[0][:16]
        assert epoch_ids(loader) == orders[1]
        loader.set_epoch(2)
        assert epoch_ids(loader) == orders[2]
        with pytest.raises(ConfigError, match="epoch=-1"):
            loader.set_epoch(-1)


def test_the_seed_decides_the_order() -> None:
    def order(seed: int) -> list[int]:
        with loader_of(seed=seed) as loader:
            return epoch_ids(loader)

    assert order(3) == order(3)
    assert order(3) != order(4)


def test_shuffle_false_is_in_order_with_a_static_cache() -> None:
    with loader_of(shuffle=False, recipe="lru") as loader:
        for _ in range(3):
            assert epoch_ids(loader) == list(range(100))
        # LRU would have no hit at all in a scan.
        assert 0.4 < loader.epoch_stats[-1].byte_hit_ratio <= 0.5


@pytest.mark.parametrize("drop_last", [False, True])
def test_drop_last_and_len(drop_last: bool) -> None:
    with loader_of(drop_last=drop_last) as loader:
        sizes = [len(batch) for batch, _ in loader]
        assert sizes == [16] * 6 + ([] if drop_last else [4])
        assert len(loader) == len(sizes) == len(iter(loader))


def test_batch_size_none_gives_samples() -> None:
    with loader_of(batch_size=None, shuffle=False) as loader:
        assert list(loader) == [[i, 2 * i] for i in range(100)]  # a list, as torch makes of it
        assert len(loader) == 100


def test_a_sampler_supplies_the_plan() -> None:
    chosen = SubsetRandomSampler(range(10, 20), generator=torch.Generator().manual_seed(0))
    with loader_of(sampler=chosen, batch_size=4) as loader:
        assert sorted(epoch_ids(loader)) == list(range(10, 20))
        assert len(loader) == 3
    weighted = WeightedRandomSampler([1.0] * 5 + [0.0] * 95, num_samples=32)
    with loader_of(sampler=weighted) as loader:
        assert set(epoch_ids(loader)) <= set(range(5))


def test_a_batch_sampler_supplies_the_plan() -> None:
    sampler = BatchSampler(SequentialSampler(range(10)), 4, drop_last=False)
    with loader_of(batch_size=1, batch_sampler=sampler) as loader:
        assert [batch.tolist() for batch, _ in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
        assert len(loader) == 3


def test_a_sampler_without_length_or_end() -> None:
    def forever() -> Any:
        while True:
            yield from range(100)

    class Endless:
        def __iter__(self) -> Any:
            return forever()

    with loader_of(sampler=Endless()) as loader:
        for number, (batch, _) in zip(range(10), loader, strict=False):
            assert batch[0] == number * 16 % 100


def test_a_sampler_of_lists_without_batching_gives_lists() -> None:
    with loader_of(batch_size=None, sampler=[[3, 4], [5, 6]]) as loader:
        assert [[int(i) for i, _ in batch] for batch in loader] == [[3, 4], [5, 6]]


def test_a_sampler_that_asks_for_what_is_not_there() -> None:
    with loader_of(sampler=[5, 100]) as loader, pytest.raises(ConfigError, match="from 5 to 100"):
        drain_all(loader)


def test_the_planned_order_is_visible_as_a_sampler() -> None:
    with loader_of() as loader:
        assert len(loader.sampler) == 100
        assert list(loader.sampler) == epoch_ids(loader)
        batches = list(loader.batch_sampler)
        assert [batch.tolist() for batch, _ in loader] == batches


def test_subsets_keep_the_ids_of_the_base() -> None:
    base = SampleDataset(numbers(100), number_of, targets=np.arange(100))
    odd = Subset(base, range(1, 100, 2))
    nested = Subset(odd, [0, 10, 20, 30, -1])
    with Loader(nested, batch_size=2, cache="100%") as loader:
        seen = []
        for batch, targets in loader:
            assert loader.last_ids.tolist() == batch.tolist() == targets.tolist()
            loader.observe(batch * 0.5)
            seen += batch.tolist()
        assert sorted(seen) == [1, 21, 41, 61, 99]
        assert len(loader.scores) == 100
        assert np.flatnonzero(loader.scores.seen).tolist() == [1, 21, 41, 61, 99]
        assert loader.scores.values[41] == 20.5
        # What loader.sampler yields are indices of the Subset, as in torch.
        loader.set_epoch(0)
        assert [nested[i][0] for i in loader.sampler] == seen


def test_batches_are_those_of_torch(image_root: Path) -> None:
    dataset = images(image_root)
    arguments: dict[str, Any] = {"batch_size": 7, "shuffle": False}
    with Loader(dataset, cache=0, **arguments) as loader:
        for ours, theirs in zip(loader, DataLoader(dataset, **arguments), strict=True):
            assert type(ours) is type(theirs)
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_dict_batches_and_a_collate_function(image_root: Path) -> None:
    with Loader(
        images(image_root), batch_size=16, collate_fn=dict_collate, return_meta=True
    ) as loader:
        for batch in loader:
            assert list(batch) == ["image", "label", "meta"]
            assert batch["meta"].ids.tolist() == ids_in(batch["image"])


def test_hits_outcomes_and_bytes_add_up(image_root: Path) -> None:
    dataset = images(image_root)
    cache = Cache("100%", stands_aside=False)
    with Loader(dataset, batch_size=16, cache=cache, return_meta=True) as loader:
        for _, _, meta in loader:
            assert (meta.outcomes == Outcome.FETCHED).all()
        for _ in loader:
            assert (loader.last_outcomes == Outcome.HIT).all()
        stats = loader.stats
        assert (stats.accesses, stats.hits, stats.fetched) == (120, 60, 60)
        assert stats.bytes_from_source == stats.bytes_from_cache == dataset.source.sizes.sum()
        assert stats.hit_ratio == stats.byte_hit_ratio == 0.5
        assert stats.coverage == stats.ess == 1.0
        assert stats.cache_bytes == dataset.source.sizes.sum()
        assert [epoch.hit_ratio for epoch in loader.epoch_stats] == [0.0, 1.0]
        assert 0 < stats.stall_seconds < 60


def test_augmentation_depends_on_the_seed_and_the_epoch_only(image_root: Path) -> None:
    def two_epochs(**arguments: Any) -> torch.Tensor:
        with Loader(images(image_root, with_noise), batch_size=16, **arguments) as loader:
            return torch.cat([batch for _ in range(2) for batch, _ in loader])

    torch.manual_seed(5)
    first = two_epochs()
    torch.manual_seed(6)
    assert torch.equal(first, two_epochs())
    assert not torch.equal(first, two_epochs(seed=1))
    with Loader(images(image_root, with_noise), batch_size=5) as loader:
        assert torch.equal(torch.cat([b for b, _ in loader]), first[:NUM_IMAGES])
    noise = first.reshape(2, NUM_IMAGES, -1)[:, :, 0] % 1
    assert len(noise.unique()) > 1.9 * NUM_IMAGES  # a new draw for each sample and epoch


def test_without_workers_the_callers_generators_stay_as_they_were(image_root: Path) -> None:
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # noqa: NPY002
    with Loader(images(image_root, with_noise), batch_size=16) as loader:
        iterator = iter(loader)
        states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # noqa: NPY002
        list(iterator)
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), states[2])


def test_total_steps() -> None:
    with loader_of(epochs=3) as loader:
        assert loader.total_steps() == 21
    with loader_of() as loader, pytest.raises(ConfigError, match="epochs="):
        loader.total_steps()


def test_after_close_everything_says_so() -> None:
    loader = loader_of()
    iterator = iter(loader)
    batch, _ = next(iterator)
    loader.close()
    loader.close()
    for attempt in (
        lambda: next(iterator),
        lambda: iter(loader),
        lambda: loader.observe(batch),
        loader.end_epoch,
    ):
        with pytest.raises(SegmentError, match="closed"):
            attempt()
    assert loader.stats.accesses == 16
    assert len(loader) == 7


def test_end_epoch_logs_what_happened(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "stoker"), loader_of() as loader:
        drain_all(loader)
        loader.end_epoch(accuracy=0.5)
    assert "predicted hit ratio" in caplog.text
    assert "recipe foresight" in caplog.text
    assert "epoch 0, accuracy 0.5000: 100 samples" in caplog.text


def test_two_iterators_at_once() -> None:
    with loader_of(shuffle=False) as loader:
        pairs = [(a.tolist(), b.tolist()) for (a, _), (b, _) in zip(loader, loader, strict=True)]
        assert all(a == b for a, b in pairs)


def drain_all(loader: Loader) -> None:
    for _ in loader:
        pass
