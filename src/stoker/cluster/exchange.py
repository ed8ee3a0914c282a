"""Scores of all ranks made one table."""

from __future__ import annotations

import numpy as np

from stoker.cluster.collective import Collective
from stoker.scores import Scores

_ROW = np.dtype([("id", "<u4"), ("value", "<f8"), ("last", "<i8"), ("times", "<i8")])


def exchange(scores: Scores, agreed: Scores, ranks: Collective) -> None:
    """Make ``scores`` the same on all ranks, given what all of them ``agreed`` on before.

    Only rows observed since then travel, 28 bytes each. Of a sample that several ranks observed,
    the score of the latest step counts, and of the highest rank where steps are equal; its
    observations add up. History, volatile samples and ``ready`` are left as they are: every rank
    derives them from the same rows. Every rank must call this.
    """
    if ranks.world_size == 1:
        return
    ids = np.flatnonzero(scores.seen != agreed.seen)
    own = np.empty(len(ids), _ROW)
    own["id"] = ids
    own["value"] = scores.values[ids]
    own["last"] = scores.last[ids]
    own["times"] = scores.seen[ids] - agreed.seen[ids]
    rows = np.concatenate(ranks.gather(own))
    rows = rows[np.argsort(rows["last"], kind="stable")]  # of equal steps, the ranks in order
    values, last, seen = agreed.values.copy(), agreed.last.copy(), agreed.seen.copy()
    # Of assignments to the same row, the last one holds.
    values[rows["id"]] = rows["value"]
    last[rows["id"]] = rows["last"]
    np.add.at(seen, rows["id"], rows["times"])
    scores.restore(**{**scores.arrays(), "values": values, "last": last, "seen": seen})
