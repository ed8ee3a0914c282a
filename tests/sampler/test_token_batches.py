"""Batches by lengths: every access once, no budget exceeded, every token in its place."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stoker
from stoker.errors import ConfigError
from stoker.sampler.batching import Batching
from stoker.sampler.token_batches import (
    Buckets,
    PackedRows,
    Packing,
    PaddedRows,
    TokenBudget,
    best_fit,
)

LONGEST = 40

batchings = st.one_of(
    st.builds(
        TokenBudget,
        st.integers(LONGEST, 200),
        most=st.none() | st.integers(1, 9),
        window=st.integers(1, 60),
    ),
    st.builds(Buckets, st.just((7, 20, LONGEST)), st.integers(LONGEST, 200)),
    st.builds(
        Packing,
        st.integers(LONGEST, 60),
        rows=st.integers(1, 4),
        cut=st.booleans(),
        window=st.integers(1, 60),
    ),
    st.builds(Packing, st.integers(5, 30), rows=st.integers(1, 4), longer=st.just("truncate")),
)
many_lengths = st.lists(st.integers(0, LONGEST), min_size=1, max_size=150)


def grouped(batching: Batching, lengths: list[int], **options: Any) -> list[list[int]]:
    """Return the accesses of each batch."""
    fitted = batching.lengths_of(np.array(lengths, np.int64))
    rng = np.random.default_rng(options.pop("seed", 0))
    order, bounds = batching.group(fitted, rng, **options)
    assert bounds[0] == 0 and bounds[-1] == len(order) and (np.diff(bounds) > 0).all()
    return [part.tolist() for part in np.split(order, bounds[1:-1])]


@given(batchings, many_lengths, st.integers(0, 9))
def test_every_access_is_in_one_batch_within_its_budget(
    batching: Batching, lengths: list[int], seed: int
) -> None:
    batches = grouped(batching, lengths, seed=seed)
    assert sorted(place for batch in batches for place in batch) == list(range(len(lengths)))
    fitted = batching.lengths_of(np.array(lengths, np.int64))
    for batch in batches:
        places = batching.places_of(fitted[batch])
        assert fitted[batch].sum() <= places <= batching.places
        if isinstance(batching, TokenBudget) and batching.most is not None:
            assert len(batch) <= batching.most


@given(batchings, many_lengths)
def test_collate_loses_no_token_and_takes_the_places_counted(
    batching: Batching, lengths: list[int]
) -> None:
    fitted = np.minimum(batching.lengths_of(np.array(lengths, np.int64)), lengths)
    for batch in grouped(batching, lengths):
        made = batching.collate([np.full(lengths[place], 1 + place) for place in batch])
        shown = np.bincount(made["tokens"].ravel(), minlength=1 + len(lengths))[1:]
        expected = np.zeros(len(lengths), int)
        expected[batch] = fitted[batch]
        assert shown.tolist() == expected.tolist()
        assert made["tokens"].size <= batching.places_of(np.maximum(fitted[batch], 1))


@given(batchings, many_lengths, st.integers(1, 5))
def test_the_batches_depend_on_the_random_numbers_alone(
    batching: Batching, lengths: list[int], seed: int
) -> None:
    copy = pickle.loads(pickle.dumps(batching))
    assert grouped(batching, lengths, seed=seed) == grouped(copy, lengths, seed=seed)


def test_buckets_have_as_many_shapes_as_there_are_full_batches() -> None:
    batching = Buckets([4, 8], 16)
    lengths = [1, 5, 2, 6, 3, 7, 4, 8, 1]
    assert grouped(batching, lengths) == [[1, 3], [0, 2, 4, 6], [5, 7], [8]]
    assert grouped(batching, lengths, drop_last=True) == [[1, 3], [0, 2, 4, 6], [5, 7]]


def test_packing_drops_a_last_batch_of_fewer_rows_if_asked() -> None:
    assert len(grouped(Packing(8, rows=2), [8, 8, 8])) == 2
    assert len(grouped(Packing(8, rows=2), [8, 8, 8], drop_last=True)) == 1


def test_packing_of_texts_is_at_least_97_percent_full() -> None:
    rng = np.random.default_rng(3)
    lengths = np.minimum(rng.lognormal(5.5, 1, 20_000).astype(np.int64) + 1, 2048)
    for batching in (Packing(2048, rows=4), Packing(2048, rows=4, cut=True)):
        _, bounds = batching.group(lengths, rng)
        assert lengths.sum() >= 0.97 * (len(bounds) - 1) * batching.places


def test_lengths_are_bytes_or_given() -> None:
    sizes = np.array([8, 2, 6])
    assert TokenBudget(8).lengths_of(sizes).tolist() == [8, 2, 6]
    assert TokenBudget(8, token_bytes=2).lengths_of(sizes).tolist() == [4, 1, 3]
    given = TokenBudget(8, lengths=[3, 0, 1])
    assert given.lengths_of(sizes, are_exact=False).tolist() == [3, 1, 1]
    with pytest.raises(ConfigError, match="are estimates"):
        TokenBudget(8).lengths_of(sizes, are_exact=False)
    with pytest.raises(ConfigError, match="sample 0 has 8 tokens and 7 fit"):
        TokenBudget(7).lengths_of(sizes)
    for wrong in ([1, 2], [1.0, 2.0, 3.0], [[1], [2], [3]], [-1, 2, 3]):
        with pytest.raises(ConfigError, match="lengths"):
            TokenBudget(8, lengths=wrong).lengths_of(sizes)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: TokenBudget(0), "budget=0"),
        (lambda: TokenBudget(8, most=0), "most=0"),
        (lambda: TokenBudget(8, window=-1), "window=-1"),
        (lambda: TokenBudget(8, token_bytes=0), "token_bytes=0"),
        (lambda: TokenBudget(8, dtype="float32"), "no type of integers"),
        (lambda: Buckets([], 8), "ascending"),
        (lambda: Buckets([4, 4], 8), "ascending"),
        (lambda: Buckets([4, 9], 8), "no room for one sample of 9"),
        (lambda: Packing(0), "length=0"),
        (lambda: Packing(8, rows=0), "rows=0"),
        (lambda: Packing(8, longer="skip"), "longer='skip'"),  # type: ignore[arg-type]
    ],
)
def test_what_makes_no_sense_raises_at_construction(make: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()


def test_they_are_names_of_stoker() -> None:
    assert (stoker.TokenBudget, stoker.Buckets, stoker.Packing) == (TokenBudget, Buckets, Packing)


SAMPLES = [np.array([1, 2, 3], np.uint16), np.array([4], np.uint16), np.array([5, 6], np.uint16)]


def test_padded_to_the_longest() -> None:
    batch = PaddedRows(pad=9)(SAMPLES)
    assert batch["tokens"].tolist() == [[1, 2, 3], [4, 9, 9], [5, 6, 9]]
    assert batch["tokens"].dtype == np.int64 and batch["lengths"].tolist() == [3, 1, 2]
    assert batch.keys() == {"tokens", "lengths"}


def test_padded_to_the_bound_of_the_bucket() -> None:
    collate = PaddedRows((2, 4, 8), dtype="int32")
    assert collate(SAMPLES)["tokens"].shape == (3, 4)
    assert collate(SAMPLES[1:])["tokens"].tolist() == [[4, 0], [5, 6]]
    with pytest.raises(ConfigError, match="has 9 tokens and the longest bucket is 8"):
        collate([np.arange(9)])


def test_targets_come_with_their_tokens() -> None:
    batch = PaddedRows()([(tokens, number) for number, tokens in enumerate(SAMPLES)])
    assert batch["targets"].tolist() == [0, 1, 2]


def test_packed_into_whole_rows() -> None:
    batch = PackedRows(4, rows=3)(SAMPLES)
    assert batch["tokens"].tolist() == [[1, 2, 3, 4], [5, 6, 0, 0], [0, 0, 0, 0]]
    assert batch["positions"].tolist() == [[0, 1, 2, 0], [0, 1, 0, 0], [0, 0, 0, 0]]
    assert batch["documents"].tolist() == [[0, 0, 0, 1], [2, 2, -1, -1], [-1, -1, -1, -1]]


def test_a_sample_that_does_not_fit_begins_a_row_or_is_cut() -> None:
    whole = PackedRows(2, rows=2)(SAMPLES[1:])
    assert whole["tokens"].tolist() == [[4, 0], [5, 6]]
    cut = PackedRows(2, rows=3, cut=True)(SAMPLES)
    assert cut["tokens"].tolist() == [[1, 2], [3, 4], [5, 6]]
    assert cut["positions"].tolist() == [[0, 1], [2, 0], [0, 1]]
    assert cut["documents"].tolist() == [[0, 0], [0, 1], [2, 2]]


def test_what_is_too_long_raises_or_is_truncated() -> None:
    with pytest.raises(ConfigError, match="3 samples do not fit into 1 rows of 5 tokens"):
        PackedRows(5)(SAMPLES)
    with pytest.raises(ConfigError, match="1 samples do not fit into 4 rows of 2 tokens"):
        PackedRows(2, rows=4)(SAMPLES[:1])
    assert PackedRows(2, truncate=True)(SAMPLES[:1])["tokens"].tolist() == [[1, 2]]


@pytest.mark.parametrize("sample", [b"bytes", np.zeros((2, 2), int), np.zeros(3), [[1], [2, 3]]])
def test_what_is_no_row_of_tokens_is_named(sample: object) -> None:
    with pytest.raises((ConfigError, ValueError), match=r"no row of tokens|inhomogeneous"):
        PaddedRows()([sample])


def textbook(lengths: list[int], capacity: int) -> list[int]:
    """Return what is in each bin, by a search through all of them; sorted."""
    bins: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [place for place, full in enumerate(bins) if full + length <= capacity]
        if fitting:
            bins[max(fitting, key=lambda place: bins[place])] += length
        else:
            bins.append(length)
    return sorted(bins)


@given(st.integers(1, 70).flatmap(lambda c: st.tuples(st.just(c), st.lists(st.integers(1, c)))))
def test_the_bins_are_those_of_the_textbook(given: tuple[int, list[int]]) -> None:
    capacity, lengths = given
    bins = best_fit(np.array(lengths, np.int64), capacity)
    filled = np.bincount(bins, np.array(lengths, np.int64)) if lengths else np.empty(0)
    assert sorted(filled.astype(int).tolist()) == textbook(lengths, capacity)
