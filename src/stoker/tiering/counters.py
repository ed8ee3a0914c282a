"""What programs under the shim have counted: opens, reads and bytes, by source and tier."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from stoker.tiering.layout import COUNTERS, COUNTERS_MAGIC

EVENTS = ("requests", "requests_lost", "waits", "waits_given_up", "checks", "changes")


def create_counters(path: Path) -> None:
    """Make the file that programs count in; it must not exist. Raises :class:`OSError`."""
    with path.open("xb") as file:
        os.fchmod(file.fileno(), 0o600)
        os.posix_fallocate(file.fileno(), 0, COUNTERS.itemsize)
        file.write(COUNTERS_MAGIC)


def read_counters(path: Path, tiers: int) -> dict[str, Any]:
    """Return the sums: ``source`` and ``tiers`` with opens, reads and bytes, and the events.

    Raises :class:`OSError` if the file cannot be read, :class:`ValueError` if it is another.
    """
    content = np.fromfile(path, COUNTERS, 1)
    if not len(content) or content[0]["magic"] != COUNTERS_MAGIC:
        raise ValueError(f"{path} holds no counters")
    shards = content[0]["shards"]
    rows = [
        {name: int(shards["rows"][:, row][name].sum()) for name in ("opens", "reads", "bytes")}
        for row in range(1 + tiers)
    ]
    events = {name: int(shards[name].sum()) for name in EVENTS}
    return {"source": rows[0], "tiers": rows[1:], **events}
