from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import ArrayLike

import stoker
from stoker.epoch.batch import sample_seeds
from stoker.errors import ConfigError, SampleCorrupt
from stoker.pytorch.batch_server import preserved_generators, seed_generators
from stoker.source import BaseSource, MemorySource


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(1))  # noqa: NPY002


def test_seeding_decides_all_three() -> None:
    with preserved_generators():
        seed_generators(2**63 + 5)
        first = draws()
        seed_generators(2**63 + 5)
        assert draws() == first
        seed_generators(2**63 + 6)
        assert all(a != b for a, b in zip(draws(), first, strict=True))


def test_generators_are_given_back_also_after_an_error() -> None:
    with preserved_generators():
        random.seed(1)
        expected = draws()
        random.seed(1)
    torch.manual_seed(3)
    np.random.seed(3)  # noqa: NPY002
    random.seed(3)
    expected = draws()
    torch.manual_seed(3)
    np.random.seed(3)  # noqa: NPY002
    random.seed(3)
    try:
        with preserved_generators():
            seed_generators(9)
            draws()
            raise KeyError
    except KeyError:
        pass
    assert draws() == expected


def test_a_normal_number_drawn_in_advance_is_given_back_too() -> None:
    np.random.seed(3)  # noqa: NPY002
    first, second = np.random.randn(), np.random.randn()  # noqa: NPY002
    np.random.seed(3)  # noqa: NPY002
    assert np.random.randn() == first  # noqa: NPY002
    with preserved_generators():
        seed_generators(9)
        draws()
    assert np.random.randn() == second  # noqa: NPY002


def test_preserved_within_preserved() -> None:
    with preserved_generators():
        seed_generators(9)
        expected = draws(), draws()
        seed_generators(9)
        assert draws() == expected[0]
        with preserved_generators():
            seed_generators(10)
            draws()
        assert draws() == expected[1]


def test_seeds_differ_by_seed_epoch_and_position() -> None:
    positions = np.arange(1000)
    found = [
        *sample_seeds(0, 0, positions),
        *sample_seeds(1, 0, positions),
        *sample_seeds(0, 1, positions),
        *sample_seeds(1, 1, positions),
        *sample_seeds(2**64 - 1, 0, positions),
    ]
    assert len(set(found)) == 5000
    assert all(0 <= seed < 2**64 for seed in found)
    assert sample_seeds(3, 4, positions[10:20]) == sample_seeds(3, 4, positions)[10:20]


def test_first_draws_look_uniform() -> None:
    with preserved_generators():
        firsts = []
        for seed in sample_seeds(0, 0, np.arange(2000)):
            seed_generators(seed)
            firsts.append(draws())
    means, spreads = np.mean(firsts, axis=0), np.std(firsts, axis=0)
    assert np.abs(means - 0.5).max() < 0.03  # 4.6 standard errors
    assert np.abs(spreads - 12**-0.5).max() < 0.02
    assert np.abs(np.corrcoef(np.transpose(firsts)) - np.eye(3)).max() < 0.1


SAMPLES = [bytes([i]) * (i % 7) for i in range(40)]


@pytest.mark.parametrize("workers", [0, 1])
def test_packed_batches_are_the_same_bytes_in_one_piece(workers: int) -> None:
    targets = np.arange(40, dtype=np.float32) / 2
    dataset = stoker.SampleDataset(MemorySource(SAMPLES), decode="packed", targets=targets)
    with stoker.Loader(
        dataset,
        8,
        num_workers=workers,
        cache="50%",
        return_meta=True,
        persistent_workers=workers > 0,
    ) as loader:
        for _ in range(2):
            seen = []
            for (data, offsets), labels, meta in loader:
                assert data.dtype == torch.uint8 and offsets.dtype == torch.int64
                ids = meta.ids.tolist()
                rows = [data[a:b].numpy().tobytes() for a, b in pairwise(offsets.tolist())]
                assert rows == [SAMPLES[i] for i in ids]
                assert labels.tolist() == targets[ids].tolist()
                data += 1  # it is the batch's own memory
                seen += ids
            assert sorted(seen) == list(range(40))
        assert loader.stats.hits > 0


class Broken(BaseSource):
    """Sample 7 cannot be read."""

    fingerprint = "broken"

    def __len__(self) -> int:
        return 40

    @property
    def sizes(self) -> Any:
        return np.full(40, 4, np.int64)

    def read(self, ids: ArrayLike) -> list[bytes]:
        if 7 in np.asarray(ids):
            raise SampleCorrupt("sample 7 is on a bad disk", [7])
        return [b"%04d" % i for i in np.asarray(ids).tolist()]


def test_packed_batches_have_no_targets_unless_given_and_others_for_what_is_broken() -> None:
    dataset = stoker.SampleDataset(Broken(), decode="packed")
    with stoker.Loader(dataset, 8, on_error="skip", return_meta=True) as loader:
        for data, offsets, meta in loader:
            assert 7 not in meta.ids and offsets.tolist() == list(range(0, 33, 4))
            assert data.numpy().tobytes() == b"".join(b"%04d" % i for i in meta.ids.tolist())
        assert [failure.id for failure in loader.quarantine] == [7]
    assert dataset[3] == b"0003"  # without a Loader there are samples only


@pytest.mark.parametrize(
    "options",
    [
        {"collate_fn": list},
        {"batch_size": None},
        {"cache": stoker.Cache("20%", stage="decoded")},
        {"batch_size": 1, "batching": stoker.TokenBudget(64)},
    ],
    ids=["collate_fn", "single", "stage", "batching"],
)
def test_packed_batches_have_no_decoded_samples(options: dict[str, Any]) -> None:
    dataset = stoker.SampleDataset(MemorySource(SAMPLES), decode="packed")
    with pytest.raises(ConfigError, match="decode='packed' leaves samples as bytes"):
        stoker.Loader(dataset, **{"batch_size": 4, **options})
    with pytest.raises(ConfigError, match="transform needs them decoded"):
        dataset.transform = bytes
    with pytest.raises(ConfigError, match="decode='flat' is not known"):
        stoker.SampleDataset(MemorySource(SAMPLES), decode="flat")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no packed batches"):
        stoker.mix({"a": dataset, "b": dataset}, [0.5, 0.5], epoch_samples=40)
