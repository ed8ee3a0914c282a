"""A data set that says which of its samples each one is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.data import Dataset


class WithIds(Dataset[Any]):
    """Gives ``(id, sample)`` where the map-style ``dataset`` gives ``sample``.

    So the training loop knows whose losses it has. Pickles, and is safe in threads, as ``dataset``
    is.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[int, Any]:
        return index, self.dataset[index]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[int, Any]]:
        """Return several samples, in one call of ``dataset`` if that can."""
        batched = getattr(self.dataset, "__getitems__", None)
        samples = map(self.dataset.__getitem__, indices) if batched is None else batched(indices)
        return list(zip(indices, samples, strict=True))
