"""Data sets of images in class folders: ``root/class/.../image.jpg``, in files or objects."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.errors import ConfigError
from stoker.shared import SharedArray
from stoker.source.files import FileSource, check_threads
from stoker.source.folder_listing import IMAGE_EXTENSIONS, FolderCache, FolderListing, list_folder
from stoker.source.key_listing import DAY, KeyListing
from stoker.source.key_source import KeySource
from stoker.source.keys import Keys
from stoker.source.pace import Pace
from stoker.source.packed import Offsets
from stoker.source.remote.address import OBJECT_SCHEMES, address_of
from stoker.source.remote.client import Client


class ClassFolders:
    """Classes and targets of a source whose samples come class by class."""

    def _hold_classes(self, classes: tuple[str, ...], class_sizes: Offsets) -> None:
        """Keep the class names, and how many samples each has."""
        self._classes = classes
        targets = np.repeat(np.arange(len(classes)), class_sizes)
        self._targets = SharedArray.copy_of(targets, "targets")

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names, sorted; the place in it is the target."""
        return self._classes

    @property
    def class_to_idx(self) -> dict[str, int]:
        """The target of each class name."""
        return {name: target for target, name in enumerate(self._classes)}

    @property
    def targets(self) -> npt.NDArray[np.int64]:
        """The target of each sample, i64[N], read-only."""
        return self._targets.read_only


def check_extensions(extensions: tuple[str, ...]) -> None:
    """Raise ConfigError for a single string, or no extensions."""
    if isinstance(extensions, str) or not extensions:
        raise ConfigError(f'extensions={extensions!r}: give a tuple like (".jpg", ".png")')


class ImageFolderSource(ClassFolders, FileSource):
    """The files of class folders, with the ids and targets of torchvision's ``ImageFolder``.

    The listing is stored in ``$XDG_CACHE_HOME/stoker/listings`` (``~/.cache/...``) and used again
    while no directory has changed; see :class:`stoker.source.folder_listing.FolderCache` for what
    that notices. For the rest see :class:`FileSource`.
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


class ImagePrefixSource(ClassFolders, KeySource):
    """The objects of class folders, with the ids and targets of a local ``ImageFolderSource``.

    That is: a copy of the prefix in a local folder has the same samples in the same order, and
    the same targets. (A folder without images is a class only there: here it does not exist.)
    Class folders are listed at once. For everything else see :class:`ObjectSource`; addresses
    that it does not know are read through fsspec.
    """

    def __init__(
        self,
        url: str,
        *,
        extensions: tuple[str, ...] = IMAGE_EXTENSIONS,
        storage_options: Mapping[str, Any] | None = None,
        pace: Pace | None = None,
        listing_max_age: float = DAY,
    ) -> None:
        """List the folders below ``url``.

        Objects count by their ``extensions``, in any case. The other arguments are those of
        :class:`ObjectSource`. Raises as it does, and :class:`ConfigError` when there are no
        class folders with samples, or for web servers, which do not list.
        """
        check_extensions(extensions)
        scheme = url.partition("://")[0].lower()
        if scheme in ("http", "https"):
            raise ConfigError(f"url={url!r}: web servers do not list; use ObjectSource with keys")
        address = address_of(url, storage_options, by_fsspec=scheme not in OBJECT_SCHEMES)
        prefix = f"{address.prefix.rstrip('/')}/".lstrip("/" if scheme != "memory" else "")
        client = Client(address.place, pace or Pace(), in_process=scheme == "memory")
        listing = KeyListing(client, address, listing_max_age)
        found = listing.below(prefix, by_folder=True).without_prefix(len(prefix.encode()))
        keys, classes, class_sizes = class_layout(found, extensions)
        if not len(keys):
            raise ConfigError(
                f"there are no samples in class folders below {url}: objects like "
                f"class/file are expected, ending in {', '.join(extensions)}"
            )
        self._hold(client, address.root, prefix, keys, listing.stored)
        self._hold_classes(classes, class_sizes)


def class_layout(keys: Keys, extensions: tuple[str, ...]) -> tuple[Keys, tuple[str, ...], Offsets]:
    """Return the samples in torchvision's order, the class names, and the samples in each class.

    ``keys`` are names below the prefix. Classes are sorted, in a class its folders are sorted by
    path, in a folder its files are sorted: a file comes before those of folders beside it.
    """
    endings = tuple(extension.lower().encode() for extension in extensions)
    samples = []
    for index in range(len(keys)):
        name = keys[index]
        folder, slash, file = name.rpartition(b"/")
        if slash and file.lower().endswith(endings):
            samples.append((folder.partition(b"/")[0], folder, file, index))
    samples.sort()
    classes: dict[str, int] = {}
    for name, _, _, _ in samples:
        classes[name.decode()] = classes.get(name.decode(), 0) + 1
    order = np.fromiter((sample[3] for sample in samples), np.int64, len(samples))
    return keys.take(order), tuple(classes), np.array(list(classes.values()), np.int64)
