"""TOML and YAML files as plain values, with the line on which each key stands."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.errors import ConfigError

Keys = tuple[str | int, ...]
"""Path to a value: ``("tier", 0, "size")``."""


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


_HEADER = re.compile(r"\s*(\[\[?)\s*([\w\"'-]+)\s*\]")
_KEY = re.compile(r"[\s{,]*([A-Za-z0-9_-]+|\"[^\"]*\"|'[^']*')\s*=")


def _toml_lines(text: str) -> dict[Keys, int]:
    """Return the line of each key of tables at the top and of arrays of tables.

    tomllib does not tell. A key that hides in some other syntax is simply not found.
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
    """Note the lines of keys as deep as tiers have them: aliases may lead on for ever."""
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
