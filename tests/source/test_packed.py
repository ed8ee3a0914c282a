"""Packed batches: there and back."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stoker.source.packed import offsets_of, pack, unpack


@given(st.lists(st.binary(max_size=20), max_size=20))
def test_unpacking_undoes_packing(samples: list[bytes]) -> None:
    data, offsets = pack(samples)
    assert data.dtype == np.uint8
    assert offsets.dtype == np.int64
    assert unpack(data, offsets) == samples


def test_offsets_begin_with_zero() -> None:
    assert offsets_of(np.array([3, 0, 2], np.uint32)).tolist() == [0, 3, 3, 5]
    assert offsets_of(np.array([], np.int64)).tolist() == [0]
