"""Credentials that say when they were given; without torch, for the processes that ask for them."""

from __future__ import annotations

import time
from typing import Any


class Credentials:
    """Gives a key with the time it was asked for; each process that reads asks for its own."""

    def __call__(self) -> dict[str, Any]:
        key = f"key-{time.time():017.6f}-"
        return {"access_key_id": key, "secret_access_key": "s", "expires_at": None}


def signed_at(head: str) -> float:
    """Return when the credentials of a request were asked for; 0 if it has none."""
    _, found, rest = head.partition("Credential=key-")
    return float(rest[:17]) if found else 0.0
