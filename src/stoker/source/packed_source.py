"""What sources have in common whose ``read_packed`` is the one that does the work."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from stoker.errors import SampleCorrupt
from stoker.source.base import BaseSource, Errors, Packed, Source, check_ids
from stoker.source.packed import Bytes, Offsets, offsets_of, unpack


class PackedSource(BaseSource):
    """Supplies ``read`` and ``read_each``; a subclass defines ``read_packed`` and the rest."""

    def read(self, ids: npt.ArrayLike) -> list[bytes]:
        """Return the samples of ``ids``; see :meth:`Source.read`."""
        data, offsets, errors = self.read_packed(ids)
        if errors:
            wanted = check_ids(ids, len(self))
            error = errors[min(errors)]
            error.ids = wanted[sorted(errors)].tolist()
            raise error
        return unpack(data, offsets)

    def read_each(self, ids: npt.ArrayLike) -> tuple[list[bytes | None], Errors]:
        """Return the samples, None for each that failed; see :meth:`Source.read_each`."""
        data, offsets, errors = self.read_packed(ids)
        samples: list[bytes | None] = [*unpack(data, offsets)]
        for index in errors:
            samples[index] = None
        return samples, errors

    def read_packed(self, ids: npt.ArrayLike) -> Packed:
        """Return the samples in one array; see :meth:`Source.read_packed`."""
        raise NotImplementedError(f"{type(self).__name__} has to define read_packed")


def read_whole(source: Source, ids: npt.NDArray[np.uint32]) -> Packed:
    """Return what ``source.read_packed`` gives; what lacks bytes, or has more, is corrupt.

    Storage that ends an answer too early, and files that change, are so noticed whatever the
    samples are. Raises what the source raises.
    """
    data, offsets, errors = source.read_packed(ids)
    if not getattr(source, "sizes_are_exact", True):
        return data, offsets, errors
    lengths, expected = np.diff(offsets), source.sizes[ids]
    wrong = [place for place in np.flatnonzero(lengths != expected).tolist() if place not in errors]
    if not wrong:
        return data, offsets, errors
    cut = {
        place: SampleCorrupt(
            f"{source.name(int(ids[place]))}: {lengths[place]} bytes came, not {expected[place]}",
            [int(ids[place])],
        )
        for place in wrong
    }
    return without({**errors, **cut}, data, offsets)


def without(errors: Errors, data: Bytes, offsets: Offsets) -> Packed:
    """Return the packed batch with no bytes for the samples that have an error."""
    if not errors:
        return data, offsets, errors
    sizes = np.diff(offsets)
    failed = np.zeros(len(sizes), np.bool_)
    failed[list(errors)] = True
    return data[np.repeat(~failed, sizes)], offsets_of(np.where(failed, 0, sizes)), errors
