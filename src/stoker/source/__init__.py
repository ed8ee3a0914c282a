"""Where samples live: in memory, in files, in object stores, or behind your own class."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from stoker.source.base import BaseSource, Source, as_source, check_ids
from stoker.source.pace import Pace, Retry
from stoker.source.packed import Packed, join_parts, split_parts

if TYPE_CHECKING:
    from stoker.source.array_rows import HDF5Source, ZarrSource
    from stoker.source.arrow import ArrowSource
    from stoker.source.clips import ClipSource
    from stoker.source.files import FileSource
    from stoker.source.held import MemorySource
    from stoker.source.image_folder import ImageFolderSource, ImagePrefixSource, ImageShardSource
    from stoker.source.joined import JoinedSource
    from stoker.source.lance_source import LanceSource
    from stoker.source.lmdb_source import LMDBSource
    from stoker.source.mds import MDSSource
    from stoker.source.media import ClipFormat
    from stoker.source.objects import FsspecSource, ObjectSource
    from stoker.source.open import open_image_folder, open_source
    from stoker.source.parquet import ParquetSource
    from stoker.source.records import NumpySource, TFRecordSource
    from stoker.source.sample_format import SampleFormat
    from stoker.source.shards import ShardSource

# Loaded when it is first used: training starts several processes, and each reads one format.
_LATER = {
    "ArrowSource": "stoker.source.arrow",
    "ClipFormat": "stoker.source.media",
    "ClipSource": "stoker.source.clips",
    "FileSource": "stoker.source.files",
    "FsspecSource": "stoker.source.objects",
    "HDF5Source": "stoker.source.array_rows",
    "ImageFolderSource": "stoker.source.image_folder",
    "ImagePrefixSource": "stoker.source.image_folder",
    "ImageShardSource": "stoker.source.image_folder",
    "JoinedSource": "stoker.source.joined",
    "LMDBSource": "stoker.source.lmdb_source",
    "LanceSource": "stoker.source.lance_source",
    "MDSSource": "stoker.source.mds",
    "MemorySource": "stoker.source.held",
    "NumpySource": "stoker.source.records",
    "ObjectSource": "stoker.source.objects",
    "ParquetSource": "stoker.source.parquet",
    "SampleFormat": "stoker.source.sample_format",
    "ShardSource": "stoker.source.shards",
    "TFRecordSource": "stoker.source.records",
    "ZarrSource": "stoker.source.array_rows",
    "open_image_folder": "stoker.source.open",
    "open_source": "stoker.source.open",
}

__all__ = [
    "ArrowSource",
    "BaseSource",
    "ClipFormat",
    "ClipSource",
    "FileSource",
    "FsspecSource",
    "HDF5Source",
    "ImageFolderSource",
    "ImagePrefixSource",
    "ImageShardSource",
    "JoinedSource",
    "LMDBSource",
    "LanceSource",
    "MDSSource",
    "MemorySource",
    "NumpySource",
    "ObjectSource",
    "Pace",
    "Packed",
    "ParquetSource",
    "Retry",
    "SampleFormat",
    "ShardSource",
    "Source",
    "TFRecordSource",
    "ZarrSource",
    "as_source",
    "check_ids",
    "join_parts",
    "open_image_folder",
    "open_source",
    "split_parts",
]


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module 'stoker.source' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
