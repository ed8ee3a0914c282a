"""The Loader: torch's DataLoader, fed through the cache."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, Sampler

from stoker.cluster.group import joined
from stoker.epoch.batch import ServedBatch
from stoker.epoch.cached import OnError, check_on_error
from stoker.epoch.cursor import Cursor
from stoker.epoch.ranks import LazyRanks
from stoker.epoch.session import FrontEnd, Network, Session, SessionSettings
from stoker.epoch.settings import (
    EpochSettings,
    as_scored,
    check_accuracy,
    check_epochs,
    check_own_order,
    needs_scores,
    without_accuracy,
)
from stoker.epoch.setup import CacheSetup
from stoker.epoch.state import RankState
from stoker.epoch.tracing import trace_path
from stoker.errors import ConfigError, SegmentError
from stoker.jobs.member import Sharing
from stoker.pytorch.dataset import DatasetPopulation
from stoker.pytorch.meta import Meta
from stoker.pytorch.observe import Shown
from stoker.pytorch.ranks import current_ranks, find_nodes, from_rank_zero
from stoker.pytorch.torch_session import Engine, LoaderIterator, PlanSampler, array_of, tensor_of
from stoker.recipes import as_recipe
from stoker.recipes.base import Recipe
from stoker.recipes.baselines import minio
from stoker.types import parse_bytes

log = logging.getLogger("stoker")


class Loader(FrontEnd, DataLoader[Any]):
    """A torch DataLoader whose samples come through a cache shared by workers, ranks and jobs.

    Every argument of torch's DataLoader works and means the same, except that ``shuffle=None``
    lets the recipe decide, and all recipes of this version shuffle. ``dataset`` is an
    ImageFolder, a SampleDataset, what ``wrap()`` returns, or a ``Subset`` of these, whose ids are
    then those of the base data set. Batches are exactly what torch would give.

    Order: one plan per epoch for the whole job, a function of ``seed`` and the epoch; each rank
    gets every ``world_size``-th access, equally many (filled up from the start, or cut with
    ``drop_last``). Recipes that follow scores exchange them through torch.distributed when an epoch
    begins, and raise ConfigError where ranks cannot, or make different plans. ``shuffle=False``
    visits each sample once, in order, with a static cache whatever the recipe, and fills nothing
    up, so that ranks may differ by one sample. A ``sampler`` or ``batch_sampler`` supplies this
    rank's indices instead. ``generator`` seeds the plan in place of ``seed``. Augmentation depends
    on (seed, epoch, place in the plan) and not on the workers: Python's, NumPy's and torch's global
    generators are seeded before each sample, and with ``num_workers=0`` given back afterwards.

    Further arguments:

    - ``cache``: payload bytes, ``8 << 30``, ``"8GiB"``, or a share of the visited samples' bytes,
      ``"20%"``; 0 switches it off. Memory is reserved at the first iteration.
    - ``recipe``: a name of ``stoker.recipes.names()`` or a Recipe. The default, ``"foresight"``,
      visits each sample once an epoch and keeps the smallest, and what any job needs soonest where
      several share the cache; with a sampler of one's own, whose plan is not known, ``"minio"``,
      which keeps what came first. ``"oracle"`` caches everything before the first batch, whatever
      ``cache`` says.
    - ``cache_stage``: ``"encoded"`` bytes, or ``"decoded"`` arrays (more bytes, less work; random
      transforms still come after it).
    - ``epochs``: how many there will be, for :meth:`total_steps` and recipes that change with time.
    - ``seed``: of order and augmentation, 0 to 2**64 - 1.
    - ``rank``, ``world_size``: of data parallelism; by default those of torch.distributed or
      torchrun at the first iteration.
    - ``on_error``: for samples that cannot be read or decoded: ``"raise"``, ``"skip"``, or a
      function called in the worker with a ``Failure`` that raises, or returns to skip. Skipped
      ones are replaced by samples of the same plan, so that lengths stay equal.
    - ``return_meta``: adds a ``Meta`` to each batch, under the key ``"meta"`` of a dict batch,
      else as the last element.
    - ``prefetch_bytes``: how much a process of its own may read ahead for the ranks of this
      machine, on top of the cache; no more than 5 % of the cache or a few batches; 0: nothing.
    - ``cache_dir``: a directory on a local disk, for this data set only, where a second cache lies
      below the one in memory; what is there when the next run begins is not read again.
      ``disk_cache``: its payload bytes, as ``cache``; by default all samples, or as it was made.
    - ``pool``: servers that all nodes share, ``"valkey://h1:6379,h2:6379"``, where samples are
      looked for before the source is read (``docs/pool.md``). ``pool_cache``: payload bytes that
      this data set may take there, as ``cache``; by default what the servers have.
    - ``rescore``: for recipes that rescore samples between epochs: a function that gets a
      batch as the training loop does, and returns its losses ``[n]``, without gradients. Without
      it these go by the scores of last visits, with a warning.
    - ``locality``: with ranks on several nodes, each sample has one node that keeps it, and ranks
      prefer samples of their node, as far as each step of all ranks has the samples that the plan
      has there. False: ranks divide each step as on one node, and nodes keep what they read.
    - ``sharing``: a :class:`~stoker.jobs.Sharing`, how this job and others that share its cache
      agree on who stays in it, and its name in ``stoker ls``.
    - ``trace``: a file in which each rank writes down what was visited, how it was served, and how
      it was scored (``path``, ``path.1`` ...), for ``stoker simulate --trace``; about 8 bytes a
      visit. A resumed run appends to its trace. If the file cannot be written, there is
      one warning, and training continues.

    Raises :class:`~stoker.errors.ConfigError` for what makes no sense, at construction, and
    ValueError where torch does. :class:`~stoker.errors.CapacityError` comes with the first
    iteration. To be used by one thread; workers may be started by fork, spawn or forkserver.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        cache: int | float | str = "20%",
        recipe: str | Recipe | None = None,
        cache_stage: str = "encoded",
        epochs: int | None = None,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        on_error: OnError = "raise",
        return_meta: bool = False,
        cache_dir: str | os.PathLike[str] | None = None,
        disk_cache: int | float | str | None = None,
        pool: str | None = None,
        pool_cache: int | float | str | None = None,
        rescore: Any = None,
        prefetch_bytes: int | float | str = "256MiB",
        locality: bool = True,
        sharing: Sharing | None = None,
        trace: str | os.PathLike[str] | None = None,
        **torch_arguments: Any,
    ) -> None:
        check_on_error(on_error)
        check_epochs(epochs)
        sharing = sharing or Sharing()
        self._population = DatasetPopulation(dataset)
        own_order = sampler is not None or batch_sampler is not None
        self._recipe = as_recipe(recipe, is_planned=not own_order)
        if own_order:
            check_own_order(self._recipe)
        if shuffle is False and not own_order and not self._recipe.preload:
            self._recipe = minio()
        self._recipe = as_scored(self._recipe, rescore)
        setup = CacheSetup(
            self._population.base,
            self._population,
            cache,
            self._recipe,
            cache_stage,
            cache_dir,
            disk_cache,
            pool,
            pool_cache,
        )
        self._ranks = LazyRanks(rank, world_size, current_ranks)
        self._seed = seed if generator is None else generator.initial_seed() % 2**64
        self._session = Session(
            setup,
            EpochSettings(
                seed=self._seed,
                epochs=epochs,
                batch_size=batch_size,
                shuffle=shuffle is not False,
                drop_last=drop_last,
                is_planned=not own_order,
                needs_scores=needs_scores(self._recipe),
                ranks_substitute=self._recipe.substitution is not None,
                without_accuracy="" if own_order else without_accuracy(self._recipe),
                probe=sharing.probe,
            ),
            SessionSettings(
                parse_bytes(prefetch_bytes, name="prefetch_bytes"),
                sharing,
                locality,
                trace_path(trace),
            ),
            self._ranks,
            Network(from_rank_zero, find_nodes, joined),
            rescore,
        )
        self._controller = self._session.controller
        self._share = self._controller.share
        super().__init__(
            dataset,
            batch_size,
            shuffle if own_order else None,
            sampler if own_order else PlanSampler(self._share),
            batch_sampler,
            num_workers,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            **torch_arguments,
        )
        self._own_order = own_order
        self._return_meta = return_meta
        self._epochs = epochs
        self._engine = Engine(
            self._session,
            self._ranks,
            on_error=on_error,
            rescore=rescore,
            returns_meta=return_meta,
        )
        self._running: weakref.ref[LoaderIterator] | None = None
        self._closed = False

    # --- iterating ---

    def __iter__(self) -> LoaderIterator:  # type: ignore[override]
        """Begin the next epoch; one that was not finished counts as used up."""
        self._check_open()
        self._controller.end()
        self._session.open(self.num_workers)
        iterator = LoaderIterator(self._engine, self)
        self._running = weakref.ref(iterator)
        return iterator

    def __len__(self) -> int:
        """Batches of this rank in an epoch, the same on every rank.

        Exact once the epoch has begun; before, it is by the scores that ranks agreed on last.

        After :meth:`load_state_dict`, those that are left of the restored epoch; once it is being
        iterated, the whole of it again, with the batches handed out before the state was saved
        (Lightning counts so), while ``len(iter(loader))`` stays what is left.
        """
        walk = self._controller.walk
        if walk is None:
            return self._engine.batches_from(self, self._share.coming)
        return walk.start.steps + self._engine.batches_from(self, walk.start)

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration that of ``epoch``, from 0; a sampler of one's own is told too.

        Optional: iterating again advances by itself. The restored epoch resumes;
        another one leaves its rest out, with a warning. ConfigError for a negative epoch.
        """
        self._share.set_epoch(epoch)
        self._tell_epoch(epoch)

    def total_steps(self) -> int:
        """Return the batches of this rank in all ``epochs``; ConfigError if they were not given.

        Where the length of an epoch depends on scores, what a schedule is best laid out by.
        """
        if self._epochs is None:
            raise ConfigError("total_steps() needs the number of epochs: give the Loader epochs=")
        if self._own_order:
            return self._engine.batches_from(self, Cursor()) * self._epochs
        return self._share.planned_batches(self._epochs)

    def end_epoch(self, accuracy: float | None = None) -> None:
        """Mark the end of an epoch, with the validation accuracy for recipes that adapt to it.

        ``accuracy`` is a share, from 0 to 1. Where only some ranks tell it, all take the mean of
        theirs when the next epoch begins. A recipe that adapts to it and is told none warns once.
        Waits for losses that are still being copied. Raises
        :class:`~stoker.errors.ConfigError` for an accuracy out of range.
        """
        self._check_open()
        accuracy = None if accuracy is None else check_accuracy(accuracy)
        self._controller.end()
        self._controller.tell(accuracy)
        told = "" if accuracy is None else f", accuracy {accuracy:.4f}"
        if self._session.records.epochs:
            last = self._session.records.epochs[-1]
            epoch = self._session.records.epoch
            log.info("epoch %d%s: %s; %s", epoch, told, last.summary, last.verdict)

    # --- losses ---

    def observe(
        self,
        losses: Any = None,
        *,
        logits: torch.Tensor | None = None,
        embeddings: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        meta: Meta | None = None,
    ) -> None:
        """Have the samples of a batch scored by its losses ``[n]``; those really served.

        ``meta`` says which batch (``return_meta=True``); without it there must be exactly one
        that was handed out and not observed. Without ``losses``, cross entropy is computed from
        ``logits`` and ``labels``, as by :func:`per_sample_loss`. Some recipes need these two for
        gradient norms, or ``embeddings`` ``[n, d]`` and ``labels`` for neighbours; what a recipe
        does not need is not looked at. Everything is computed where it lies, and copied from an
        accelerator while that continues to compute. A sample whose loss, gradient or embedding is
        not finite keeps its score, is counted in ``stats.non_finite`` and warned of once. A
        recipe that gets nothing to score by for 100 batches says so once, and visits samples
        uniformly.

        Raises :class:`~stoker.errors.ConfigError` for a wrong length, embeddings of another
        dimension than before, when it is not clear which batch is meant, and for a batch observed
        before.
        """
        self._check_open()
        self._engine.observer.observe(Shown(losses, logits, labels, embeddings), meta)

    @property
    def returns_meta(self) -> bool:
        """Whether each batch carries its Meta."""
        return self._return_meta

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Asked for by ``accelerator.prepare()``, which would make a plain DataLoader of it."""
        raise ConfigError(
            "accelerator.prepare() would read around the cache: use "
            "stoker.pytorch.integrations.accelerate.prepare(loader, accelerator)"
        )

    @property
    def weights(self) -> torch.Tensor:
        """Loss weights ``float32[n]`` of the latest batch, all ones unless the recipe reweights.

        A recipe that learns from a part of each batch sets them in :meth:`observe`. Lies where the
        losses observed last lay. ConfigError when several batches are unobserved, as it is then
        unclear which one is meant: use ``meta.weights``.
        """
        return self._engine.observer.weights()

    @property
    def last_ids(self) -> NDArray[np.uint32]:
        """The samples really served in the latest batch, ``u32[n]``."""
        return self._last().ids

    @property
    def last_outcomes(self) -> NDArray[np.int8]:
        """How each sample of the latest batch was served, ``i8[n]`` of ``stoker.Outcome``."""
        return self._last().outcomes

    # --- resuming in another run ---

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank for :meth:`load_state_dict`: tensors and primitives.

        To be taken at the same step on every rank. It counts the batches that the iterator has
        handed out, not those that workers have ready, and holds copies of the scores, 24 bytes a
        sample. An abandoned epoch can be resumed until the next iteration begins or
        :meth:`end_epoch` is called. With a recipe that serves other samples than the plan has, it
        holds those really served to all ranks of this node, which are waited for, 10 seconds at
        most. SegmentError once the loader is closed; ConfigError in the middle of an epoch whose
        batches come out of order (``in_order=False``).
        """
        self._check_open()
        return self._engine.save(self).to_dict(tensor_of)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume where the loader that gave this state was: with the samples not yet handed out.

        The next iteration is the rest of that epoch, none if nothing is left. Workers, prefetch,
        cache, batch size and the number of ranks may have changed: the rest of the plan is
        divided again, and filled up or cut so that ranks stay equal. Order and augmentation are
        those of an uninterrupted run. A sampler of one's own is told the epoch and must give the
        same again, on as many ranks; what was handed out is skipped. A wrapped data set without a
        name is known by its class and length only. Ranks may all load the state of one of them:
        scores and counts are then those of that rank.

        Raises :class:`~stoker.errors.StateMismatch`, and changes nothing, for the state of
        another data set, seed or plan, or of another version of the format. The first iteration
        raises it where the states that ranks loaded do not say together what was really served.
        """
        self._check_open()
        state = RankState.from_dict(state_dict, array_of)
        self._engine.restore(self, state)
        self._tell_epoch(state.cursor.epoch)

    # --- the end ---

    def close(self) -> None:
        """Stop the workers and let go of the cache, which lives on while another job has it.

        May be called again; also done by ``with``, and by the system when the process dies.
        """
        if self._closed:
            return
        self._controller.end()
        self._closed = True
        iterator = self._running() if self._running is not None else None
        if iterator is not None:
            iterator.stop()
        self._engine.close()

    def __repr__(self) -> str:
        return (
            f"<Loader of {self._session.setup}, in batches of {self.batch_size} "
            f"by {self.num_workers} workers>"
        )

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # --- inside ---

    def _tell_epoch(self, epoch: int) -> None:
        """Tell a sampler of the user's which epoch comes next."""
        if self._own_order:
            for own in (self.sampler, self.batch_sampler):
                told = getattr(own, "set_epoch", None)
                if told is not None:
                    told(epoch)

    def _check_open(self) -> None:
        if self._closed:
            raise SegmentError("the loader is closed: make a new one")

    def _last(self) -> ServedBatch:
        last = self._controller.observer.last
        if last is None:
            raise ConfigError("there is no batch yet in this epoch: iterate first")
        return last
