"""The Loader: torch's DataLoader, fed through the cache."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, Sampler

from stoker.epoch.batch import ServedBatch
from stoker.epoch.cached import OnError
from stoker.epoch.front_end import FrontEnd
from stoker.epoch.planner import Cursor
from stoker.epoch.ranks import LazyRanks, Network
from stoker.epoch.session import Session
from stoker.epoch.settings import Cache, EpochSettings, Size, as_cache, check_packed, recipe_of
from stoker.epoch.setup import CacheSetup
from stoker.errors import ConfigError
from stoker.pytorch.dataset import DatasetPopulation
from stoker.pytorch.device import Device, checked_target, is_accelerator
from stoker.pytorch.hand_over import Meta
from stoker.pytorch.observe import Shown
from stoker.pytorch.ranks import current_ranks, find_nodes, from_rank_zero, joined
from stoker.pytorch.torch_session import (
    AsTensors,
    LoaderIterator,
    PlanBatches,
    PlanSampler,
    Rescore,
    TorchSession,
)
from stoker.recipes.base import Recipe
from stoker.sampler.batching import Batching


class Loader(FrontEnd, DataLoader[Any]):
    """A torch DataLoader whose samples come through a cache shared by workers, ranks and jobs.

    Every argument of torch's DataLoader means the same, those not named here included, but for two:
    ``shuffle=None`` lets the recipe decide, and all recipes of this version shuffle; ``generator``
    goes with a sampler of one's own only. ``dataset`` is an ImageFolder, a SampleDataset, what
    ``wrap()`` returns, a ``Subset`` of these, whose ids are then those of the base data set, or
    what ``stoker.mix`` makes of several. Batches are exactly what torch would give.

    Order: one plan per epoch for the whole job, a function of ``seed`` and the epoch; each rank
    gets every ``world_size``-th access, equally many (filled up from the start, or cut with
    ``drop_last``). Recipes that follow scores exchange them through torch.distributed when an epoch
    begins, and raise ConfigError where ranks cannot, or make different plans. ``shuffle=False``
    visits each sample once, in order, with a static cache whatever the recipe, and fills nothing
    up, so that ranks may differ by one sample. A ``sampler`` or ``batch_sampler`` supplies this
    rank's indices instead. Augmentation depends on (seed, epoch, position in the plan) and not on
    workers: Python's, NumPy's and torch's global generators are seeded before each sample, and with
    ``num_workers=0`` given back afterwards.

    Further arguments:

    - ``batching``: batches by the lengths of samples, in the place of ``batch_size``: a
      :class:`stoker.TokenBudget`, :class:`stoker.Buckets` or :class:`stoker.Packing`. Without a
      ``collate_fn``, batches are dictionaries of tensors of tokens.
    - ``cache``: memory as payload bytes, ``8 << 30``, ``"8GiB"``, or as a share of the bytes of the
      visited samples, ``"20%"``; 0 switches it off. A :class:`stoker.Cache` says more: a disk and a
      pool below it, decoded samples, what is read ahead, how jobs and nodes share it. Memory is
      reserved at the first iteration.
    - ``recipe``: a name of ``stoker.recipes.names()`` or a Recipe. The default, ``"foresight"``,
      visits each sample once an epoch and keeps the smallest, and what any job needs soonest where
      several share the cache; with a sampler of one's own, whose plan is not known, ``"minio"``,
      which keeps what came first. ``"oracle"`` caches everything before the first batch, whatever
      ``cache`` says.
    - ``epochs``: how many there will be, for :meth:`total_steps` and recipes that change with time.
    - ``seed``: of order and augmentation, 0 to 2**64 - 1.
    - ``rank``, ``world_size``: of data parallelism; by default those of torch.distributed or
      torchrun at the first iteration.
    - ``on_error``: for samples that cannot be read or decoded: ``"raise"``, ``"skip"``, or a
      function called in the worker with a ``Failure`` that raises, or returns to skip. Skipped
      ones are replaced by samples of the same plan, so that lengths stay equal.
    - ``return_meta``: adds a ``Meta`` to each batch, under the key ``"meta"`` of a dict batch,
      else as the last element.
    - ``decode_threads``: with ``num_workers=0``, so many threads of this process read and decode up
      to twice as many batches ahead, without a worker process; an image transform of
      ``stoker.images`` runs there too. Other transforms run in the training thread, as the random
      numbers of the process belong to it. ``decode`` and ``on_error`` must be safe in threads.
    - ``pin_memory``: also a device, ``"cuda"`` say: batches are pinned, and copied there one batch
      ahead, while training computes. Tensors in tuples, lists and dicts move, ``meta`` stays on the
      host; with ``"cpu"`` all does.
    - ``rescore``: for recipes that rescore samples between epochs: a function that gets a
      batch as the training loop does, and returns its losses ``[n]``, without gradients. Without
      it these go by the scores of last visits, with a warning.
    - ``trace``: a file in which each rank writes down what was visited, how it was served, and how
      it was scored (``path``, ``path.1`` ...), for ``stoker simulate --trace``; about 8 bytes a
      visit. A resumed run appends to its trace. If the file cannot be written, there is
      one warning, and training continues.
    - ``progress``: show a bar of the epoch on the terminal or in the notebook, on rank 0, with
      samples a second and the share of waiting; it needs the extra ``tui``.

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
        pin_memory: bool | Device = False,
        drop_last: bool = False,
        *,
        batching: Batching | None = None,
        cache: Cache | Size = "20%",
        recipe: str | Recipe | None = None,
        epochs: int | None = None,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        on_error: OnError = "raise",
        return_meta: bool = False,
        decode_threads: int = 0,
        rescore: Rescore | None = None,
        trace: str | os.PathLike[str] | None = None,
        progress: bool = False,
        **torch_arguments: Any,
    ) -> None:
        _check_threads(decode_threads, num_workers)
        target = checked_target(pin_memory)
        is_planned = sampler is None and batch_sampler is None
        if is_planned:
            _check_no_generator(torch_arguments.get("generator"))
        in_order = shuffle is False
        population = DatasetPopulation(dataset)
        chosen = recipe_of(
            recipe,
            is_planned=is_planned,
            shuffle=not in_order,
            rescore=rescore,
            mixture=population.mixture,
            batching=batching,
            has_size=batch_size != 1,
        )
        cache = as_cache(cache)
        if population.base.is_packed:
            check_packed(
                {
                    "collate_fn": collate_fn is not None,
                    "batching": batching is not None,
                    "batch_size=None": batch_size is None,
                    "Cache(stage='decoded')": cache.stage == "decoded",
                }
            )
        ranks = LazyRanks(rank, world_size, current_ranks)
        self._session = Session(
            CacheSetup(population.base, population, cache, chosen),
            EpochSettings(seed, epochs, batch_size, not in_order, drop_last, is_planned),
            ranks,
            Network(from_rank_zero, find_nodes, joined),
            rescore=rescore,
            trace=trace,
            batching=batching,
            progress=progress,
        )
        if batching is not None:
            batch_sampler, drop_last = PlanBatches(self._session.controller.share), False
            collate_fn = collate_fn or AsTensors(batching.collate)
        elif is_planned:
            sampler = PlanSampler(self._session.controller.share)
        self._torch = TorchSession(
            self._session,
            ranks,
            on_error,
            rescore,
            returns_meta=return_meta,
            threads=decode_threads,
            target=target,
        )
        self._running: weakref.ref[LoaderIterator] | None = None
        super().__init__(
            dataset,
            batch_size,
            None if is_planned else shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn,
            pin_memory is True or is_accelerator(target),
            drop_last,
            **torch_arguments,
        )

    # --- iterating ---

    def __iter__(self) -> LoaderIterator:  # type: ignore[override]
        """Begin the next epoch; one that was not finished counts as used up."""
        self._check_open()
        self._session.controller.end()
        self._session.open(self._torch.readers(self))
        iterator = LoaderIterator(self._torch, self)
        self._running = weakref.ref(iterator)
        return iterator

    def __len__(self) -> int:
        """Batches of this rank in an epoch, the same on every rank.

        Exact once the epoch has begun; before, it is by the scores that ranks agreed on last.

        After :meth:`load_state_dict`, those that are left of the restored epoch; once it is being
        iterated, the whole of it again, with the batches handed out before the state was saved
        (Lightning counts so), while ``len(iter(loader))`` stays what is left.
        """
        controller = self._session.controller
        walk = controller.walk
        if walk is None:
            return self._torch.batches_from(self, controller.share.coming)
        return walk.start.steps + self._torch.batches_from(self, walk.start)

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration that of ``epoch``, from 0; a sampler of one's own is told too.

        Optional: iterating again advances by itself. A restored epoch resumes; another one leaves
        its rest out, with a warning. ConfigError for a negative epoch.
        """
        super().set_epoch(epoch)
        self._tell_epoch(epoch)

    def total_steps(self) -> int:
        """Return the batches of this rank in all ``epochs``; ConfigError if they were not given.

        Where the length of an epoch depends on scores, what a schedule is best laid out by.
        """
        if self._is_planned:
            return super().total_steps()
        return self._torch.batches_from(self, Cursor()) * self._known_epochs()

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
        self._torch.observer.observe(Shown(losses, logits, labels, embeddings), meta)

    @property
    def returns_meta(self) -> bool:
        """Whether each batch carries its Meta."""
        return self._torch.returns_meta

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
        return self._torch.observer.weights()

    @property
    def last_ids(self) -> NDArray[np.uint32]:
        """The samples really served in the latest batch, ``u32[n]``."""
        return self._last().ids

    @property
    def last_outcomes(self) -> NDArray[np.int8]:
        """How each sample of the latest batch was served, ``i8[n]`` of ``stoker.Outcome``."""
        return self._last().outcomes

    # --- resuming in another run ---

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """Return the state of this rank for :meth:`load_state_dict`: tensors and primitives.

        To be taken at the same step on every rank. It counts the batches that the iterator has
        handed out, not those that workers have ready, and holds copies of the scores, 24 bytes a
        sample. An abandoned epoch can be resumed until the next iteration begins or
        :meth:`end_epoch` is called. With a recipe that serves other samples than the plan has, it
        holds those really served to all ranks of this node, which are waited for, 10 seconds at
        most. ``batches``: only so many of this iteration count, for frameworks that draw some ahead
        of training; what was drawn after them comes again.

        Raises SegmentError once the loader is closed; ConfigError in the middle of an epoch whose
        batches come out of order (``in_order=False``), for more ``batches`` than were handed out,
        and for fewer with a sampler of one's own or once the iteration has ended.
        """
        self._check_open()
        return self._torch.save(self, batches)

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
        self._tell_epoch(self._torch.restore(self, state_dict))

    def __repr__(self) -> str:
        size = self.batch_size or "several"
        return (
            f"<Loader of {self._session.setup}, in batches of {size} by {self.num_workers} workers>"
        )

    # --- inside ---

    def _tell_epoch(self, epoch: int) -> None:
        """Tell a sampler of the user's which epoch comes next."""
        if not self._is_planned:
            for own in (self.sampler, self.batch_sampler):
                told = getattr(own, "set_epoch", None)
                if told is not None:
                    told(epoch)

    @property
    def _is_planned(self) -> bool:
        """Whether epochs are planned here; else a sampler of the user's gives the order."""
        return self._session.controller.settings.is_planned

    def _stop(self) -> None:
        iterator = None if self._running is None else self._running()
        if iterator is not None:
            iterator.stop()
        self._torch.stop_threads()
        self._torch.inner = None

    def _last(self) -> ServedBatch:
        last = self._session.controller.observer.last
        if last is None:
            raise ConfigError("there is no batch yet in this epoch: iterate first")
        return last


def _check_no_generator(generator: torch.Generator | None) -> None:
    """Raise ConfigError for the generator of an order that is drawn from the seed."""
    if generator is not None:
        seed = generator.initial_seed() % 2**64
        raise ConfigError(
            "generator= goes with a sampler of your own; otherwise the seed decides the order: "
            f"give seed={seed} in its place"
        )


def _check_threads(decode_threads: int, num_workers: int) -> None:
    if decode_threads < 0 or (decode_threads and num_workers):
        raise ConfigError(
            f"decode_threads={decode_threads}, num_workers={num_workers}: give 0 or more threads, "
            "and none beside worker processes"
        )
