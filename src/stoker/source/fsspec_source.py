"""A data set of files that fsspec reads: FTP, SFTP, HDFS, Hugging Face, and many others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stoker.source.objects import ObjectSource
from stoker.source.pace import Pace
from stoker.source.remote.place import address_of


class FsspecSource(ObjectSource):
    """The files below a folder of any file system of fsspec, or those of a list of paths.

    For what :class:`ObjectSource` does not read. fsspec does not say which version of a file it
    reads, so one that was replaced is noticed only by its size. Listings are not stored, because
    fsspec cannot list in pages.
    """

    def __init__(
        self,
        url: str,
        keys: Sequence[str] | None = None,
        *,
        storage_options: Mapping[str, Any] | None = None,
        pace: Pace | None = None,
    ) -> None:
        """List the files below ``url``, or ask after those of ``keys``, which are below it.

        ``storage_options`` go to the file system. ``memory://`` is read in this process, and so
        in children only after a fork; everything else in the helper process.

        Raises as :class:`ObjectSource` does.
        """
        address = address_of(url, storage_options, by_fsspec=True)
        in_memory = url.partition("://")[0].lower() == "memory"
        self._find(address, keys, pace or Pace(), 0.0, in_process=in_memory)
