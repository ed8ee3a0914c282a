"""Mixtures of data sets in a Loader."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.parts import Squares, images, number_of, numbers, to_tensor
from torch.utils.data import DataLoader, SequentialSampler, Subset

import stoker
from stoker import Cache, TokenBudget
from stoker.errors import ConfigError, StateMismatch
from stoker.images import Eval
from stoker.pytorch import Loader, MixedDataset, SampleDataset, with_cache, wrap
from stoker.source import MemorySource

WEIGHTS = {"web": 0.75, "code": 0.25}


def plus_thousand(number: int) -> int:
    return number + 1000


def parts() -> dict[str, Any]:
    return {
        "web": SampleDataset(numbers(100), number_of),
        "code": SampleDataset(numbers(20), number_of, plus_thousand),
    }


def mixture(**options: Any) -> MixedDataset:
    given = {"epoch_samples": 80, **options}
    weights = given.pop("weights", WEIGHTS)
    return stoker.mix(given.pop("parts", parts()), weights, **given)


def walked(loader: Loader, epochs: int) -> list[list[int]]:
    return [[int(i) for batch in loader for i in batch] for _ in range(epochs)]


def test_each_part_has_its_own_transform_and_passes() -> None:
    with Loader(mixture(), 8, cache="50%") as loader:
        assert len(loader) == 10
        epochs = walked(loader, 5)
        stats = loader.source_stats
    for epoch in epochs:
        assert len(epoch) == 80 and sum(i >= 1000 for i in epoch) == 20
        assert sorted(i for i in epoch if i >= 1000) == list(range(1000, 1020))
    web = [i for epoch in epochs for i in epoch if i < 1000]
    for begin in (0, 100, 200):
        assert sorted(web[begin : begin + 100]) == list(range(100))
    assert stats["web"].epochs == 3 and stats["code"].epochs == 5
    assert stats["web"].accesses == 300 and stats["code"].accesses == 100
    assert stats["code"].hits + 20 >= 60, "the code stays in the cache, once read"
    assert sum(s.hits for s in stats.values()) == loader.stats.hits


def test_every_batch_has_the_shares() -> None:
    with Loader(mixture(), 20, cache=0) as loader:
        for batch in loader:
            assert 3 <= int((batch >= 1000).sum()) <= 7


def test_samples_can_say_where_they_are_from() -> None:
    with Loader(mixture(tagged=True), 16, cache=0, return_meta=True) as loader:
        for values, origins, meta in loader:
            assert ((values >= 1000) == (origins == 1)).all()
            data: Any = loader.dataset
            assert data.origins(meta.ids).tolist() == origins.tolist()
            assert data.names == ("web", "code")


def test_workers_and_prefetch_serve_the_same() -> None:
    with Loader(mixture(), 8, cache=0) as loader:
        expected = walked(loader, 2)
    options: dict[str, Any] = {"cache": Cache("40%", prefetch="1MiB"), "num_workers": 1}
    with Loader(mixture(), 8, multiprocessing_context="spawn", **options) as loader:
        assert walked(loader, 2) == expected
        assert loader.stats.accesses == 160


def test_ranks_divide_one_plan() -> None:
    def of(rank: int, world_size: int) -> list[int]:
        with Loader(mixture(), 8, cache=0, rank=rank, world_size=world_size) as loader:
            return walked(loader, 1)[0]

    whole, halves = of(0, 1), [of(rank, 2) for rank in range(2)]
    assert halves == [whole[0::2], whole[1::2]]


def test_resumes_in_the_middle_with_counts() -> None:
    with Loader(mixture(), 8, cache="50%") as loader:
        expected = walked(loader, 3)[2]
        whole = loader.source_stats
    with Loader(mixture(), 8, cache="50%") as loader:
        walked(loader, 2)
        begun = iter(loader)
        first = [int(i) for _ in range(3) for i in next(begun)]
        state = loader.state_dict()
        at_three = loader.source_stats
    torch.save(state, buffer := io.BytesIO())
    buffer.seek(0)
    with Loader(mixture(), 8, cache="50%") as loader:
        loader.load_state_dict(torch.load(buffer, weights_only=True))
        assert loader.source_stats == at_three
        assert first + walked(loader, 1)[0] == expected
        after = loader.source_stats
    for name, stats in whole.items():
        assert (after[name].accesses, after[name].epochs) == (stats.accesses, stats.epochs)


def test_a_state_of_other_weights_raises() -> None:
    with Loader(mixture(), 8, cache=0) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with (
        Loader(mixture(weights={"web": 1, "code": 1}), 8, cache=0) as loader,
        pytest.raises(StateMismatch, match="order"),
    ):
        loader.load_state_dict(state)


def test_subsets_and_wrapped_data_sets() -> None:
    some = Subset(SampleDataset(numbers(100), number_of), range(10, 20))
    mixed = mixture(parts={"web": some, "code": wrap(Squares(), name="squares")}, tagged=True)
    assert len(mixed) == 140
    with Loader(
        mixture(parts={"web": some, "code": parts()["code"]}, epoch_samples="last"), 8, cache="50%"
    ) as loader:
        (epoch,) = walked(loader, 1)
        assert len(epoch) == 80
        assert sorted(i for i in epoch if i < 1000) == sorted([*range(10, 20)] * 6)
        assert loader.source_stats["web"].samples == 10
    sample, origin = mixed[139]
    assert origin == 1 and sample[0].tolist() == [[39 * 39] * 4] * 4
    with Loader(mixed, None, cache=Cache("50%", prefetch="1MiB")) as loader:
        assert len([*loader]) == 80


@pytest.mark.parametrize("stage", ["encoded", "decoded"])
@pytest.mark.parametrize("other", [Eval(8, 8), Eval(10, 8)])
def test_image_transforms_of_one_kind_or_several(image_root: Path, stage: str, other: Eval) -> None:
    one = images(image_root, [Eval(8, 8)])
    two = images(image_root, [other])
    data = mixture(parts={"web": one, "code": two})
    assert (data.image_transform is None) == (other != Eval(8, 8))
    with Loader(data, 8, cache=Cache("50%", stage=stage), return_meta=True) as loader:
        for pixels, targets, meta in loader:
            for image, target, index in zip(pixels, targets, meta.ids.tolist(), strict=True):
                part, local = (one, index) if index < len(one) else (two, index - len(one))
                expected, label = part[local]
                assert int(target) == label
                assert (image.int() - expected.int()).abs().max() <= 3


def test_read_through_and_by_torchs_own_loader(image_root: Path) -> None:
    data = mixture(parts={"web": images(image_root, to_tensor), "code": parts()["code"]})
    assert int(data[len(data) - 1]) == 1019
    assert data[0][1] == 0
    plain = mixture()
    cached = with_cache(plain, "50%")
    values = [int(i) for batch in DataLoader(cached, 10) for i in batch]
    assert values == [*range(100), *range(1000, 1020)]
    cached.close()


def test_bad_input_raises_at_construction() -> None:
    with pytest.raises(ConfigError, match="leave out shuffle"):
        Loader(mixture(), 8, shuffle=False)
    with pytest.raises(ConfigError, match="leave out shuffle"):
        Loader(mixture(), 8, sampler=SequentialSampler(mixture()))
    with pytest.raises(ConfigError, match="chooses samples itself"):
        Loader(mixture(), 8, recipe="shade")
    with pytest.raises(ConfigError, match="Subset of a mixture"):
        Loader(Subset(mixture(), [1, 2]), 8)
    with pytest.raises(ConfigError, match="mixture of mixtures"):
        mixture(parts={"web": mixture(), "code": parts()["code"]})
    with pytest.raises(ConfigError, match="0 samples"):
        mixture(parts={"web": Subset(parts()["web"], []), "code": parts()["code"]})
    with (
        Loader(parts()["web"], 8, cache=0) as loader,
        pytest.raises(ConfigError, match="no mixture"),
    ):
        _ = loader.source_stats


def test_a_source_may_fail(tmp_path: Path) -> None:
    """A sample that is replaced counts for the source of its replacement."""
    broken = SampleDataset(numbers(20), _fails_at_three)
    data = mixture(parts={"web": parts()["web"], "code": broken})
    with Loader(data, 8, cache=0, on_error="skip") as loader:
        assert len(walked(loader, 1)[0]) == 80
        assert [failure.id for failure in loader.quarantine] == [103]
        counts = loader.source_stats
    assert counts["web"].accesses + counts["code"].accesses == 80


def _fails_at_three(raw: bytes) -> int:
    number = number_of(raw)
    if number == 3:
        raise ValueError("three")
    return number


def test_many_parts() -> None:
    names = [f"part {i}" for i in range(40)]
    many = {name: SampleDataset(numbers(5), number_of) for name in names}
    weights = {name: i + 1.0 for i, name in enumerate(names)}
    with Loader(mixture(parts=many, weights=weights, epoch_samples=820), 41, cache=0) as loader:
        list(loader)
        found = [stats.accesses for stats in loader.source_stats.values()]
    np.testing.assert_allclose(found, np.arange(1, 41), atol=1e-9)


def tokens(raw: bytes) -> Any:
    return np.frombuffer(raw, np.uint8)


def texts(count: int, token: int) -> SampleDataset:
    return SampleDataset(MemorySource([bytes([token]) * (1 + i % 9) for i in range(count)]), tokens)


def test_batches_by_length_of_a_mixture() -> None:
    """They change the order within an epoch, not how often each part comes; states are exact."""

    def loader_of(rank: int = 0, world_size: int = 1) -> Loader:
        data = mixture(parts={"web": texts(100, 1), "code": texts(20, 2)})
        budget = TokenBudget(32, token_bytes=1)
        options: dict[str, Any] = {"rank": rank, "world_size": world_size, "return_meta": True}
        return Loader(data, batching=budget, cache="50%", **options)

    with loader_of() as loader:
        epochs = [[batch["meta"].ids.tolist() for batch in loader] for _ in range(2)]
        stats = loader.source_stats
    for epoch in epochs:
        assert sorted(i for batch in epoch for i in batch if i >= 100) == list(range(100, 120))
        assert sum(len(batch) for batch in epoch) == 80
    assert (stats["web"].epochs, stats["code"].epochs) == (1.2, 2)
    with loader_of() as loader:
        begun = iter(loader)
        first = [next(begun)["meta"].ids.tolist() for _ in range(4)]
        assert loader.source_stats["code"].accesses == sum(i >= 100 for b in first for i in b)
        assert loader.source_stats["code"].epochs == loader.source_stats["code"].accesses / 20
        state = loader.state_dict()
    found = [i for batch in first for i in batch]
    for rank in range(2):
        with loader_of(rank, 2) as loader:
            loader.load_state_dict(state)
            found += [i for batch in loader for i in batch["meta"].ids.tolist()]
    assert sorted(found) == sorted(i for batch in epochs[0] for i in batch)
