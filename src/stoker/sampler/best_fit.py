"""Bin packing by best fit, decreasing."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from numpy.typing import NDArray


def best_fit(lengths: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """Return i64[n], the bin of each item, numbered from 0 as they were opened.

    The longest items come first, equal ones in the order given, and each goes where it leaves the
    least room. ``lengths`` i64[n] are 1 to ``capacity``. Source: best fit decreasing (Johnson,
    Near-optimal bin packing algorithms, 1973). The bins are found by a bit set of the rooms that
    they have left, so an item costs about 1 µs for each 8,000 of ``capacity``, and 1 µs.
    """
    order = np.argsort(-lengths, kind="stable")
    bins = np.empty(len(lengths), np.int64)
    with_room: defaultdict[int, list[int]] = defaultdict(list)  # room left -> bins that have it
    rooms, opened = 0, 0  # bit i of rooms: with_room[i] is not empty
    chosen: list[int] = []
    for length in lengths[order].tolist():
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            same = with_room[room]
            own = same.pop()
            if not same:
                rooms ^= 1 << room
        else:
            own, room, opened = opened, capacity, opened + 1
        chosen.append(own)
        if left := room - length:
            if not (same := with_room[left]):
                rooms |= 1 << left
            same.append(own)
    bins[order] = chosen
    return bins
