"""Mixtures of data sets or sources: ``stoker.mix``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from stoker.epoch.stage import Samples
from stoker.errors import ConfigError
from stoker.sampler.mixture import Mixture, Weights
from stoker.source.base import REQUIRED, Source, as_source
from stoker.source.joined import JoinedSource


def mix(
    parts: Mapping[str, Any],
    weights: Weights,
    *,
    epoch_samples: int | Literal["first", "last"],
    tagged: bool = False,
) -> Any:
    """Return one data set, or source, whose parts a Loader, or a Feed, visits by their weights.

    ::

        mixture = stoker.mix({"web": web, "code": code}, {"web": 0.7, "code": 0.3},
                             epoch_samples=1_000_000)
        loader = stoker.Loader(mixture, batch_size=256, cache="20%")

    - ``parts``: data sets of Stoker's by name, what ``wrap()`` returns and ``Subset`` included, for
      a Loader; or sources, for a Feed.
    - ``weights``: relative, by name, and all of them: the same throughout; or a function of the
      epoch that returns them, the same each time; or :class:`stoker.Stages`, which change by step.
    - ``epoch_samples``: samples of an epoch, of all ranks together; ``"first"``: until the part
      that is the first to end has been visited once, ``"last"``: until the last one has, while
      others begin again. A part that ends begins again with a new permutation, and is continued
      in the next epoch.
    - ``tagged``: of data sets, make each sample the pair of it and the place of its part.

    Returns a :class:`~stoker.pytorch.MixedDataset` or :class:`~stoker.mixing.MixedSource`. Its
    ``origins(ids)`` says which part samples are from, and ``loader.source_stats`` counts each part.

    Raises :class:`~stoker.errors.ConfigError` for no parts or empty ones, data sets beside sources,
    weights that are negative, all zero, of unknown parts, or missing, and a function of them that
    does not pickle.
    """
    if not isinstance(parts, Mapping) or not parts:
        raise ConfigError(f"parts={parts!r}: give a dict from name to data set or source")
    given = [*parts.values()]
    are_sources = [_is_source(part) for part in given]
    if all(are_sources):
        if tagged:
            raise ConfigError("tagged= is for data sets: of sources, origins(batch.ids) tells")
        sources = [as_source(part) for part in given]
        lengths = tuple(map(len, sources))
        return MixedSource(sources, Mixture(tuple(parts), lengths, weights, epoch_samples))
    if any(are_sources):
        raise ConfigError(
            "there are sources beside data sets: make data sets of them, stoker.SampleDataset"
            "(source), or mix sources only"
        )
    from stoker.pytorch.dataset import MixedDataset

    return MixedDataset(given, [*parts], weights, epoch_samples, tagged=tagged)


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


def _is_source(part: Any) -> bool:
    """Whether it is to be read from as it is, and no data set."""
    return not isinstance(part, Samples) and all(hasattr(part, name) for name in REQUIRED)
