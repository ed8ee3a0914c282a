"""A sample as it lies in a pool: behind a header, by which a reader knows it or refuses it."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stoker.store.packed import Packed
from stoker.store.tier import Ids, Mask

_HEAD = np.dtype(
    [("magic", "S4"), ("id", "<u4"), ("length", "<u8"), ("crc", "<u4"), ("owner", "V12")]
)
_MAGIC = b"StP1"

HEAD_BYTES = _HEAD.itemsize
"""Bytes of the header: magic and version, id, length, CRC-32 of the sample, owner; 32."""
OWNER_BYTES = 12
"""Bytes of a digest that stands for the data set's content and the cache stage."""


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
    """Return the samples of ``values``, which of ``ids`` they are, and how many were refused.

    A value without a whole header, of another data set or id, of another length, or whose bytes
    do not sum up is refused. None is a sample that is not there. One that is not found has zero
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
    for place, value, crc, is_ours in zip(
        there, chosen, heads["crc"].tolist(), good.tolist(), strict=True
    ):
        body = memoryview(value)[HEAD_BYTES:]  # type: ignore[arg-type]
        if is_ours and zlib.crc32(body) == crc:
            bodies.append(body)
            found[place] = True
            lengths[place] = len(body)
    offsets = np.zeros(len(ids) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    data: NDArray[np.uint8] = np.frombuffer(bytearray().join(bodies), np.uint8)
    return Packed(data, offsets), found, refused + len(there) - len(bodies)
