"""Which samples of a data set are visited: all, or a part."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError
from stoker.scores import Scores


class Population:
    """The samples that are visited, of a data set of ``num_samples``: the view of a training.

    ``ids`` (``u32[n]``) are those of the data set that the indices of the view stand for, in any
    order, some perhaps several times; None: all, in order. Scores and caches speak of ids of the
    data set whatever part of it is visited. Immutable.
    """

    def __init__(self, num_samples: int, ids: NDArray[np.uint32] | None = None) -> None:
        self.num_samples = num_samples
        """Samples of the data set, visited or not."""
        self._ids = ids

    def __len__(self) -> int:
        return self.num_samples if self._ids is None else len(self._ids)

    def ids(self, indices: NDArray[np.int64] | NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Return base ids ``u32[n]`` for indices of the view ``[n]``; negative ones count back.

        Raises :class:`~stoker.errors.ConfigError` for those out of range.
        """
        if indices.size and not -len(self) <= indices.min() <= indices.max() < len(self):
            raise ConfigError(
                f"the sampler gave indices from {indices.min()} to {indices.max()}, which is out "
                f"of range: there are {len(self)} samples, 0 to {len(self) - 1}"
            )
        if indices.dtype.kind == "i":
            indices = np.where(indices < 0, indices + len(self), indices)
        chosen = indices if self._ids is None else self._ids[indices]
        return np.ascontiguousarray(chosen, np.uint32)

    def sizes(self, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return those of the base's ``sizes``, ``i64[N]``, that are visited, each once."""
        return sizes if self._ids is None else sizes[np.unique(self._ids)]

    def visited(self, ids: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Return those of ``ids`` ``u32[n]`` of the base that are visited."""
        return ids if self._ids is None else ids[np.isin(ids, self._ids)]

    def spread(self, times: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return f32[N], ``times`` f32[n] until samples of the view are used, by id of the base.

        Of a sample that comes twice in the view the earlier; one that does not, at the very end.
        """
        if self._ids is None:
            return times
        by_id = np.full(self.num_samples, np.finfo(np.float32).max / 2, np.float32)
        np.minimum.at(by_id, self._ids, times)
        return by_id

    def scores(self, scores: Scores) -> Scores:
        """Return the scores of the samples that are visited, by index of the view.

        For the whole data set these are ``scores`` themselves, else a copy.
        """
        if self._ids is None:
            return scores
        part = Scores(len(self))
        arrays = scores.arrays()
        for name in ("values", "last", "seen", "volatile", "basis"):
            arrays[name] = arrays[name][self._ids]
        part.restore(**arrays)
        return part

    @property
    def label(self) -> str:
        """Empty for the whole data set, else a short hash of the subset's ids."""
        if self._ids is None:
            return ""
        return hashlib.blake2b(self._ids.tobytes(), digest_size=8).hexdigest()
