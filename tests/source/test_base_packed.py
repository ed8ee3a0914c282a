"""What came of a read is held against what the source says of its samples."""

from __future__ import annotations

import numpy as np

from stoker.errors import SampleCorrupt
from stoker.source.base import BaseSource, read_whole
from stoker.source.held import MemorySource
from stoker.testing import FaultySource


def test_a_sample_of_another_size_is_corrupt() -> None:
    samples = [bytes([n]) * (10 + n) for n in range(6)]
    source = FaultySource(MemorySource(samples), always={2: "short", 4: "unavailable"})
    ids = np.array([5, 2, 4, 0], np.uint32)
    data, offsets, errors = read_whole(source, ids)
    assert isinstance(errors[1], SampleCorrupt) and errors[1].ids == [2]
    assert "6 bytes came, not 12" in str(errors[1])
    assert sorted(errors) == [1, 2]
    assert offsets.tolist() == [0, 15, 15, 15, 25]
    assert data.tobytes() == samples[5] + samples[0]


def test_sizes_that_are_estimates_are_not_held_against_anything() -> None:
    class Estimating(BaseSource):
        fingerprint = "estimating"
        sizes = np.full(3, 7)
        sizes_are_exact = False

        def __len__(self) -> int:
            return 3

        def read(self, ids: object) -> list[bytes]:
            return [b"long enough" for _ in np.asarray(ids)]

    data, _, errors = read_whole(Estimating(), np.arange(3, dtype=np.uint32))
    assert not errors and len(data) == 33
