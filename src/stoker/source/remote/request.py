"""What an engine is asked for, what it answers and counts, and which of Stoker's errors that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stoker.errors import ConfigError, SampleCorrupt, SampleNotFound, SourceError, SourceUnavailable
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
    """Requests of any kind that failed, whether or not they were retried."""
    throttled: int = 0
    """Those of them that the storage throttled."""
    hedged: int = 0
    """Second requests for reads that were late."""
    received_bytes: int = 0
    """Bytes of all reads."""


def error_of(name: str, failure: Failure, ids: Sequence[int] = ()) -> SourceError:
    """Return the error for samples ``ids`` in the object ``name``.

    Raises :class:`ConfigError` where the credentials or the request itself are at fault: that is
    not a matter of these samples.
    """
    raise_refused(name, failure)
    tried = f"{failure.attempts} attempts in {failure.seconds:.1f} s"
    kind: type[SourceError] = SourceUnavailable
    if failure.why is Why.NOT_FOUND:
        kind = SampleNotFound
        text = f"{name} is not there: put it back, or make the data set again, which lists it again"
    elif failure.why is None:
        kind = SampleCorrupt
        text = f"{name}: {failure.message}: make the data set again, which lists it again"
    elif failure.why is Why.CUT:
        kind = SampleCorrupt
        text = f"{name} did not arrive whole ({tried}); the last time: {failure.message}"
    else:
        text = f"{name} could not be read ({tried}); the last time: {failure.message}"
        if failure.why is Why.UNREACHABLE:
            text += "; check the address, the endpoint in storage_options and the network"
    return kind(text, ids)


def raise_refused(name: str, failure: Failure) -> None:
    """Raise ConfigError if the credentials or the request itself are at fault."""
    if failure.why is Why.NO_CREDENTIALS:
        raise ConfigError(
            f"there are no credentials for {name}: {failure.message}; give them in "
            "storage_options or the environment, or skip_signature=True for public data"
        )
    if failure.why is Why.REFUSED:
        raise ConfigError(
            f"the storage refuses to give {name}, also after asking for new credentials: "
            f"{failure.message}; check the credentials (storage_options, environment), and "
            "whether the object exists: some storages hide that from those who may not list"
        )
    if failure.why is Why.INVALID:
        raise ConfigError(f"{name} cannot be requested like this: {failure.message}")
