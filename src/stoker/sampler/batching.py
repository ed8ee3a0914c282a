"""Plans in batches by the lengths of samples: what a batch is, and how ranks divide them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stoker.errors import ConfigError
from stoker.plan import Plan
from stoker.sampler.base import Sampler
from stoker.sampler.draws import generator
from stoker.scores import Scores

Lengths = NDArray[np.int64]
Arrays = dict[str, NDArray[Any]]

_STREAM = 6  # of random numbers, apart from those of the samplers
_KEPT = 3  # epochs whose batches are kept: this one, the next one, and one that is asked about


class Groups(NamedTuple):
    """The accesses of an epoch put into batches."""

    order: NDArray[np.int64]
    """``i64[A]``, places in the order that they were grouped from, each once at most."""
    bounds: NDArray[np.int64]
    """``i64[B + 1]``, from 0 to A: batch ``b`` is ``order[bounds[b] : bounds[b + 1]]``."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Batching(ABC):
    """Puts the samples of an epoch into batches by their lengths.

    The order that samples are drawn in is grouped, for the whole job and before the epoch begins:
    batches are a part of the plan. Every sample is in one batch, as often as it was drawn. Where
    the batches of an epoch do not divide among the ranks, those of the last step are split, so that
    all ranks have equally many; samples are repeated only where a step has fewer than there are
    ranks. Immutable, and safe in any thread or process.

    Raises :class:`~stoker.errors.ConfigError` for what makes no sense, at construction, and for
    lengths that do not fit, at that of the Loader or Feed.
    """

    lengths: ArrayLike | None = field(default=None, repr=False)
    """``int[N]``, tokens of each sample of the data set; None: its bytes / ``token_bytes``."""
    token_bytes: int = 1
    """Bytes of a token in the bytes of a sample, where there are no ``lengths``."""
    pad: int = 0
    """The token that fills rows up."""
    dtype: str = "int64"
    """Of the tokens in a batch."""

    def __post_init__(self) -> None:
        check_counts(token_bytes=self.token_bytes)
        if np.dtype(self.dtype).kind not in "iu":
            raise ConfigError(f"dtype={self.dtype!r} is no type of integers: tokens are")

    # --- what a kind of batching says ---

    @property
    @abstractmethod
    def places(self) -> int:
        """Tokens that a full batch has room for."""

    @property
    @abstractmethod
    def collate(self) -> Callable[[Sequence[Any]], Arrays]:
        """What makes arrays of the samples of a batch."""

    @property
    @abstractmethod
    def longest(self) -> int:
        """Tokens of the longest sample that fits."""

    @abstractmethod
    def group(
        self, lengths: Lengths, rng: np.random.Generator | None, *, drop_last: bool = False
    ) -> Groups:
        """Return batches of accesses whose samples have ``lengths`` ``i64[A]``, 1 or more.

        Without ``rng`` nothing is shuffled. ``drop_last`` leaves out batches that are not full,
        where that says something.
        """

    @abstractmethod
    def places_of(self, lengths: Lengths) -> int:
        """Return the tokens that a batch of samples of ``lengths`` ``i64[n]`` has room for."""

    # --- what all have ---

    def lengths_of(self, sizes: NDArray[np.int64], *, are_exact: bool = True) -> Lengths:
        """Return i64[N], the tokens of samples of so many bytes (``sizes`` i64[N]), 1 or more.

        ConfigError where lengths are not known, or one does not fit.
        """
        if self.lengths is None:
            if not are_exact:
                raise ConfigError(
                    "the sizes of these samples are estimates, which are no lengths: give "
                    f"{type(self).__name__}(lengths=), the tokens of each sample"
                )
            lengths = sizes // self.token_bytes
        else:
            lengths = _integers(self.lengths, len(sizes))
        return np.maximum(self.fitted(lengths), 1)

    def fitted(self, lengths: Lengths) -> Lengths:
        """Return ``lengths`` i64[N]; ConfigError where one does not fit into a batch."""
        over = np.flatnonzero(lengths > self.longest)
        if len(over):
            raise ConfigError(
                f"{len(over)} samples are too long for {self}: sample {over[0]} has "
                f"{lengths[over[0]]} tokens and {self.longest} fit; shorten them in your "
                "transform, and give lengths=np.minimum(lengths, "
                f"{self.longest})"
            )
        return lengths


