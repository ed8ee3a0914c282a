"""The Feed: batches of NumPy arrays through the cache, without torch."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stoker.epoch.batch import Failure, Request, sample_seeds
from stoker.epoch.cached import Fetched, OnError, RequestServer, check_on_error, in_order
from stoker.epoch.front_end import FrontEnd
from stoker.epoch.ranks import Collective, LazyRanks, Network, alone, launched_ranks
from stoker.epoch.session import Session
from stoker.epoch.settings import (
    Cache,
    EpochSettings,
    Population,
    Size,
    as_cache,
    check_packed,
    recipe_of,
)
from stoker.epoch.setup import CacheSetup
from stoker.epoch.stage import Decode
from stoker.epoch.state import RankState
from stoker.errors import ConfigError
from stoker.feed.batch import Batch, Shown, stacked
from stoker.feed.samples import FeedSamples, Transforms
from stoker.images import split
from stoker.recipes.base import Recipe
from stoker.sampler.batching import Batching
from stoker.source.base import Source
from stoker.source.packed import Packed, pack

_REST_STREAM = 0x7265737400000000  # keeps further transforms apart from the image transform

Rescore = Callable[[Batch], ArrayLike]
"""The user's: takes a batch, and returns its losses ``[n]``."""


class Feed(FrontEnd):
    """Iterates over batches of a source, an epoch at a time, through a cache that jobs may share.

    What :class:`stoker.Loader` is to torch: the same plans, recipes, cache and prefetch, and
    arguments of the same name mean the same. ``source`` is a Source
    (:func:`stoker.source.open_source` makes one), or the path or address of images in class
    folders, whose targets are their classes. Batches are :class:`~stoker.feed.Batch`.

    - ``batching``: batches by the lengths of samples, in the place of ``batch_size``: a
      :class:`stoker.TokenBudget`, :class:`stoker.Buckets` or :class:`stoker.Packing`. The data of a
      batch are then a dictionary of arrays of tokens.
    - ``decode``: makes a sample of its bytes; without it samples are bytes, and images of class
      folders ``u8[height, width, 3]``. A dict of such functions by name for a mixture of sources
      (``stoker.mix``), of which ``mixture.origins(batch.ids)`` says where samples are from. Or
      ``"packed"``: the data of a batch are its samples' bytes one after the other, a
      :class:`stoker.source.Packed`, without the time that an object for each sample takes.
    - ``transform``: a function of the decoded sample and a ``numpy.random.Generator`` that depends
      on (seed, epoch, position in the plan) and not on threads; it must be safe in several threads.
      Or a list of such functions. The first may be :class:`stoker.images.Train` or ``Eval``, which
      decodes images and writes the pixels where the batch has them.
    - ``targets``: array-like ``[N, ...]``, one for each sample.
    - ``decode_threads``: how many read, decode and transform; 0: the caller does. ``ready``:
      batches that may be made ahead of the training loop, by default twice ``decode_threads``.
    - ``rescore``: for recipes that score samples again between epochs: from a Batch to its losses.
    - ``to_device``: what makes of the data of a batch, and of its targets, what training gets:
      ``jax.device_put``, say. The threads call it, so copies run up to ``ready`` batches ahead.
    - ``rank``, ``world_size``: by default those of torchrun or srun, else one process. Several
      ranks cannot exchange scores here: recipes that need that raise ConfigError when an epoch
      begins. Ranks read as on one node, whatever ``Cache(locality=)`` says.
    - ``progress``: show a bar of the epoch on the terminal or in the notebook, on rank 0, with
      samples a second and the share of waiting; it needs the extra ``tui``.

    Raises :class:`~stoker.errors.ConfigError` for what makes no sense, at construction;
    :class:`~stoker.errors.CapacityError` comes with the first iteration. To be used by one thread.
    """

    def __init__(
        self,
        source: Source | str | Path,
        batch_size: int | None = None,
        *,
        batching: Batching | None = None,
        decode: Decode | Mapping[str, Decode] | Literal["packed"] | None = None,
        transform: Transforms | None = None,
        targets: ArrayLike | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        decode_threads: int = 4,
        ready: int | None = None,
        cache: Cache | Size = "20%",
        recipe: str | Recipe | None = None,
        epochs: int | None = None,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        on_error: OnError = "raise",
        rescore: Rescore | None = None,
        trace: str | os.PathLike[str] | None = None,
        to_device: Callable[[Any], Any] | None = None,
        progress: bool = False,
    ) -> None:
        check_on_error(on_error)
        _check_callable(to_device)
        _check_counts(batch_size, decode_threads=decode_threads, ready=ready)
        samples = FeedSamples(source, decode, targets)
        cache = as_cache(cache)
        if samples.is_packed:
            check_packed(
                {
                    "transform": transform is not None,
                    "batching": batching is not None,
                    "Cache(stage='decoded')": cache.stage == "decoded",
                }
            )
        if not len(samples):
            raise ConfigError("the source has 0 samples: there is nothing to feed")
        if batch_size is None and batching is None:
            raise ConfigError("say what a batch is: give batch_size= or batching=")
        self.batch_size = batch_size
        self._stacked: Callable[[list[Any]], Any] = (
            stacked if batching is None else batching.collate
        )
        self._samples = samples
        samples.image_transform, self._transform = split(transform)
        self._threads = decode_threads
        self._ready = 2 * decode_threads if ready is None else ready
        self._on_error: OnError = on_error
        self._rescore = rescore
        self._to_device = to_device
        self._ranks = LazyRanks(rank, world_size, launched_ranks)
        population = Population(len(samples), mixture=samples.mixture)
        chosen = recipe_of(
            recipe,
            is_planned=True,
            shuffle=shuffle,
            rescore=rescore,
            mixture=samples.mixture,
            batching=batching,
            has_size=batch_size is not None,
        )
        self._session = Session(
            CacheSetup(samples, population, cache, chosen),
            EpochSettings(seed, epochs, batch_size or 1, shuffle, drop_last),
            self._ranks,
            Network(alone, lambda ranks: None, _join),
            rescore=rescore,
            trace=trace,
            batching=batching,
            progress=progress,
        )
        self._controller = self._session.controller
        self._share = self._controller.share
        self._running: Iterator[Batch] | None = None

    # --- iterating ---

    def __iter__(self) -> Iterator[Batch]:
        """Begin the next epoch; one that was not finished counts as used up."""
        self._check_open()
        self._stop()
        self._controller.end()
        self._session.open(self._threads)
        server = self._session.server(self._on_error)
        self._session.begin(self._threads, self._rescorer(server))
        serve = partial(self._serve, server)
        served = in_order(serve, iter(self._session.requests), self._threads, self._ready)
        self._running = self._epoch(served)
        return self._running

    def __len__(self) -> int:
        """Batches of this rank in an epoch, the same on every rank.

        Exact once the epoch has begun; before, it is by the scores known then. After
        :meth:`load_state_dict`, those that are left of the restored epoch.
        """
        walk = self._controller.walk
        return self._share.batches(self._share.coming if walk is None else walk.start)

    def end_epoch(self, accuracy: float | None = None) -> None:
        """Mark the end of an epoch, with the validation accuracy for recipes that adapt to it.

        ``accuracy`` is a share, from 0 to 1; :class:`~stoker.errors.ConfigError` for another.
        """
        self._stop()
        super().end_epoch(accuracy)

    # --- losses ---

    def observe(
        self,
        losses: ArrayLike | None = None,
        *,
        logits: ArrayLike | None = None,
        embeddings: ArrayLike | None = None,
        labels: ArrayLike | None = None,
        batch: Batch | None = None,
    ) -> None:
        """Have the samples of a batch scored by its losses ``[n]``; those really served.

        Anything that NumPy makes an array of. ``batch`` says which one; without it there must be
        exactly one that was handed out and not observed. Without ``losses``, cross entropy is
        computed from ``logits`` ``[n, ..., classes]`` and ``labels`` ``int[n, ...]``. Some recipes
        need these two for gradient norms, or ``embeddings`` ``[n, d]`` and ``labels`` for
        neighbours. Raises :class:`~stoker.errors.ConfigError` for a wrong length, when it is not
        clear which batch is meant, and for one that was observed before.
        """
        self._check_open()
        observer = self._controller.observer
        meant = observer.batch(batch)
        shown = Shown(losses, logits, labels, embeddings)
        signals = shown.signals(observer.scorer.needs, len(meant))
        if "embeddings" in signals:
            observer.begins(signals["embeddings"])
        self._controller.observe(signals, meant)

    # --- resuming ---

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """Return the state of this rank for :meth:`load_state_dict`: arrays and primitives.

        To be taken at the same step on every rank. It counts the batches that were handed out, not
        those that threads have ready, and holds copies of the scores, 24 bytes a sample.
        ``batches``: only so many of this iteration count, for frameworks that draw some ahead of
        training; what was drawn after them comes again.

        Raises :class:`~stoker.errors.ConfigError` for more than were handed out, and for fewer
        once the iteration has ended; SegmentError once the feed is closed.
        """
        self._check_open()
        return self._session.save(batches=batches).to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume where the feed that gave this state was: with the samples not yet handed out.

        The next iteration is the rest of that epoch. Threads, prefetch, cache, batch size and the
        number of ranks may have changed. Raises :class:`~stoker.errors.StateMismatch`, and changes
        nothing, for the state of another source, seed or plan.
        """
        self._check_open()
        self._stop()
        self._session.restore(RankState.from_dict(state))

    def __repr__(self) -> str:
        size = self.batch_size or "several"
        return f"<Feed of {self._session.setup}, in batches of {size} by {self._threads} threads>"

    # --- inside ---

    def _stop(self) -> None:
        """Abandon the epoch in progress; its threads end."""
        running, self._running = self._running, None
        if running is not None:
            running.close()  # type: ignore[attr-defined]

    def _epoch(self, served: Iterator[tuple[Batch, Any, Any]]) -> Iterator[Batch]:
        """Yield the batches of the epoch that has begun, and note how long they are waited for."""
        walk, records = self._controller.walk, self._session.records
        assert walk is not None
        arriving = self._session.held_back(served)
        try:
            while True:
                began, computed = time.perf_counter(), time.thread_time()
                item = next(arriving, None)
                waited = time.perf_counter() - began
                records.add_stall(waited, min(waited, time.thread_time() - computed))
                if item is None:
                    break
                batch = self._controller.receive(*item)
                walk.step(len(batch))
                yield batch
            self._controller.end()
        finally:
            served.close()  # type: ignore[attr-defined]

    def _serve(
        self, server: RequestServer, request: Request
    ) -> tuple[Batch, tuple[Failure, ...], NDArray[np.uint32] | None]:
        """Return a batch, the failures in it, and what was missed; called by the threads."""
        seeds: list[int] = []
        if self._samples.image_transform is not None or self._transform is not None:
            seed = self._controller.settings.seed
            seeds = sample_seeds(seed, request.epoch, request.positions)
        fetched, failures, missed = server.serve(request, seeds)
        targets = self._samples.targets
        placed = _unchanged if self._to_device is None else self._to_device
        batch = Batch(
            token=request.token,
            epoch=request.epoch,
            ids=fetched.ids,
            outcomes=fetched.outcomes,
            positions=request.positions,
            plan_weights=request.weights,
            data=placed(self._finished(fetched, seeds)),
            targets=None if targets is None else placed(targets[fetched.ids]),
        )
        return batch, failures, missed

    def _finished(self, fetched: Fetched, seeds: list[int]) -> Any:
        """Return the data of a batch: its samples transformed, in one array if they fit."""
        if self._samples.is_packed:
            return fetched.packed or Packed(*pack(fetched.decoded))  # some were replaced
        if self._transform is None:
            return self._stacked(fetched.decoded) if fetched.pixels is None else fetched.pixels
        if fetched.pixels is not None:  # the image transform drew from the plain seeds
            seeds = [seed ^ _REST_STREAM for seed in seeds]
        rngs = map(np.random.default_rng, seeds)
        pairs = zip(fetched.decoded, rngs, strict=True)
        return self._stacked([self._transform(*pair) for pair in pairs])

    def _rescorer(self, server: RequestServer) -> Callable[[NDArray[np.uint32], int], None] | None:
        """Return what has samples scored again by the user's function, if there is one."""
        rescore, session = self._rescore, self._session
        if rescore is None:
            return None

        def run(ids: NDArray[np.uint32], epoch: int) -> None:
            session.begin_aside(ids, epoch)
            serve = partial(self._serve, server)
            for batch, _, _ in in_order(serve, iter(session.requests), self._threads, self._ready):
                signals = Shown(rescore(batch)).signals(frozenset(), len(batch))
                self._controller.observer.rescore(batch.ids, batch.epoch, signals)

        return run


def _join(rank: int, world_size: int) -> Collective:
    """Raise ConfigError: ranks of a Feed have no network."""
    raise ConfigError(
        f"{world_size} ranks of a Feed cannot exchange scores: use a recipe that does without "
        "them, like 'foresight' or 'minio', or stoker.Loader with torch.distributed"
    )


def _check_counts(batch_size: int | None, *, decode_threads: int, ready: int | None) -> None:
    if batch_size is not None and batch_size < 1:
        raise ConfigError(f"batch_size={batch_size}: give 1 or more")
    if decode_threads < 0 or (ready is not None and ready < 0):
        raise ConfigError(f"decode_threads={decode_threads}, ready={ready}: give 0 or more")


def _check_callable(to_device: Any) -> None:
    if to_device is not None and not callable(to_device):
        raise ConfigError(f"to_device={to_device!r} cannot be called: give jax.device_put, say")


def _unchanged(arrays: Any) -> Any:
    return arrays
