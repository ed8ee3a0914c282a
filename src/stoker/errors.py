"""Every exception that Stoker raises, and its warnings.

::

    StokerError
    ├── ConfigError          an argument is invalid; also a ValueError
    │   └── UntrustedPath     another user could change a file or folder; also a PermissionError
    ├── CapacityError        not enough memory or disk for what was asked
    ├── SourceError          the storage under the data set failed
    │   ├── SampleNotFound     the sample is not there (any more)
    │   ├── SampleCorrupt      the bytes are there and cannot be used
    │   └── SourceUnavailable  the storage gave up after retries
    ├── StateMismatch        a saved state belongs to another data set or plan
    ├── RanksUnavailable     other ranks of the job do not answer
    └── SegmentError         a cache segment is not usable or breaks an invariant

Each message names the invalid value and says what to do about it, without the passwords
and tokens of addresses in it.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterable
from types import FrameType
from typing import Any

_USER = re.compile(r"(?<=://)[^/?#\s]*@")
_SECRET = re.compile(
    r"([?&][^=&\s\"']*(?:signature|sig|token|secret|password|credential|key|sas)=)[^&,\s\"']*", re.I
)


def redacted(text: str) -> str:
    """Return ``text`` without what may be secret in addresses: the user before a host, and tokens.

    ``https://user:password@host/x?sig=abc`` becomes ``https://host/x?sig=***``.
    """
    return _SECRET.sub(r"\1***", _USER.sub("", text)) if "://" in text else text


class StokerError(Exception):
    """Base of every error raised by Stoker."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*(redacted(arg) if isinstance(arg, str) else arg for arg in args))


class ConfigError(StokerError, ValueError):
    """An argument or a combination of arguments is invalid; raised at construction."""


class UntrustedPath(ConfigError, PermissionError):
    """A file, folder or socket belongs to another user, or others may write to it.

    Its message names path, owner and mode, and what makes it right.
    """


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


_PACKAGE = __name__.partition(".")[0] + "."


def warn_caller(message: str) -> None:
    """Warn (RuntimeWarning) at the line outside of this package that led here."""
    level, frame = 1, sys._getframe().f_back
    while frame is not None and _is_ours(frame):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, RuntimeWarning, stacklevel=level + 1)


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith(_PACKAGE)
