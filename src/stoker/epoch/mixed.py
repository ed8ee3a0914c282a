"""Sources that are mixed, and what was served of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.sampler.mixture import Mixture, MixtureSampler
from stoker.source.base import Source
from stoker.source.joined import JoinedSource
from stoker.types import Outcome


class MixedSource(JoinedSource):
    """Several sources in one, for a Feed that visits them as a mixture says.

    ``stoker.mix`` makes it of sources. Ids count through them; :meth:`origins` tells them apart.
    As safe in threads and processes as the sources are. Raises
    :class:`~stoker.errors.ConfigError` as :class:`~stoker.source.JoinedSource` does.
    """

    def __init__(self, sources: Sequence[Source], mixture: Mixture) -> None:
        super().__init__(sources)
        self.mixture = mixture
        """How they are mixed; other processes, which only read, do not get it."""

    def __getstate__(self) -> dict[str, Any]:
        # A function of weights may be of the user's script, which those do not run.
        return {name: value for name, value in vars(self).items() if name != "mixture"}

    @property
    def names(self) -> tuple[str, ...]:
        """What the sources are called, in order."""
        return self.mixture.names

    def origins(self, ids: NDArray[np.uint32]) -> NDArray[np.int64]:
        """Return i64[n], the place in :attr:`names` of the source of each of ``ids`` ``u32[n]``."""
        return self.mixture.origins(ids)


@dataclass(frozen=True)
class SourceStats:
    """What was handed out of one source of a mixture, by one rank since training began."""

    samples: int
    """Those of the source that are visited."""
    accesses: int
    """Samples handed out."""
    hits: int
    """Those that came from the cache without a read of the source."""
    bytes: int
    """Bytes of all of them, as they are cached; an estimate where sizes are."""
    bytes_fetched: int
    """Bytes of those for which the source was read."""
    epochs: float
    """How often all ranks together have visited each sample, in the mean."""

    @property
    def hit_ratio(self) -> float:
        """Hits / accesses, from 0 to 1."""
        return self.hits / self.accesses if self.accesses else 0.0


class _Counts(NamedTuple):
    accesses: NDArray[np.int64]
    hits: NDArray[np.int64]
    bytes: NDArray[np.int64]
    bytes_fetched: NDArray[np.int64]


class SourceBooks:
    """Counts what a rank is handed of each source of a mixture.

    ``sizes`` ``i64[N]`` are those of samples as they are cached. One thread.
    """

    def __init__(self, mixture: Mixture, seed: int, sizes: NDArray[np.int64]) -> None:
        self._mixture, self._sizes = mixture, sizes
        self._sampler = MixtureSampler(mixture, seed)
        self._counts = _Counts(*np.zeros((len(_Counts._fields), len(mixture.names)), np.int64))

    def add(self, ids: NDArray[np.uint32], outcomes: NDArray[np.int8]) -> None:
        """Count samples ``u32[n]`` that were handed out, and how they were served, ``i8[n]``."""
        origins, sizes = self._mixture.origins(ids), self._sizes[ids]
        fetched = outcomes == Outcome.FETCHED
        added = (1, outcomes == Outcome.HIT, sizes, sizes * fetched)
        for counts, values in zip(self._counts, added, strict=True):
            np.add.at(counts, origins, values)

    def stats(self, epoch: int, served: NDArray[np.uint32]) -> dict[str, SourceStats]:
        """Return the counts by name.

        ``served`` u32[n] are what all ranks together have been handed in ``epoch``, before which
        all epochs are over.
        """
        planned = served[: self._mixture.accesses]  # what fills it up for ranks is no visit
        now = np.bincount(self._mixture.origins(planned), minlength=len(self._mixture.names))
        visited = (self._sampler.before(epoch) + now).tolist()
        lengths, counts = self._mixture.lengths, self.state()
        found = {}
        for place, (name, (accesses, hits, total, fetched)) in enumerate(counts.items()):
            times = visited[place] / lengths[place]
            found[name] = SourceStats(lengths[place], accesses, hits, total, fetched, times)
        return found

    def state(self) -> dict[str, list[int]]:
        """Return the counts by name, for :meth:`restore`."""
        columns = np.stack(self._counts, axis=1).tolist()
        return dict(zip(self._mixture.names, columns, strict=True))

    def restore(self, state: Mapping[str, Sequence[int]]) -> None:
        """Make the counts those of :meth:`state`, and count on from there."""
        none = [0] * len(_Counts._fields)
        for source, name in enumerate(self._mixture.names):
            for counts, value in zip(self._counts, state.get(name, none), strict=True):
                counts[source] = value
