"""Photographs kept at the size at which training uses them: ``Cache(stage="resized:288")``."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stoker.images.resize import Resized
from stoker.shared import SharedArray
from stoker.source.base import PackedRead, PackedSource, Source, check_ids, read_whole
from stoker.source.packed import Buffer, pack

_PROBES = 32  # samples resized to learn how small they become
_VERSION = 1  # of what is done to an image: part of the key


class ResizedSource(PackedSource):
    """The samples of ``source`` as ``form`` makes them, by whichever process reads.

    ``sizes`` is an estimate: those of ``source``, times the mean factor of 32 samples that are
    read at construction. As safe in threads and processes as ``source``.
    """

    def __init__(self, source: Source, form: Resized) -> None:
        self._source, self._form = source, form
        self.factor = self._measured()
        """Estimated bytes of all samples / those of the originals."""
        sizes = np.ceil(source.sizes * self.factor).astype(np.int64)
        self._sizes = SharedArray.copy_of(sizes, "stoker-resized")

    def __len__(self) -> int:
        return len(self._source)

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Estimated bytes of each sample, ``i64[N]``, read-only."""
        return self._sizes.read_only

    @property
    def sizes_are_exact(self) -> bool:
        """False: they are not known before the samples are made."""
        return False

    @property
    def fingerprint(self) -> str:
        """That of the originals, and the form."""
        form = f"{self._form.short_side}-{self._form.quality}"
        return f"{self._source.fingerprint}-resized{_VERSION}-{form}"

    @property
    def local_identity(self) -> str:
        """That of the originals."""
        return self._source.local_identity

    @property
    def is_private(self) -> bool:
        """Whether the originals' fingerprint has no meaning outside this job."""
        return self._source.is_private

    @property
    def is_ready(self) -> bool:
        """Whether the originals can be read at once."""
        return self._source.is_ready

    def name(self, sample_id: int) -> str:
        """Return what the original is called."""
        return self._source.name(sample_id)

    @property
    def lanes(self) -> int:
        """As many as for the originals."""
        return self._source.lanes

    def read_one(self, sample_id: int) -> Buffer:
        """Return one sample; see :meth:`Source.read_one`."""
        return self._form(self._source.read_one(sample_id))

    def read_packed(self, ids: ArrayLike) -> PackedRead:
        """Return the samples in one array; see :meth:`Source.read_packed`."""
        data, offsets, errors = read_whole(self._source, check_ids(ids, len(self)))
        view = data.data
        samples = [self._form(view[begin:end]) for begin, end in pairwise(offsets.tolist())]
        return *pack(samples), errors

    def close(self) -> None:
        """Close the originals."""
        self._source.close()

    def _measured(self) -> float:
        ids = np.unique(np.linspace(0, len(self) - 1, _PROBES).astype(np.uint32))
        _, offsets, errors = self.read_packed(ids)
        good = np.delete(np.arange(len(ids)), list(errors))
        before = int(self._source.sizes[ids[good]].sum())
        return float(np.diff(offsets)[good].sum() / before) if before else 1.0
