"""Several sources as one, one after the other."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from stoker.errors import ConfigError, SourceError
from stoker.shared import SharedArray
from stoker.source.base import (
    Errors,
    PackedRead,
    Source,
    as_source,
    check_ids,
    read_whole,
)
from stoker.source.held import HeldSource
from stoker.source.packed import Buffer, Packed, gather

_AT_ONCE = 16  # sources that are read at the same time

_Group = tuple[int, npt.NDArray[np.int64], npt.NDArray[np.uint32]]


class JoinedSource(HeldSource):
    """The samples of several sources: ids count through the first one, then the second, ...

    A read asks each source once for what is its own; if ``at_once``, up to 16 of them at the same
    time, so that latencies do not add up. As safe in threads and processes as the sources are,
    which are closed with it. Sizes are copied, 8 bytes a sample in shared memory.

    Raises :class:`ConfigError` for no sources, and what is no source.
    """

    def __init__(self, sources: Sequence[Source], *, at_once: bool = True) -> None:
        if not sources:
            raise ConfigError("there are no sources to join: give one or more")
        self.parts = tuple(map(as_source, sources))
        """The sources, in order."""
        self.starts = np.cumsum([0, *map(len, self.parts)])
        """``i64[k + 1]``, the first id of each, and the number of all samples."""
        if self.starts[-1] > 2**32 - 1:
            raise ConfigError(f"{self.starts[-1]} samples are too many: ids are 32 bits")
        self._sizes = SharedArray.create(int(self.starts[-1]), np.int64, name="sizes")
        np.concatenate([part.sizes for part in self.parts], out=self._sizes.array)
        names = "".join(f"{part.fingerprint} {len(part)}\n" for part in self.parts)
        self._fingerprint = f"joined-{_hash(names)}"
        self._at_once = at_once

    @property
    def sizes_are_exact(self) -> bool:
        """Whether they are for all sources; those that are exact are checked here otherwise."""
        return all(part.sizes_are_exact for part in self.parts)

    @property
    def local_identity(self) -> str:
        """Hash of the sources' identities; empty if none has one."""
        identities = [part.local_identity for part in self.parts]
        return _hash("\n".join(identities)) if any(identities) else ""

    @property
    def is_private(self) -> bool:
        """Whether one of the sources is."""
        return any(part.is_private for part in self.parts)

    @property
    def is_ready(self) -> bool:
        """Whether all sources are."""
        return all(part.is_ready for part in self.parts)

    def at_hand(self, ids: npt.NDArray[np.uint32]) -> float:
        """Return the share of samples ``u32[n]`` in memory, each source asked for its own."""
        if not len(ids):
            return 0.0
        shares = (
            len(rows) * self.parts[part].at_hand(local) for part, rows, local in self._by_part(ids)
        )
        return sum(shares) / len(ids)

    @property
    def breaks(self) -> npt.NDArray[np.int64]:
        """The sources' own, and the first sample of each source but the first."""
        own = [part.breaks + start for part, start in zip(self.parts, self.starts, strict=False)]
        return np.unique(np.concatenate([*own, self.starts[1:-1]]))

    def name(self, sample_id: int) -> str:
        """Return what its source calls the sample; those without names count through all."""
        part, local = self._place(sample_id)
        name = part.name(local)
        return super().name(sample_id) if name == super().name(local) else name

    def read_packed(self, ids: npt.ArrayLike) -> PackedRead:
        """Return the samples in one array; see :meth:`Source.read_packed`."""
        self._check_open()
        wanted = check_ids(ids, len(self))
        whole, index = np.zeros(len(wanted), np.int64), np.zeros(len(wanted), np.int64)
        pieces: list[Packed] = []
        errors: Errors = {}
        groups = self._by_part(wanted)
        for (part, rows, _), (data, offsets, failed) in zip(
            groups, self._read_all(groups), strict=True
        ):
            whole[rows], index[rows] = len(pieces), np.arange(len(rows))
            pieces.append(Packed(data, offsets))
            self._rename(part, failed)
            errors |= {int(rows[row]): error for row, error in failed.items()}
        return *gather(pieces, whole, index), errors

    @property
    def lanes(self) -> int:
        """The most of any source; 0 if one of them is better read at once."""
        lanes = [part.lanes for part in self.parts]
        return max(lanes) if all(lanes) else 0

    def read_one(self, sample_id: int) -> Buffer:
        """Return one sample; see :meth:`Source.read_one`."""
        self._check_open()
        part, local = self._place(int(check_ids([sample_id], len(self))[0]))
        try:
            return part.read_one(local)
        except SourceError as error:
            error.ids = [sample_id]
            raise

    def close(self) -> None:
        """Close the sources; reading afterwards raises."""
        super().close()
        for part in self.parts:
            part.close()

    def _by_part(self, ids: npt.NDArray[np.uint32]) -> list[_Group]:
        """Return, of each source that has some of ``ids``: its number, their rows, its own ids."""
        parts = np.searchsorted(self.starts, ids, side="right") - 1
        found = []
        for part in np.unique(parts).tolist():
            rows = np.flatnonzero(parts == part)
            found.append((part, rows, (ids[rows] - self.starts[part]).astype(np.uint32)))
        return found

    def _read_all(self, groups: Sequence[_Group]) -> list[PackedRead]:
        """Return what each source gives."""

        def read(group: _Group) -> PackedRead:
            part, _, local = group
            source = self.parts[part]
            # The caller checks all sizes, or none.
            return source.read_packed(local) if is_exact else read_whole(source, local)

        is_exact = self.sizes_are_exact
        if len(groups) < 2 or not self._at_once:
            return [read(group) for group in groups]
        # Threads of this call alone: kept ones would not survive a fork.
        with ThreadPoolExecutor(min(len(groups), _AT_ONCE) - 1, "stoker-joined") as pool:
            others = [pool.submit(read, group) for group in groups[1:]]
            return [read(groups[0]), *(other.result() for other in others)]

    def _place(self, sample_id: int) -> tuple[Source, int]:
        part = int(np.searchsorted(self.starts, sample_id, side="right")) - 1
        return self.parts[part], sample_id - int(self.starts[part])

    def _rename(self, part: int, failed: Errors) -> None:
        """Have errors of a source say which samples of ours they are about."""
        start = int(self.starts[part])
        for error in {id(error): error for error in failed.values()}.values():
            error.ids = [start + local for local in error.ids]


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
