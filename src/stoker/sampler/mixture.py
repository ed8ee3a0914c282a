"""A mixture of sources: which one each access goes to, and every source in passes of its own."""

from __future__ import annotations

import heapq
import operator
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError
from stoker.plan import MAX_LENGTH, Plan
from stoker.sampler.base import Sampler
from stoker.sampler.draws import generator, shuffle, systematic
from stoker.sampler.uniform import expected, repeated
from stoker.scores import Scores
from stoker.shared import SharedArray

_MOST = 2**16  # sources: labels are 16 bits
_COUNTS, _ORDER, _WALK = 1 << 32, 1 << 33, 1 << 34  # streams of random numbers
_TOGETHER = 4096  # samples: passes of small sources are drawn so many at once


@dataclass(frozen=True)
class Stages:
    """Weights that change within epochs: ``Stages({0: {"web": 9, "code": 1}, 10_000: {...}})``.

    ``weights`` gives those from each step on, counted over the whole training. A step takes
    ``step_samples``, batch size times ranks; with the default of 1, steps are samples. Stages stay
    where they are if batches or ranks change later. Immutable; pickles.

    Raises :class:`~stoker.errors.ConfigError` unless the first stage begins at 0, for steps that
    are not whole numbers, and for ``step_samples`` below 1.
    """

    weights: Mapping[int, Mapping[str, float]]
    """From the first step of each stage to its weights, by name of the source."""
    step_samples: int = 1
    """Samples of a step, of all ranks together."""

    def __post_init__(self) -> None:
        if self.step_samples < 1:
            raise ConfigError(f"step_samples={self.step_samples} is out of range: give 1 or more")
        wrong = [step for step in self.weights if not isinstance(step, int) or step < 0]
        if wrong or 0 not in self.weights:
            raise ConfigError(
                f"stages begin at steps {list(self.weights)}: give whole numbers, the first one 0"
            )


Weights = Mapping[str, float] | Callable[[int], Mapping[str, float]] | Stages
"""Relative weights by name of the source: the same throughout, by epoch, or in stages."""


class Segment(NamedTuple):
    """Accesses of an epoch that follow each other and have the same weights."""

    length: int
    """Accesses, of all ranks together."""
    shares: NDArray[np.float64]
    """``f64[k]``, the share of each source; the sum is 1."""


