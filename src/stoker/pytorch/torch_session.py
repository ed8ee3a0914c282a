"""A session that feeds torch's workers: the loader inside a Loader, its order, and its iterator."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, default_collate
from torch.utils.data import Sampler as TorchSampler

from stoker.epoch.batch import BatchSpec, Request, RequestSampler
from stoker.epoch.cached import BatchMemory, OnError, check_on_error, in_order
from stoker.epoch.controller import Begun
from stoker.epoch.planner import Cursor, Walk
from stoker.epoch.rank_share import RankShare
from stoker.epoch.ranks import LazyRanks, Ranks
from stoker.epoch.session import Session
from stoker.epoch.settings import Population
from stoker.epoch.state import RankState
from stoker.errors import CapacityError, ConfigError, SegmentError
from stoker.node.memory import keep_freed_memory
from stoker.pytorch import device
from stoker.pytorch.batch_server import BatchServer, Prepared, as_it_is
from stoker.pytorch.hand_over import Envelope, HandOver, attach, private_collate
from stoker.pytorch.observe import TensorObserver

Rescore = Callable[[Any], Any]
"""The user's: takes a batch as the training loop gets it, and returns its losses ``[n]``."""

log = logging.getLogger("stoker")
_LOOK = 5.0  # seconds between two looks at who the parent is
_GRACE = 10.0  # seconds


