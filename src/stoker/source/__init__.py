"""Where samples live: in memory, in files, in object stores, or behind a class of one's own."""

from stoker.source.adapt import as_source
from stoker.source.base import BaseSource, Source
from stoker.source.files import FileSource
from stoker.source.fsspec_source import FsspecSource
from stoker.source.image_folder import ImageFolderSource
from stoker.source.memory import MemorySource
from stoker.source.objects import ObjectSource
from stoker.source.pace import Pace
from stoker.source.retry import Retry

__all__ = [
    "BaseSource",
    "FileSource",
    "FsspecSource",
    "ImageFolderSource",
    "MemorySource",
    "ObjectSource",
    "Pace",
    "Retry",
    "Source",
    "as_source",
]
