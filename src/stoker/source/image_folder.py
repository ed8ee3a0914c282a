"""Data sets of images in class folders: ``root/class/.../image.jpg``, in files or objects."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.errors import ConfigError, SourceUnavailable
from stoker.shared import SharedArray
from stoker.source.files import FileSource, Listing, check_threads, list_names
from stoker.source.listing import Arrays, Keys, ListingCache
from stoker.source.objects import DAY, KeyListing, KeySource
from stoker.source.pace import Pace
from stoker.source.packed import Offsets
from stoker.source.remote.backend import OBJECT_SCHEMES, address_of
from stoker.source.remote.client import Client
from stoker.source.shards import ShardSource
from stoker.types import FileIdentity

IMAGE_EXTENSIONS = (
    ".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp"
)  # fmt: skip
"""The extensions that torchvision's ImageFolder accepts, in any case."""
# Old file systems keep times in steps of up to 2 seconds: a directory that changed so shortly
# before it was listed may have changed again afterwards, with the same time.
_SETTLED_NS = 2_000_000_000
_LOOKED_AT = 64  # files
_FORM = "folder 2"  # of what is stored: other forms lie in other files


@dataclass(frozen=True, eq=False)
class FolderListing:
    """The samples of an image folder, its classes, and what its directories looked like."""

    files: Listing
    classes: tuple[str, ...]
    """Class names, sorted; the index in it is the target."""
    class_sizes: Offsets
    """Samples of each class, i64[C]; samples of one class are consecutive."""
    directories: tuple[bytes, ...]
    """Every directory that was read, below the root; the root itself is the empty name."""
    identities: npt.NDArray[np.uint64]
    """The :class:`~stoker.types.FileIdentity` of each directory before it was read, u64[D, 5]."""
    listed_ns: int
    """When the listing was started, in nanoseconds since 1970."""


@dataclass
class _ClassFolder:
    """The part of a listing that is in one class folder."""

    names: list[bytes]
    directories: list[tuple[bytes, FileIdentity]]


def list_folder(
    root: bytes, extensions: tuple[str, ...], threads: int, allow_empty: bool
) -> FolderListing:
    """Read ``root/class/**/file`` and return what is there; ``root`` ends in a slash.

    Classes and files come in the order of ``torchvision.datasets.ImageFolder``: classes sorted,
    in a class its directories sorted by path, in a directory its files sorted, links followed
    (except in loops). ``threads`` directories are read, and files asked, at once.

    Raises :class:`ConfigError` when there is no such directory, no class folder, or a class has
    no sample (unless ``allow_empty``), :class:`SourceUnavailable` for a directory that cannot be
    read, and as :func:`list_names` for files.
    """
    listed_ns = time.time_ns()
    endings = tuple(os.fsencode(extension.lower()) for extension in extensions)
    root_identity, class_names = _class_folders(root)
    with ThreadPoolExecutor(threads, "stoker-list") as pool:
        folders = list(pool.map(lambda name: _read_class(root, name, endings), class_names))
    classes = tuple(map(os.fsdecode, class_names))
    class_sizes = np.array([len(folder.names) for folder in folders], np.int64)
    _refuse_empty(root, classes, class_sizes, extensions, allow_empty)
    names = [name for folder in folders for name in folder.names]
    directories = [
        (b"", root_identity),
        *(found for folder in folders for found in folder.directories),
    ]
    return FolderListing(
        files=list_names(root, names, threads),
        classes=classes,
        class_sizes=class_sizes,
        directories=tuple(name for name, _ in directories),
        identities=pack_identities([identity for _, identity in directories]),
        listed_ns=listed_ns,
    )


def pack_identities(identities: Sequence[FileIdentity]) -> npt.NDArray[np.uint64]:
    """Return them as rows of an array, u64[D, 5]; times before 1970 modulo 2^64."""
    rows = [[number % 2**64 for number in identity] for identity in identities]
    return np.array(rows, np.uint64).reshape(len(rows), len(FileIdentity._fields))


def _class_folders(root: bytes) -> tuple[FileIdentity, list[bytes]]:
    """Return the root's identity and the sorted names of the directories in it."""
    try:
        identity = FileIdentity.of(os.stat(root))  # noqa: PTH116
        with os.scandir(root) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(
            f"root={os.fsdecode(root)!r} is not a directory: give one with a folder per class"
        ) from error
    except OSError as error:
        raise _unreadable(root, error) from error
    if not names:
        raise ConfigError(
            f"root={os.fsdecode(root)!r} has no class folders: "
            "samples are expected in root/class/file"
        )
    return identity, names


