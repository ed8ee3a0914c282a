"""Configuration of a run: options, a configuration file, and a list of files to place first."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stoker.errors import ConfigError
from stoker.source.listing import arrays_of
from stoker.types import parse_bytes

Keys = tuple[str | int, ...]
"""Path to a value: ``("tier", 0, "size")``."""
_HEADER = re.compile(r"\s*(\[\[?)\s*([\w\"'-]+)\s*\]")
_KEY = re.compile(r"[\s{,]*([A-Za-z0-9_-]+|\"[^\"]*\"|'[^']*')\s*=")
MOST_TIERS = 8
SHORTAGES = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EIO}
)
"""Errors that do not mean a bad configuration: programs then run without copies."""
_MOST_THREADS = 256


@dataclass(frozen=True)
class Document:
    """A parsed file."""

    name: str
    values: dict[str, Any]
    line_of: Callable[[Keys], int | None]

    def where(self, keys: Keys) -> str:
        """Return ``FILE:LINE`` of a key, or the file alone where the line is not known."""
        line = self.line_of(keys)
        return self.name if line is None else f"{self.name}:{line}"


def read_document(path: Path) -> Document:
    """Return what the file says: TOML, or YAML if its name ends in .yaml or .yml.

    Raises :class:`~stoker.errors.ConfigError` if it cannot be read or parsed, or is YAML and
    PyYAML is not installed.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {str(path)!r} cannot be read: {error}") from error
    if path.suffix in (".yaml", ".yml"):
        return _read_yaml(str(path), text)
    try:
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    return Document(str(path), values, _toml_lines(text).get)


def _toml_lines(text: str) -> dict[Keys, int]:
    """Return the line of each key of tables at the top and of arrays of tables.

    tomllib does not report them. A key in some other syntax is not found.
    """
    lines: dict[Keys, int] = {}
    counts: dict[str, int] = {}
    prefix: Keys = ()
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _HEADER.match(line):
            name = header[2].strip("\"'")
            prefix = (name,)
            if header[1] == "[[":
                prefix = (name, counts.get(name, 0))
                counts[name] = counts.get(name, 0) + 1
            lines.setdefault((name,), number)
            lines[prefix] = number
        elif key := _KEY.match(line):
            lines[(*prefix, key[1].strip("\"'"))] = number
    return lines


def _read_yaml(name: str, text: str) -> Document:
    try:
        import yaml
    except ImportError as error:
        raise ConfigError(
            f"{name} is YAML, which needs PyYAML: pip install 'stoker[yaml]', or write TOML"
        ) from error
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text)
    except Exception as error:  # also what values like 2001-13-45 raise
        raise ConfigError(f"{name} is not YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{name} holds no keys: write source: DIR and tier: [...]")
    lines: dict[Keys, int] = {}
    _note_lines(node, (), lines)
    return Document(name, values, lines.get)


def _note_lines(node: Any, keys: Keys, lines: dict[Keys, int]) -> None:
    """Note the lines of keys, only as deep as tiers have them: aliases may be endless."""
    if len(keys) == 3 or keys[:1] not in ((), ("tier",)):
        return
    children: list[tuple[str | int, Any, Any]] = []
    if node.id == "mapping":
        children = [(str(key.value), key, value) for key, value in node.value]
    elif node.id == "sequence":
        children = [(number, value, value) for number, value in enumerate(node.value)]
    for key, place, value in children:
        lines[(*keys, key)] = place.start_mark.line + 1
        _note_lines(value, (*keys, key), lines)


def read_order(path: Path, source: Path) -> tuple[list[bytes], int]:
    """Return the paths relative to ``source``, first to place first, and how many were skipped.

    A repeated path counts where it comes first. Raises
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


@dataclass(frozen=True)
class TierConfig:
    """One tier: a directory of Stoker's own, and the maximum bytes of copies in it."""

    path: Path
    quota: int


@dataclass(frozen=True)
class Config:
    """A checked configuration; paths are absolute and free of links."""

    source: Path
    """Directory with the files; read, never written."""
    tiers: tuple[TierConfig, ...]
    """In the order in which they are tried."""
    spelling: Path
    """The source as it was named, absolute: programs may use this path too."""
    threads: int = 6
    """Small files copied at the same time, and the same number of large ones."""
    revalidate: float = 60.0
    """Seconds within which a change of a placed file's source is noticed (30,000 files at most)."""
    small: int = 0
    """Largest file, in bytes, whose first open waits for the copy; 0: none does."""
    ahead: int = 128 << 20
    """How far ahead of the copy, in bytes, a read of a larger file may wait."""
    fsync: bool = False
    """Flush each copy to disk before it is used."""
    checksum: bool = False
    """Store a checksum with each copy, and check it before a later run uses the copy."""
    order: Path | None = None
    """Warm list or importance scores: what is placed first (see :mod:`stoker.tiering.config`)."""


