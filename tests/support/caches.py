"""Caches for helpers that have defaults of their own."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from stoker import Cache


def gathered(options: dict[str, Any]) -> dict[str, Any]:
    """Return a loader's arguments, with those that a Cache has gathered into ``cache``."""
    names = {field.name for field in fields(Cache)} & options.keys()
    if not names:
        return options
    rest = {name: value for name, value in options.items() if name not in names}
    memory = rest.get("cache", Cache.memory)
    return {**rest, "cache": Cache(memory, **{name: options[name] for name in names})}
