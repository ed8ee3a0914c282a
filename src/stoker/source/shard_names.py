"""Writes out the names of shards: ``train-{000..099}.tar``."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from stoker.errors import ConfigError

_BRACES = re.compile(r"\{([^{}]*)\}")
_COUNT = re.compile(r"([0-9]{1,18})\.\.([0-9]{1,18})")
_MOST = 10_000_000
_COMPRESSED = (".tgz", ".tbz", ".txz", ".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip")


def expand(shards: str | Path | Sequence[str | Path]) -> list[str]:
    """Return the addresses of the shards, braces written out.

    Raises :class:`ConfigError` when there are none, or one is a compressed archive.
    """
    given = [shards] if isinstance(shards, str | Path) else list(shards)
    names = [name for pattern in given for name in _written_out(str(pattern))]
    if not names:
        raise ConfigError("shards is empty: give at least one tar file")
    for name in names:
        if name.lower().endswith(_COMPRESSED):
            raise ConfigError(
                f"{name} is compressed, so samples in it cannot be read one by one: unpack it to "
                "a plain .tar (images do not get smaller anyway)"
            )
    return names


def _written_out(pattern: str) -> list[str]:
    """Return what a pattern with braces stands for."""
    pieces = _BRACES.split(pattern)
    choices = [[piece] if place % 2 == 0 else _choices(piece) for place, piece in enumerate(pieces)]
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
