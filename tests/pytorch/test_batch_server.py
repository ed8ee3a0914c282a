from __future__ import annotations

import random

import numpy as np
import torch

from stoker.epoch.batch import sample_seeds
from stoker.pytorch.batch_server import preserved_generators, seed_generators


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
