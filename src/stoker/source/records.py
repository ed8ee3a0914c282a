"""Samples that are ranges of files, wherever the format of the files says they lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.errors import ConfigError
from stoker.shared import SharedArray
from stoker.source.base import Errors, PackedRead, PackedSource, check_ids, without
from stoker.source.file_set import FileSet
from stoker.source.packed import Offsets, offsets_of
from stoker.source.remote.request import Tally
from stoker.source.sample_format import SampleFormat, every_value

_MOST = 1 << 32


class RecordSource(PackedSource):
    """Records of files as samples; a subclass finds where they lie.

    Records of one file that lie close together are read by one request. The index takes 20 bytes a
    sample, in shared memory. Thread-safe; works in children of every start method, also after the
    parent has read.
    """

    format: SampleFormat
    """What the bytes of a sample are; ``format.decode`` takes them apart."""

    def _hold(
        self,
        files: FileSet,
        counts: list[int],
        starts: Offsets,
        lengths: Offsets,
        sample_format: SampleFormat,
        about: str = "",
    ) -> None:
        """Keep where the records lie: so many of each file, one file after the other."""
        if not 0 < len(starts) < _MOST:
            raise ConfigError(f"there are {len(starts)} samples: a source has 1 to {_MOST - 1}")
        self._files, self.format = files, sample_format
        self._first = offsets_of(np.array(counts, np.int64))
        self._starts = SharedArray.copy_of(starts, "starts")
        self._lengths = SharedArray.copy_of(lengths, "lengths")
        self._fingerprint = f"{files.keys.fingerprint}-{about}"
        self._closed = False

    def __len__(self) -> int:
        return len(self._starts.array)

    @property
    def sizes(self) -> Offsets:
        """Bytes of each sample, i64[N], read-only."""
        return self._lengths.read_only

    @property
    def fingerprint(self) -> str:
        """Hash of the files' names, sizes and versions, and what of them is read."""
        return self._fingerprint

    @property
    def local_identity(self) -> str:
        """Hash of the files' change times where they are of this machine, else empty."""
        return self._files.local_identity

    @property
    def breaks(self) -> Offsets:
        """``i64[K]``: the first sample of each file but the first."""
        begins: Offsets = np.unique(self._first[1:-1])
        return begins[(begins > 0) & (begins < len(self))]

    @property
    def is_ready(self) -> bool:
        """Whether this process has its helper already, or needs none."""
        return self._files.is_open

    @property
    def tally(self) -> Tally:
        """The requests that this process has made so far."""
        return self._files.tally

    @property
    def decode(self) -> Callable[[bytes], Any]:
        """What makes a value, or a dictionary of values by column, of a sample's bytes."""
        return self.format.decode

    def name(self, sample_id: int) -> str:
        """Return the file's address and the record in it, like ``s3://b/000.tfrecord#17``."""
        file = self._file_of(np.array([sample_id]))[0]
        return f"{self._files.name(int(file))}#{sample_id - self._first[file]}"

    def values(self) -> npt.NDArray[Any]:
        """Return all values of a source of one column of numbers, ``[N, ...]``.

        Raises :class:`ConfigError` for another column, and what a read does.
        """
        return every_value(self.format, self.read_packed(np.arange(len(self))))

    def _file_of(self, ids: npt.NDArray[Any]) -> Offsets:
        found = np.searchsorted(self._first, ids.astype(np.int64), "right") - 1
        return found.astype(np.int64)

    def read_packed(self, ids: npt.ArrayLike) -> PackedRead:
        """Return the samples in one array; see :meth:`Source.read_packed`.

        Raises :class:`ConfigError` also for refused credentials, as :class:`KeySource` does.
        """
        if self._closed:
            raise ConfigError(f"this {type(self).__name__} is closed: make a new one to read from")
        wanted = check_ids(ids, len(self))
        files = self._file_of(wanted)
        starts, lengths = self._starts.array[wanted], self._lengths.array[wanted]
        data, failures = self._files.fetch_near(files, starts, lengths)
        errors: Errors = {
            row: self._files.error(int(files[row]), failure, [int(wanted[row])])
            for row, failure in failures.items()
        }
        return without(errors, data, offsets_of(lengths))

    def close(self) -> None:
        """Let go of the storage and refuse further reads."""
        self._closed = True
        self._files.close()