def _read_class(root: bytes, name: bytes, endings: tuple[bytes, ...]) -> _ClassFolder:
    """Return the samples of one class folder, in order."""
    found = sorted(_walk(root, name, endings, frozenset()))
    return _ClassFolder(
        names=[directory + b"/" + file for directory, _, files in found for file in sorted(files)],
        directories=[(directory, identity) for directory, identity, _ in found],
    )


def _walk(
    root: bytes, directory: bytes, endings: tuple[bytes, ...], above: frozenset[tuple[int, int]]
) -> Iterator[tuple[bytes, FileIdentity, list[bytes]]]:
    """Yield every directory from here down: its name, identity and sample files."""
    files, below = [], []
    try:
        # Asked before reading: what changes meanwhile makes the listing stale, not wrong.
        identity = FileIdentity.of(os.stat(root + directory))  # noqa: PTH116
        inode = (identity.device, identity.inode)
        if inode in above:
            return
        with os.scandir(root + directory) as entries:
            for entry in entries:
                if entry.is_dir():
                    below.append(directory + b"/" + entry.name)
                elif entry.name.lower().endswith(endings):
                    files.append(entry.name)
    except OSError as error:
        raise _unreadable(root + directory, error) from error
    yield directory, identity, files
    for name in below:
        yield from _walk(root, name, endings, above | {inode})


def _unreadable(path: bytes, error: OSError) -> SourceUnavailable:
    return SourceUnavailable(
        f"cannot list {os.fsdecode(path)}: {error.strerror}: "
        f"let this user (id {os.geteuid()}) read and enter it"
    )


def _refuse_empty(
    root: bytes,
    classes: tuple[str, ...],
    class_sizes: Offsets,
    extensions: tuple[str, ...],
    allow_empty: bool,
) -> None:
    """Raise ConfigError when there are no samples, or a class without any that is not allowed."""
    empty = [name for name, size in zip(classes, class_sizes, strict=True) if size == 0]
    if len(empty) == len(classes) or (empty and not allow_empty):
        raise ConfigError(
            f"root={os.fsdecode(root)!r} has no samples in {', '.join(map(repr, empty[:5]))}"
            f"{' and others' if len(empty) > 5 else ''}: put files ending in "
            f"{', '.join(extensions)} there, or remove the empty folders (allow_empty=True keeps "
            "them as classes without samples)"
        )


class FolderCache:
    """The stored listing of one folder; see :class:`ListingCache` for where and how.

    The listing is reused while every directory in it is unchanged, so files and folders that are
    added, removed or renamed are noticed, and so is another tree at the same path, whatever its
    times. Rewriting a file in place changes no directory: 64 files drawn at random are checked, so
    a tree that was rebuilt in place is noticed. A single file is noticed when it is read, if its
    size changed, and otherwise may not be. A file system that does not keep the times of
    directories (some mounts of object stores) hides additions and removals: do not cache listings
    there. A source that reads a missing file, or one of another size, discards it.
    """

    def __init__(self, root: bytes, extensions: tuple[str, ...], allow_empty: bool) -> None:
        """Belong to the folder ``root``, listed with these extensions; nothing is read yet."""
        self._root = root
        question = (_FORM, os.path.realpath(root), extensions, allow_empty)
        self.stored = ListingCache(repr(question))
        """Where the listing lies."""

    def load(self, threads: int) -> FolderListing | None:
        """Return the stored listing if it is still valid; check ``threads`` directories at once."""

        def if_it_holds(stored: Arrays) -> FolderListing | None:
            listing = _decode(stored, self._root)
            return listing if _still_holds(listing, threads) else None

        return self.stored.load(if_it_holds)

    def store(self, listing: FolderListing) -> None:
        """Replace what is stored; a failure is logged."""
        self.stored.store(_encode(listing))


def _encode(listing: FolderListing) -> Arrays:
    return {
        "names": listing.files.names,
        "offsets": listing.files.offsets,
        "sizes": listing.files.sizes,
        "fingerprint": _join([listing.files.fingerprint.encode()]),
        "ctimes_ns": listing.files.ctimes_ns,
        "classes": _join([os.fsencode(name) for name in listing.classes]),
        "class_sizes": listing.class_sizes,
        "directories": _join(list(listing.directories)),
        "identities": listing.identities,
        "listed_ns": np.array(listing.listed_ns, np.int64),
    }


