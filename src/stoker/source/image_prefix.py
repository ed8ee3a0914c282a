"""A data set of images in class folders of an object store: ``prefix/class/.../image.jpg``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from stoker.errors import ConfigError
from stoker.source.class_folders import ClassFolders, check_extensions
from stoker.source.folder_listing import IMAGE_EXTENSIONS
from stoker.source.key_listing import DAY, KeyListing
from stoker.source.key_source import KeySource
from stoker.source.keys import Keys
from stoker.source.pace import Pace
from stoker.source.packed import Offsets
from stoker.source.remote.client import Client
from stoker.source.remote.place import OBJECT_SCHEMES, address_of


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
