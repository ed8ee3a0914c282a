"""The index that lies beside packed shards, so that no machine has to read them for one."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stoker.errors import SampleCorrupt
from stoker.source.listing_cache import decode, encode
from stoker.source.packed import Offsets
from stoker.source.shard_index import ShardIndex, index_of
from stoker.source.tar_members import Member, Read

INDEX = "stoker-index.bin"
"""Its name, in the folder or below the prefix of the shards."""

PROBE = 512
"""Bytes of a probe: the header of a file in the archive, which lies right before its data."""
_PROBES = 3  # of a shard


class Layout(NamedTuple):
    """What is where in a shard."""

    members: list[Member]
    probes: npt.NDArray[np.int64]
    """``i64[n, 2]``: where headers lie that tell this shard from others, and their CRC-32."""


class StoredIndex(NamedTuple):
    """An index as it was stored, of shards that may be others by now."""

    layout: ShardIndex
    shards: npt.NDArray[np.uint32]
    """``u32[n]``, the shard of each probe."""
    probes: npt.NDArray[np.int64]
    """``i64[n, 2]``: where to read :data:`PROBE` bytes, and their CRC-32."""


def layout_of(members: Sequence[Member], read: Read) -> Layout:
    """Return the layout of a shard of these ``members``, which ``read`` reads."""
    chosen = sorted(
        {len(members) * part // _PROBES for part in range(_PROBES)} | {len(members) - 1}
    )
    starts = [members[i].start - PROBE for i in chosen if 0 <= i < len(members)]
    probes = [(start, zlib.crc32(read(start, PROBE))) for start in starts]
    return Layout(list(members), np.array(probes, np.int64).reshape(-1, 2))


def to_bytes(layouts: Sequence[Layout], name: Callable[[int], str], sizes: Sequence[int]) -> bytes:
    """Return what to store for shards called ``name(i)``, of ``sizes`` bytes.

    Raises :class:`~stoker.errors.ConfigError` where there are no samples.
    """
    arrays = index_of((layout.members for layout in layouts), name).as_arrays()
    names = "\0".join(name(number) for number in range(len(layouts)))
    arrays["shard_names"] = np.frombuffer(names.encode(), np.uint8)
    arrays["shard_sizes"] = np.array(sizes, np.int64)
    counts = [len(layout.probes) for layout in layouts]
    arrays["probe_shards"] = np.repeat(np.arange(len(layouts), dtype=np.uint32), counts)
    arrays["probes"] = np.concatenate([layout.probes for layout in layouts]).ravel()
    return encode(arrays)


def from_bytes(stored: bytes, names: Sequence[str], sizes: Offsets) -> StoredIndex:
    """Return the index of shards of these ``names`` and ``sizes`` (``i64[S]``), some or all of it.

    Raises an exception of any kind for bytes that are none, and where it is that of other shards.
    """
    arrays = decode(stored)
    told = arrays.pop("shard_names").tobytes().decode().split("\0")
    place, told_sizes = {name: i for i, name in enumerate(told)}, arrays.pop("shard_sizes")
    chosen = np.array([place.get(name, -1) for name in names], np.int64)
    if (chosen < 0).any() or len(np.unique(chosen)) < len(chosen) or len(told) != len(told_sizes):
        raise SampleCorrupt("it is of other shards")
    if not np.array_equal(told_sizes[chosen], sizes):
        raise SampleCorrupt("it is of shards that were replaced")
    shards, probes = arrays.pop("probe_shards"), arrays.pop("probes").reshape(-1, 2)
    index = ShardIndex.from_arrays(arrays)
    index.check(told_sizes)
    if len(shards) != len(probes) or (shards >= len(told)).any():
        raise SampleCorrupt("its probes are of no shard")
    if (probes[:, 0] < 0).any() or (probes[:, 0] > told_sizes[shards] - PROBE).any():
        raise SampleCorrupt("its probes are beyond the shards")
    if not np.isin(index.shards, shards).all():
        raise SampleCorrupt("it has shards without a probe")
    now = np.full(len(told), -1, np.int64)
    now[chosen] = np.arange(len(chosen))
    is_wanted = now[shards] >= 0
    which = now[shards[is_wanted]].astype(np.uint32)
    if len(told) > len(chosen) or (np.diff(chosen) < 0).any():
        index = index.of_shards(chosen)
    if len(index.first) < 2:
        raise SampleCorrupt("these shards are empty")
    return StoredIndex(index, which, probes[is_wanted])
