"""What is written to a pool: framed samples, and for how long by their importance."""

from __future__ import annotations

import binascii
import functools
import hashlib
import itertools
import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stoker.shared import SharedArray
from stoker.source.packed import Packed
from stoker.store.tier import Ids, Keys, Mask

_HEAD = np.dtype(
    [("magic", "S4"), ("id", "<u4"), ("length", "<u8"), ("crc", "<u4"), ("owner", "V12")]
)
_MAGIC = b"StP1"

HEAD_BYTES = _HEAD.itemsize
"""Bytes of the header: magic and version, id, length, CRC-32 of the sample, owner; 32."""
OWNER_BYTES = 12
"""Bytes of a digest that stands for the data set's content and the cache stage."""
PREFIX = "stoker:"
"""Prefix of all keys, for the rules of an access list."""
SLOTS = 16384
"""Hash slots of a cluster, each of which lies on one server."""
BUCKETS = 256
"""Groups of keys that lie together. So many that the servers of any sensible cluster share them out
evenly, so few that a batch asks for several of each."""
# Bits reversed, so that any few neighbouring ids are spread over all of them.
_BITS = BUCKETS.bit_length() - 1
_BUCKET_OF = np.array([int(f"{i:0{_BITS}b}"[::-1], 2) for i in range(BUCKETS)], np.int64)
LEVELS = 64
"""Resolution of ranks."""
_LEAST_DAYS, _STEP_DAYS = 1.0, 0.5
_DAY_MS = 24 * 3600 * 1000


def seal(ids: Ids, samples: Packed, owner: bytes) -> list[bytes]:
    """Return the values for samples ``ids`` (``u32[n]``) of the data set ``owner``."""
    view = samples.data.data
    bounds = samples.offsets.tolist()
    bodies = [view[start:end] for start, end in itertools.pairwise(bounds)]
    heads = np.zeros(len(ids), _HEAD)
    heads["magic"] = _MAGIC
    heads["id"] = ids
    heads["length"] = np.diff(samples.offsets)
    heads["crc"] = [zlib.crc32(body) for body in bodies]
    heads["owner"] = np.void(owner)
    packed = heads.tobytes()
    return [
        b"".join((packed[start : start + HEAD_BYTES], body))
        for start, body in zip(range(0, len(packed), HEAD_BYTES), bodies, strict=True)
    ]


def unseal(ids: Ids, values: Sequence[bytes | None], owner: bytes) -> tuple[Packed, Mask, int]:
    """Return the samples of ``values``, which of ``ids`` they are, and how many were rejected.

    A value without a whole header, of another data set or id, of another length, or whose bytes
    do not sum up is rejected. None is a sample that is not there. One that is not found has zero
    length. The result may be written to.
    """
    found = np.zeros(len(ids), np.bool_)
    lengths = np.zeros(len(ids), np.int64)
    there = [k for k, v in enumerate(values) if isinstance(v, bytes) and len(v) >= HEAD_BYTES]
    refused = sum(value is not None for value in values) - len(there)
    chosen = [values[k] for k in there]
    heads = np.frombuffer(b"".join([value[:HEAD_BYTES] for value in chosen]), _HEAD)  # type: ignore[index]
    sizes = np.array([len(value) for value in chosen], np.int64) - HEAD_BYTES  # type: ignore[arg-type]
    good = heads["magic"] == _MAGIC
    good &= heads["id"] == ids[there]
    good &= heads["length"] == sizes.astype(np.uint64)
    good &= heads["owner"] == np.void(owner)
    bodies = []
    for row, value, crc, is_ours in zip(
        there, chosen, heads["crc"].tolist(), good.tolist(), strict=True
    ):
        body = memoryview(value)[HEAD_BYTES:]  # type: ignore[arg-type]
        if is_ours and zlib.crc32(body) == crc:
            bodies.append(body)
            found[row] = True
            lengths[row] = len(body)
    offsets = np.zeros(len(ids) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    data: NDArray[np.uint8] = np.frombuffer(bytearray().join(bodies), np.uint8)
    return Packed(data, offsets), found, refused + len(there) - len(bodies)


class PoolKeys:
    """The keys of the samples of the data set that ``name`` stands for; no two data sets share any.

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


class PoolOrder:
    """The level of each sample, 0 to ``LEVELS - 1``; a higher one lives longer.

    With keys that say what a sample is worth, the level is the rank of a sample's key among all
    keys, as :meth:`learn` saw them last. Without (``takes_keys=False``), as for policies without
    keys of their own and those whose keys are times of the next use, where what was just used
    always ranks last, there is a fixed random order: what is
    kept is then the same set on all machines and at all times, and nothing hits more bytes when
    each sample is visited once an epoch. Time to live grows by half a day a level, from a day on,
    so that samples no longer requested are evicted in the end, and ranks weigh more than ages.

    Only samples whose rank lies in the best ``share`` are worth storing. All is kept in shared
    memory: forked children and processes that receive it by pickling see it change. Safe in any
    thread; one process learns.
    """

    def __init__(self, *, takes_keys: bool = True) -> None:
        self.takes_keys = takes_keys
        # 0: share; 1: whether keys are known; then the least key of each level but the first
        self._table = SharedArray.create(LEVELS + 1, np.float64, name="stoker-pool-order")
        self._table.array[:2] = 1.0, 0.0

    @property
    def share(self) -> float:
        """The share of samples that are stored, 0 to 1."""
        return float(self._table.array[0])

    @share.setter
    def share(self, value: float) -> None:
        self._table.array[0] = value

    def learn(self, keys: NDArray[np.float64]) -> None:
        """Take ``keys`` (``f64[N]``) as those of all samples."""
        if not self.takes_keys or not len(keys):
            return
        edges = np.arange(1, LEVELS) * len(keys) // LEVELS
        self._table.array[2:] = np.partition(np.nan_to_num(keys), edges)[edges]
        self._table.array[1] = 1.0

    def levels(self, ids: Ids, keys: Keys = None) -> NDArray[np.uint8]:
        """Return the levels ``u8[n]`` of samples with these keys."""
        # Multiplied by 2^32 / golden ratio: neighbouring ids lie far apart, all evenly.
        mixed = (ids * np.uint32(2654435769)) >> np.uint32(32 - LEVELS.bit_length() + 1)
        if keys is None or not self._table.array[1]:
            return np.asarray(mixed, np.uint8)
        edges, keys = self._table.array[2:], np.nan_to_num(keys)
        low = np.searchsorted(edges, keys, side="left")
        high = np.searchsorted(edges, keys, side="right")
        # Equal keys, which may be all of them at first, spread over the levels they stand for.
        return np.asarray(low + mixed * (high - low + 1) // LEVELS, np.uint8)

    def is_worth_storing(self, levels: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Return which levels ``u8[n]`` are among the share that is stored."""
        worth: NDArray[np.bool_] = (levels + 1.0) / LEVELS > 1.0 - self.share
        return worth

    @staticmethod
    def lifetimes(levels: NDArray[np.uint8]) -> list[int]:
        """Return the times to live of levels ``u8[n]``, in milliseconds."""
        days = _LEAST_DAYS + levels.astype(np.float64) * _STEP_DAYS
        lifetimes: list[int] = (days * _DAY_MS).astype(np.int64).tolist()
        return lifetimes
