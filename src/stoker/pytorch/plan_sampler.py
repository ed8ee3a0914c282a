"""The planned order as a torch sampler, and a torch sampler's order as batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from torch.utils.data import Sampler as TorchSampler

from stoker.epoch.batch import BatchSpec
from stoker.epoch.cursor import Cursor
from stoker.epoch.planner import Planner
from stoker.epoch.ranks import Ranks
from stoker.epoch.settings import Population


class PlanSampler(TorchSampler[int]):
    """The planned order as a torch sampler, so that ``loader.sampler`` is what users expect.

    Yields this rank's indices of the loader's data set for the iteration that comes next.
    """

    def __init__(self, planner: Planner) -> None:
        self._planner = planner

    def __iter__(self) -> Iterator[int]:
        return self._planner.indices()

    def __len__(self) -> int:
        return self._planner.accesses(self._planner.coming)

    def set_epoch(self, epoch: int) -> None:
        """Do as ``Loader.set_epoch``: Lightning and others tell the sampler, as in torch."""
        self._planner.set_epoch(epoch)


def sampled_batch_specs(
    indices: Iterable[Any], population: Population, ranks: Ranks, at: Cursor
) -> Iterator[BatchSpec]:
    """Yield the batches that a sampler of the user's asks for; it is this rank's own already.

    ``indices`` yields a list of indices of the population's view, or a single index. What lies
    before ``at`` is drawn and left out, up to the middle of a batch.
    """
    done = 0
    over = at.consumed // ranks.world_size
    for wanted in indices:
        batch = np.atleast_1d(np.asarray(wanted, np.int64))
        places = done + np.arange(len(batch))
        done += len(batch)
        batch, places = batch[places >= over], places[places >= over]
        if len(batch):
            positions = places * ranks.world_size + ranks.rank
            yield BatchSpec(population.ids(batch), positions, single=np.ndim(wanted) == 0)
