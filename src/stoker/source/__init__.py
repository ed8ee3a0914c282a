"""Where samples live: in memory, in files, in an image folder, or behind a class of one's own."""

from stoker.source.adapt import as_source
from stoker.source.base import BaseSource, Source
from stoker.source.files import FileSource
from stoker.source.image_folder import ImageFolderSource
from stoker.source.memory import MemorySource

__all__ = [
    "BaseSource",
    "FileSource",
    "ImageFolderSource",
    "MemorySource",
    "Source",
    "as_source",
]
