"""MixtureSampler: shares in every window, sources in passes of their own, weights that change."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.errors import ConfigError
from stoker.sampler import Mixture, MixtureSampler, Sampler, Stages
from stoker.testing.sampler_conformance import SamplerConformance

AB = ("a", "b")


class TestOnePassEach(SamplerConformance):
    def make_sampler(self, pad_to: int) -> Sampler:
        lengths = (60, self.num_samples - 60)
        weights = dict(zip(AB, lengths, strict=True))
        return MixtureSampler(Mixture(AB, lengths, weights, self.num_samples), 7, pad_to)


def by_epoch(epoch: int) -> Mapping[str, float]:
    return {"a": 1.0, "b": float(epoch % 3)}


def mixture_of(lengths: list[int], weights: list[float], accesses: int) -> Mixture:
    names = tuple(f"source {i}" for i in range(len(lengths)))
    return Mixture(names, tuple(lengths), dict(zip(names, weights, strict=True)), accesses)


def off_by(labels: np.ndarray[Any, Any], shares: np.ndarray[Any, Any]) -> float:
    """How far counts are from their shares at most, after any number of accesses."""
    hot = labels[:, None] == np.arange(len(shares))
    ideal = np.arange(1, len(labels) + 1)[:, None] * shares
    return float(np.abs(hot.cumsum(axis=0) - ideal).max())


mixtures = st.lists(
    st.tuples(st.integers(1, 40), st.one_of(st.just(0.0), st.floats(1e-4, 1.0))),
    min_size=1,
    max_size=7,
).filter(lambda parts: any(weight for _, weight in parts))


@settings(max_examples=60, deadline=None)
@given(mixtures, st.integers(1, 300), st.integers(0, 5))
def test_it_is_a_simple_model_of_walkers(
    parts: list[tuple[int, float]], accesses: int, seed: int
) -> None:
    """Every source is walked through in whole permutations, over the borders of epochs."""
    lengths, weights = map(list, zip(*parts, strict=True))
    mixture = mixture_of(lengths, weights, accesses)
    sampler = MixtureSampler(mixture, seed)
    shares = np.array(weights) / sum(weights)
    walked: list[list[int]] = [[] for _ in lengths]
    for epoch in range(4):
        assert sampler.before(epoch).tolist() == [len(visits) for visits in walked]
        ids = sampler.plan(None, epoch).ids
        assert len(ids) == accesses
        labels = mixture.origins(ids)
        assert off_by(labels, shares) < (2 if len(lengths) <= 2 else 5)
        counts = np.bincount(labels, minlength=len(lengths))
        assert (np.abs(counts - accesses * shares) < 1 + 1e-5).all()
        starts = np.cumsum(lengths) - lengths
        for source in range(len(lengths)):
            walked[source] += (ids[labels == source] - starts[source]).tolist()
    for length, visits in zip(lengths, walked, strict=True):
        for begin in range(0, len(visits) - length + 1, length):
            assert sorted(visits[begin : begin + length]) == list(range(length))
        rest = visits[len(visits) // length * length :]
        assert len(set(rest)) == len(rest)


@settings(max_examples=30, deadline=None)
@given(mixtures, st.integers(1, 200))
def test_what_is_expected_is_a_pass(parts: list[tuple[int, float]], accesses: int) -> None:
    """The accesses of a pass, as many as two epochs have of them."""
    lengths, weights = map(list, zip(*parts, strict=True))
    mixture = mixture_of(lengths, weights, accesses)
    sampler = MixtureSampler(mixture, 1, looks_ahead=True)
    assert MixtureSampler(mixture, 1).plan(None, 0).beyond is None
    for epoch in range(3):
        beyond = sampler.plan(None, epoch).beyond
        assert beyond is not None and len(beyond) == sum(lengths)
        counts = sampler.before(epoch + 2) - sampler.before(epoch)
        of_source = beyond[np.cumsum(lengths) - 1]
        assert (of_source[counts == 0] > 1e37).all()
        passes = 2 * accesses / of_source[counts > 0]
        np.testing.assert_allclose(passes, (counts / lengths)[counts > 0], rtol=1e-6)
        np.testing.assert_array_equal(beyond, np.repeat(of_source, lengths))


def test_passes_of_a_source_do_not_depend_on_what_it_is_mixed_with() -> None:
    one, other = (
        MixtureSampler(mixture_of([50, length], [1, weight], 100), 3)
        for length, weight in ((9, 1.0), (70, 0.2))
    )
    visits = []
    for sampler in (one, other):
        ids = np.concatenate([sampler.plan(None, epoch).ids for epoch in range(4)])
        visits.append(ids[ids < 50][:200])
    np.testing.assert_array_equal(*visits)
    halves = visits[0].reshape(4, 50)
    assert len({tuple(half) for half in halves.tolist()}) == 4, "a new permutation each pass"


def test_ranks_get_the_same_mixture() -> None:
    """With equal weights a strict alternation would give one source to each of two ranks."""
    mixture = mixture_of([1000, 1000], [1, 1], 10_000)
    labels = mixture.origins(MixtureSampler(mixture, 5).plan(None, 0).ids)
    for rank in range(2):
        assert 0.45 < labels[rank::2].mean() < 0.55


def test_a_rare_source_comes_in_some_epochs() -> None:
    mixture = mixture_of([10, 10], [0.999, 0.001], 100)
    counts = MixtureSampler(mixture, 2).before(1000)
    assert counts.sum() == 100_000
    assert 60 < counts[1] < 140


def test_the_plan_says_whether_samples_repeat() -> None:
    once = MixtureSampler(mixture_of([25, 25], [1, 1], 20), 1)
    assert [once.plan(None, epoch).repeats for epoch in range(4)] == [False, False, True, False]


@pytest.mark.parametrize(("end", "accesses"), [("first", 100), ("last", 200)])
def test_an_epoch_may_end_with_a_source(end: Any, accesses: int) -> None:
    mixture = Mixture((*AB, "c"), (75, 50, 1), {"a": 3, "b": 1, "c": 0}, end)
    assert mixture.accesses == accesses
    counts = MixtureSampler(mixture).before(1)
    assert counts.tolist() == [accesses * 3 // 4, accesses // 4, 0]


def test_weights_by_epoch() -> None:
    sampler = MixtureSampler(Mixture(AB, (20, 20), by_epoch, 60))
    assert np.diff([sampler.before(epoch) for epoch in range(4)], axis=0).tolist() == [
        [60, 0],
        [30, 30],
        [20, 40],
    ]
    pickled = pickle.dumps(sampler)
    assert len(pickled) < 2000, "without what was drawn"
    again = pickle.loads(pickled)
    assert again.plan(None, 5).identity == sampler.plan(None, 5).identity


def test_weights_in_stages() -> None:
    """They change within epochs, and where they change is a matter of samples, not of ranks."""
    stages = Stages({0: {"a": 1, "b": 0}, 10: {"a": 1, "b": 1}, 30: {"a": 0, "b": 1}}, 8)
    mixture = Mixture(AB, (1000, 1000), stages, 100)
    sampler = MixtureSampler(mixture)
    labels = np.concatenate([mixture.origins(sampler.plan(None, e).ids) for e in range(3)])
    assert labels[:80].sum() == 0
    assert off_by(labels[80:100], np.array([0.5, 0.5])) < 2
    assert off_by(labels[100:200], np.array([0.5, 0.5])) < 2
    assert labels[240:].all()
    assert [segment.length for segment in mixture.segments(0)] == [80, 20]
    assert [segment.length for segment in mixture.segments(1)] == [100]
    assert [segment.length for segment in mixture.segments(2)] == [40, 60]


def test_drop_last_and_padding() -> None:
    mixture = mixture_of([7, 5], [1, 1], 10)
    bare = MixtureSampler(mixture, 1).plan(None, 2)
    padded = MixtureSampler(mixture, 1, pad_to=4).plan(None, 2)
    cut = MixtureSampler(mixture, 1, pad_to=4, drop_last=True).plan(None, 2)
    assert padded.ids.tolist() == [*bare.ids.tolist(), *bare.ids[:2].tolist()]
    assert cut.ids.tolist() == bare.ids[:8].tolist()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"names": (), "lengths": ()}, "0 sources"),
        ({"lengths": (3, 0)}, "'b' has 0 samples"),
        ({"weights": {"a": 1}}, "lack 'b'"),
        ({"weights": {"a": 1, "b": 1, "c": 1}}, "'c', which is no source"),
        ({"weights": {"a": 1, "b": -1}}, "none below 0"),
        ({"weights": {"a": 0, "b": 0}}, "one above"),
        ({"weights": {"a": 1, "b": float("nan")}}, "finite"),
        ({"weights": {"a": 1, "b": float("inf")}}, "finite"),
        ({"weights": [1, 2]}, "give a dict"),
        ({"weights": lambda epoch: {"a": 1, "b": 1}}, "does not pickle"),
        ({"weights": by_epoch, "epoch_samples": "first"}, "do not change"),
        ({"weights": Stages({0: {"a": 1}})}, "from step 0 lack 'b'"),
        ({"epoch_samples": 0}, "epoch of 0 samples"),
        ({"epoch_samples": 1.5}, "epoch_samples=1.5"),
        ({"epoch_samples": "longest"}, "'first' or 'last'"),
    ],
)
def test_bad_input_raises_at_construction(changed: dict[str, Any], message: str) -> None:
    given = {"names": AB, "lengths": (3, 4), "weights": {"a": 1, "b": 1}, "epoch_samples": 5}
    with pytest.raises(ConfigError, match=message):
        Mixture(**{**given, **changed})


def test_bad_samplers_and_stages() -> None:
    mixture = mixture_of([3, 4], [1, 1], 3)
    for options, message in (
        ({"seed": -1}, "seed=-1"),
        ({"pad_to": 0}, "pad_to=0"),
        ({"pad_to": 4, "drop_last": True}, "leaves none"),
    ):
        with pytest.raises(ConfigError, match=message):
            MixtureSampler(mixture, **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="first one 0"):
        Stages({5: {"a": 1}})
    with pytest.raises(ConfigError, match="first one 0"):
        Stages({0: {"a": 1}, 1.5: {"a": 1}})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="step_samples=0"):
        Stages({0: {"a": 1}}, 0)
