"""A data set of images in class folders: ``root/class/.../image.jpg``."""

from __future__ import annotations

import os
from pathlib import Path

from stoker.source.class_folders import ClassFolders, check_extensions
from stoker.source.files import FileSource, check_threads
from stoker.source.folder_cache import FolderCache
from stoker.source.folder_listing import IMAGE_EXTENSIONS, FolderListing, list_folder


class ImageFolderSource(ClassFolders, FileSource):
    """The files of class folders, with the ids and targets of torchvision's ``ImageFolder``.

    The listing is kept in ``$XDG_CACHE_HOME/stoker/listings`` (``~/.cache/...``) and used again
    while no directory has changed; :class:`stoker.source.folder_cache.FolderCache` says what
    that notices and what not. For everything else see :class:`FileSource`.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        extensions: tuple[str, ...] = IMAGE_EXTENSIONS,
        allow_empty: bool = False,
        cache_listing: bool = True,
        threads: int = 16,
        drop_page_cache: bool = False,
    ) -> None:
        """List the folder, or take its listing from the cache.

        Files count by their ``extensions``, in any case. ``allow_empty`` keeps class folders
        without samples as classes. ``cache_listing=False`` neither uses nor keeps a listing.
        ``threads`` and ``drop_page_cache`` are those of :class:`FileSource`.

        Raises :class:`ConfigError` for a root that is not a directory or has no class folders, a
        class without samples, or bad arguments; :class:`SourceUnavailable` for a directory that
        cannot be read; :class:`SampleNotFound` for a link that leads nowhere.
        """
        check_threads(threads)
        check_extensions(extensions)
        folder = Path(root).absolute()
        top = os.path.join(os.fsencode(folder), b"")  # noqa: PTH118
        cache = FolderCache(top, extensions, allow_empty) if cache_listing else None
        listing = cache.load(threads) if cache else None
        if listing is None:
            listing = list_folder(top, extensions, threads, allow_empty)
            if cache:
                cache.store(listing)
        self._hold_folder(listing, threads, drop_page_cache)
        self._stored = None if cache is None else cache.stored

    def _hold_folder(self, listing: FolderListing, threads: int, drop_page_cache: bool) -> None:
        """Keep the listing in shared memory."""
        self._hold(listing.files, threads, drop_page_cache)
        self._hold_classes(listing.classes, listing.class_sizes)
