"""Which files an address, a path or a list of them stands for: braces, wildcards, folders."""

from __future__ import annotations

import glob
import math
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any

from stoker.errors import ConfigError
from stoker.source.pace import Pace
from stoker.source.remote.address import OBJECT_SCHEMES, Address, address_of
from stoker.source.remote.client import Client
from stoker.source.remote.request import Failure, error_of

Places = str | Path | Sequence[str | Path]

_BRACES = re.compile(r"\{([^{}]*)\}")
_COUNT = re.compile(r"([0-9]{1,18})\.\.([0-9]{1,18})")
_WILD = re.compile(r"[*?\[]")
_MOST = 10_000_000


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
            found += _local(name, endings)
        elif _WILD.search(name) or name.endswith("/"):
            found += _remote(name, endings, storage_options, pace)
        else:
            found.append(name)
    if not found:
        raise ConfigError(f"{places!r} stands for no files: give paths, a pattern, or a folder")
    return found


def place_of(url: str, storage_options: Mapping[str, Any] | None) -> Address:
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


def _local(name: str, endings: tuple[str, ...]) -> list[str]:
    path = Path(name)
    if path.is_dir():
        below = sorted(file for file in path.rglob("*") if file.name.lower().endswith(endings))
        return [str(file) for file in below if file.is_file()]
    if _WILD.search(name) and not path.exists():
        return sorted(glob.glob(name, recursive=True))  # noqa: PTH207
    return [name]


def _remote(
    url: str, endings: tuple[str, ...], storage_options: Mapping[str, Any] | None, pace: Pace
) -> list[str]:
    wild = _WILD.search(url)
    fixed = url[: wild.start()] if wild else url
    address = place_of(fixed, storage_options)
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
