"""Listings: of objects in a few arrays; kept on local disk, so that a million are asked for once.

No Python object per key is kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import os
import tempfile
import zipfile
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from stoker.errors import UntrustedPath
from stoker.node.owned import open_folder, read_file
from stoker.source.packed import Bytes, Offsets, offsets_of
from stoker.source.remote.backend import Entry

_log = logging.getLogger(__name__)
_MAGIC = b"stoker listing 1\n"
_DIGEST_BYTES = 32

_T = TypeVar("_T")
Arrays = dict[str, npt.NDArray[Any]]
Tags = npt.NDArray[np.uint64]


class ListingCache:
    """The answer to one question, as arrays in one file: written atomically, checked by hash.

    It lies in ``$XDG_CACHE_HOME/stoker/listings`` (``~/.cache/...``). Several processes may use
    one at once; the last to store wins. A file that is damaged or of another version is ignored;
    so is a directory that cannot be written, or that other users may write to, with a log message.
    The caller decides whether the answer is still valid.
    """

    def __init__(self, question: str) -> None:
        """Belong to ``question``, which says what is listed and how; nothing is read yet."""
        name = hashlib.blake2b(question.encode(errors="surrogateescape"), digest_size=16)
        self.path = _cache_home() / "stoker" / "listings" / f"{name.hexdigest()}.listing"

    def load(self, use: Callable[[Arrays], _T]) -> _T | None:
        """Return what ``use`` makes of what is stored; None if nothing is, or it is damaged.

        An exception in ``use`` means that it is damaged.
        """
        try:
            with open_folder(self.path.parent) as folder:
                stored = read_file(folder.inside / self.path.name, called=self.path)
        except UntrustedPath as error:
            _log.warning("a listing is not used: %s", error)
            return None
        except OSError:
            return None
        try:
            return use(decode(stored))
        except Exception as error:  # zipfile, NumPy and users of the arrays raise what they like
            _log.warning("%s is damaged (%r): listing again", self.path, error)
            return None

    def store(self, listing: Arrays) -> None:
        """Replace what is stored; a failure is logged."""
        try:
            with open_folder(self.path.parent, make=True) as folder:
                _replace(folder.inside / self.path.name, encode(listing))
        except OSError as error:
            _log.warning("cannot keep the listing in %s: %s", self.path, error)

    def discard(self) -> None:
        """Discard what is stored, which turned out to be wrong; a failure is logged."""
        try:
            with open_folder(self.path.parent) as folder:
                (folder.inside / self.path.name).unlink(missing_ok=True)
        except FileNotFoundError:  # nothing was ever stored
            pass
        except OSError as error:
            _log.warning("cannot discard the listing in %s: %s", self.path, error)


def kept(cache: ListingCache | None, use: Callable[[Arrays], _T], make: Callable[[], Arrays]) -> _T:
    """Return what ``use`` makes of what the cache has, or of what is made and stored there now.

    Without a cache it is always made.
    """
    found = None if cache is None else cache.load(use)
    if found is None:
        arrays = make()
        found = use(arrays)
        if cache is not None:
            cache.store(arrays)
    return found


def _replace(path: Path, content: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        temporary = Path(file.name)
        try:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise


def _cache_home() -> Path:
    configured = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore relative paths.
    if configured.startswith("/"):
        return Path(configured)
    try:
        return Path.home() / ".cache"
    except RuntimeError:  # a user without a home: nothing is found there, nor can it be made
        return Path(os.devnull)


def encode(listing: Arrays) -> bytes:
    """Return a listing as bytes: magic, hash, and a zip of arrays."""
    body = io.BytesIO()
    np.savez(body, **listing)  # type: ignore[arg-type]
    payload = body.getbuffer()
    digest = hashlib.blake2b(payload, digest_size=_DIGEST_BYTES).digest()
    return b"".join((_MAGIC, digest, payload))


def decode(stored: bytes) -> Arrays:
    """Return the listing that ``stored`` is; raises an exception of any kind when it is none."""
    start = len(_MAGIC) + _DIGEST_BYTES
    payload = memoryview(stored)[start:]
    if not stored.startswith(_MAGIC):
        raise ValueError("another version")
    if hashlib.blake2b(payload, digest_size=_DIGEST_BYTES).digest() != stored[len(_MAGIC) : start]:
        raise ValueError("its hash is wrong")
    return arrays_of(bytes(payload))


def arrays_of(npz: bytes) -> Arrays:
    """Return the arrays that ``numpy.savez`` wrote, by name.

    Unlike ``numpy.load`` it does not trust headers: an array is as large as its bytes. Raises an
    exception of any kind for other files.
    """
    with zipfile.ZipFile(io.BytesIO(npz)) as archive:
        return {
            member.filename.removesuffix(".npy"): _array_of(archive.read(member))
            for member in archive.infolist()
        }


def _array_of(npy: bytes) -> npt.NDArray[Any]:
    file = io.BytesIO(npy)
    version = np.lib.format.read_magic(file)
    read_header: Any = (
        np.lib.format.read_array_header_1_0
        if version == (1, 0)
        else np.lib.format.read_array_header_2_0
    )
    shape, is_fortran, dtype = read_header(file)
    if dtype.hasobject:
        raise ValueError("an array of objects")
    values = bytearray(npy[file.tell() :])
    return np.ndarray(shape, dtype, values, order="F" if is_fortran else "C")


@dataclass(frozen=True, eq=False)
class Keys:
    """Names, sizes and versions of N objects."""

    names: Bytes
    """The names one after the other, in UTF-8, u8[total]."""
    offsets: Offsets
    """Where each name begins in ``names``, and where the last ends, i64[N + 1]."""
    sizes: Offsets
    """Bytes of each object, i64[N]."""
    tags: Tags
    """The version of each object, u64[N]; 0 where the storage does not say."""

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> bytes:
        """Return one name."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.names[self.offsets[index] : self.offsets[index + 1]].tobytes()

    @property
    def fingerprint(self) -> str:
        """Hash of names, sizes and versions, in order."""
        digest = hashlib.blake2b(digest_size=16, person=b"stoker.objects")
        for part in (self.offsets, self.names, self.sizes, self.tags):
            digest.update(np.ascontiguousarray(part).data)
        return digest.hexdigest()

    def take(self, order: npt.ArrayLike) -> Keys:
        """Return the keys with these indices, i64[n], in this order."""
        chosen = np.asarray(order, np.int64)
        lengths = np.diff(self.offsets)[chosen]
        offsets = offsets_of(lengths)
        # The bytes of name i of the result are consecutive, as they were before.
        shift = np.repeat(self.offsets[chosen] - offsets[:-1], lengths)
        names = self.names[shift + np.arange(offsets[-1])]
        return Keys(names, offsets, self.sizes[chosen], self.tags[chosen])

    def without_prefix(self, length: int) -> Keys:
        """Return the keys without the first ``length`` bytes of each name."""
        kept = np.ones(len(self.names), np.bool_)
        for at in range(length):
            kept[self.offsets[:-1] + at] = False
        lengths = np.diff(self.offsets) - length
        return Keys(self.names[kept], offsets_of(lengths), self.sizes, self.tags)


