"""Samples served through a Store, a batch at a time, in threads; what replaces those that fail."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import chain, islice
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from stoker.epoch.batch import Failure, Request
from stoker.epoch.read_ahead import DirectReading
from stoker.epoch.stage import Samples, Stage
from stoker.errors import ConfigError, SampleCorrupt, SourceError
from stoker.images import Canvas
from stoker.prefetch.walk import Progress
from stoker.source.packed import Packed
from stoker.store.claims import ASIDE, Served, Turns
from stoker.store.registry import SharedArena, SharedArrays
from stoker.store.store import Store
from stoker.store.tier import Into, Keys, NullTier
from stoker.types import Outcome

TOGETHER = 16  # images at once: those that a data set decodes itself take memory meanwhile

_Request = TypeVar("_Request")
_Served = TypeVar("_Served")


class Fetched(NamedTuple):
    """A batch before its transforms."""

    ids: NDArray[np.uint32]
    """``u32[n]``, the samples really served."""
    decoded: list[Any]
    """What the transforms work on; None where there is an error."""
    outcomes: NDArray[np.int8]
    """``i8[n]``, a :class:`~stoker.types.Outcome` per sample."""
    errors: dict[int, SourceError]
    """Place in the batch -> why that sample cannot be used."""
    pixels: NDArray[np.uint8] | None = None
    """``u8[n, ...]``, of which ``decoded`` are views, where an image transform wrote them."""
    packed: Packed | None = None
    """All bytes, in the place of ``decoded``, where that was asked for and there is no error."""


class CachedSamples:
    """The samples of ``dataset``, served through ``store`` a batch at a time.

    Worker processes of any start method share the store's cache; safe in any thread as far as
    decoding is.
    """

    def __init__(
        self,
        dataset: Samples,
        store: Store,
        stage: Stage,
        shared: Sequence[SharedArena | SharedArrays] = (),
    ) -> None:
        self.dataset = dataset
        self.store = store
        self.stage = stage
        self.shared = shared
        """What this process opened for it, closed with it."""

    def fetch(
        self,
        ids: NDArray[np.uint32],
        keys: Keys = None,
        turns: Turns | None = None,
        canvas: Canvas | None = None,
        *,
        packed: bool = False,
        into: Into = None,
        copied: Callable[[], None] | None = None,
    ) -> Fetched:
        """Return samples ``u32[n]`` before their transforms, with one call of the store.

        ``keys`` are those of the cache policy after these accesses, and ``turns`` which ones of
        the epoch they are; None: some of the epoch in progress. With a ``canvas`` for ``n`` images
        each sample becomes its row there; with ``packed`` a batch without
        errors stays bytes, of which no objects are made, and which may lie in ``into``. ``copied``
        is called before anything is decoded, when cached copies are needed no more. A cached copy
        that does not decode is a miss. What cannot be read or decoded is reported in ``errors``;
        what cannot be decoded does not stay in the cache, as a later read may bring better bytes.
        """
        served = self.store.serve(ids, keys, turns, into)
        if copied is not None:
            copied()
        if packed and not served.errors:
            whole = Packed(served.data, served.offsets)
            return Fetched(served.ids, [], served.outcomes, {}, packed=whole)
        decoded, corrupt = self._decoded(served, range(len(served)), canvas)
        outcomes = served.outcomes
        errors = {**served.errors, **corrupt}
        copies = [row for row in corrupt if self._was_copy(outcomes[row])]
        if copies:
            again = self.store.reread(served, copies)
            outcomes = outcomes.copy()
            outcomes[copies] = again.outcomes
            values, corrupt = self._decoded(again, copies, canvas)
            failed = {**again.errors, **corrupt}
            for slot, row in enumerate(copies):
                decoded[row] = values[slot]
                del errors[row]
                if slot in failed:
                    errors[row] = failed[slot]
        useless = errors.keys() - served.errors.keys()
        if useless:
            self.store.discard(served.ids[list(useless)])
        if self.dataset.is_audited:
            hits = np.setdiff1d(np.flatnonzero(outcomes == Outcome.HIT), list(errors))
            self.dataset.audit(served.ids[hits], [decoded[row] for row in hits])
        pixels = None if canvas is None else canvas.pixels
        return Fetched(served.ids, decoded, outcomes, errors, pixels)

    def _decoded(
        self, served: Served, rows: Sequence[int], canvas: Canvas | None
    ) -> tuple[list[Any], dict[int, SourceError]]:
        """Return each sample, None where there is an error, and what does not decode.

        ``rows`` are theirs on the canvas.
        """
        decoded: list[Any] = [None] * len(served)
        corrupt: dict[int, SourceError] = {}
        data, bounds, ids = served.data.data, served.offsets.tolist(), served.ids.tolist()
        own = {
            row: data[bounds[row] : bounds[row + 1]]
            for row in range(len(served))
            if row not in served.errors
        }
        if canvas is not None:
            failed = self._drawn({rows[row]: (ids[row], each) for row, each in own.items()}, canvas)
            for row in own:
                if (error := failed.get(rows[row])) is None:
                    decoded[row] = canvas.pixels[rows[row]]
                else:
                    corrupt[row] = self.dataset.named(ids[row], error)
                    corrupt[row].__cause__ = error
            return decoded, corrupt
        for row, each in own.items():
            try:
                decoded[row] = self.stage.decoded(ids[row], each)
            except SampleCorrupt as reason:
                corrupt[row] = reason
        return decoded, corrupt

    def _drawn(
        self, data: dict[int, tuple[int, memoryview]], canvas: Canvas
    ) -> dict[int, SampleCorrupt]:
        """Fill rows of the canvas with samples, id and bytes; return why some cannot be filled."""
        failed = {}
        places = iter(data.items())
        while group := list(islice(places, TOGETHER)):
            drawings = {}
            for row, sample in group:
                try:
                    drawings[row] = canvas.begin(row, self.stage.image(*sample))
                except SampleCorrupt as error:
                    failed[row] = error
            failed.update(canvas.finish(drawings))
        return failed

    def _was_copy(self, outcome: int) -> bool:
        """Whether the bytes may be others than the source has."""
        return outcome != Outcome.FETCHED or self.store.pool is not None

    def aside(self) -> CachedSamples:
        """Return the same samples through the same cache, for reads that are not training's.

        They are counted apart, and never served by another sample. It need not be closed.
        """
        stage = self.stage
        store = Store(
            stage.source,
            self.store.tier,
            pool=self.store.pool,
            originals=stage.originals,
            fetch_share=self.store.fetch_share,
        )
        return CachedSamples(self.dataset, store, self.stage)

    def past_the_cache(self) -> CachedSamples:
        """Return the same samples without the cache, claimed and counted with these.

        None is served by another one but where that is its turn. It need not be closed.
        """
        own = self.store
        store = Store(
            self.stage.source,
            NullTier(own.tier.regions),
            places=own.places,
            substitution=None if own.claims is None else own.substitution,
            claims=own.claims,
            originals=self.stage.originals,
            fetch_share=own.fetch_share,
        )
        store.counters = own.counters
        return CachedSamples(self.dataset, store, self.stage)

    def close(self) -> None:
        """Let go of the cache; reading afterwards raises SegmentError. May be called again."""
        self.store.close()
        for shared in self.shared:
            shared.close()

    def __getstate__(self) -> dict[str, Any]:
        # Being found by other jobs is the part of the process that opened the cache.
        return {**self.__dict__, "shared": ()}

    def __len__(self) -> int:
        return len(self.dataset)


class Counts:
    """What was counted for one rank: in its store, its stage, and reads that are not training's.

    Called, it returns counts by name for :class:`~stoker.epoch.stats.Stats`; ``aside`` are the
    samples for such reads, where there are any.
    """

    def __init__(self, cached: CachedSamples, aside: CachedSamples | None, data_bytes: int) -> None:
        self.workers = 0
        """Processes or threads that make batches."""
        self.direct: DirectReading | None = None
        """Who says what is read past the cache, where that may be."""
        self._cached = cached
        self._aside = aside
        self._data_bytes = data_bytes

    def __call__(self) -> dict[str, Any]:
        """Return the counts of this rank and its workers."""
        counters = self._cached.store.stats()
        apart = {} if self._aside is None else self._aside.store.counters.totals()
        stored = counters["bytes_from_source"] + int(apart.get("bytes_from_source", 0))
        return {
            **counters,
            "bytes_from_source": self._cached.stage.bytes_from_source(stored),
            "rescored": int(apart.get("accesses", 0)),
            "data_bytes": self._data_bytes,
            "workers": self.workers,
            "direct": 0 if self.direct is None else self.direct.samples,
        }


OnError = Literal["raise", "skip"] | Callable[[Failure], Any]
"""``"raise"``; ``"skip"``; or a function that is called in the worker and raises, or returns to
skip the sample."""


def check_on_error(on_error: Any) -> None:
    """Raise ConfigError unless it is an :data:`OnError`."""
    if on_error not in ("raise", "skip") and not callable(on_error):
        raise ConfigError(f"on_error={on_error!r} is not known: use 'raise', 'skip' or a function")


class BatchMemory:
    """Where the memory of batches comes from: NumPy's for images, the cache's own for bytes."""

    def pixels(self, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        """Return new memory for the images of a batch, ``u8`` of that shape."""
        return np.empty(shape, np.uint8)

    def data(self, num_bytes: int) -> Into:
        """Return new memory for the bytes of a batch, ``u8[num_bytes]``, if there is any."""
        return None


class Replacer:
    """Fetches a batch and puts other samples in the place of those that failed.

    A replacement is what the same rank's plan gave just before the batch, in that order, then
    the good samples of the batch itself: the same whatever the number of workers, never a sample
    that is not in the plan, and the batch keeps its length. Passed to worker processes with
    ``on_error``, which has to pickle for spawn and forkserver.
    """

    def __init__(self, cached: CachedSamples, on_error: OnError, memory: BatchMemory) -> None:
        self._cached = cached
        self._on_error = on_error
        self._memory = memory

    def fetch(
        self, request: Request, seeds: Sequence[int], copied: Callable[[], None] | None = None
    ) -> tuple[Fetched, tuple[Failure, ...]]:
        """Return the samples really served, and what had to be replaced.

        If the data set has an image transform, samples are what it makes of them, in one array
        after the other; ``seeds`` are those of the ``n`` rows. ``copied`` is called when the cached
        copies of the samples that were asked for are needed no more.

        Raises the :class:`~stoker.errors.SourceError` of a sample that is not to be skipped, or
        that nothing can replace.
        """
        turns = Turns(request.stamp, request.positions)
        transform = self._cached.dataset.image_transform
        canvas = into = None
        if transform is not None:
            canvas = Canvas(transform, seeds, self._memory.pixels((len(seeds), *transform.shape)))
        is_packed = self._cached.dataset.is_packed
        if is_packed:
            into = self._memory.data(int(self._cached.store.source.sizes[request.ids].sum()))
        fetched = self._cached.fetch(
            request.ids, request.keys, turns, canvas, packed=is_packed, into=into, copied=copied
        )
        if not fetched.errors:
            return fetched, ()
        ids = fetched.ids.copy()
        outcomes = fetched.outcomes.copy()
        failures = tuple(
            self._excused(int(ids[row]), error) for row, error in sorted(fetched.errors.items())
        )
        spares = self._spares(request, fetched)
        for row, error in sorted(fetched.errors.items()):
            own = None if canvas is None else canvas.at([row])
            ids[row], fetched.decoded[row] = self._next_good(spares, error, own)
            outcomes[row] = Outcome.SUBSTITUTED
        return fetched._replace(ids=ids, outcomes=outcomes, errors={}), failures

    def _excused(self, index: int, error: SourceError) -> Failure:
        if self._on_error == "raise":
            raise error
        failure = Failure(index, self._cached.stage.source.name(index), str(error))
        if callable(self._on_error):
            self._on_error(failure)
        return failure

    def _spares(self, request: Request, fetched: Fetched) -> Iterator[int]:
        good = np.delete(fetched.ids, list(fetched.errors))
        # Enough of the batch's own for each failure to take one of them in turn.
        own = np.resize(good, max(len(good), len(fetched.errors))) if len(good) else good
        return chain(request.spares.tolist(), own.tolist())

    def _next_good(
        self, spares: Iterator[int], error: SourceError, canvas: Canvas | None
    ) -> tuple[int, Any]:
        for spare in spares:
            wanted = np.array([spare], np.uint32)
            fetched = self._cached.fetch(wanted, turns=ASIDE, canvas=canvas)
            if not fetched.errors:
                return int(fetched.ids[0]), fetched.decoded[0]
        raise error


class ServedRequest(NamedTuple):
    """What came of a Request."""

    fetched: Fetched
    """Without errors."""
    failures: tuple[Failure, ...]
    """What had to be replaced."""
    missed: NDArray[np.uint32] | None
    """``u32[m]``, samples asked for that were not cached; None where that does not matter."""


class RequestServer:
    """Serves Requests: through the cache, past it, or apart from training, as each one says.

    ``bare`` are the samples without the cache, ``aside`` those for reads that are not training's,
    where there are any; ``progress`` is told of training's. Batches lie in ``memory``. In any
    thread or worker process.
    """

    def __init__(
        self,
        cached: CachedSamples,
        on_error: OnError,
        progress: Progress | None = None,
        aside: CachedSamples | None = None,
        bare: CachedSamples | None = None,
        memory: BatchMemory | None = None,
    ) -> None:
        self.cached = cached
        """The samples through the cache."""
        self._progress = progress
        memory = BatchMemory() if memory is None else memory
        self._own = Replacer(cached, on_error, memory)
        self._aside = Replacer(aside or cached, on_error, memory)
        self._bare = Replacer(bare or cached, on_error, memory)

    def serve(self, request: Request, seeds: list[int]) -> ServedRequest:
        """Return the samples of ``request``; see :meth:`Replacer.fetch`."""
        replacer = self._bare if request.is_bare else self._own
        fetched, failures = self._noted(
            self._aside if request.is_aside else replacer, request, seeds
        )
        missed = None
        if self.cached.store.packaged is not None:
            missed = request.ids[np.isin(fetched.outcomes, (Outcome.FETCHED, Outcome.SUBSTITUTED))]
        return ServedRequest(fetched, failures, missed)

    def _noted(
        self, replacer: Replacer, request: Request, seeds: list[int]
    ) -> tuple[Fetched, tuple[Failure, ...]]:
        """Fetch, and say so to the prefetch process if it is for training."""
        if self._progress is None or request.is_aside:
            return replacer.fetch(request, seeds)
        accesses = request.epoch, request.first, len(request.ids)
        alone = len(request.ids) * self.cached.store.read_seconds
        self._progress.start(*accesses, alone)
        # Before decoding: the window has room for other workers' batches meanwhile.
        finish = partial(self._progress.finish, *accesses)
        try:
            return replacer.fetch(request, seeds, finish)
        finally:
            finish()


def in_order(
    serve: Callable[[_Request], _Served], requests: Iterable[_Request], threads: int, ready: int
) -> Iterator[_Served]:
    """Yield what ``serve`` makes of each request, in order, at most ``ready`` ahead of the caller.

    Raises what ``serve`` does, in its place. Without threads, and with ``ready`` 0, the caller
    serves. Closing the iterator waits for those that are being served; the rest is dropped.
    """
    if not threads or not ready:
        yield from map(serve, requests)
        return
    left = iter(requests)
    pool = ThreadPoolExecutor(threads, thread_name_prefix="stoker-feed")
    try:
        running: deque[Future[_Served]] = deque()
        running.extend(pool.submit(serve, request) for request in islice(left, ready))
        while running:
            served = running.popleft().result()
            running.extend(pool.submit(serve, request) for request in islice(left, 1))
            yield served
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
