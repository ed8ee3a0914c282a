"""Batches by lengths in the Feed: the plans of the Loader, as arrays."""

from __future__ import annotations

import numpy as np
import pytest
from support.texts import check_batch, texts, tokens_of

from stoker import Feed, Packing, TokenBudget
from stoker.errors import ConfigError


def test_every_sample_once_and_resumed_exactly() -> None:
    batching = Packing(40, rows=2, token_bytes=2)
    with Feed(texts(80), batching=batching, decode=tokens_of) as feed:
        expected = []
        for batch in feed:
            check_batch(batch.data, batch.ids, 80)
            assert batch.data["documents"].max() + 1 == len(batch)
            expected.append(batch.ids.tolist())
        assert len(feed) == len(expected) and 0 <= feed.stats.padding < 0.2
    assert sorted(sample for batch in expected for sample in batch) == list(range(80))
    with Feed(texts(80), batching=batching, decode=tokens_of) as feed:
        batches = iter(feed)
        for _ in range(5):
            next(batches)
        state = feed.state_dict(batches=3)
    with Feed(texts(80), batching=batching, decode=tokens_of, decode_threads=0) as feed:
        feed.load_state_dict(state)
        assert [batch.ids.tolist() for batch in feed] == expected[3:]


def test_targets_come_beside_the_data() -> None:
    targets = np.arange(30)
    budget = TokenBudget(90, token_bytes=2)
    with Feed(texts(30), batching=budget, decode=tokens_of, targets=targets) as feed:
        for batch in feed:
            assert batch.targets is not None
            assert batch.targets.tolist() == batch.ids.tolist()


def test_one_of_the_two_says_what_a_batch_is() -> None:
    with pytest.raises(ConfigError, match="batch_size= or batching="):
        Feed(texts(3))
    with pytest.raises(ConfigError, match="leave one out"):
        Feed(texts(3), 4, batching=TokenBudget(90))