class Grouping:
    """Puts the plans of an epoch into batches by the lengths of its samples.

    ``lengths`` i64[N] are those of the samples of the data set, and ``visited`` u32[n] the ids that
    plans stand for; None: all, in order. Without ``shuffle`` batches come in the order of the plan.
    Pure but for a memory of the latest results; for one thread.
    """

    def __init__(
        self,
        batching: Batching,
        lengths: Lengths,
        visited: NDArray[np.uint32] | None = None,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        self._batching, self._of_all = batching, lengths
        self._lengths = lengths if visited is None else lengths[visited]
        self._visited = visited
        self._seed, self._shuffle, self._drop_last = seed, shuffle, drop_last
        self._kept: dict[str, Groups] = {}

    @property
    def typical(self) -> int:
        """Samples of a batch, in the mean of a full one, 1 or more."""
        return max(1, round(self._batching.places / max(1.0, float(self._lengths.mean()))))

    def shortest(self, count: int) -> NDArray[np.uint32]:
        """Return so many of the shortest samples, by id: they fit in the place of any other."""
        found = np.argsort(self._lengths, kind="stable")[:count].astype(np.uint32)
        return found if self._visited is None else self._visited[found]

    def tokens_of(self, ids: NDArray[np.uint32]) -> tuple[int, int]:
        """Return the tokens of a batch of ids ``u32[n]``, and those that it has room for."""
        lengths = self._of_all[ids]
        return int(lengths.sum()), self._batching.places_of(lengths)

    def __call__(self, plan: Plan) -> Groups:
        """Return the batches of ``plan``; ConfigError where none is full and the rest dropped."""
        groups = self._kept.pop(plan.identity, None)
        if groups is None:
            rng = generator(self._seed, plan.epoch, _STREAM) if self._shuffle else None
            lengths = self._lengths[plan.ids]
            groups = self._batching.group(lengths, rng, drop_last=self._drop_last)
            if len(groups.bounds) < 2:
                raise ConfigError(
                    f"drop_last leaves no batch of {len(plan)} samples, as none is full: use "
                    "smaller batches or drop_last=False"
                )
        self._kept[plan.identity] = groups
        while len(self._kept) > _KEPT:
            del self._kept[next(iter(self._kept))]
        return groups


@dataclass(frozen=True)
class BatchedSampler(Sampler):
    """The plans of ``inner``, made for one rank, with their accesses put into batches.

    A plan has the accesses of a batch one after another, and says where batches begin. It is not
    made for any number of ranks: they divide the batches, by :func:`for_ranks`.

    Raises :class:`~stoker.errors.ConfigError` for a sampler whose order serves the cache, which
    batching would undo.
    """

    inner: Sampler
    grouping: Grouping

    def __post_init__(self) -> None:
        if self.inner.reads_blocks or self.inner.apart is not None:
            raise ConfigError(
                "batching= changes the order of samples, and this recipe draws them in one that "
                "the cache needs: leave out its block= or repeat=, or batching="
            )

    @property
    def uses_scores(self) -> bool:
        """Whether plans depend on scores."""
        return self.inner.uses_scores

    @property
    def longest(self) -> int:
        """Accesses of the longest plan."""
        return self.inner.longest

    def length_at(self, epoch: int, scores: Scores | None = None) -> int:
        """Return the accesses of the plan of ``epoch``."""
        return len(self.plan(scores, epoch))

    def plan(self, scores: Scores | None, epoch: int) -> Plan:
        """Return the plan of ``epoch``, from 0, with its batches; raises what ``inner`` does."""
        plan = self.inner.plan(scores, epoch)
        groups = self.grouping(plan)
        return plan.part(groups.order, plan.start, groups.bounds)

    @property
    def without_accuracy(self) -> str:
        """What happens to plans if no accuracy is reported; empty: nothing."""
        return self.inner.without_accuracy

    def begin_epoch(self, scores: Scores, epoch: int) -> None:
        """Have ``inner`` keep in ``scores`` what epochs are drawn from."""
        self.inner.begin_epoch(scores, epoch)

    def foresees(self, scores: Scores | None, epoch: int) -> bool:
        """Whether the plan that these scores give for ``epoch`` is the one that it will have."""
        return self.inner.foresees(scores, epoch)

    def began(self, epoch: int) -> int:
        """Return the epoch with which the super-epoch of ``epoch`` begins."""
        return self.inner.began(epoch)

    def describe(self, scores: Scores | None, epoch: int) -> str:
        """Return in one line what is done in ``epoch``, and why, for the log; empty: nothing."""
        return self.inner.describe(scores, epoch)


def for_ranks(
    bounds: NDArray[np.int64], world_size: int, *, drop_last: bool = False, fill: bool = True
) -> NDArray[np.int64]:
    """Return i64[B' + 1], batches of which each rank takes every ``world_size``-th.

    They are ``bounds`` i64[B + 1] but for the last step. Its batches are halved, the one with
    most samples first, until there are enough, or with ``drop_last`` left out. Where the step has
    fewer samples than there are ranks, ``fill`` adds batches of one access each after the end,
    which the caller takes from the start of the epoch; otherwise some ranks have a batch less.
    """
    rest = (len(bounds) - 1) % world_size
    if not rest:
        return bounds
    whole = len(bounds) - 1 - rest
    if drop_last:
        return bounds[: whole + 1]
    cuts = bounds[whole:].tolist()
    while len(cuts) <= world_size:
        sizes = np.diff(cuts)
        most = int(sizes.argmax())
        if sizes[most] < 2:
            break
        cuts.insert(most + 1, cuts[most] + int(sizes[most]) // 2)
    if fill:
        cuts += range(cuts[-1] + 1, cuts[-1] + 1 + world_size + 1 - len(cuts))
    return np.concatenate([bounds[:whole], cuts])


def _integers(given: ArrayLike, num_samples: int) -> Lengths:
    array = np.asarray(given)
    if array.shape != (num_samples,) or array.dtype.kind not in "iu":
        raise ConfigError(
            f"lengths of shape {list(array.shape)} and type {array.dtype} do not fit {num_samples} "
            "samples: give the number of tokens of each"
        )
    if array.min(initial=0) < 0:
        raise ConfigError(f"lengths has {array.min()}: give numbers of tokens, 0 or more")
    return array.astype(np.int64)


def check_counts(**given: int) -> None:
    """Raise :class:`~stoker.errors.ConfigError`, by name, for what is no number from 1 on."""
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise ConfigError(f"{name}={value!r} is out of range: give 1 or more")
