"""Which ids of which data set a Loader visits: the whole of it, or nested Subsets."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, Subset

from stoker.epoch.settings import Population
from stoker.errors import ConfigError
from stoker.pytorch.dataset import SourceDataset


class DatasetPopulation(Population):
    """The samples that indices of ``view``, the user's data set, stand for in ``base``.

    ``base`` is the data set under any number of Subsets, so that scores and cache speak of the
    same ids whatever part is trained on. Immutable.

    Raises :class:`~stoker.errors.ConfigError` for data sets that cannot be cached by id, and
    for no samples.
    """

    def __init__(self, view: Any) -> None:
        self.base, ids = _unwrapped(view)
        super().__init__(len(self.base), ids)
        if len(self) == 0:
            raise ConfigError(f"{type(view).__name__} has 0 samples: there is nothing to load")


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
