"""Where packages lie: what a depot promises, and which one an address means."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from stoker.errors import ConfigError
from stoker.packaging.directory_depot import DirectoryDepot, check_directory
from stoker.source.remote.address import Address, address_of

Pieces = Sequence[bytes | memoryview]
"""One package, to be written one piece after the other."""

_READ_ONLY = ("http", "https")
_ON_DISK = Path("/var/tmp")  # /tmp may be memory


class Depot(Protocol):
    """Holds packages by name. Used by several threads of the packaging process only.

    All methods raise :class:`OSError` when the place fails: :class:`FileNotFoundError` for a
    package that is not there, with ``ENOSPC`` when it is full.
    """

    def names(self) -> list[str]:
        """Return the packages of this data set and owner, those of earlier runs included."""
        ...

    def publish(self, name: str, pieces: Pieces) -> None:
        """Put a package there: whole, or not at all."""
        ...

    def read(self, name: str, num_bytes: int = -1) -> memoryview:
        """Return a package in one read, or its first bytes."""
        ...

    def remove(self, names: Sequence[str]) -> None:
        """Remove packages; those that are not there are passed over."""
        ...

    def close(self) -> None:
        """Let go of the place; a private one is removed with all packages."""
        ...


def place_of(url: str | os.PathLike[str], storage_options: Mapping[str, Any]) -> Path | Address:
    """Return the directory or the prefix of an object store that ``url`` means.

    Raises :class:`~stoker.errors.ConfigError` for a directory that holds something else than
    packages, and for an address that cannot be written to.
    """
    text = os.fspath(url)
    scheme, found, path = text.partition("://")
    if scheme.lower() == "file" and found:
        text, found = "/" + path.lstrip("/"), ""
    if not found:
        if storage_options:
            raise ConfigError(f"url={text!r} is a directory, which has no storage_options")
        return check_directory(Path(text).expanduser().absolute())
    if scheme.lower() in _READ_ONLY:
        raise ConfigError(f"url={text!r} cannot be written to: give a directory, or s3://, gs://")
    address = address_of(text, storage_options)
    if not address.prefix.strip("/"):
        raise ConfigError(f"url={text!r} is a whole bucket: give a prefix of it for packages only")
    return address


def private_place(key: str) -> Path:
    """Return the directory for packages of the job ``key`` that nobody gave a place for."""
    base = _ON_DISK if "TMPDIR" not in os.environ and _ON_DISK.is_dir() else tempfile.gettempdir()
    return Path(base) / f"stoker-packages-{os.geteuid()}-{key}"


def open_depot(place: Path | Address, is_private: bool, group: str, holder: str) -> Depot:
    """Open the depot at ``place`` for packages whose names begin with ``group``.

    ``holder`` (hexadecimal digits) is the same for processes that take each other's place. To be
    called in the packaging process only. Raises :class:`OSError` when the place fails or is
    in use, :class:`~stoker.errors.ConfigError` when it is not Stoker's.
    """
    if isinstance(place, Path):
        return DirectoryDepot(place, group, is_private)
    from stoker.packaging.object_depot import ObjectDepot

    return ObjectDepot(place, group, holder)


def new_name(group: str) -> str:
    """Return a name for a package that nobody has used before."""
    return f"{group}-{secrets.token_hex(8)}.pkg"
