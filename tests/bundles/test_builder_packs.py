"""Which samples go into which packages."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hn

from stoker.bundles.builder import mixed_packages, pack

NUM = 60


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, list[np.ndarray], np.ndarray, int]:
    low = draw(hn.arrays(np.bool_, NUM))
    missed = draw(hn.arrays(np.bool_, NUM))
    sizes = draw(hn.arrays(np.int64, NUM, elements=st.integers(0, 50)))
    cuts = sorted(draw(st.lists(st.integers(0, NUM), max_size=8)))
    order = np.random.default_rng(draw(st.integers(0, 9))).permutation(NUM).astype(np.uint32)
    existing = np.split(order, cuts)[: draw(st.integers(0, 8))]
    return low, missed, existing, sizes, draw(st.integers(1, 400))


def homes(existing: list[np.ndarray], count: int) -> np.ndarray:
    """Return u32[count], the number of the package of each sample, from 1 on; 0: none."""
    named = np.zeros(count, np.uint32)
    for number, ids in enumerate(existing):
        named[ids] = number + 1
    return named


@given(cases(), st.integers(0, 99))
def test_packages_are_what_they_promise(
    case: tuple[np.ndarray, np.ndarray, list[np.ndarray], np.ndarray, int], seed: int
) -> None:
    low, missed, existing, sizes, least = case
    packages = pack(low, missed, homes(existing, NUM), sizes, least, np.random.default_rng(seed))
    again = pack(low, missed, homes(existing, NUM), sizes, least, np.random.default_rng(seed))
    assert all(np.array_equal(a, b) for a, b in zip(packages, again, strict=True))
    weights = [int(sizes[ids].sum()) for ids in packages]
    counts = Counter(np.concatenate([[], *packages]).astype(int).tolist())
    assert set(counts) == set(np.flatnonzero(low).tolist())
    if sizes[low].sum() >= least:
        assert min(weights) >= least
        for ids in packages:
            assert sizes[ids[:-1]].sum() < least
    else:
        assert len(packages) == int(low.any())
    for ids in packages:
        assert ids.dtype == np.uint32
        assert len(np.unique(ids)) == len(ids)
    # Repeats are found in the last package only, and come from the one before.
    repeated = [number for number, count in counts.items() if count > 1]
    assert max(counts.values(), default=0) <= 2
    if repeated:
        assert np.isin(repeated, packages[-1]).all()
        assert np.isin(repeated, packages[-2]).all()
    first = np.concatenate([[], *packages])[: int((low & missed).sum())]
    assert missed[first.astype(int)].all()


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def test_missed_then_packed_then_the_rest(rng: np.random.Generator) -> None:
    low = np.ones(NUM, np.bool_)
    missed = np.zeros(NUM, np.bool_)
    missed[[3, 40, 41]] = True
    existing = [np.arange(0, 20, dtype=np.uint32)]
    order = np.concatenate(pack(low, missed, homes(existing, NUM), np.ones(NUM, np.int64), 10, rng))
    assert set(order[:3].tolist()) == {3, 40, 41}
    assert set(order[3:22].tolist()) == set(range(20)) - {3}
    assert set(order[22:].tolist()) == set(range(20, NUM)) - {40, 41}


def test_samples_are_mixed_within_few_packages(rng: np.random.Generator) -> None:
    """A new package takes from no more than two groups, so each old one is read about once."""
    count, each = 100, 50
    existing = np.split(rng.permutation(count * each).astype(np.uint32), count)
    everything = np.ones(count * each, np.bool_)
    home = homes(existing, count * each)
    packages = pack(everything, ~everything, home, np.ones(count * each, np.int64), each, rng)
    mixed = mixed_packages(each)
    assert mixed == 16
    sources = [len(np.unique(home[ids])) for ids in packages]
    assert max(sources) <= 2 * mixed
    assert np.mean(sources) > mixed / 2  # but they are mixed
    # Groups are others in the next epoch.
    neighbours = [set(np.unique(home[ids]).tolist()) for ids in packages[:16]]
    assert set().union(*neighbours) != set(range(1, 1 + mixed))


def test_first_packages_are_random_over_all(rng: np.random.Generator) -> None:
    low = np.ones(10_000, np.bool_)
    first, *_ = pack(low, ~low, homes([], 10_000), np.ones(10_000, np.int64), 1000, rng)
    assert abs(first.mean() - 5_000) < 500  # five standard deviations
    assert len(np.unique(first // 1000)) == 10


def test_the_memory_for_mixing_is_bounded() -> None:
    assert mixed_packages(1 << 20) == 16
    assert mixed_packages(8 << 20) == 4
    assert mixed_packages(1 << 28) == 2
