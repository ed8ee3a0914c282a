"""What the simulator says of the hits that the trial measures."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stoker.sim import replay
from stoker.sim.signals import with_made_up_graph
from trial.contestants import CACHE, CONTESTANTS, Setting, made
from trial.summary import Summary
from trial.train import Storage


def simulated(summary: Summary, sizes: NDArray[np.int64]) -> dict[str, float]:
    """Return the hits of each contestant that is no control, as a share of all accesses.

    With its chosen setting, and samples of these ``sizes``, i64[N] bytes. Losses and neighbours
    are made up, which is what may set them apart from the measured hits. Without recipes that
    measure the storage, which a replay has none of.
    """
    about = summary["about"]
    total, batch = int(sizes.sum()), about["batch_size"]
    storage = Storage(about["reads"], about["compute"])
    settings = {run["name"]: Setting(*run["setting"]) for run in summary["judged"]}
    found = {}
    for name, setting in settings.items():
        if CONTESTANTS[name].kind == "control" or "adaptive" in CONTESTANTS[name].recipe:
            continue
        recipe = made(CONTESTANTS[name], setting, len(sizes), total, batch)
        told = replay(
            with_made_up_graph(recipe),
            len(sizes),
            about["epochs"],
            CACHE,
            sizes,
            batch_size=batch,
            conditions=storage.conditions(total, float(sizes.mean()), batch),
        )
        found[name] = round(told.hit_ratio, 4)
    return found
