"""Which ids of which data set a Loader visits: the whole of it, or nested Subsets."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, Subset

from stoker.errors import ConfigError
from stoker.pytorch.dataset import SourceDataset
from stoker.scores import Scores


class Population:
    """The samples that indices of ``view``, the user's data set, stand for in ``base``.

    ``base`` is the data set under any number of Subsets, so that scores and cache speak of the
    same ids whatever part is trained on. Immutable.

    Raises :class:`~stoker.errors.ConfigError` for data sets that cannot be cached by id, and
    for no samples.
    """

    def __init__(self, view: Any) -> None:
        self.base, self._ids = _unwrapped(view)
        if len(self) == 0:
            raise ConfigError(f"{type(view).__name__} has 0 samples: there is nothing to load")

    def __len__(self) -> int:
        return len(self.base) if self._ids is None else len(self._ids)

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
        by_id = np.full(len(self.base), np.finfo(np.float32).max / 2, np.float32)
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


def _unwrapped(view: Any) -> tuple[SourceDataset, NDArray[np.uint32] | None]:
    ids: NDArray[Any] | None = None
    base = view
    while _is_plain_subset(base):
        inner = np.asarray(base.indices)
        ids = inner.astype(np.int64) if ids is None else inner[ids].astype(np.int64)
        base = base.dataset
    if isinstance(base, IterableDataset):
        raise ConfigError(
            f"{type(base).__name__} is an IterableDataset, which has no sample ids to cache by: "
            "use a map-style data set, or keep the samples as tar shards"
        )
    if not isinstance(base, SourceDataset):
        raise ConfigError(
            f"{type(base).__name__} is not a Stoker data set: use stoker.ImageFolder, "
            "stoker.SampleDataset or stoker.wrap(dataset)"
        )
    if ids is None:
        return base, None
    ids = np.where(ids < 0, ids + len(base), ids)
    if ids.size and not 0 <= ids.min() <= ids.max() < len(base):
        raise ConfigError(
            f"the Subset has indices from {ids.min()} to {ids.max()}, and its data set has "
            f"{len(base)} samples"
        )
    return base, ids.astype(np.uint32)


def _is_plain_subset(dataset: Any) -> bool:
    """Whether it only selects: a Subset with its own ``__getitem__`` may do anything."""
    own = type(dataset)
    return isinstance(dataset, Subset) and own.__getitem__ is Subset.__getitem__
