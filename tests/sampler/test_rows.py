"""Rows of tokens: every token in its place, and what is no token named."""

import numpy as np
import pytest

from stoker.errors import ConfigError
from stoker.sampler.rows import PackedRows, PaddedRows

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
