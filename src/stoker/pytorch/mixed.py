"""Several data sets in one, visited as a mixture says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError, SampleCorrupt
from stoker.pytorch.dataset import DatasetPopulation, SourceDataset
from stoker.sampler.mixture import Mixture, Weights
from stoker.source.joined import JoinedSource


class MixedDataset(SourceDataset):
    """Data sets in one, each with its own decoding, transforms and targets.

    ``stoker.mix`` makes it, for a Loader that draws from the data sets by their weights. Indices
    count through the data sets, those under Subsets in full; :meth:`origins` tells them apart, of
    ``meta.ids`` say. A sample is what its data set makes of it; if ``tagged``, the pair of that and
    the place of the data set in :attr:`names`. As safe in threads and processes as the data sets.

    Raises :class:`~stoker.errors.ConfigError` for what is no data set of Stoker's, and for a
    mixture of mixtures.
    """

    def __init__(
        self,
        parts: Sequence[Any],
        names: Sequence[str],
        weights: Weights,
        epoch_samples: Any,
        *,
        tagged: bool = False,
    ) -> None:
        views = [DatasetPopulation(part) for part in parts]
        self.parts = tuple(view.base for view in views)
        """The data sets, in order, under any Subsets."""
        if any(part.mixture is not None for part in self.parts):
            raise ConfigError("a mixture of mixtures has no weights: mix all parts at once")
        if any(part.is_packed for part in self.parts):
            raise ConfigError("a mixture has no packed batches: leave decode='packed' out of it")
        is_plain = all(part.is_bytes_of_source for part in self.parts)
        # Code of the user's stays in the thread that it is called in.
        sources = [part.source for part in self.parts]
        super().__init__(JoinedSource(sources, at_once=is_plain))
        self.is_bytes_of_source = is_plain
        self.mixture: Mixture = Mixture(
            tuple(names),
            tuple(map(len, views)),
            weights,
            epoch_samples,
            tuple(map(len, self.parts)),
        )
        self.tagged = tagged
        """Whether samples say which data set they are from."""
        transforms = [part.image_transform for part in self.parts]
        # One for all writes into the memory of the batch; else each data set applies its own.
        is_common = all(transform == transforms[0] for transform in transforms)
        self.image_transform = transforms[0] if is_common else None
        self._starts: list[int] = self.source.starts.tolist()  # type: ignore[attr-defined]
        if any(view.label for view in views):
            every = zip(views, self._starts, strict=False)
            ids = [view.ids(np.arange(len(view))) + np.uint32(start) for view, start in every]
            self.visited = np.concatenate(ids)

    @property
    def names(self) -> tuple[str, ...]:
        """What the data sets are called, in order."""
        return self.mixture.names

    def origins(self, ids: Any) -> NDArray[np.int64]:
        """Return i64[n], the place in :attr:`names` of the data set of each of ``ids`` ``[n]``."""
        return self.mixture.origins(np.asarray(ids))

    @property
    def is_random(self) -> bool:
        """Whether a data set has a transform that may draw random numbers of the process."""
        return any(part.is_random or self._transforms(part) for part in self.parts)

    @property
    def decode_name(self) -> str | None:
        """What identifies the decoding of all data sets; None where one is code of the user's."""
        names = [part.decode_name for part in self.parts]
        return None if None in names else "+".join(map(str, names))

    def decode_named(self, index: int, data: memoryview) -> Any:
        """Return what the sample's data set makes of its bytes; the error names it."""
        _, part, _ = self._place(index)
        try:
            return part.decode(data)
        except SampleCorrupt as error:
            raise self.named(index, error) from error

    @property
    def is_audited(self) -> bool:
        """Whether a data set is."""
        return any(part.is_audited for part in self.parts)

    def audit(self, ids: NDArray[np.uint32], decoded: Sequence[Any]) -> None:
        """Have the samples' data sets look at what came from the cache."""
        for index, sample in zip(ids.tolist(), decoded, strict=True):
            _, part, local = self._place(index)
            part.audit(np.array([local], np.uint32), [sample])

    def image_of(self, index: int, data: memoryview) -> Any:
        """Return what the sample's data set has its image transform take."""
        _, part, local = self._place(index)
        return part.image_of(local, data)

    def finish(self, index: int, decoded: Any) -> Any:
        """Return the sample as its data set does, tagged if that was asked for."""
        origin, part, local = self._place(index)
        if self._transforms(part):
            decoded = part.image_transform(decoded)
        sample = part.finish(local, decoded)
        return (sample, origin) if self.tagged else sample

    def _transforms(self, part: SourceDataset) -> bool:
        """Whether a data set has an image transform that is not that of all."""
        return part.image_transform is not None and self.image_transform is None

    def _place(self, index: int) -> tuple[int, Any, int]:
        origin = int(self.mixture.origins(np.array(index)))
        return origin, self.parts[origin], index - self._starts[origin]
