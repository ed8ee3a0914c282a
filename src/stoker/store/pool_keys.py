"""What samples are called in a pool, so that one request asks for many of them."""

from __future__ import annotations

import binascii
import functools
import hashlib

import numpy as np
from numpy.typing import NDArray

from stoker.store.pool_frame import OWNER_BYTES
from stoker.store.tier import Ids

PREFIX = "stoker:"
"""All keys begin so, for the rules of an access list."""
SLOTS = 16384
"""Hash slots of a cluster, each of which lies on one server."""
BUCKETS = 256
"""Groups of keys that lie together. So many that the servers of any sensible cluster share them out
evenly, so few that a batch asks for several of each."""

# Bits reversed, so that any few neighbouring ids are spread over all of them.
_BITS = BUCKETS.bit_length() - 1
_BUCKET_OF = np.array([int(f"{i:0{_BITS}b}"[::-1], 2) for i in range(BUCKETS)], np.int64)


class PoolKeys:
    """The keys of the samples of the data set that ``name`` stands for; no two share any.

    Sample ``i`` is ``stoker:{DATASET.TAG}:i``. The part in braces alone decides the slot, and the
    tags are chosen such that bucket ``b`` lies in the ``b``-th of :data:`BUCKETS` equal parts of
    the slots: then samples are spread over servers as evenly as slots are. Immutable.
    """

    def __init__(self, name: str) -> None:
        self.owner = hashlib.blake2b(name.encode(), digest_size=OWNER_BYTES).digest()
        """Stands for the data set in the values' headers."""
        self._tags = _tags(self.owner.hex()[:16])
        prefixes = [f"{PREFIX}{{{tag}}}:".encode() for tag in self._tags]
        self._prefixes = [prefixes[bucket] for bucket in _BUCKET_OF.tolist()]
        self.slots: NDArray[np.int64] = np.array([slot_of(tag) for tag in self._tags])
        """``i64[BUCKETS]``, the slot of each bucket."""

    def names(self, ids: Ids) -> list[bytes]:
        """Return the keys of samples."""
        prefixes = self._prefixes
        return [prefixes[i % BUCKETS] + b"%d" % i for i in ids.tolist()]

    @staticmethod
    def buckets(ids: Ids) -> NDArray[np.int64]:
        """Return the buckets ``i64[n]`` of samples."""
        return _BUCKET_OF[ids % BUCKETS]


def slot_of(tag: str) -> int:
    """Return the slot of a key with ``tag`` in braces: CRC-16/XMODEM modulo the number of slots."""
    return binascii.crc_hqx(tag.encode(), 0) % SLOTS


@functools.lru_cache(64)
def _tags(dataset: str) -> tuple[str, ...]:
    """Return a tag for each bucket: the first of the data set's that lies in its part."""
    found: dict[int, str] = {}
    number = 0
    while len(found) < BUCKETS:
        tag = f"{dataset}.{number}"
        found.setdefault(slot_of(tag) * BUCKETS // SLOTS, tag)
        number += 1
    return tuple(found[bucket] for bucket in range(BUCKETS))
