"""Where samples live: in memory, in files, in object stores, or behind your own class."""

from stoker.source.arrow_files import ArrowSource
from stoker.source.base import BaseSource, Source, as_source
from stoker.source.files import FileSource
from stoker.source.hdf5 import HDF5Source
from stoker.source.image_folder import ImageFolderSource, ImagePrefixSource, ImageShardSource
from stoker.source.in_memory import MemorySource
from stoker.source.lmdb_source import LMDBSource
from stoker.source.mds import MDSSource
from stoker.source.numpy_files import NumpySource
from stoker.source.objects import FsspecSource, ObjectSource
from stoker.source.open import open_image_folder, open_source
from stoker.source.pace import Pace, Retry
from stoker.source.packed import join_parts, split_parts
from stoker.source.parquet import ParquetSource
from stoker.source.sample_format import SampleFormat
from stoker.source.shards import ShardSource
from stoker.source.tfrecord import TFRecordSource
from stoker.source.zarr_source import ZarrSource

__all__ = [
    "ArrowSource",
    "BaseSource",
    "FileSource",
    "FsspecSource",
    "HDF5Source",
    "ImageFolderSource",
    "ImagePrefixSource",
    "ImageShardSource",
    "LMDBSource",
    "MDSSource",
    "MemorySource",
    "NumpySource",
    "ObjectSource",
    "Pace",
    "ParquetSource",
    "Retry",
    "SampleFormat",
    "ShardSource",
    "Source",
    "TFRecordSource",
    "ZarrSource",
    "as_source",
    "join_parts",
    "open_image_folder",
    "open_source",
    "split_parts",
]