class TorchSession:
    """Feeds torch's workers the epochs that ``session`` takes them through.

    ``outer``, where a method takes it, is the user's loader, whose workers, collate function and
    order are used; it is not kept. Used by the training process only, from one thread.
    """

    def __init__(
        self,
        session: Session,
        ranks: LazyRanks,
        on_error: OnError,
        rescore: Rescore | None,
        *,
        returns_meta: bool,
        threads: int = 0,
        target: torch.device | None = None,
    ) -> None:
        check_on_error(on_error)
        self.observer = TensorObserver(session.controller.observer)
        """Takes what training shows in tensors."""
        self.inner: InnerLoader | None = None
        """The torch loader that runs the workers."""
        self.returns_meta = returns_meta
        """Whether each batch carries its Meta."""
        self._session = session
        self._ranks = ranks
        self._on_error = on_error
        self._rescore = rescore
        self._threads = threads
        self._target = target
        self._generator_began: torch.Tensor | None = None

    def readers(self, outer: DataLoader[Any]) -> int:
        """Return how many processes or threads read batches ahead."""
        return outer.num_workers or self._threads

    def begin_epoch(self, outer: DataLoader[Any]) -> tuple[Iterator[Envelope], Walk]:
        """Begin the coming epoch; return its envelopes, and where the training loop is in it."""
        session = self._session
        self.stop_threads()
        if self.inner is None or not outer.persistent_workers:
            self.inner = self._make_inner(outer)
        if outer.generator is not None:
            self._generator_began = outer.generator.get_state()
        own = None
        if not session.controller.settings.is_planned:
            own = partial(self._own_batch_specs, outer)
        begun = session.begin(self.readers(outer), self._rescorer(outer, self.inner), own)
        with _no_collection():
            return iter(self.inner), begun.walk

    def is_redirected(self, walk: Walk) -> bool:
        """Whether ``set_epoch`` came after ``walk`` began, for another epoch."""
        controller = self._session.controller
        return walk is controller.walk and controller.share.is_redirected(walk.start)

    def batches_from(self, outer: DataLoader[Any], at: Cursor) -> int:
        """Return this rank's batches of an epoch from ``at`` on."""
        controller, size = self._session.controller, outer.batch_size
        if controller.settings.is_planned:
            return controller.share.batches(at)
        skipped = at.consumed // self._ranks.now().world_size // size if size else at.steps
        return DataLoader.__len__(outer) - skipped

    def add_stall(self, seconds: float, computed: float) -> None:
        """Count time that the training loop waited, of which its thread ``computed`` that much."""
        self._session.records.add_stall(seconds, computed)

    def receive(self, envelope: Envelope) -> Any:
        """Note what came, and return the batch as the training loop gets it."""
        controller = self._session.controller
        meta = controller.receive(envelope.meta, envelope.failures, envelope.missed)
        return attach(envelope.batch, meta) if self.returns_meta else envelope.batch

    def on_device(self, envelopes: Iterator[Envelope]) -> Iterator[Envelope]:
        """Return ``envelopes`` with their batches where the user wants them."""
        return device.on_device(envelopes, self._target)

    def arriving(self, envelopes: Iterator[Envelope]) -> Iterator[Envelope]:
        """Return the batches of an epoch as training gets them."""
        return self.on_device(self._session.held_back(envelopes))

    def end_epoch(self) -> None:
        """Close the books of the epoch in progress, if there is one."""
        self._session.controller.end()

    def save(self, outer: DataLoader[Any], batches: int | None = None) -> dict[str, Any]:
        """Return the state of this rank; see ``Loader.state_dict``."""
        walk = self._session.controller.walk
        if walk is not None and outer.num_workers > 1 and not getattr(outer, "in_order", True):
            raise ConfigError(
                "batches that come out of order are no beginning of the epoch, so there is no "
                "state in the middle of it: take it between epochs, or leave out in_order=False"
            )
        generator = self._generator_began
        if walk is None and outer.generator is not None:
            generator = outer.generator.get_state()
        state = self._session.save(None if generator is None else generator.numpy(), batches)
        return state.to_dict(tensor_of)

    def restore(self, outer: DataLoader[Any], saved: Mapping[str, Any]) -> int:
        """Continue from a state, and return its epoch; see ``Loader.load_state_dict``."""
        state = RankState.from_dict(saved, array_of)
        self._session.restore(state)
        if outer.generator is not None and state.generator is not None:
            outer.generator.set_state(torch.from_numpy(state.generator))
        return state.cursor.epoch

    def stop_threads(self) -> None:
        """Wait for the threads that make batches, if there are any; the epoch ends for them."""
        if self.inner is not None:
            self.inner.prepared.stop()

    # --- inside ---

    def _make_inner(self, outer: DataLoader[Any]) -> InnerLoader:
        session = self._session
        session.open(self.readers(outer))
        own = private_collate if outer.collate_fn is default_collate else outer.collate_fn
        hand_over = _hand_over(outer)
        served = session.server(self._on_error, self._memory(outer, own, hand_over))
        server = BatchServer(served, own, session.controller.settings.seed)
        prepared = PreparedBatches(session.requests, server, self._threads)
        return InnerLoader(outer, server, prepared, hand_over or as_it_is)

    def _memory(
        self, outer: DataLoader[Any], collate: Any, hand_over: HandOver | None
    ) -> BatchMemory | None:
        """Return where the memory of batches comes from; None: new memory."""
        if device.pins(outer) and not outer.num_workers:
            return device.PinnedMemory()
        if hand_over is None:
            return None
        assert self._session.cached is not None, "open() comes first"
        dataset = self._session.cached.dataset
        # What the user's code might keep must not be what training gets, and may write to.
        is_seen = collate is not private_collate or dataset.is_shown
        return hand_over if dataset.is_packed or not is_seen else None

    def _own_batch_specs(self, outer: DataLoader[Any], begun: Begun) -> Iterator[BatchSpec]:
        """Yield the batches that the user's sampler asks for."""
        indices: Any = outer.sampler if outer.batch_sampler is None else outer.batch_sampler
        population = self._session.setup.population
        return sampled_batch_specs(indices, population, self._ranks.now(), begun.walk.start)

    def _rescorer(
        self, outer: DataLoader[Any], inner: InnerLoader
    ) -> Callable[[NDArray[np.uint32], int], None] | None:
        """Return what has samples scored again by the user's function, if there is one."""
        rescore, session = self._rescore, self._session
        if rescore is None:
            return None

        def run(ids: NDArray[np.uint32], epoch: int) -> None:
            session.begin_aside(ids, epoch)
            for envelope in self.on_device(iter(inner)):
                self.observer.rescore(envelope.meta, rescore(envelope.batch))

        return run


class PreparedBatches:
    """The requests of an epoch, or with ``threads`` what ``server`` has prepared of them.

    A batch sampler of torch's. Threads run while an iterator is in use.
    """

    def __init__(self, requests: RequestSampler, server: BatchServer, threads: int) -> None:
        self._requests, self._server, self._threads = requests, server, threads
        self._running: weakref.ref[Any] | None = None

    def __iter__(self) -> Iterator[Request | Prepared]:
        if not self._threads:
            return iter(self._requests)
        requests = iter(self._requests)
        running = in_order(self._server.prepare, requests, self._threads, 2 * self._threads)
        self._running = weakref.ref(running)
        return running

    def stop(self) -> None:
        """End the threads of the last iterator; it yields nothing more."""
        running = None if self._running is None else self._running()
        if running is not None:
            running.close()