@dataclass(frozen=True)
class Mixture:
    """Which sources are mixed, how much of each, and how long an epoch is.

    ``stoker.mix`` makes it. Immutable; pickles, if a function ``weights`` does.

    Raises :class:`~stoker.errors.ConfigError` for fewer than one source, a source without samples,
    weights that are negative, not finite, all zero, of unknown sources or missing, a function of
    weights that does not pickle, and an ``epoch_samples`` out of range; :meth:`segments` raises it
    where a function gives such weights for a later epoch.
    """

    names: tuple[str, ...]
    lengths: tuple[int, ...]
    """Samples of each source that are visited."""
    weights: Weights
    epoch_samples: int | Literal["first", "last"]
    """Accesses of an epoch, of all ranks together, before they are filled up or cut to be equal.
    ``"first"``: until the first source has been visited once, ``"last"``: until the last one has,
    while others begin again; both for weights that do not change."""
    totals: tuple[int, ...] = ()
    """Samples of each source, visited or not, which ids count through; empty: :attr:`lengths`."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.names) <= _MOST:
            raise ConfigError(f"a mixture of {len(self.names)} sources: give 1 to {_MOST}")
        for name, length in zip(self.names, self.lengths, strict=True):
            if length < 1:
                raise ConfigError(f"source {name!r} has 0 samples: leave it out of the mixture")
        if isinstance(self.weights, Stages):
            for step, weights in self.weights.weights.items():
                self._shares(weights, f"from step {step}")
        elif callable(self.weights):
            _check_pickles(self.weights)
        if not 1 <= self.accesses <= MAX_LENGTH:
            raise ConfigError(
                f"an epoch of {self.accesses} samples is out of range: give epoch_samples= from 1 "
                f"to {MAX_LENGTH}"
            )
        self.segments(0)

    @property
    def accesses(self) -> int:
        """Accesses of an epoch, of all ranks together."""
        if self.epoch_samples not in ("first", "last"):
            return _whole(self.epoch_samples)
        if not isinstance(self.weights, Mapping):
            raise ConfigError(
                f"epoch_samples={self.epoch_samples!r} needs weights that do not change: give the "
                "number of samples in an epoch"
            )
        shares = self._shares(self.weights, "")
        ends = np.array(self.lengths)[shares > 0] / shares[shares > 0]
        return max(1, round(float(ends.min() if self.epoch_samples == "first" else ends.max())))

    def segments(self, epoch: int) -> list[Segment]:
        """Return the parts of ``epoch``, from 0, that have weights of their own, in order."""
        length = self.accesses
        if not isinstance(self.weights, Stages):
            given = self.weights(epoch) if callable(self.weights) else self.weights
            return [Segment(length, self._shares(given, f"of epoch {epoch}"))]
        stages, step = self.weights.weights, self.weights.step_samples
        first, end = epoch * length, (epoch + 1) * length
        begins = sorted(begin * step for begin in stages)
        inside = [first, *(begin for begin in begins if first < begin < end)]
        found = []
        for begin, until in zip(inside, [*inside[1:], end], strict=True):
            stage = begins[np.searchsorted(begins, begin, side="right") - 1] // step
            found.append(Segment(until - begin, self._shares(stages[stage], f"from step {stage}")))
        return found

    def origins(self, ids: NDArray[np.uint32]) -> NDArray[np.int64]:
        """Return i64[n], the place in :attr:`names` of the source of each of ``ids`` ``u32[n]``."""
        ends = np.cumsum(self.totals or self.lengths)
        return np.searchsorted(ends, ids, side="right")

    def _shares(self, weights: Any, when: str) -> NDArray[np.float64]:
        """Return f64[k], ``weights`` by name as shares whose sum is 1."""
        where = f"weights {when}".strip()
        if not isinstance(weights, Mapping):
            raise ConfigError(f"{where} are {weights!r}: give a dict from name to weight")
        if unknown := [name for name in weights if name not in self.names]:
            raise ConfigError(
                f"{where} name {unknown[0]!r}, which is no source: use {', '.join(self.names)}"
            )
        if missing := [name for name in self.names if name not in weights]:
            raise ConfigError(f"{where} lack {missing[0]!r}: give 0 to leave a source out")
        values = np.array([float(weights[name]) for name in self.names])
        if not (np.isfinite(values) & (values >= 0)).all() or not values.any():
            raise ConfigError(
                f"{where} are {dict(weights)}: give finite numbers, none below 0 and one above"
            )
        values /= values.max()
        shares: NDArray[np.float64] = values / values.sum()
        return shares


@dataclass(frozen=True)
class MixtureSampler(Sampler):
    """Draws from the sources of a mixture, each of which is shuffled and walked through in passes.

    An epoch has as many accesses of each source as its weight says, rounded at random so that the
    expectation is exact, and these are spread over the epoch: after any number of its accesses
    with the same weights, each of two sources has its share of them to less than 2 accesses, and
    each of more than two to less than 5. Which of neighbouring accesses go to which source is
    random, so that ranks get the same mixture.

    A source is visited in passes, each a permutation drawn from (seed, pass, place of the source).
    A pass continues in the next epoch where it was. Where an access falls is computed from the
    epochs before, of which only the counts are drawn. Padded or cut for ranks as
    :class:`~stoker.sampler.uniform.UniformSampler` is. The latest pass of each source is kept, 4
    bytes a sample. Frozen and pure: safe in any thread or process.

    Accesses are dealt out along a binary tree of sources (Huffman, Proceedings of the IRE 1952),
    so that heavy ones are near its root. At each node the smaller side draws one of each s/n places
    in turn, which is stratified sampling.

    Raises :class:`~stoker.errors.ConfigError` for a seed that is not an unsigned 64-bit number,
    ``pad_to`` below 1, or ``drop_last`` that would leave nothing.
    """

    uses_scores: ClassVar[bool] = False

    mixture: Mixture
    seed: int = 0
    """Unsigned 64 bits; with the epoch it decides the order."""
    pad_to: int = 1
    """Number of ranks: the length of a plan is a multiple of it."""
    drop_last: bool = False
    """Cut the rest off instead of filling up from the start."""
    looks_ahead: bool = False
    """Whether plans say after how many accesses samples are expected again."""
    _before: dict[int, NDArray[np.int64]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _drawn: dict[int, tuple[int, NDArray[np.uint32]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**64:
            raise ConfigError(f"seed={self.seed} is out of range: give 0 to 2**64 - 1")
        if self.pad_to < 1:
            raise ConfigError(
                f"pad_to={self.pad_to} is out of range: give the number of ranks, from 1"
            )
        if not self.longest:
            raise ConfigError(
                f"drop_last leaves none of {self.mixture.accesses} samples to {self.pad_to} ranks: "
                "use fewer ranks or drop_last=False"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_before": {}, "_drawn": {}}

    @property
    def longest(self) -> int:
        """Accesses of every plan, for all ranks together."""
        accesses = self.mixture.accesses
        rest = accesses % self.pad_to
        return accesses - rest if self.drop_last else accesses + (-accesses % self.pad_to)

    def length_at(self, epoch: int, scores: Scores | None = None) -> int:
        """Return :attr:`longest`: every epoch has the same length."""
        return self.longest

    def plan(self, scores: Scores | None, epoch: int) -> Plan:
        """Return the plan of ``epoch``, from 0; ``scores`` are not looked at.

        Raises :class:`~stoker.errors.ConfigError` for a negative epoch, and what
        :meth:`Mixture.segments` does.
        """
        lengths = np.array(self.mixture.lengths)
        labels, before = self._labels(epoch), self.before(epoch)
        counts = np.bincount(labels, minlength=len(lengths))
        visits = [
            first + self._walk(source, int(before[source]), int(counts[source]))
            for source, first in enumerate(np.cumsum(lengths) - lengths)
        ]
        ids = np.empty(len(labels), np.uint32)
        ids[np.argsort(labels, kind="stable")] = np.concatenate(visits)
        memory = SharedArray.create(self.longest, np.uint32, name="plan.ids")
        memory.array[:] = repeated(ids, self.longest)
        return Plan(
            epoch,
            epoch * self.longest,
            memory,  # type: ignore[arg-type]
            beyond=self._beyond(epoch) if self.looks_ahead else None,
            repeats=bool((before % lengths + counts > lengths).any()),
        )

    def before(self, epoch: int) -> NDArray[np.int64]:
        """Return i64[k], the accesses of each source in all epochs before ``epoch``.

        Read-only. Raises :class:`~stoker.errors.ConfigError` for a negative epoch.
        """
        generator(self.seed, epoch)  # refuses it
        known = max((begun for begun in tuple(self._before) if begun <= epoch), default=0)
        total = self._before.get(known, np.zeros(len(self.mixture.names), np.int64))
        for each in range(known, epoch):
            total = total + self._counts(each).sum(axis=0)
            total.flags.writeable = False
            self._before[each + 1] = total
        return total

    # --- inside ---

    def _counts(self, epoch: int) -> NDArray[np.int64]:
        """Return i64[segments, k], the accesses of each source in each segment of ``epoch``."""
        rng = generator(self.seed, epoch, stream=_COUNTS)
        rows = []
        for length, shares in self.mixture.segments(epoch):
            exact = np.round(length * shares, 6)  # 0.3 x 10 is a little more than 3
            counts = np.floor(exact).astype(np.int64)
            counts[systematic(exact - counts, length - int(counts.sum()), rng)] += 1
            rows.append(counts)
        return np.stack(rows)

    def _labels(self, epoch: int) -> NDArray[np.uint16]:
        """Return u16[A], the source of each access of ``epoch``."""
        return np.concatenate(
            [
                dealt_out(counts, generator(self.seed, epoch, stream=_ORDER + segment))
                for segment, counts in enumerate(self._counts(epoch))
            ]
        )

    def _walk(self, source: int, first: int, count: int) -> NDArray[np.uint32]:
        """Return u32[count], the visits of a source from its ``first`` on, ids within it."""
        length = self.mixture.lengths[source]
        together = length * max(1, _TOGETHER // length)
        visits = np.empty(count, np.uint32)
        done = 0
        while done < count:
            sheet, begin = divmod(first + done, together)
            part = self._sheet(source, sheet)[begin : begin + count - done]
            visits[done : done + len(part)] = part
            done += len(part)
        return visits

    def _sheet(self, source: int, sheet: int) -> NDArray[np.uint32]:
        """Return u32[m], a pass of a source, or as many of a small one as are drawn together."""
        known, drawn = self._drawn.get(source, (-1, None))
        if drawn is not None and known == sheet:
            return drawn
        length = self.mixture.lengths[source]
        rng = generator(self.seed, sheet, stream=_WALK + source)
        drawn = np.tile(np.arange(length, dtype=np.uint32), max(1, _TOGETHER // length))
        if len(drawn) == length:
            shuffle(drawn, rng)  # much faster than rows of one array
        else:
            rows = drawn.reshape(-1, length)
            rng.permuted(rows, axis=1, out=rows)
        # A large source has many epochs in one pass.
        self._drawn[source] = sheet, drawn
        return drawn

    def _beyond(self, epoch: int) -> NDArray[np.float32]:
        """Return f32[N], the accesses of a pass of each sample's source, by its share by now.

        That is of this epoch and the next one: what is visited in either is not without value.
        """
        counts = self._counts(epoch).sum(axis=0) + self._counts(epoch + 1).sum(axis=0)
        lengths = np.array(self.mixture.lengths)
        return np.repeat(expected(counts / lengths, 2 * self.mixture.accesses), lengths)


def dealt_out(counts: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.uint16]:
    """Return u16[sum], each source i ``counts[i]`` times, spread evenly and at random."""
    labels = np.empty(int(counts.sum()), np.uint16)
    todo: list[tuple[Any, NDArray[np.int64]]] = [(_tree(counts), np.arange(len(labels)))]
    while todo:
        node, places = todo.pop()
        if isinstance(node, int):
            labels[places] = node
            continue
        (fewer, less), (_, more) = node
        taken = np.zeros(len(places), np.bool_)
        taken[_stratified(fewer, len(places), rng)] = True
        todo += [(less, places[taken]), (more, places[~taken])]
    return labels


def _tree(counts: NDArray[np.int64]) -> Any:
    """Return Huffman's tree: a source, or two pairs of an access count and a tree, fewer first."""
    nodes: list[tuple[int, int, Any]] = [
        (count, source, source) for source, count in enumerate(counts.tolist())
    ]
    heapq.heapify(nodes)
    for number in range(len(counts), 2 * len(counts) - 1):
        fewer, _, less = heapq.heappop(nodes)
        others, _, more = heapq.heappop(nodes)
        heapq.heappush(nodes, (fewer + others, number, ((fewer, less), (others, more))))
    return nodes[0][2]


def _stratified(count: int, length: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return i64[count], distinct places below ``length``, one at random in each stratum.

    ``count`` is at most half of ``length``: strata then have two places or more, and neighbours
    that drew the place which they share move apart without reaching the next one's.
    """
    if not count:
        return np.empty(0, np.int64)
    drawn = (np.arange(count) + rng.random(count)) * (length / count)
    places = np.minimum(drawn.astype(np.int64), length - 1)
    places[1:] += places[1:] == places[:-1]
    return places


def _whole(number: Any) -> int:
    """Return an ``epoch_samples`` that is a whole number; ConfigError for anything else."""
    try:
        return operator.index(number)
    except TypeError:
        raise ConfigError(
            f"epoch_samples={number!r} is not known: give the samples of an epoch, 'first' or "
            "'last'"
        ) from None


def _check_pickles(weights: Any) -> None:
    try:
        pickle.dumps(weights)
    except Exception as error:
        raise ConfigError(
            f"weights={weights!r} does not pickle ({error}): give a function that a module defines"
        ) from error
