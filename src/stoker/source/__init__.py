"""Where samples live: in memory, in files, in an image folder, or behind a class of one's own."""

from stoker.source.adapt import as_source
from stoker.source.base import BaseSource, Source
from stoker.source.memory import MemorySource

__all__ = ["BaseSource", "MemorySource", "Source", "as_source"]
