"""Writes MDS folders as MosaicML's writer does."""

from __future__ import annotations

import bz2
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

COLUMNS = {"image": "jpeg", "label": "int", "name": "str", "box": "ndarray:float32:2,2"}
SIZES = {"int": 8, "ndarray:float32:2,2": 16}


def _zstd(data: bytes) -> bytes:
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    return bytes(pa.Codec("zstd").compress(data, asbytes=True))


PACK: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "zstd": _zstd,
}


def record(row: dict[str, Any], columns: dict[str, str]) -> bytes:
    values = []
    for name in sorted(columns):
        value = row[name]
        value = value.encode() if isinstance(value, str) else value
        value = np.int64(value).tobytes() if isinstance(value, int) else value
        values.append((SIZES.get(columns[name]), bytes(value)))
    head = [len(value) for size, value in values if size is None]
    return np.array(head, np.uint32).tobytes() + b"".join(value for _, value in values)


def write(
    folder: Path,
    shards: list[list[dict[str, Any]]],
    columns: dict[str, str] = COLUMNS,
    compression: str | None = None,
) -> Path:
    """Write what ``streaming.MDSWriter`` does."""
    names = sorted(columns)
    about = {
        "version": 2,
        "format": "mds",
        "compression": compression,
        "hashes": [],
        "size_limit": 1 << 26,
        "column_names": names,
        "column_encodings": [columns[name] for name in names],
        "column_sizes": [SIZES.get(columns[name]) for name in names],
    }
    config = json.dumps(about, sort_keys=True).encode()
    listed = []
    for number, rows in enumerate(shards):
        records = [record(row, columns) for row in rows]
        offsets = np.cumsum([0, *map(len, records)]).astype(np.uint32)
        offsets += 4 + offsets.nbytes + len(config)
        parts = [np.uint32(len(rows)).tobytes(), offsets.tobytes(), config, *records]
        data = b"".join(parts)
        raw = {"basename": f"shard.{number:05}.mds", "bytes": len(data), "hashes": {}}
        zipped = None
        if compression is not None:
            kind = compression.partition(":")[0]
            data = PACK[kind](data)
            zipped = {**raw, "basename": f"{raw['basename']}.{kind}", "bytes": len(data)}
        (folder / (zipped or raw)["basename"]).write_bytes(data)
        listed.append({**about, "samples": len(rows), "raw_data": raw, "zip_data": zipped})
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": listed}))
    return folder
