"""Every exception that Stoker raises.

::

    StokerError
    ├── ConfigError          an argument is refused; also a ValueError
    ├── CapacityError        not enough memory or disk for what was asked
    ├── SourceError          the storage under the data set failed
    │   ├── SampleNotFound     the sample is not there (any more)
    │   ├── SampleCorrupt      the bytes are there and cannot be used
    │   └── SourceUnavailable  the storage gave up after retries
    ├── StateMismatch        a saved state belongs to another data set or plan
    ├── RanksUnavailable     other ranks of the job do not answer
    └── SegmentError         a cache segment is not usable or breaks an invariant

Each message names the value that was refused and says what to do about it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class StokerError(Exception):
    """Base of every error raised by Stoker."""


class ConfigError(StokerError, ValueError):
    """An argument or a combination of arguments is refused at construction."""


class CapacityError(StokerError):
    """The memory or disk that was asked for is not there."""


class SourceError(StokerError):
    """The storage under the data set failed for one or more samples.

    ``ids`` lists the samples that failed; it is empty when the source does not say.
    """

    def __init__(self, message: str, ids: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ids: list[int] = list(ids)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.ids)


class SampleNotFound(SourceError):
    """A sample that was listed is not in the source any more."""


class SampleCorrupt(SourceError):
    """A sample's bytes were read but cannot be used."""


class SourceUnavailable(SourceError):
    """The source did not answer, after the retries that were allowed."""


class StateMismatch(StokerError):
    """A saved state does not belong to this data set, plan or recipe."""


class RanksUnavailable(StokerError):
    """Another rank of the job does not answer: it died, or the network between them did."""


class SegmentError(StokerError):
    """A cache segment has another version, is damaged, or breaks an invariant."""
