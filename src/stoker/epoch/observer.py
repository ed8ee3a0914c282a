"""What training shows of its batches -> scores of the samples that were really served."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from stoker.epoch.batch import ServedBatch, Use
from stoker.epoch.placing import EpochCache
from stoker.epoch.tracing import Tracer
from stoker.errors import ConfigError, warn_caller
from stoker.importance.base import Neighbours, Observation, Scorer, Signal
from stoker.importance.baselines import SelectiveBackward
from stoker.scores import Scores

Ids = NDArray[np.uint32]
Signals = dict[Signal, NDArray[Any]]
"""Signals by name, each with one row for each sample, in the types of an Observation."""

PATIENCE = 100
"""Batches without what a recipe needs from the training loop, after which it is told."""

_Batch = TypeVar("_Batch", bound=ServedBatch)


class Arriving(Protocol):
    """Signals of a batch that may still be on their way to the host."""

    @property
    def has_arrived(self) -> bool:
        """Whether :meth:`arrays` returns without waiting."""
        ...

    def arrays(self) -> Signals:
        """Return the signals; waits for them."""
        ...


class Arrived(NamedTuple):
    """Signals that are on the host already."""

    signals: Signals

    @property
    def has_arrived(self) -> bool:
        """True."""
        return True

    def arrays(self) -> Signals:
        """Return the signals."""
        return self.signals


class Listener(Protocol):
    """Is told what becomes of batches, in the order in which it happens."""

    def observed(
        self,
        ids: Ids,
        losses: NDArray[np.float64],
        token: int | None = None,
        epoch: int | None = None,
    ) -> None:
        """Take finite losses ``f64[n]`` of samples ``u32[n]``; no ``token``: not training's."""
        ...

    def scored(
        self,
        ids: Ids,
        neighbours: Neighbours | None,
        scores: Scores,
        epoch: int | None = None,
    ) -> None:
        """Take samples ``u32[n]`` that have new scores; with ``epoch`` they are not training's."""
        ...


class Followers:
    """Those who follow what becomes of batches: a cache that follows scores, and a trace."""

    def __init__(self) -> None:
        self._cache: EpochCache | None = None
        self._tracer: Tracer | None = None

    def open(self, cache: EpochCache, tracer: Tracer | None) -> None:
        """Tell them from now on."""
        self._cache, self._tracer = cache, tracer

    def observed(
        self,
        ids: Ids,
        losses: NDArray[np.float64],
        token: int | None = None,
        epoch: int | None = None,
    ) -> None:
        """Pass on losses; see :class:`Listener`."""
        if self._tracer is not None:
            self._tracer.observed(ids, losses, token, epoch)

    def scored(
        self,
        ids: Ids,
        neighbours: Neighbours | None,
        scores: Scores,
        epoch: int | None = None,
    ) -> None:
        """Pass on new scores; see :class:`Listener`."""
        is_aside = epoch is not None
        if self._cache is not None and self._cache.follows_scores and not is_aside:
            self._cache.follow(ids, neighbours, scores)
        if self._tracer is not None:
            self._tracer.scored(ids, scores.values[ids], neighbours, is_aside, epoch)


class _Underway(NamedTuple):
    """An observation whose signals may be on their way to the host."""

    batch: ServedBatch
    step: int
    signals: Arriving