def read_config(path: Path | None, flags: Mapping[str, Any]) -> Config:
    """Return the configuration from a TOML or YAML file, a flag replacing what the file says.

    ``flags`` has the fields of :class:`Config`; ``tiers`` as ``DIR:SIZE`` strings; None or empty
    means not given. Raises :class:`~stoker.errors.ConfigError`, which names file, line and key,
    or the flag.
    """
    document = read_document(path) if path else Document("", {}, lambda keys: None)
    base = Path.cwd() if path is None else path.absolute().parent
    values = _from_file(document, base)
    given = {key: value for key, value in flags.items() if value not in (None, ())}
    if "tiers" in given:
        given["tiers"] = tuple(_tier_of_flag(text) for text in given["tiers"])
    for key in given.keys() - {"tiers"}:
        given[key] = _convert(f"--{key}", key, given[key], Path.cwd())
    values |= given
    for key, flag in (("source", "--source DIR"), ("tiers", "--tier DIR:SIZE")):
        if not values.get(key):
            raise ConfigError(f"no {key} given: use {flag}, or --config FILE")
    spelling = values.pop("source")
    config = Config(Path(os.path.realpath(spelling)), spelling=spelling, **values)
    _check_places(config)
    return config


def _from_file(document: Document, base: Path) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in document.values.items():
        if key == "tier":
            values["tiers"] = _tiers(document, value, base)
        elif key in _FIELDS:
            values[key] = _convert(document.where((key,)), key, value, base)
        else:
            known = ", ".join([*_FIELDS, "tier"])
            raise ConfigError(f"{document.where((key,))}: unknown key {key!r}: known are {known}")
    return values


def _tiers(document: Document, value: Any, base: Path) -> tuple[TierConfig, ...]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ConfigError(
            f"{document.where(('tier',))}: tier is not a list of tables: write [[tier]] with path "
            "and size for each (TOML), or '- path: ...' (YAML)"
        )
    tiers = []
    for number, item in enumerate(value):
        for key in item:
            if key not in ("path", "size"):
                where = document.where(("tier", number, key))
                raise ConfigError(f"{where}: unknown key {key!r} in tier: known are path, size")
        for key in ("path", "size"):
            if key not in item:
                where = document.where(("tier", number))
                raise ConfigError(f"{where}: tier {number + 1} has no {key}: add it")
        with _named(document.where(("tier", number, "path"))):
            path = _path(item["path"], base, "path")
        with _named(document.where(("tier", number, "size"))):
            tiers.append(TierConfig(path, _quota(item["size"])))
    return tuple(tiers)


def _tier_of_flag(text: str) -> TierConfig:
    path, colon, size = text.rpartition(":")
    if not (path and colon):
        raise ConfigError(f"--tier {text!r} is not DIR:SIZE: write /nvme/stoker:100GiB, say")
    with _named(f"--tier {text}"):
        return TierConfig(_path(path, Path.cwd(), "path"), _quota(size))


def _convert(where: str, key: str, value: Any, base: Path) -> Any:
    with _named(where):
        return _FIELDS[key](value, base, key)


@contextlib.contextmanager
def _named(where: str) -> Iterator[None]:
    """Add the place of the value to a ConfigError."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _spelling(value: Any, base: Path, key: str) -> Path:
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise ConfigError(f"{key}={value!r} is not a path")
    return Path(os.path.normpath(base / Path(value).expanduser()))


def _path(value: Any, base: Path, key: str) -> Path:
    return Path(os.path.realpath(_spelling(value, base, key)))


def _quota(value: Any) -> int:
    quota = parse_bytes(value, name="size")
    if quota <= 0:
        raise ConfigError(f"size={value!r} leaves no room: give the tier at least a file's bytes")
    return quota


def _size(value: Any, base: Path, key: str) -> int:
    return parse_bytes(value, name=key)


def _threads(value: Any, base: Path, key: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST_THREADS:
        raise ConfigError(f"{key}={value!r} is not a whole number from 1 to {_MOST_THREADS}")
    return value


def _seconds(value: Any, base: Path, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{key}={value!r} is not a number of seconds")
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{key}={value!r} is not a number of seconds above 0")
    return float(value)


def _switch(value: Any, base: Path, key: str) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{key}={value!r} is neither true nor false")
    return value


_FIELDS: dict[str, Callable[[Any, Path, str], Any]] = {
    "source": _spelling,
    "threads": _threads,
    "revalidate": _seconds,
    "small": _size,
    "ahead": _size,
    "fsync": _switch,
    "checksum": _switch,
    "order": _path,
}


def _check_places(config: Config) -> None:
    if not config.source.is_dir():
        raise ConfigError(f"source={str(config.source)!r} is not a directory: name an existing one")
    if config.source == Path("/"):
        raise ConfigError("source='/' is the whole file system: name the directory of the data")
    if len(config.tiers) > MOST_TIERS:
        raise ConfigError(f"{len(config.tiers)} tiers are too many: use at most {MOST_TIERS}")
    if config.order is not None and not config.order.is_file():
        raise ConfigError(f"order={str(config.order)!r} is not a file: name a list or scores")
    taken = [config.source]
    for tier in config.tiers:
        for other in taken:
            if tier.path.is_relative_to(other) or other.is_relative_to(tier.path):
                raise ConfigError(
                    f"tier {str(tier.path)!r} and {str(other)!r} contain one another: "
                    "source and tiers need directories apart"
                )
        taken.append(tier.path)