class InnerLoader(DataLoader[Any]):
    """Has what ``prepared`` yields served in the workers that ``outer`` asks for.

    ``hand_over`` is the collate function, of batches that are made.
    """

    def __init__(
        self,
        outer: DataLoader[Any],
        server: BatchServer,
        prepared: PreparedBatches,
        hand_over: Callable[[Any], Any],
    ) -> None:
        super().__init__(
            server,
            batch_sampler=prepared,  # type: ignore[arg-type]
            collate_fn=hand_over,
            **_same_as(outer),
            worker_init_fn=BeginWorker(outer.worker_init_fn, _start_method(outer)),
        )
        self.prepared = prepared

    def check_worker_number_rationality(self) -> None:
        """Do nothing: the outer loader has warned already."""


@contextmanager
def _no_collection() -> Iterator[None]:
    """Collect no garbage meanwhile, nor in processes forked meanwhile: see :class:`BeginWorker`."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class BeginWorker:
    """Does what the user's ``worker_init_fn`` does, if there is one, and ties a worker to training.

    A worker of torch's looks for the end of the process that it finds as its parent: it waits for
    ever where training was killed as the worker began, or where another worker was killed while
    it sent a batch. Here it ends some seconds after training in any case. A worker that is forked
    leaves what was there before it to no collection: a tensor or an event on an accelerator that
    lies in a cycle would be freed by a process which has no accelerator, and end it.
    """

    def __init__(self, then: Callable[[int], None] | None, method: str) -> None:
        self._then = then
        self._has_server = method == "forkserver"
        self._collects = gc.isenabled()
        self._is_forked = method == "fork"

    def __call__(self, worker: int) -> None:
        """Begin the worker of that number."""
        if self._is_forked:
            gc.freeze()
            if self._collects:
                gc.enable()
        keep_freed_memory()
        if self._then is not None:
            self._then(worker)
        training = multiprocessing.parent_process()
        parent = os.getppid() if training is None or self._has_server else training.pid
        threading.Thread(target=_end_after, args=(parent,), daemon=True).start()


def _end_after(parent: int | None) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK)
    time.sleep(_GRACE)  # in which torch ends it as usual
    os._exit(1)


def _hand_over(outer: DataLoader[Any]) -> HandOver | None:
    """Return the way of batches from workers; None where there are none, or torch sends them."""
    if not outer.num_workers:
        return None
    try:
        copy_of = device.pinned_copy if device.pins(outer) else None
        return HandOver(outer.num_workers, outer.prefetch_factor or 1, copy_of)
    except CapacityError as error:
        log.info("batches of workers travel as torch sends them: %s", error)
        return None


def _start_method(outer: DataLoader[Any]) -> str:
    context = outer.multiprocessing_context or multiprocessing
    return str(context.get_start_method())


def _same_as(outer: DataLoader[Any]) -> dict[str, Any]:
    names = [
        "num_workers",
        "pin_memory",
        "timeout",
        "multiprocessing_context",
        "generator",
        "prefetch_factor",
        "persistent_workers",
        "in_order",
    ]
    if outer.pin_memory_device:  # naming it is deprecated
        names.append("pin_memory_device")
    # in_order came with torch 2.6.
    return {name: getattr(outer, name) for name in names if hasattr(outer, name)}


class LoaderIterator:
    """Yields the batches of one epoch, and measures how long the training loop waits for them.

    The epoch is that which comes next, or which ``set_epoch`` names before the first batch:
    Lightning tells it only then when it resumes.
    """

    def __init__(self, session: TorchSession, loader: DataLoader[Any]) -> None:
        self._session, self._loader = session, loader
        self._envelopes: Iterator[Envelope] | None
        self._arriving: Iterator[Envelope]
        self._begin()
        self._is_fresh = True

    def __iter__(self) -> LoaderIterator:
        return self

    def __len__(self) -> int:
        """Batches that this iterator gives in all."""
        return self._session.batches_from(self._loader, self._walk.start)

    def __next__(self) -> Any:
        if self._envelopes is None:
            raise SegmentError("the loader is closed: make a new one to read on")
        begin, computed = time.perf_counter(), time.thread_time()
        try:
            envelope = next(self._directed())
        except StopIteration:
            self._session.end_epoch()
            raise
        finally:
            waited = time.perf_counter() - begin
            self._session.add_stall(waited, min(waited, time.thread_time() - computed))
        batch = self._session.receive(envelope)
        self._walk.step(len(envelope.meta))
        return batch

    def stop(self) -> None:
        """Stop the workers and let go of them; iterating further raises SegmentError."""
        # A traceback may hold torch's iterator, which stops its workers only when it is deleted,
        # and takes 5 seconds for each when the garbage collector does that.
        shutdown = getattr(self._envelopes, "_shutdown_workers", None)
        if shutdown is not None:
            shutdown()
        self._envelopes = None
        self._arriving = iter(())

    def _begin(self) -> None:
        self._envelopes, self._walk = self._session.begin_epoch(self._loader)
        self._arriving = self._session.arriving(self._envelopes)

    def _directed(self) -> Iterator[Envelope]:
        """Return the batches, begun again if they are not those of the epoch that is wanted."""
        if self._is_fresh and self._session.is_redirected(self._walk):
            if not self._loader.persistent_workers:
                self.stop()
            self._begin()
        self._is_fresh = False
        return self._arriving


class PlanSampler(TorchSampler[int]):
    """The planned order as a torch sampler, so that ``loader.sampler`` is what users expect.

    Yields this rank's indices of the loader's data set for the iteration that comes next.
    """

    def __init__(self, share: RankShare) -> None:
        self._share = share

    def __iter__(self) -> Iterator[int]:
        return self._share.indices()

    def __len__(self) -> int:
        return self._share.accesses(self._share.coming)

    def set_epoch(self, epoch: int) -> None:
        """Do as ``Loader.set_epoch``: Lightning and others tell the sampler, as in torch."""
        self._share.set_epoch(epoch)


class PlanBatches(TorchSampler[list[int]]):
    """The batches of a plan as a torch batch sampler; their order is :attr:`sampler`."""

    def __init__(self, share: RankShare) -> None:
        self.sampler = PlanSampler(share)
        self._share = share

    def __iter__(self) -> Iterator[list[int]]:
        return self._share.index_batches()

    def __len__(self) -> int:
        return self._share.batches(self._share.coming)

    def set_epoch(self, epoch: int) -> None:
        """Do as ``Loader.set_epoch``."""
        self._share.set_epoch(epoch)


class AsTensors:
    """A collate function of arrays by name, ``make``, as one of tensors in the same memory."""

    def __init__(self, make: Callable[[Sequence[Any]], Mapping[str, NDArray[Any]]]) -> None:
        self._make = make

    def __call__(self, samples: Sequence[Any]) -> dict[str, torch.Tensor]:
        """Return tensors by name; raises what ``make`` does."""
        return {name: torch.from_numpy(array) for name, array in self._make(samples).items()}


def sampled_batch_specs(
    indices: Iterable[Any], population: Population, ranks: Ranks, at: Cursor
) -> Iterator[BatchSpec]:
    """Yield the batches that a sampler of the user's asks for; it is this rank's own already.

    ``indices`` yields a list of indices of the population's view, or a single index. What lies
    before ``at`` is drawn and left out, up to the middle of a batch.
    """
    done = 0
    over = at.consumed // ranks.world_size
    for wanted in indices:
        batch = np.atleast_1d(np.asarray(wanted, np.int64))
        taken = done + np.arange(len(batch))
        done += len(batch)
        batch, taken = batch[taken >= over], taken[taken >= over]
        if len(batch):
            positions = taken * ranks.world_size + ranks.rank
            yield BatchSpec(population.ids(batch), positions, single=np.ndim(wanted) == 0)


def tensor_of(array: NDArray[Any]) -> torch.Tensor:
    """Return a tensor over the memory of ``array``."""
    return torch.from_numpy(array)


def array_of(tensor: torch.Tensor) -> NDArray[Any]:
    """Return a tensor's values, from whichever device; AttributeError for what is no tensor."""
    array: NDArray[Any] = tensor.cpu().numpy()
    return array
