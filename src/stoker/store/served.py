"""What the store hands out for one batch."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stoker.errors import SourceError


@dataclass(frozen=True, eq=False, slots=True)
class Served:
    """``n`` samples in the order in which they were asked for.

    ``len(served)`` is ``n``, and ``served[i]`` is the ``i``-th sample, ``u8[length]``, a view.
    """

    ids: NDArray[np.uint32]
    """``u32[n]``, the samples really served."""
    data: NDArray[np.uint8]
    """``u8[total]``, the samples one after the other."""
    offsets: NDArray[np.int64]
    """``i64[n + 1]``: sample ``i`` is ``data[offsets[i]:offsets[i + 1]]``."""
    outcomes: NDArray[np.int8]
    """``i8[n]``, a :class:`~stoker.types.Outcome` per sample."""
    errors: dict[int, SourceError] = field(default_factory=dict)
    """Index in the batch -> why that sample could not be read; it then has zero length."""

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> NDArray[np.uint8]:
        if not 0 <= index < len(self.ids):
            raise IndexError(f"sample {index} of a batch of {len(self.ids)}")
        return self.data[self.offsets[index] : self.offsets[index + 1]]
