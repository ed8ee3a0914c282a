"""Requests that cover ranges: all of them, none too large, few where they lie close together."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stoker.source.remote.request import coalesce


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1000), st.integers(0, 100)), max_size=40),
    st.integers(0, 50),
    st.integers(1, 300),
)
def test_requests_cover_their_ranges(
    ranges: list[tuple[int, int, int]], gap: int, largest: int
) -> None:
    table = np.array(ranges, np.int64).reshape(-1, 3)
    shards, starts, ends = table[:, 0].astype(np.uint32), table[:, 1], table[:, 1] + table[:, 2]
    requests = coalesce(shards, starts, ends, gap, largest)
    chosen = requests.request_of
    assert (requests.shards[chosen] == shards).all()
    assert (requests.starts[chosen] <= starts).all()
    assert ((requests.starts + requests.lengths)[chosen] >= ends).all()
    limit = max(largest, int(table[:, 2].max(initial=0)))
    assert (requests.lengths <= limit).all()
    assert len(requests.starts) == len(np.unique(chosen))


def test_neighbours_share_a_request() -> None:
    shards = np.array([1, 0, 0, 0], np.uint32)
    starts = np.array([20, 20, 0, 40])
    for gap, largest, count in ((10, 100, 2), (9, 100, 4), (10, 30, 3)):
        requests = coalesce(shards, starts, starts + 10, gap, largest)
        assert len(requests.starts) == count
    starts, ends = np.array([0, 5, 30]), np.array([100, 10, 40])
    inside = coalesce(np.zeros(3, np.uint32), starts, ends, 0, 1000)
    assert (inside.starts.tolist(), inside.lengths.tolist()) == ([0], [100])
