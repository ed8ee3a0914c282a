"""One package: many samples in one object, which one read brings whole.

All numbers are little-endian::

    magic 8 | version u32 | n u32 | data set 16 | payload bytes u64 | payload CRC u32 | head CRC u32
    offsets i64[n + 1] | ids u32[n] | payload

The head is everything before the payload. Its CRC-32C counts the field of that CRC as zero.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stoker._core import crc32c
from stoker.errors import SegmentError
from stoker.scores import distinct
from stoker.source.base import Source
from stoker.source.packed import Packed
from stoker.store.tier import Ids

_MAGIC = b"STOKRPKG"
_VERSION = 1
_FIXED = struct.Struct("<8sII16sQII")
_HEAD_CRC = _FIXED.size - 4


@dataclass(frozen=True, eq=False)
class Package:
    """``n`` samples of one data set, each at most once."""

    ids: Ids
    """``u32[n]``."""
    samples: Packed
    """Their bytes, in that order."""


def stamp_of(fingerprint: str, num_samples: int) -> bytes:
    """Return the 16 bytes by which packages name their data set."""
    text = f"{num_samples} {fingerprint}".encode()
    return hashlib.blake2b(text, digest_size=16, person=b"stoker.package").digest()


def stamp_of_files(source: Source) -> bytes:
    """Return the stamp of a source's samples as they are on this machine: packages outlive runs."""
    return stamp_of(source.fingerprint + source.local_identity, len(source))


def encode(package: Package, stamp: bytes) -> list[bytes | memoryview]:
    """Return the package of the data set ``stamp`` as pieces, to be written one after the other."""
    data, offsets = package.samples
    payload = np.ascontiguousarray(data[offsets[0] : offsets[-1]])
    table = (offsets - offsets[0]).astype("<i8").tobytes() + package.ids.astype("<u4").tobytes()
    fixed = bytearray(
        _FIXED.pack(_MAGIC, _VERSION, len(package.ids), stamp, len(payload), crc32c(payload), 0)
    )
    struct.pack_into("<I", fixed, _HEAD_CRC, _crc(bytes(fixed) + table))
    return [bytes(fixed), table, payload.data]


def head_bytes(begin: bytes | memoryview) -> int:
    """Return the length of a head from its first bytes, :data:`LEAST_HEAD` at least.

    Raises :class:`~stoker.errors.SegmentError` if they are not a package's.
    """
    if len(begin) < _FIXED.size:
        raise SegmentError(f"a package is cut off after {len(begin)} bytes")
    magic: bytes
    version: int
    count: int
    magic, version, count, *_ = _FIXED.unpack_from(begin)
    if magic != _MAGIC or version != _VERSION:
        raise SegmentError(f"not a package of version {_VERSION}: it begins with {magic!r}")
    return _FIXED.size + 8 * (count + 1) + 4 * count


LEAST_HEAD = _FIXED.size
"""Bytes of a head that say how long it is."""


def decode_ids(head: bytes | memoryview, stamp: bytes, num_samples: int) -> Ids:
    """Return the ids ``u32[n]`` that a package's head lists.

    Raises :class:`~stoker.errors.SegmentError` if it is damaged, or of another data set.
    """
    return _decode_head(head, stamp, num_samples)[0]


def decode(data: bytes | memoryview, stamp: bytes, num_samples: int) -> Package:
    """Return the package in ``data``; its samples are a view.

    Raises :class:`~stoker.errors.SegmentError` if it is damaged, cut off, or of another data set
    than the one that ``stamp`` and ``num_samples`` stand for.
    """
    ids, offsets, crc = _decode_head(data, stamp, num_samples)
    payload = np.frombuffer(data, np.uint8)[head_bytes(data) :]
    if len(payload) != offsets[-1] or crc32c(payload) != crc:
        raise SegmentError(f"the payload of a package of {len(ids)} samples is damaged")
    return Package(ids, Packed(payload, offsets))


def _decode_head(
    data: bytes | memoryview, stamp: bytes, num_samples: int
) -> tuple[Ids, NDArray[np.int64], int]:
    length = head_bytes(data)
    if len(data) < length:
        raise SegmentError(f"the head of a package is cut off after {len(data)} bytes")
    head = bytearray(data[:length])
    _, _, count, whose, payload, payload_crc, head_crc = _FIXED.unpack_from(head)
    struct.pack_into("<I", head, _HEAD_CRC, 0)
    if _crc(head) != head_crc:
        raise SegmentError(f"the head of a package of {count} samples is damaged")
    if whose != stamp:
        raise SegmentError("a package belongs to another data set")
    offsets = np.frombuffer(head, "<i8", count + 1, _FIXED.size).astype(np.int64)
    ids = np.frombuffer(head, "<u4", count, _FIXED.size + 8 * (count + 1)).astype(np.uint32)
    # Writers of packages keep these; a CRC says that it was written whole, not by whom.
    sound = offsets[0] == 0 and offsets[-1] == payload and bool((np.diff(offsets) >= 0).all())
    if not sound or len(distinct(ids)) != count or (count and int(ids.max()) >= num_samples):
        raise SegmentError(f"the head of a package of {count} samples makes no sense")
    return ids, offsets, payload_crc


def _crc(data: bytes | bytearray) -> int:
    return crc32c(np.frombuffer(data, np.uint8))