def _decode(parts: Arrays, root: bytes) -> FolderListing:
    return FolderListing(
        files=Listing(
            root=root,
            names=parts["names"],
            offsets=parts["offsets"],
            sizes=parts["sizes"],
            ctimes_ns=parts["ctimes_ns"],
            fingerprint=_split(parts["fingerprint"])[0].decode(),
        ),
        classes=tuple(map(os.fsdecode, _split(parts["classes"]))),
        class_sizes=parts["class_sizes"],
        directories=tuple(_split(parts["directories"])),
        identities=parts["identities"],
        listed_ns=int(parts["listed_ns"]),
    )


def _join(names: list[bytes]) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Return file names as one array; none of them can contain the NUL between them."""
    return np.frombuffer(b"\0".join(names), np.uint8)


def _split(joined: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> list[bytes]:
    return joined.tobytes().split(b"\0")


def _still_holds(listing: FolderListing, threads: int) -> bool:
    """Return whether no directory has changed since, according to the kernel."""
    changed_ns = listing.identities[:, FileIdentity._fields.index("ctime_ns")]
    if int(changed_ns.max()) > listing.listed_ns - _SETTLED_NS:
        return False
    files = listing.files
    drawn = random.sample(range(len(files.sizes)), min(_LOOKED_AT, len(files.sizes)))
    paths = [files.root + name for name in listing.directories]
    paths += [files.root + files.name(index) for index in drawn]
    try:
        with ThreadPoolExecutor(threads, "stoker-list") as pool:
            now = list(pool.map(_identity, paths))
    except OSError:
        return False
    directories, looked_at = now[: len(listing.directories)], now[len(listing.directories) :]
    unchanged = np.array_equal([file.ctime_ns for file in looked_at], files.ctimes_ns[drawn])
    return unchanged and np.array_equal(pack_identities(directories), listing.identities)


def _identity(path: bytes) -> FileIdentity:
    return FileIdentity.of(os.stat(path))  # noqa: PTH116


class ClassFolders:
    """Classes and targets of a source."""

    def _hold_classes(self, classes: tuple[str, ...], targets: npt.NDArray[np.int64]) -> None:
        """Keep the class names, and each sample's index among them."""
        self._classes = classes
        self._targets = SharedArray.copy_of(targets, "targets")

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names, sorted; the index in it is the target."""
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
    while no directory has changed; see :class:`stoker.source.image_folder.FolderCache` for what
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
        targets = np.repeat(np.arange(len(listing.classes)), listing.class_sizes)
        self._hold_classes(listing.classes, targets)


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
        client = Client(address.location, pace or Pace(), in_process=scheme == "memory")
        listing = KeyListing(client, address, listing_max_age)
        found = listing.below(prefix, by_folder=True).without_prefix(len(prefix.encode()))
        keys, classes, class_sizes = class_layout(found, extensions)
        if not len(keys):
            raise ConfigError(
                f"there are no samples in class folders below {url}: objects like "
                f"class/file are expected, ending in {', '.join(extensions)}"
            )
        self._hold(client, address.root, prefix, keys, listing.stored)
        self._hold_classes(classes, np.repeat(np.arange(len(classes)), class_sizes))


class ImageShardSource(ClassFolders, ShardSource):
    """Images in tar shards, in which the folder of an image is its class: ``n01440764/0017.jpg``.

    That is what ``stoker pack --image-folder`` makes of class folders; its samples are in another
    order. Classes are sorted, so targets are those of the folders. For everything else see
    :class:`ShardSource`.
    """

    def __init__(
        self,
        shards: str | Path | Sequence[str | Path],
        *,
        extensions: tuple[str, ...] = IMAGE_EXTENSIONS,
        storage_options: Mapping[str, Any] | None = None,
        pace: Pace | None = None,
    ) -> None:
        """Index the shards.

        A sample is its part with one of the ``extensions``. The other arguments are those of
        :class:`ShardSource`. Raises as it does, and :class:`ConfigError` for a sample outside of
        folders.
        """
        check_extensions(extensions)
        part = ";".join(extension.removeprefix(".") for extension in extensions)
        super().__init__(shards, part=part, storage_options=storage_options, pace=pace)
        index = self._parts
        folders = [index.key(sample).partition("/") for sample in range(len(self))]
        outside = [sample for sample, (_, slash, _) in enumerate(folders) if not slash]
        if outside:
            raise ConfigError(
                f"{self.name(outside[0])} is in no folder, so it has no class: use open_source, or "
                "pack class folders by `stoker pack --image-folder`"
            )
        classes, targets = np.unique([folder for folder, _, _ in folders], return_inverse=True)
        self._hold_classes(tuple(classes.tolist()), targets)


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
