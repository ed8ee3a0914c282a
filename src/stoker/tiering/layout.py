"""The numbers of ``shim/table.h``: a test compares them with what a C compiler makes of it."""

from __future__ import annotations

import struct
from enum import IntEnum

import numpy as np

TABLE_MAGIC, COUNTERS_MAGIC, VERSION = b"STOKERT1", b"STOKERC2", 2
REQUEST_MAGIC = 0x4D544B53
MAX_SOURCES, MAX_TIERS, BUCKETS, SHARDS, MARKS = 8, 8, 64, 64, 65536
RING_BYTES = 4194304
PATH_MULTIPLIER, COPY_MULTIPLIER = 0x9E3779B1, 0x9E3779B97F4A7C15


class State(IntEnum):
    """What has become of a file."""

    WANTED = 1
    COPYING = 2
    PLACED = 3
    REFUSED = 4
    DROPPED = 5


class Kind(IntEnum):
    """What a program asks for."""

    OPENED = 1
    CHANGED = 2


STRING = np.dtype([("offset", "u8"), ("length", "u4"), ("zero", "u4")])
SOURCE = np.dtype(
    [("path", STRING), ("dev", "u8"), ("ino", "u8"), ("number", "u4"), ("zero", "u4")]
)
TIER = np.dtype([("part_dir", STRING), ("dev", "u8")])
ENTRY = np.dtype(
    [
        ("word", "u4"),
        ("tier", "u1"),
        ("source", "u1"),
        ("link", "u2"),
        ("hash", "u4"),
        ("path_length", "u4"),
        ("path_offset", "u8"),
        ("copied", "u8"),
        ("validated_ns", "u8"),
        ("copy_ino", "u8"),
        ("source_dev", "u8"),
        ("source_ino", "u8"),
        ("source_mode", "u4"),
        ("source_nlink", "u4"),
        ("source_uid", "u4"),
        ("source_gid", "u4"),
        ("source_size", "u8"),
        ("source_blocks", "u8"),
        ("source_atime_ns", "i8"),
        ("source_mtime_ns", "i8"),
        ("source_ctime_ns", "i8"),
        ("source_blksize", "u4"),
        ("zero", "u4"),
    ]
)
HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("version", "u4"),
        ("zero", "u4"),
        ("bytes", "u8"),
        ("entries_offset", "u8"),
        ("entries_limit", "u8"),
        ("path_index_offset", "u8"),
        ("copy_index_offset", "u8"),
        ("arena_offset", "u8"),
        ("arena_limit", "u8"),
        ("index_limit_log2", "u4"),
        ("zero1", "u4"),
        ("small_bytes", "u8"),
        ("ahead_bytes", "u8"),
        ("wait_ms", "u4"),
        ("heartbeat_ms", "u4"),
        ("source_count", "u4"),
        ("tier_count", "u4"),
        ("sources", SOURCE, MAX_SOURCES),
        ("tiers", TIER, MAX_TIERS),
        ("copy_dirs", STRING, (MAX_SOURCES, MAX_TIERS)),
        ("large_bytes", "u8"),
        ("mount_namespace", "u8"),
        ("pad1", "V128"),
        ("heartbeat_ns", "u8"),
        ("arena_used", "u8"),
        ("entry_count", "u4"),
        ("path_index_log2", "u4"),
        ("copy_index_log2", "u4"),
        ("daemon_pid", "u4"),
        ("pad2", "V32"),
        ("changes", "u4", BUCKETS),
        ("pad3", "V1984"),
    ]
)
ROW = np.dtype([("opens", "u8"), ("reads", "u8"), ("bytes", "u8")])
SHARD = np.dtype(
    [
        ("rows", ROW, 1 + MAX_TIERS),
        ("requests", "u8"),
        ("requests_lost", "u8"),
        ("waits", "u8"),
        ("waits_given_up", "u8"),
        ("checks", "u8"),
        ("changes", "u8"),
        ("elsewhere", "u8"),
        ("pad", "V48"),
    ]
)
RING = np.dtype(
    [
        ("head", "u8"),
        ("pad1", "V56"),
        ("tail", "u8"),
        ("pad2", "V56"),
        ("words", "u8", RING_BYTES // 8),
    ]
)
COUNTERS = np.dtype(
    [
        ("magic", "S8"),
        ("marked", "u8"),
        ("all", "u8"),
        ("pad", "V40"),
        ("marks", "u8", MARKS),
        ("shards", SHARD, SHARDS),
    ]
)
REQUEST = struct.Struct("=IBBHII")


def offset_of(dtype: np.dtype[np.void], field: str) -> int:
    """Return where a field of a structure begins."""
    fields = dtype.fields
    assert fields is not None
    return int(fields[field][1])