class Observer:
    """Keeps which batches are unobserved, and has the observed ones scored.

    ``needed``: whether the recipe does anything with scores, and should say so when there are
    none. ``backward`` decides which samples of a batch are learned from. Used by the training
    process only, from one thread at a time.
    """

    def __init__(
        self,
        scores: Scores,
        scorer: Scorer,
        listener: Listener,
        *,
        backward: SelectiveBackward | None = None,
        seed: int = 0,
        needed: bool = False,
    ) -> None:
        self.non_finite = 0
        """Samples in this run whose losses were NaN or infinite; they kept their scores."""
        self.seconds = 0.0
        """Time that the training loop spent in :meth:`add` in this run."""
        self.last: ServedBatch | None = None
        """The batch handed out last."""
        self.step = 0
        """Batches observed so far, also in the run that this one resumes."""
        self.loss_sum = 0.0
        """Of the finite losses since :meth:`take_loss`."""
        self.loss_count = 0
        """How many those were."""
        self.scorer = scorer
        self.backward = backward
        self._listener = listener
        self._scores = scores
        self._seed = seed
        self._needed = needed
        self._closed = False
        self._missing: list[Signal] = []
        self._dimension = 0  # of the embeddings observed, once there were some
        self._hungry = 0  # batches handed out since something was scored
        self._weighted = 0  # batches handed out whose weights were not all one
        self._use = Use()
        self._told: set[str] = set()
        self._unobserved: set[int] = set()
        self._underway: deque[_Underway] = deque()

    @property
    def scores(self) -> Scores:
        """The scores with everything observed so far; waits for copies still under way."""
        self._drain(wait=True)
        if not self._closed:
            self.scorer.drain()
            self._take_scored()
        return self._scores

    @property
    def is_starved(self) -> bool:
        """Whether the training loop has long not given, or not used, what the recipe needs."""
        return self._hungry >= PATIENCE or (self._weighted >= PATIENCE and not self._use.weights)

    def begins(self, embeddings: Any) -> bool:
        """Whether ``embeddings`` ``[n, d]`` are the first that are observed.

        Raises :class:`~stoker.errors.ConfigError` unless all have the same length ``d``.
        """
        is_first, dimension = not self._dimension, embeddings.shape[1]
        self._dimension = self._dimension or dimension
        if dimension != self._dimension:
            raise ConfigError(
                f"observe() got embeddings of dimension {dimension}, and before of "
                f"{self._dimension}: give the output of one layer throughout"
            )
        return is_first

    def restore(
        self, step: int, losses: tuple[float, int], scores: Mapping[str, NDArray[Any]]
    ) -> None:
        """Put a saved state in the place of this one; what is on its way is dropped.

        Raises what :meth:`Scores.restore <stoker.scores.Scores.restore>` does for ``scores``.
        """
        self._scores.restore(**scores)
        self._underway.clear()
        self.step = step
        self.loss_sum, self.loss_count = losses
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Forget the batches of an epoch that is over or was abandoned."""
        self._unobserved.clear()
        self.last = None

    def hand_out(self, batch: _Batch) -> _Batch:
        """Note that the training loop gets this batch; return what it gets to know of it."""
        weights = batch.plan_weights
        if self.backward is not None and weights is None:
            weights = np.ones(len(batch), np.float32)  # add() writes to them
        handed = replace(batch, plan_weights=weights, use=self._use)
        self.last = handed
        self._unobserved.add(batch.token)
        if self._needed:
            self._weighted += weights is not None
            self._hungry += 1
            self._complain()
        return handed

    def batch(self, meta: ServedBatch | None = None) -> ServedBatch:
        """Return the one batch that an observation speaks of: ``meta``, or the last one.

        Raises :class:`~stoker.errors.ConfigError` for a batch that is not of this loader, was
        observed before, or belongs to an earlier epoch, and without ``meta`` unless exactly one
        batch is unobserved.
        """
        if meta is not None:
            if not isinstance(meta, ServedBatch):
                raise ConfigError(
                    f"meta={meta!r} does not come from this loader: pass what return_meta=True "
                    "added to the batch"
                )
            if meta.token not in self._unobserved:
                raise ConfigError(
                    f"the batch of this meta (token {meta.token}) was observed before, or belongs "
                    "to an earlier epoch: observe each batch once, within its epoch"
                )
            return meta
        if len(self._unobserved) > 1:
            raise self._ambiguous("observe()")
        if self.last is None or self.last.token not in self._unobserved:
            raise ConfigError("there is no unobserved batch: call observe() once after each batch")
        return self.last

    def add(self, batch: ServedBatch, signals: Arriving, began: float) -> None:
        """Take the signals of a batch that :meth:`batch` returned, whenever they arrive.

        ``began``: when the training loop began to wait for this, by ``time.perf_counter()``.
        """
        self._unobserved.discard(batch.token)
        self.step += 1
        underway = _Underway(batch, self.step - 1, signals)
        self._drain(wait=False)
        if self.backward is not None:
            self._weigh(underway)
        self._underway.append(underway)
        self._drain(wait=False)
        self.seconds += time.perf_counter() - began

    def score(self, ids: Ids, epoch: int, signals: Signals) -> None:
        """Have a step's samples ``u32[n]`` scored, whose signals are known to be finite.

        What :meth:`add` does with them, for those who need nothing told.
        """
        self.scorer.update(self._scores, Observation(ids, self.step, epoch, **signals))
        self.step += 1

    def score_run(self, ids: Ids, epoch: int, losses: NDArray[np.float64], batch: int) -> None:
        """Have a run of steps scored, ``batch`` samples each, by their finite losses ``f64[n]``.

        What :meth:`score` does for each; at once where scores do not depend on batches.
        """
        if self.scorer.scores_are_losses:
            steps = self.step + np.arange(len(ids)) // batch
            self._scores.update(ids, losses, steps)
            self.step = int(steps[-1]) + 1
            return
        for start in range(0, len(ids), batch):
            part = slice(start, start + batch)
            self.score(ids[part], epoch, {"losses": losses[part]})

    def add_losses(self, losses: NDArray[np.float64]) -> None:
        """Count finite losses ``f64[n]`` into the mean of the epoch."""
        self.loss_sum += float(losses.sum())
        self.loss_count += len(losses)

    def rescore(self, ids: Ids, epoch: int, signals: Signals) -> None:
        """Have samples ``u32[n]`` scored by what a batch showed that is none of training's."""
        ids, signals = self._finite(ids, signals)
        if len(ids):
            self.scorer.update(self._scores, Observation(ids, self.step, epoch, **signals))
            self._listener.observed(ids, signals["losses"], epoch=epoch)
            self._listener.scored(ids, None, self._scores, epoch)

    def weighed(self) -> ServedBatch:
        """Return the batch whose loss weights the training loop asks for.

        Raises :class:`~stoker.errors.ConfigError` if there is none, or it could be several.
        """
        if self.last is None:
            raise ConfigError("there is no batch yet whose weights to return: iterate first")
        if len(self._unobserved) > 1:
            raise self._ambiguous("weights")
        return self.last

    def take_loss(self) -> tuple[float, int]:
        """Return the sum and the count of the finite losses since the last call."""
        taken = self.loss_sum, self.loss_count
        self.loss_sum, self.loss_count = 0.0, 0
        return taken

    def close(self) -> None:
        """Have everything scored, and end what the scorer runs; may be called again."""
        if self._closed:
            return
        try:
            _ = self.scores
        finally:
            self._closed = True
            self.scorer.close()

    def _ambiguous(self, what: str) -> ConfigError:
        return ConfigError(
            f"{what} cannot tell which batch is meant: {len(self._unobserved)} are unobserved. "
            "Call observe() after each batch, or use return_meta=True and the meta of the batch"
        )

    # --- scoring ---

    def _weigh(self, underway: _Underway) -> None:
        """Multiply the batch's weights by those of the samples learned from."""
        batch = underway.batch
        assert self.backward is not None and batch.plan_weights is not None
        losses = underway.signals.arrays().get("losses")
        if losses is None:
            return
        rng = np.random.default_rng([self._seed, batch.epoch, int(batch.positions[0])])
        weights = batch.plan_weights
        weights *= self.backward.weights(losses, rng)

    def _drain(self, *, wait: bool) -> None:
        """Have the observations scored that have arrived, or all of them."""
        while self._underway and (wait or self._underway[0].signals.has_arrived):
            batch, step, signals = self._underway.popleft()
            self._score(batch, step, signals.arrays())

    def _score(self, batch: ServedBatch, step: int, signals: Signals) -> None:
        ids, signals = self._finite(batch.ids, signals)
        losses = signals.get("losses")
        if losses is not None:
            self.add_losses(losses)
            self._listener.observed(ids, losses, batch.token)
        self._missing = sorted(self.scorer.needs - signals.keys())
        if self._missing or not len(ids):
            return
        self._hungry = 0
        self.scorer.update(self._scores, Observation(ids, step, batch.epoch, **signals))
        if not self.scorer.is_deferred:
            self._listener.scored(ids, self.scorer.neighbours, self._scores)
        self._take_scored()

    def _take_scored(self) -> None:
        """Tell what a scorer has done that works beside the training."""
        for ids, neighbours in self.scorer.take_scored():
            self._listener.scored(ids, neighbours, self._scores)

    def _finite(self, ids: Ids, signals: Signals) -> tuple[Ids, Signals]:
        """Return the samples all of whose signals are finite."""
        keep = np.ones(len(ids), np.bool_)
        for rows in signals.values():
            keep &= np.isfinite(rows) if rows.ndim == 1 else np.isfinite(rows).all(axis=1)
        if keep.all():
            return ids, signals
        self._note_non_finite(ids[~keep])
        return ids[keep], {name: rows[keep] for name, rows in signals.items()}

    # --- telling ---

    def _note_non_finite(self, ids: Ids) -> None:
        self._warn(
            "non-finite",
            f"the losses of {len(ids)} samples are not finite (the first is sample {ids[0]}): "
            "they keep their scores. Further ones are counted in stats.non_finite",
        )
        self.non_finite += len(ids)

    def _complain(self) -> None:
        """Say once what the recipe needs and the training loop does not give or use."""
        if self._hungry == PATIENCE:
            missing = " or ".join(self._missing or sorted(self.scorer.needs))
            self._warn(
                "hungry",
                f"the recipe needs {missing}, and {PATIENCE} batches came without: samples are "
                "visited uniformly. Call loader.observe() after each batch",
            )
        if self._weighted == PATIENCE and not self._use.weights:
            self._warn(
                "weights",
                f"the recipe weighs samples, and {PATIENCE} batches went by without a look at "
                "loader.weights or meta.weights: samples are visited uniformly from the next "
                "epoch on. Train on (losses * loader.weights).mean()",
            )

    def _warn(self, what: str, message: str) -> None:
        if what not in self._told:
            self._told.add(what)
            warn_caller(message)
