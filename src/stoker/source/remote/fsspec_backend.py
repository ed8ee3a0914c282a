"""Reads whatever fsspec has a file system for."""

from __future__ import annotations

import pickle
import re
import socket
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from stoker.source.remote.backend import UNKNOWN_TAG, Entry, Fault, Got, Why, tag_of

_T = TypeVar("_T")
_PAGE = 10_000
# What file systems call the version of a file; each has some of them.
_VERSIONS = (
    "ETag", "etag", "e_tag", "md5Hash", "md5", "checksum", "uid", "version", "generation",
    "blob_id", "xet_hash", "LastModified", "last_modified", "updated", "modify", "mtime", "created",
    "ino",
)  # fmt: skip
_BUFFERED = ("hf",)  # file systems that open a file for a range, and read 5 MB ahead by default
_THROTTLED = re.compile(r"\b(429|503)\b|SlowDown|[Tt]hrottl|Too Many Requests|[Rr]ate limit")
_STATUSES = {401: Why.REFUSED, 403: Why.REFUSED, 404: Why.NOT_FOUND, 410: Why.NOT_FOUND}


class FsspecBackend:
    """One fsspec file system; see :class:`stoker.source.remote.backend.Backend`."""

    def __init__(self, root: str, options: bytes) -> None:
        """Make the file system. Raises Fault for a scheme or options that it refuses."""
        self._root, self._options = root, options
        scheme = root.partition("://")[0]
        self._how = {"cache_type": "none"} if scheme in _BUFFERED else {}
        self._fs = self._make(fresh=False)

    def _make(self, fresh: bool) -> Any:
        import fsspec

        options = pickle.loads(self._options)
        if fresh:
            options["skip_instance_cache"] = True
        try:
            return fsspec.filesystem(self._root.partition("://")[0], **options)
        except Exception as error:
            text = f"fsspec refused {self._root}: {type(error).__name__}: {error}"
            raise Fault(Why.INVALID, text) from error

    def pages(self, prefix: str, after: str = "") -> Iterator[list[Entry]]:
        """Yield pages of files; see :meth:`Backend.pages`."""
        folder = prefix.rpartition("/")[0]
        found = self._ask(lambda: self._fs.find(folder or "/", detail=True))
        page: list[Entry] = []
        for path, info in found.items():
            if path.startswith(prefix) and path > after:
                page.append(_entry(path, info))
            if len(page) == _PAGE:
                yield page
                page = []
        yield page

    def folders(self, prefix: str) -> tuple[list[str], list[Entry]]:
        """Return what is directly below a folder; see :meth:`Backend.folders`."""
        found = self._ask(lambda: self._fs.ls(prefix.rstrip("/") or "/", detail=True))
        return [f"{info['name'].rstrip('/')}/" for info in found if info["type"] == "directory"], [
            _entry(info["name"], info) for info in found if info["type"] != "directory"
        ]

    def head(self, key: str) -> Entry:
        """Return what the file system says of one file."""
        return _entry(key, self._ask(lambda: self._fs.info(key)))

    def get(self, key: str, start: int, length: int) -> Got:
        """Return bytes of one file; the file system is not asked for its version."""
        whole = length < 0
        data = self._ask(
            lambda: self._fs.cat_file(
                key,
                start=None if whole else start,
                end=None if whole else start + length,
                **self._how,
            )
        )
        return Got(memoryview(data), len(data) if whole else -1, UNKNOWN_TAG)

    def direct(self) -> None:
        """Return None: only the file system knows how its files are read."""

    def renew(self) -> None:
        """Recreate the file system, bypassing fsspec's own cache of file systems."""
        self._fs = self._make(fresh=True)

    def _ask(self, request: Callable[[], _T]) -> _T:
        try:
            return request()
        except FileNotFoundError as error:
            raise Fault(Why.NOT_FOUND, f"no such file: {error}") from error
        except PermissionError as error:
            raise Fault(Why.REFUSED, f"{error}") from error
        except (ValueError, TypeError, NotImplementedError) as error:
            raise Fault(Why.INVALID, f"{type(error).__name__}: {error}") from error
        except (ConnectionRefusedError, socket.gaierror) as error:
            raise Fault(Why.UNREACHABLE, f"{type(error).__name__}: {error}") from error
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            why = Why.THROTTLED if _THROTTLED.search(text) else Why.TRANSIENT
            raise Fault(_STATUSES.get(_status(error), why), text) from error


def _status(error: Exception) -> int:
    """Return the HTTP status of an error of httpx, requests or aiohttp; 0 if it has none."""
    answer = getattr(error, "response", None)
    return int(getattr(answer, "status_code", getattr(error, "status", 0)) or 0)


def _entry(path: str, info: dict[str, Any]) -> Entry:
    size = info.get("size")
    if size is None:
        raise Fault(Why.INVALID, f"{path}: the file system does not say how large it is")
    versions = [info[name] for name in _VERSIONS if info.get(name)]
    tag = tag_of(size, *versions) if versions else UNKNOWN_TAG
    return Entry(path.encode(), int(size), tag)
