"""Which files are placed first: a warm list, or importance scores.

A **warm list** is a text file with one path a line, the most used file first; empty lines and
lines that begin with ``#`` are skipped. One that ends with a zero byte, as ``find -print0`` writes
it, has a zero byte after each path and no comments, so that names may hold line feeds.
**Importance scores** are an ``.npz`` file with two arrays of one length: ``paths`` (``S[N]`` or
``U[N]``) and ``scores`` (float ``[N]``, the higher the more used; NaN comes last); the file named
``paths[i]`` has the score ``scores[i]``. A path is relative to the source, or absolute and below
it; what lies elsewhere is skipped and counted.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from stoker.errors import ConfigError
from stoker.source.listing_cache import arrays_of


def read_order(path: Path, source: Path) -> tuple[list[bytes], int]:
    """Return the paths relative to ``source``, first to place first, and how many were skipped.

    A path that comes again counts where it came first. Raises
    :class:`~stoker.errors.ConfigError`, which names the file (and line or array), for what is
    neither a list nor scores.
    """
    named = _read_scores(path) if path.suffix == ".npz" else _read_list(path)
    root = os.fsencode(source)
    relative = (_relative(name, root) for name in named)
    found = [name for name in relative if name]
    unique = list(dict.fromkeys(found))
    return unique, len(named) - len(found)


def _relative(name: bytes, root: bytes) -> bytes:
    """Return the path as the table knows it; empty if it lies elsewhere."""
    plain = os.path.normpath(name)
    if plain.startswith(root + b"/"):
        plain = plain[len(root) + 1 :]
    outside = plain.startswith((b"/", b"../")) or plain in (b".", b"..")
    return b"" if outside else plain


def _read_list(path: Path) -> list[bytes]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"order={str(path)!r} cannot be read: {error}") from error
    if content.endswith(b"\0"):
        return [name for name in content.split(b"\0") if name]
    lines = content.split(b"\n")
    for number, line in enumerate(lines, start=1):
        if b"\0" in line:
            raise ConfigError(
                f"{path}:{number}: not a path (it has a zero byte): give one path a line, or a "
                "zero byte after each path, also the last"
            )
    return [line for line in lines if line and not line.startswith(b"#")]


def _read_scores(path: Path) -> list[bytes]:
    try:
        arrays = arrays_of(path.read_bytes())
        paths, scores = arrays["paths"], arrays["scores"]
    except Exception as error:  # zipfile and NumPy raise what they like
        raise ConfigError(
            f"order={str(path)!r} has no importance scores: arrays 'paths' and 'scores' ({error})"
        ) from error
    if paths.ndim != 1 or paths.shape != scores.shape or paths.dtype.kind not in "SU":
        raise ConfigError(
            f"order={str(path)!r}: paths {paths.dtype}{paths.shape} and scores "
            f"{scores.dtype}{scores.shape} are not one path and one score a file"
        )
    if scores.dtype.kind not in "fiu":
        raise ConfigError(f"order={str(path)!r}: scores are {scores.dtype}, not numbers")
    # NaN sorts last in either direction; equal scores keep the order of the file.
    first = np.argsort(-scores.astype(np.float64), kind="stable")
    return [os.fsencode(name) for name in paths[first].tolist()]
