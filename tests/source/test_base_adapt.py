"""as_source: a class of one's own needs only four methods."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stoker.errors import ConfigError
from stoker.source import MemorySource, Source, as_source
from stoker.testing import SourceConformance


class FourMethods:
    """The least a source can be, as a user would write it."""

    def __init__(self, samples: list[bytes]) -> None:
        self.samples = samples
        self.closed = False
        self.sizes = [len(sample) for sample in samples]
        self.fingerprint = repr(samples)

    def __len__(self) -> int:
        return len(self.samples)

    def read(self, ids: np.ndarray) -> list[bytes]:
        return [self.samples[i] for i in ids]


class Closable(FourMethods):
    def name(self, sample_id: int) -> str:
        return f"number {sample_id}"

    def close(self) -> None:
        self.closed = True


class TestAdaptedSource(SourceConformance):
    def make(self, samples: list[bytes], tmp_path: Path) -> Source:
        return as_source(FourMethods(samples))


def test_a_full_source_is_returned_as_it_is() -> None:
    source = MemorySource([b"x"])
    assert as_source(source) is source


def test_name_and_close_are_used_where_they_are() -> None:
    own = Closable([b"x"])
    source = as_source(own)
    assert source.name(0) == "number 0"
    source.close()
    assert own.closed
    assert as_source(FourMethods([b"x"])).name(0) == "sample 0"


def test_what_is_missing_is_named() -> None:
    with pytest.raises(
        ConfigError, match="list is not a source: it lacks sizes, fingerprint, read"
    ):
        as_source([b"x"])
