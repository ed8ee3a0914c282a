"""Listings kept on local disk, so that a million files or objects are asked for once."""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import os
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_log = logging.getLogger(__name__)
_MAGIC = b"stoker listing 1\n"
_DIGEST_BYTES = 32

Arrays = dict[str, npt.NDArray[Any]]


class ListingCache:
    """The answer to one question, as arrays in one file: written atomically, checked by hash.

    It lies in ``$XDG_CACHE_HOME/stoker/listings`` (``~/.cache/...``). Several processes may use
    one at once; the last to store wins. A file that is damaged or of another version is as good
    as none, and a directory that cannot be written is reported to the log and otherwise ignored.
    Whether the answer still holds is for those to judge who asked.
    """

    def __init__(self, question: str) -> None:
        """Belong to ``question``, which says what is listed and how; nothing is read yet."""
        name = hashlib.blake2b(question.encode(errors="surrogateescape"), digest_size=16)
        self.path = _cache_home() / "stoker" / "listings" / f"{name.hexdigest()}.listing"

    def load(self) -> Arrays | None:
        """Return what is stored, or None."""
        try:
            stored = self.path.read_bytes()
        except OSError:
            return None
        try:
            return _decode(stored)
        except (ValueError, KeyError, OSError, zipfile.BadZipFile) as error:
            _log.warning("%s is damaged (%s): listing again", self.path, error)
            return None

    def store(self, listing: Arrays) -> None:
        """Replace what is stored; a failure is logged."""
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.path.parent, delete=False) as file:
                temporary = Path(file.name)
                try:
                    file.write(_encode(listing))
                    file.flush()
                    os.fsync(file.fileno())
                    temporary.replace(self.path)
                except BaseException:
                    with contextlib.suppress(OSError):
                        temporary.unlink()
                    raise
        except OSError as error:
            _log.warning("cannot keep the listing in %s: %s", self.path, error)


def _cache_home() -> Path:
    configured = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore relative paths.
    if configured.startswith("/"):
        return Path(configured)
    try:
        return Path.home() / ".cache"
    except RuntimeError:  # a user without a home: nothing is found there, nor can it be made
        return Path(os.devnull)


def _encode(listing: Arrays) -> bytes:
    """Return the listing as magic, hash, and a zip of arrays."""
    body = io.BytesIO()
    np.savez(body, **listing)  # type: ignore[arg-type]
    payload = body.getbuffer()
    digest = hashlib.blake2b(payload, digest_size=_DIGEST_BYTES).digest()
    return b"".join((_MAGIC, digest, payload))


def _decode(stored: bytes) -> Arrays:
    """Return the listing; raises ValueError, KeyError or BadZipFile when it is not one."""
    start = len(_MAGIC) + _DIGEST_BYTES
    payload = memoryview(stored)[start:]
    if not stored.startswith(_MAGIC):
        raise ValueError("another version")
    if hashlib.blake2b(payload, digest_size=_DIGEST_BYTES).digest() != stored[len(_MAGIC) : start]:
        raise ValueError("its hash is wrong")
    with np.load(io.BytesIO(payload), allow_pickle=False) as parts:
        return {name: parts[name] for name in parts.files}
