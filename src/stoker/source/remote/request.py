"""What an engine is asked for, what it answers, and what it counts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stoker.source.packed import Offsets
from stoker.source.remote.backend import Why


@dataclass(frozen=True, eq=False)
class Wanted:
    """Pieces of objects, to be laid one after the other."""

    keys: list[str]
    """The object of each piece."""
    starts: Offsets
    """Where each begins, i64[n]; negative for the whole object."""
    lengths: Offsets
    """Bytes of each, i64[n]."""
    sizes: Offsets
    """Bytes of the whole object as it was listed, i64[n]."""
    tags: npt.NDArray[np.uint64]
    """The object's version as it was listed, u64[n]."""


@dataclass(frozen=True)
class Failure:
    """Why a piece could not be had in the end. Pickles."""

    why: Why | None
    """None when the object is not the one that was listed."""
    message: str
    attempts: int
    seconds: float
    """From the first attempt to giving up."""


@dataclass
class Tally:
    """What was asked of the storage so far. Pickles."""

    requests: int = 0
    """Reads, second and repeated ones included; not listings."""
    failed: int = 0
    """Requests of any kind that failed, whether or not they were asked again."""
    throttled: int = 0
    """Those of them that the storage refused because it is asked too often."""
    hedged: int = 0
    """Second requests for reads that were late."""
    received_bytes: int = 0
    """Bytes of all reads."""
