"""Samples of which the truth is known: each says which one it is, and its bytes have one CRC."""

from __future__ import annotations

import tarfile
import zlib
from enum import IntEnum
from io import BytesIO
from pathlib import Path

import numpy as np

NUM = 720  # divisible by all batch sizes times numbers of ranks that the campaign uses
CLASSES = 10
SHARDS = 8
_NOISE = np.random.default_rng(11).integers(0, 256, 1 << 18, np.uint8).tobytes()
_SIZES = np.clip(np.random.default_rng(13).lognormal(8.6, 0.9, NUM), 16, 60_000).astype(int)


class Column(IntEnum):
    """What a process of the job writes on its row of the board, for the campaign to read."""

    BEAT = 0  # counts whatever it does
    STEP = 1  # steps that are over, in all epochs
    EPOCH = 2
    LENGTH = 3  # batches of the latest epoch that is over
    WRONG_BYTES = 4
    WRONG_LABELS = 5
    GONE = 6  # set by the campaign when the process has ended
    LAST_EPOCH = 7  # set by the campaign on row 0: end after this epoch; -1: continue
    JOINED = 9  # is up: faults before that would test torch, or Python
    SOURCE_FAULTS = 8  # faults that the source injected


def sample(index: int, version: int = 0) -> bytes:
    """Return the bytes of a sample: its number, its version, and noise from a place of its own."""
    head = index.to_bytes(8, "little") + version.to_bytes(8, "little")
    begin = index * 233
    return head + _NOISE[begin : begin + int(_SIZES[index]) - 16]


def label(index: int) -> int:
    """Return the class of a sample; samples in the order of their classes are in their order."""
    return index * CLASSES // NUM


CRCS = np.array([zlib.crc32(sample(index)) for index in range(NUM)], np.int64)
LABELS = np.array([label(index) for index in range(NUM)], np.int64)


def file_name(index: int) -> str:
    """Return the path of a sample below the data set's root."""
    return f"{label(index):02d}/{index:05d}.jpg"


def identify(data: bytes | memoryview | np.ndarray) -> tuple[int, int]:
    """Return the number that the bytes of a sample say, and their CRC; number -1 for too few."""
    raw = bytes(data)
    number = int.from_bytes(raw[:8], "little") if len(raw) >= 16 else -1
    return (number if 0 <= number < NUM else -1), zlib.crc32(raw)


def write_files(root: Path) -> None:
    """Write all samples as files in class folders."""
    for index in range(NUM):
        path = root / file_name(index)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(sample(index))


def write_shards(root: Path) -> None:
    """Write all samples, in order, into tar files ``train-00.tar`` and on."""
    root.mkdir(parents=True)
    for shard, indices in enumerate(np.array_split(np.arange(NUM), SHARDS)):
        with tarfile.open(root / f"train-{shard:02d}.tar", "w") as tar:
            for index in indices.tolist():
                member = tarfile.TarInfo(f"{index:05d}.bin")
                member.size = len(sample(index))
                tar.addfile(member, BytesIO(sample(index)))
