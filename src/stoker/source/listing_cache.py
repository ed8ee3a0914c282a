"""Listings kept on local disk, so that a million files or objects are asked for once."""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import os
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from stoker.errors import UntrustedPath
from stoker.node.owned import open_folder, read_file

_log = logging.getLogger(__name__)
_MAGIC = b"stoker listing 1\n"
_DIGEST_BYTES = 32

_T = TypeVar("_T")
Arrays = dict[str, npt.NDArray[Any]]


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
