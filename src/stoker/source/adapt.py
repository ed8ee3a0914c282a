"""Makes a full source out of an object that has only the four methods a source needs."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import numpy.typing as npt

from stoker.errors import ConfigError
from stoker.source.base import BaseSource, Errors, PackedRead, Source, check_ids
from stoker.source.packed import Offsets

REQUIRED = ("__len__", "sizes", "fingerprint", "read")
_OPTIONAL = (
    "sizes_are_exact",
    "local_identity",
    "is_private",
    "is_ready",
    "name",
    "read_each",
    "read_packed",
    "lanes",
    "read_one",
    "close",
)


def as_source(candidate: Any) -> Source:
    """Return ``candidate`` as a full source, supplying the optional methods that it lacks.

    Raises :class:`ConfigError`, naming what is missing, when it has not even ``__len__``,
    ``sizes``, ``fingerprint`` and ``read``.
    """
    missing = [part for part in REQUIRED if not _has(candidate, part)]
    if missing:
        raise ConfigError(
            f"{type(candidate).__name__} is not a source: it lacks {', '.join(missing)}; "
            "see stoker.source.Source"
        )
    if all(_has(candidate, part) for part in _OPTIONAL):
        return cast(Source, candidate)
    return _Completed(candidate)


def _has(candidate: Any, part: str) -> bool:
    return hasattr(type(candidate), part) or hasattr(candidate, part)


class _Completed(BaseSource):
    """An object with only the four required methods, completed by checks and defaults."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self._closed = False

    def __len__(self) -> int:
        return len(self._source)

    @property
    def sizes(self) -> Offsets:
        sizes: Offsets = np.asarray(self._source.sizes, np.int64).view()
        sizes.flags.writeable = False
        return sizes

    @property
    def sizes_are_exact(self) -> bool:
        return bool(getattr(self._source, "sizes_are_exact", True))

    @property
    def fingerprint(self) -> str:
        return cast(str, self._source.fingerprint)

    @property
    def local_identity(self) -> str:
        return str(getattr(self._source, "local_identity", ""))

    @property
    def is_private(self) -> bool:
        return bool(getattr(self._source, "is_private", False))

    @property
    def is_ready(self) -> bool:
        return bool(getattr(self._source, "is_ready", True))

    def name(self, sample_id: int) -> str:
        name = getattr(self._source, "name", super().name)
        return cast(str, name(sample_id))

    def read(self, ids: npt.ArrayLike) -> list[bytes]:
        return cast(list[bytes], self._source.read(self._checked(ids)))

    def read_each(self, ids: npt.ArrayLike) -> tuple[list[bytes | None], Errors]:
        read_each = getattr(self._source, "read_each", super().read_each)
        return cast("tuple[list[bytes | None], Errors]", read_each(self._checked(ids)))

    def read_packed(self, ids: npt.ArrayLike) -> PackedRead:
        read_packed = getattr(self._source, "read_packed", super().read_packed)
        return cast(PackedRead, read_packed(self._checked(ids)))

    def _checked(self, ids: npt.ArrayLike) -> npt.NDArray[np.uint32]:
        if self._closed:
            raise ConfigError(
                f"this {type(self._source).__name__} is closed: make a new one to read from"
            )
        return check_ids(ids, len(self))

    def close(self) -> None:
        self._closed = True
        getattr(self._source, "close", super().close)()
