"""A job asks the node's service, where there is one, before it takes memory or disk."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from stoker import _core
from stoker.errors import SegmentError
from stoker.jobs.protocol import Refused, ask, service_path
from stoker.policy.base import Region
from stoker.runtime_dir import runtime_dir
from stoker.store.place import Place
from stoker.store.registry import meeting_key
from stoker.types import format_bytes

log = logging.getLogger("stoker")


def capacity_allowed(
    key: str, num_ids: int, capacity: int, mean_size: float, regions: Sequence[Region]
) -> int:
    """Return the payload bytes that a new cache may have: ``capacity``, or less.

    What it is called and made of are the arguments of ``open_arena``. Without a service, or if it
    does not answer, all that is asked for.
    """
    mean = max(1, round(mean_size))
    needed = _core.segment_bytes(num_ids, capacity, mean, False)
    room = _ask(
        "admit",
        name=Place.of(runtime_dir(), meeting_key(key, num_ids)).name,
        memory=needed,
        capacity=capacity,
        regions=[asdict(region) for region in regions],
    )
    if room is None:
        return capacity
    # What comes on top of the payload grows with it, but for what each sample takes.
    least = _core.segment_bytes(num_ids, 0, mean, False)
    return max(0, int(capacity * (room - least) / max(1, needed - least)))


def check_disk(path: str, size: int) -> None:
    """Raise :class:`~stoker.errors.SegmentError` if the service lets no disk cache be there."""
    room = _ask("admit_disk", path=path, size=size)
    if room is not None:
        raise SegmentError(
            f"the service of this node has room for {format_bytes(room)} on disk, and a disk cache "
            f"in {path} takes {format_bytes(size)}: ask for less with disk_cache=, or give "
            "`stoker serve` more with --disk"
        )


def tell_opened() -> None:
    """Have the service hold what was opened just now, also if the job ends at once."""
    _ask("look")


def _ask(question: str, **values: Any) -> int | None:
    """Return the room that the service has, None if that is enough or nobody says."""
    if not service_path().exists():
        return None
    with contextlib.suppress(OSError, Refused, ValueError, TypeError):
        room = ask(question, **values).get("room")
        return None if room is None else int(room)
    log.info("the service of this node does not answer: training goes on without")
    return None
