"""Files that hold many samples each, local or remote: which there are, and any ranges of them."""

from __future__ import annotations

import glob
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

from stoker._core import read_cached
from stoker.errors import ConfigError, SampleCorrupt, SourceError, redacted
from stoker.source.files import list_names
from stoker.source.held import HeldSource
from stoker.source.listing import ListingCache
from stoker.source.objects import KeyListing
from stoker.source.pace import Pace
from stoker.source.packed import Bytes, Offsets, offsets_of
from stoker.source.remote.backend import OBJECT_SCHEMES, Address, address_of, local_address, tag_of
from stoker.source.remote.client import Client
from stoker.source.remote.request import Failure, Tally, Wanted, coalesce, error_of

_T = TypeVar("_T")
_SLOW_TO_OPEN = 2e-4  # seconds
_GAP, _LARGEST = 64 << 10, 8 << 20  # bytes between ranges of one request, and of all of it
_AT_ONCE = 16  # files looked at or indexed
Places = str | Path | Sequence[str | Path]
_BRACES = re.compile(r"\{([^{}]*)\}")
_COUNT = re.compile(r"([0-9]{1,18})\.\.([0-9]{1,18})")
_WILD = re.compile(r"[*?\[]")
_MOST = 10_000_000


class FileSet:
    """Some files at one location: their sizes and versions, and any ranges of them.

    Pickles, may be inherited through a fork, and is thread-safe, as :class:`Client` is. A file that
    was replaced since is reported where the storage tells versions apart, or its size changed.
    """

    def __init__(
        self,
        files: Sequence[str | Path],
        storage_options: Mapping[str, Any] | None = None,
        pace: Pace | None = None,
    ) -> None:
        """Ask the storage after the files, which are paths, or addresses of one bucket or host.

        Raises :class:`ConfigError` for files in several locations, :class:`SampleNotFound` for one
        that is not there, :class:`SourceUnavailable` when the storage does not answer.
        """
        address, names = _common_place(list(map(str, files)), storage_options)
        self.root = address.root
        """What is before every name, without secrets; empty for files of this machine."""
        self._question = address.question
        self._copies = self._copied_bytes = 0
        self._client = Client(address.location, pace or Pace(), address.root == "memory://")
        self.keys = KeyListing(self._client, address, 0.0).of(names)
        """Names, sizes and versions."""
        # A remote storage's versions are its own; those of files are size and time, set at will.
        here = [] if address.root else [os.fsencode(name) for name in names]
        self.local_identity = list_names(b"", here, _AT_ONCE).local_identity if here else ""
        """Hash of the files' change times where they are of this machine, else empty."""

    @classmethod
    def found(
        cls,
        places: Places,
        endings: tuple[str, ...],
        storage_options: Mapping[str, Any] | None,
        pace: Pace | None,
    ) -> Self:
        """Return the files that :func:`find_files` finds; raises what that and a new set do."""
        pace = pace or Pace()
        return cls(find_files(places, endings, storage_options, pace), storage_options, pace)

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def is_open(self) -> bool:
        """Whether this process can read at once."""
        return self._client.is_open

    @property
    def tally(self) -> Tally:
        """The requests that this process has made so far, copies from the page cache included."""
        asked = self._client.tally
        requests, received = (
            asked.requests + self._copies,
            asked.received_bytes + self._copied_bytes,
        )
        return replace(asked, requests=requests, received_bytes=received)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_copies": 0, "_copied_bytes": 0}

    def name(self, file: int) -> str:
        """Return the address of a file, without secrets."""
        return redacted(self.root + self.keys[file].decode())

    def size(self, file: int) -> int:
        """Return the bytes of a file."""
        return int(self.keys.sizes[file])

    def of_each(self, work: Callable[[int], _T]) -> list[_T]:
        """Return what ``work`` returns for each file, of which many are worked on at once."""
        with ThreadPoolExecutor(_AT_ONCE, "stoker-index") as pool:
            return list(pool.map(work, range(len(self))))

    @contextmanager
    def named(self, file: int) -> Iterator[None]:
        """Have errors of what a file contains name it."""
        try:
            yield
        except (ConfigError, SampleCorrupt) as error:
            raise type(error)(f"{self.name(file)}: {error}") from error

    def index_cache(self, *question: object) -> ListingCache | None:
        """Return where an index of these very files is kept on the disk of this machine.

        None where the storage does not tell versions apart, so that a replaced file could not be
        told from the one that was indexed.
        """
        if not self.keys.tags.all():
            return None
        about = (self.root, self._question, self.keys.fingerprint, self.local_identity)
        kind, *rest = question
        return ListingCache(repr((kind, *about, *rest)))

    def fetch(
        self, files: npt.NDArray[Any], starts: Offsets, lengths: Offsets
    ) -> tuple[Bytes, dict[int, Failure]]:
        """Return the ranges ``[n]`` one after the other as ``u8[total]``, and what failed.

        What of local files lies in the page cache is copied by this thread, the rest is read with
        many requests at once.
        """
        which = np.asarray(files, np.int64)
        data, left = self._copied(which, starts, lengths)
        if not len(left):
            return data, {}
        if len(left) == len(which):
            return self._requested(which, starts, lengths)
        rest, failures = self._requested(which[left], starts[left], lengths[left])
        _put(data, offsets_of(lengths), left, rest, offsets_of(lengths[left])[:-1])
        return data, {int(left[number]): failure for number, failure in failures.items()}

    def fetch_near(
        self,
        files: npt.NDArray[Any],
        starts: Offsets,
        lengths: Offsets,
        gap: int = _GAP,
        largest: int = _LARGEST,
    ) -> tuple[Bytes, dict[int, Failure]]:
        """Return what :meth:`fetch` does; ranges that lie close together are one request.

        Those have at most ``gap`` bytes between them, and together ``largest`` bytes at most.
        """
        which = np.asarray(files, np.int64)
        data, left = self._copied(which, starts, lengths)
        if not len(left):
            return data, {}
        begin, end = starts[left], starts[left] + lengths[left]
        requests = coalesce(which[left].astype(np.uint32), begin, end, gap, largest)
        shards = requests.shards.astype(np.int64)
        rest, failures = self._requested(shards, requests.starts, requests.lengths)
        of = requests.request_of
        begins = offsets_of(requests.lengths)[of] + begin - requests.starts[of]
        failed = {
            int(left[number]): failures[request]
            for number, request in enumerate(of.tolist())
            if request in failures
        }
        bounds = offsets_of(lengths)
        if len(left) == len(which) and np.array_equal(np.append(begins, len(rest)), bounds):
            return rest, failed  # in this order already, with nothing between them
        _put(data, bounds, left, rest, begins)
        return data, failed

    def _copied(
        self, files: Offsets, starts: Offsets, lengths: Offsets
    ) -> tuple[Bytes, npt.NDArray[np.int64]]:
        """Return ``u8[total]`` with the ranges that the page cache has; and the numbers of others.

        A range that begins where the one before ends is copied with it.
        """
        files, starts = np.ascontiguousarray(files), np.ascontiguousarray(starts, np.int64)
        bounds = offsets_of(lengths)
        data, done = np.empty(bounds[-1], np.uint8), np.zeros(len(files), np.bool_)
        if self.root:
            return data, np.arange(len(files))
        for file in sorted(set(files.tolist())) if len(self) > 1 else (0,):
            if not self._copy(file, files, starts, bounds, data, done):
                break
        self._copied_bytes += int(lengths[done].sum())
        return data, np.flatnonzero(~done)

    def _copy(
        self,
        file: int,
        files: Offsets,
        starts: Offsets,
        bounds: Offsets,
        data: Bytes,
        done: npt.NDArray[np.bool_],
    ) -> bool:
        """Copy what is wanted of a file, up to what is not cached, and set ``done`` for it.

        Returns whether the file was opened at once, unlike one on a network.
        """
        try:
            began = time.monotonic()
            fd = os.open(self.keys[file], os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                info = os.fstat(fd)
                if time.monotonic() - began > _SLOW_TO_OPEN:
                    return False
                if tag_of(info.st_size, info.st_mtime_ns) == self.keys.tags[file]:
                    self._copies += read_cached(fd, file, files, starts, bounds, data, done)
            finally:
                os.close(fd)
        except OSError:  # it is not there
            pass
        return True

    def _requested(
        self, which: Offsets, starts: Offsets, lengths: Offsets
    ) -> tuple[Bytes, dict[int, Failure]]:
        """Return the ranges as the client gives them."""
        return self._client.fetch(
            Wanted(
                keys=[self.keys[file].decode() for file in which.tolist()],
                starts=starts,
                lengths=lengths,
                sizes=self.keys.sizes[which],
                tags=self.keys.tags[which],
            )
        )

    def read(self, file: int, start: int, length: int) -> memoryview:
        """Return one range; raises the :class:`SourceError` of the file."""
        data, failures = self.fetch(np.array([file]), np.array([start]), np.array([length]))
        if failures:
            raise self.error(file, failures[0])
        return data.data

    def beside(self, called: str, most: int) -> Bytes | None:
        """Return ``u8[n]``, a file of at most so many bytes in the folder that all of these are in.

        None if there is none, or they are in several.
        """
        names = (self.keys[file].decode() for file in range(len(self)))
        folders = {"".join(name.rpartition("/")[:2]) for name in names}
        if len(folders) > 1:
            return None
        key = f"{folders.pop()}{called}"
        (entry,) = self._client.head([key])
        if isinstance(entry, Failure) or entry.size > most:
            return None
        wanted = Wanted(
            keys=[key],
            starts=np.zeros(1, np.int64),
            lengths=np.array([entry.size]),
            sizes=np.array([entry.size]),
            tags=np.array([entry.tag], np.uint64),
        )
        data, failures = self._client.fetch(wanted)
        return None if failures else data

    def error(self, file: int, failure: Failure, ids: Sequence[int] = ()) -> SourceError:
        """Return the error for samples ``ids`` that lie in a range that failed."""
        return error_of(self.name(file), failure, ids)

    def close(self) -> None:
        """Let go of the storage; another read would open it again."""
        self._client.close()


class FileSetSource(HeldSource):
    """A source whose samples lie in a :class:`FileSet`, those of one file one after the other."""

    _files: FileSet
    _first: Offsets
    """The first sample of each file, and N at the end, i64[F + 1]; else :attr:`breaks` differs."""

    @property
    def local_identity(self) -> str:
        """Hash of the files' change times where they are of this machine, else empty."""
        return self._files.local_identity

    @property
    def breaks(self) -> Offsets:
        """``i64[K]``: the first sample of each file but the first."""
        return np.unique(self._first)[1:-1]

    @property
    def is_ready(self) -> bool:
        """Whether this process has its helper already, or needs none."""
        return self._files.is_open

    @property
    def tally(self) -> Tally:
        """The requests that this process has made so far, for the index too."""
        return self._files.tally

    def _file_of(self, ids: npt.NDArray[Any]) -> Offsets:
        """Return the file of each of these samples, i64[n]."""
        return np.searchsorted(self._first, ids.astype(np.int64), "right") - 1

    def close(self) -> None:
        """Let go of the storage and refuse further reads."""
        super().close()
        self._files.close()


def _put(
    data: Bytes, bounds: Offsets, which: npt.NDArray[np.int64], source: Bytes, begins: Offsets
) -> None:
    """Copy the ranges ``which``, each of which begins in ``source`` there, to their places."""
    into = zip(bounds[which].tolist(), bounds[which + 1].tolist(), begins.tolist(), strict=True)
    for begin, end, at in into:
        data[begin:end] = source[at : at + end - begin]


def _common_place(
    files: list[str], storage_options: Mapping[str, Any] | None
) -> tuple[Address, list[str]]:
    """Return the location that all files are in, and their keys there."""
    if not any("://" in file for file in files):
        return local_address(""), [str(Path(file).absolute()) for file in files]
    addresses = [_address_of(file, storage_options) for file in files]
    roots = {address.location.root for address in addresses}
    if len(roots) > 1:
        raise ConfigError(
            f"the shards are in several locations ({', '.join(sorted(roots))}): use one"
        )
    return addresses[0], [address.prefix for address in addresses]


def written_out(places: Places) -> list[str]:
    """Return the places with braces written out: ``x-{00..99}.tar`` stands for 100.

    Raises :class:`ConfigError` where they stand for too many.
    """
    given = [places] if isinstance(places, str | Path) else list(places)
    return [name for pattern in given for name in _written_out(str(pattern))]


def find_files(
    places: Places,
    endings: tuple[str, ...],
    storage_options: Mapping[str, Any] | None,
    pace: Pace,
) -> list[str]:
    """Return the files that ``places`` stand for, braces, ``*`` and folders written out.

    Of a local folder, or an address with a slash at its end, they are the files below it whose
    names have one of the ``endings``; of a pattern those that it matches; each sorted by name.
    Raises :class:`ConfigError` for none, and as a listing of objects does.
    """
    found: list[str] = []
    for name in written_out(places):
        if "://" not in name:
            found += _local_files(name, endings)
        elif _WILD.search(name) or name.endswith("/"):
            found += _remote_files(name, endings, storage_options, pace)
        else:
            found.append(name)
    if not found:
        raise ConfigError(f"{places!r} stands for no files: give paths, a pattern, or a folder")
    return found


def _address_of(url: str, storage_options: Mapping[str, Any] | None) -> Address:
    """Return what the address means to the library that reads its scheme."""
    scheme = url.partition("://")[0].lower()
    return address_of(url, storage_options, by_fsspec=scheme not in OBJECT_SCHEMES)


def _written_out(pattern: str) -> list[str]:
    """Return what a pattern with braces stands for."""
    pieces = _BRACES.split(pattern)
    choices = [
        [piece] if number % 2 == 0 else _choices(piece) for number, piece in enumerate(pieces)
    ]
    _check_number(pattern, math.prod(map(len, choices)))
    return ["".join(chosen) for chosen in product(*choices)]


def _choices(inside: str) -> list[str]:
    if count := _COUNT.fullmatch(inside):
        low, high = int(count[1]), int(count[2])
        if low > high:
            raise ConfigError(f"{{{inside}}} counts down: give the smaller number first")
        _check_number(f"{{{inside}}}", high - low + 1)
        return [str(number).zfill(len(count[1])) for number in range(low, high + 1)]
    return inside.split(",")


def _check_number(what: str, number: int) -> None:
    if number > _MOST:
        raise ConfigError(f"{what} stands for {number:,} shards: give at most {_MOST:,}")


def _local_files(name: str, endings: tuple[str, ...]) -> list[str]:
    path = Path(name)
    if path.is_dir():
        below = sorted(file for file in path.rglob("*") if file.name.lower().endswith(endings))
        return [str(file) for file in below if file.is_file()]
    if _WILD.search(name) and not path.exists():
        return sorted(glob.glob(name, recursive=True))  # noqa: PTH207
    return [name]


def _remote_files(
    url: str, endings: tuple[str, ...], storage_options: Mapping[str, Any] | None, pace: Pace
) -> list[str]:
    wild = _WILD.search(url)
    fixed = url[: wild.start()] if wild else url
    address = _address_of(fixed, storage_options)
    client = Client(address.location, pace, in_process=address.root == "memory://")
    try:
        listed = client.list_all(address.prefix)
    finally:
        client.close()
    if isinstance(listed, Failure):
        raise error_of(fixed, listed)
    keys = [listed[number].decode() for number in range(len(listed))]
    if wild:
        pattern = address.prefix + url[wild.start() :]
        keys = [key for key in keys if fnmatchcase(key, pattern)]
    else:
        keys = [key for key in keys if key.lower().endswith(endings)]
    return [address.root + key for key in keys]
