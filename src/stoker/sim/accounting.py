"""The production arena without its bytes: it knows how long samples are and stores none."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stoker import _core
from stoker.errors import CapacityError, ConfigError
from stoker.node.memory_limits import read_memory
from stoker.store.arena import Arena, Samples
from stoker.store.tier import Ids, Keys, Mask
from stoker.types import format_bytes


class AccountingArena(Arena):
    """An :class:`~stoker.store.arena.Arena` that counts the bytes of samples and has none of them.

    ``lengths`` (``i64[N]``): bytes of each sample, whatever is put; what is read is empty. Orders,
    admission, regions and budgets are those of any arena, since it is the same code; eviction is
    exact. About 40 bytes of memory a sample. It is used by one thread at a time. Raises
    :class:`~stoker.errors.ConfigError` for lengths below 0 and
    :class:`~stoker.errors.CapacityError` when the memory is not there.
    """

    def __init__(self, lengths: NDArray[np.int64], capacity_bytes: int, *, seed: int = 0) -> None:
        if not len(lengths) or int(lengths.min()) < 0 or capacity_bytes < 0:
            raise ConfigError(
                f"capacity_bytes={capacity_bytes} and {len(lengths)} lengths are invalid: give "
                "0 bytes or more, for one sample at least"
            )
        self._lengths = np.ascontiguousarray(lengths, np.int64)
        mean = max(1, round(float(lengths.mean())))
        needed = _core.segment_bytes(len(lengths), capacity_bytes, mean, False, True)
        available = read_memory().available
        if needed > available:
            raise CapacityError(
                f"accounting for {len(lengths)} samples takes {format_bytes(needed)} of memory, "
                f"and {format_bytes(available)} are free here: replay fewer samples"
            )
        self._core = _core.Arena.create(len(lengths), capacity_bytes, mean, "", True, seed, True)

    def put_many(
        self,
        ids: ArrayLike,
        samples: Samples = (),
        keys: ArrayLike | None = None,
        region: str = "main",
        overflow: str = "",
    ) -> NDArray[np.bool_]:
        """Offer samples ``u32[n]`` of their known lengths; see :meth:`Arena.put_many`."""
        order = None if keys is None else np.ascontiguousarray(keys, np.float64)
        return self._core.put_lengths(self._ids(ids), self._lengths, order, region, overflow)

    def replay(
        self,
        ids: Ids,
        keys: Keys = None,
        *,
        after: Keys = None,
        regions: NDArray[np.uint8] | None = None,
        entrance: str = "main",
        overflow: str = "",
        at_once: int = 1,
    ) -> Mask:
        """Make accesses ``u32[n]``, ``at_once`` in a batch; return ``bool[n]``, which ones hit.

        Of each batch, all samples are got, those found are given their ``keys`` (``f64[n]``), and
        those missed are put with theirs. With ``after`` (``f64[n]``), ``keys`` are for puts only,
        and the samples of a batch have these keys when it is over. Of several misses of a sample in
        one batch the first counts, the others hit. ``regions`` (``u8[n]``, as indices): where each
        goes if it is put; else to ``entrance``; what is not admitted goes to ``overflow``.

        The same as :meth:`get_many`, :meth:`set_keys`, :meth:`claim` and :meth:`put_many`, batch
        after batch, at ten times the speed. Raises :class:`~stoker.errors.ConfigError` for ids and
        regions out of range, and for lengths that differ.
        """
        return self._core.replay(
            self._ids(ids), self._lengths, keys, after, regions, entrance, overflow, at_once
        )