class KeyTable:
    """Gathers pages of entries into :class:`Keys`. One thread."""

    def __init__(self) -> None:
        self._pages: list[Keys] = []
        self._last = b""
        self.is_sorted = True
        """Whether all pages so far came in the order of the keys."""

    @property
    def last(self) -> bytes:
        """The last key that was added; empty before the first."""
        return self._last

    def add(self, page: Sequence[Entry]) -> None:
        """Add a page."""
        if not page:
            return
        names = [entry.key for entry in page]
        in_order = all(a < b for a, b in pairwise([self._last, *names]))
        self.is_sorted = self.is_sorted and in_order
        self._last = names[-1]
        self._pages.append(pack_entries(page))

    def finish(self) -> Keys:
        """Return all entries, sorted by the bytes of their names, each once.

        Markers of folders (empty objects that others lie below, which some tools create) are
        left out.
        """
        keys = concatenate(self._pages)
        return without_markers(keys if self.is_sorted else sort(keys))


def pack_entries(entries: Sequence[Entry]) -> Keys:
    """Return the entries as arrays, in their order."""
    count = len(entries)
    return Keys(
        np.frombuffer(b"".join([entry.key for entry in entries]), np.uint8),
        offsets_of(np.fromiter((len(entry.key) for entry in entries), np.int64, count)),
        np.fromiter((entry.size for entry in entries), np.int64, count),
        np.fromiter((entry.tag for entry in entries), np.uint64, count),
    )


def concatenate(parts: Sequence[Keys]) -> Keys:
    """Return all keys, one part after the other."""
    if not parts:
        return pack_entries([])
    return Keys(
        np.concatenate([part.names for part in parts]),
        offsets_of(np.concatenate([np.diff(part.offsets) for part in parts])),
        np.concatenate([part.sizes for part in parts]),
        np.concatenate([part.tags for part in parts]),
    )


def sort(keys: Keys) -> Keys:
    """Return the keys sorted by the bytes of their names, each once."""
    names = [keys[index] for index in range(len(keys))]
    order = sorted(range(len(names)), key=names.__getitem__)
    first = [n == 0 or names[i] != names[order[n - 1]] for n, i in enumerate(order)]
    return keys.take(np.array(order, np.int64)[first])


def without_markers(keys: Keys) -> Keys:
    """Return the sorted keys without markers of folders."""
    empty = np.flatnonzero(keys.sizes == 0).tolist()
    markers = [index for index in empty if _is_above_another(keys, index)]
    return keys.take(np.delete(np.arange(len(keys)), markers)) if markers else keys


def _is_above_another(keys: Keys, index: int) -> bool:
    """Return whether the sorted keys contain one below ``keys[index]`` taken as a folder."""
    folder = keys[index].rstrip(b"/") + b"/"
    at = bisect_left(keys, folder, lo=index + 1)
    return at < len(keys) and keys[at].startswith(folder)
