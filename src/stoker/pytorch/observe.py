"""What training shows of its batches -> scores of the samples that were really served."""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from stoker.epoch.batch import Use
from stoker.epoch.tracing import Tracer
from stoker.errors import ConfigError
from stoker.importance.backward import SelectiveBackward
from stoker.importance.base import Neighbours, Observation, Scorer, Signal
from stoker.pytorch.knn import search_on
from stoker.pytorch.meta import Meta
from stoker.pytorch.signals import Copy, Shown, start_copy
from stoker.scores import Scores

OnScored = Callable[[NDArray[np.uint32], Neighbours | None, Scores], None]
"""Is told the ids ``u32[n]`` of each batch that was scored, their neighbours, and the scores."""

PATIENCE = 100
"""Batches without what a recipe needs from the training loop, after which it is told."""


class _Underway(NamedTuple):
    """An observation whose signals are on their way to the host."""

    meta: Meta
    step: int
    copy: Copy


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
        *,
        backward: SelectiveBackward | None = None,
        seed: int = 0,
        needed: bool = False,
    ) -> None:
        self.non_finite = 0
        """Samples in this run whose losses were NaN or infinite; they kept their scores."""
        self.seconds = 0.0
        """Time that the training loop spent in :meth:`observe` in this run."""
        self.last: Meta | None = None
        """The batch handed out last."""
        self.step = 0
        """Batches observed so far, also in the run that this one goes on from."""
        self.loss_sum = 0.0
        """Of the finite losses since :meth:`take_loss`."""
        self.loss_count = 0
        """How many those were."""
        self.on_scored: OnScored = _ignore
        self.tracer: Tracer | None = None
        """Who writes down what is observed."""
        self.scorer = scorer
        self.backward = backward
        self._scores = scores
        self._seed = seed
        self._needed = needed
        self._closed = False
        self._dimension: int | None = None
        self._missing: list[Signal] = []
        self._hungry = 0  # batches handed out since something was scored
        self._weighted = 0  # batches handed out whose weights were not all one
        self._use = Use()
        self._told: set[str] = set()
        self._unobserved: set[int] = set()
        self._underway: deque[_Underway] = deque()
        self._device: torch.device | None = None

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

    def hand_out(self, meta: Meta) -> Meta:
        """Note that the training loop gets this batch; return what it gets to know of it."""
        weights = meta.plan_weights
        if self.backward is not None and weights is None:
            weights = np.ones(len(meta), np.float32)  # observe() writes to them
        self.last = replace(meta, plan_weights=weights, use=self._use)
        self._unobserved.add(meta.token)
        if self._needed:
            self._weighted += weights is not None
            self._hungry += 1
            self._complain()
        return self.last

    def observe(self, shown: Shown, meta: Meta | None = None) -> None:
        """Take what the training loop shows of one batch; see ``Loader.observe``."""
        begin = time.perf_counter()
        meta = self._batch(meta)
        signals = shown.signals(self.scorer.needs, len(meta))
        self._check_dimension(signals.get("embeddings"))
        self._unobserved.discard(meta.token)
        self._device = next(iter(signals.values())).device
        self.step += 1
        self._drain(wait=False)
        underway = _Underway(meta, self.step - 1, start_copy(signals))
        if self.backward is not None:
            self._weigh(underway)
        self._underway.append(underway)
        self._drain(wait=False)
        self.seconds += time.perf_counter() - begin

    def rescore(self, meta: Meta, losses: Any) -> None:
        """Have a batch that is none of training's scored by its losses ``[n]``."""
        signals = start_copy(Shown(losses).signals(frozenset(), len(meta))).arrays()
        ids, signals = self._finite(meta.ids, signals)
        if len(ids):
            observation = Observation(ids, self.step, meta.epoch, **signals)
            self.scorer.update(self._scores, observation)
            if self.tracer is not None:
                self.tracer.observed(ids, signals["losses"], epoch=meta.epoch)
                self.tracer.scored(ids, self._scores.values[ids], None, True, meta.epoch)

    def weights(self) -> torch.Tensor:
        """Return the loss weights of the batch that is spoken of; see ``Loader.weights``."""
        if self.last is None:
            raise ConfigError("there is no batch yet whose weights to return: iterate first")
        if len(self._unobserved) > 1:
            raise self._ambiguous("weights")
        weights = self.last.weights
        return weights if self._device is None else weights.to(self._device, non_blocking=True)

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

    # --- which batch ---

    def _batch(self, meta: Meta | None) -> Meta:
        """Return the one batch that an observation speaks of, or raise."""
        if meta is not None:
            if not isinstance(meta, Meta):
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

    def _ambiguous(self, what: str) -> ConfigError:
        return ConfigError(
            f"{what} cannot tell which batch is meant: {len(self._unobserved)} are unobserved. "
            "Call observe() after each batch, or use return_meta=True and the meta of the batch"
        )

    def _check_dimension(self, embeddings: torch.Tensor | None) -> None:
        if embeddings is None:
            return
        dimension = embeddings.shape[1]
        if self._dimension is None:
            self._dimension = dimension
            search_on(embeddings.device, self.scorer)
        if dimension != self._dimension:
            raise ConfigError(
                f"observe() got embeddings of dimension {dimension}, and before of "
                f"{self._dimension}: give the output of one layer throughout"
            )

    # --- scoring ---

    def _weigh(self, underway: _Underway) -> None:
        """Multiply the batch's weights by those of the samples learned from."""
        assert self.backward is not None and underway.meta.plan_weights is not None
        losses = underway.copy.arrays().get("losses")
        if losses is None:
            return
        meta = underway.meta
        rng = np.random.default_rng([self._seed, meta.epoch, int(meta.positions[0])])
        weights = meta.plan_weights
        assert weights is not None
        weights *= self.backward.weights(losses, rng)

    def _drain(self, *, wait: bool) -> None:
        """Have the observations scored that have arrived, or all of them."""
        while self._underway and (wait or self._underway[0].copy.has_arrived):
            meta, step, copy = self._underway.popleft()
            self._score(meta, step, copy.arrays())

    def _score(self, meta: Meta, step: int, signals: dict[Signal, NDArray[Any]]) -> None:
        ids, signals = self._finite(meta.ids, signals)
        losses = signals.get("losses")
        if losses is not None:
            self.loss_sum += float(losses.sum())
            self.loss_count += len(losses)
            if self.tracer is not None:
                self.tracer.observed(ids, losses, meta.token)
        self._missing = sorted(self.scorer.needs - signals.keys())
        if self._missing or not len(ids):
            return
        self._hungry = 0
        self.scorer.update(self._scores, Observation(ids, step, meta.epoch, **signals))
        if not self.scorer.is_deferred:
            self._tell(ids, self.scorer.neighbours)
        self._take_scored()

    def _take_scored(self) -> None:
        """Tell what a scorer has done that works beside the training."""
        for ids, neighbours in self.scorer.take_scored():
            self._tell(ids, neighbours)

    def _tell(self, ids: NDArray[np.uint32], neighbours: Neighbours | None) -> None:
        """Tell who wants to know that these samples were scored."""
        self.on_scored(ids, neighbours, self._scores)
        if self.tracer is not None:
            self.tracer.scored(ids, self._scores.values[ids], neighbours)

    def _finite(
        self, ids: NDArray[np.uint32], signals: dict[Signal, NDArray[Any]]
    ) -> tuple[NDArray[np.uint32], dict[Signal, NDArray[Any]]]:
        """Return the samples all of whose signals are finite."""
        keep = np.ones(len(ids), np.bool_)
        for rows in signals.values():
            keep &= np.isfinite(rows) if rows.ndim == 1 else np.isfinite(rows).all(axis=1)
        if keep.all():
            return ids, signals
        self._note_non_finite(ids[~keep])
        return ids[keep], {name: rows[keep] for name, rows in signals.items()}

    # --- telling ---

    def _note_non_finite(self, ids: NDArray[np.uint32]) -> None:
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
            warnings.warn(message, RuntimeWarning, stacklevel=6)


def _ignore(ids: NDArray[np.uint32], neighbours: Neighbours | None, scores: Scores) -> None:
    """Do nothing with what was scored."""
