"""The books of one rank: what it was handed, how long it waited, and the bar that shows it."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.epoch.batch import Failure, ServedBatch
from stoker.epoch.stats import Stats, bound_of, from_counters, verdict_of
from stoker.errors import ConfigError
from stoker.jobs.metrics import Waits
from stoker.sampler.mixture import Mixture, MixtureSampler
from stoker.shared import SharedArray
from stoker.types import Outcome

_SHORT = 5.0  # seconds of an epoch too short to say anything about
_AT_ONCE = 32  # batches
_ONE = np.uint32(1)  # of the type of the counts: any other takes NumPy forty times as long
_EVERY = 0.1  # seconds between two looks of the bar: a batch takes no time of it otherwise

log = logging.getLogger("stoker")


class Records:
    """The books of one rank's loader, kept in the training process by one thread.

    ``sources``: those of the sources of a mixture. ``bar`` shows how the epoch goes.
    """

    def __init__(
        self, num_samples: int, sources: SourceBooks | None = None, bar: Bar | None = None
    ) -> None:
        self._bar = bar
        self.sources = sources
        """Counts by source; None: there is one."""
        self.tokens_of: Callable[[NDArray[np.uint32]], tuple[int, int]] | None = None
        """Returns the tokens of a batch of ids ``u32[n]``, and those that it has room for."""
        self.epochs: list[Stats] = []
        """Of each epoch that has ended, abandoned ones included."""
        self.epoch = 0
        """The epoch of the books that are open or were closed last."""
        self.failures: dict[int, Failure] = {}
        """Samples that had to be replaced, by id, with the last reason."""
        self.waits = Waits()
        """How long the training loop waited for each batch."""
        self.last_stall = 0.0
        """Seconds that the training loop waited for the latest batch."""
        self._visits = Visits(num_samples)
        self._tokens = self._token_places = 0
        self._rescoring_seconds = 0.0
        self._stall_seconds = self._epoch_seconds = 0.0  # the latter of epochs that are over
        self._start_seconds = 0.0
        self._awaits_first = False  # whether no batch of the epoch has come yet
        self._idle_seconds = 0.0  # of the stall of this epoch, without what the loop's thread did
        self._before = Stats()
        self._began: Stats | None = None
        self._began_at = self._last_at = 0.0

    def stats(self, counters: Mapping[str, Any] | None, share: int, **counts: Any) -> Stats:
        """Return all counts; those of the run before while ``counters`` are None.

        ``counters`` are those of :meth:`Store.stats <stoker.store.Store.stats>`, with ``counts`` of
        others on top; ``share``: how many samples are this rank's, 0 where coverage and effective
        sample size, which take a pass over all samples, are not needed.
        """
        if counters is None:
            return self._before
        return from_counters(
            counters,
            rescoring_seconds=self._rescoring_seconds,
            stall_seconds=self._stall_seconds,
            start_seconds=self._start_seconds,
            epoch_seconds=self._epoch_seconds + self._seconds,
            tokens=self._tokens,
            token_places=self._token_places,
            coverage=self._visits.coverage(share),
            ess=self._visits.ess(share),
            **counts,
        ).plus(self._before)

    def begin_epoch(
        self, epoch: int, earlier: NDArray[np.uint32], now: Stats, batches: int | None = None
    ) -> None:
        """Open the books of an epoch in which ``earlier`` ids ``u32[n]`` were handed out before.

        ``batches`` are to come; None: that is not known.
        """
        if self._bar is not None:
            self._bar.begin(epoch, batches)
        self.epoch = epoch
        self._visits.begin_epoch()
        self._visits.add(earlier)
        self._began = now
        self._began_at = self._last_at = time.perf_counter()
        self._awaits_first = True
        self._idle_seconds = 0.0

    @property
    def is_open(self) -> bool:
        """Whether an epoch is in progress."""
        return self._began is not None

    def end_epoch(self, now: Stats) -> None:
        """Close the books of the epoch in progress."""
        assert self._began is not None
        if self._bar is not None:
            self._bar.end()
        self.epochs.append(now.since(self._began))
        self._epoch_seconds += self._seconds
        self._began = None

    def say_verdict(self) -> None:
        """Log once what limits training: when two epochs have ended, the second not too short."""
        if len(self.epochs) != 2 or self.epochs[1].epoch_seconds < _SHORT:
            return
        last = self.epochs[1]
        bound, verdict = bound_of(last), verdict_of(last, may_be_first=False)
        level = logging.INFO if bound == "compute" else logging.WARNING
        log.log(level, "after two epochs, training is bound by %s: %s", bound, verdict)

    @property
    def _seconds(self) -> float:
        """How long the epoch in progress took up to its latest batch."""
        return 0.0 if self._began is None else self._last_at - self._began_at

    def supply(self) -> float:
        """Return what storage gave in the epoch that ended last, as a share of what training took.

        See ``Scores.supplies``. What the training loop's own thread does in the loader (taking
        batches over, decoding them without workers) is not waiting for storage. NaN where nothing
        was read or next to no time passed.
        """
        last, seconds = self.epochs[-1], self._last_at - self._began_at
        if not last.accesses or not last.fetched or seconds <= 0:
            return math.nan
        working = max(0.0, 1 - self._idle_seconds / seconds)
        return working * last.fetched / last.accesses

    def add_batch(self, batch: ServedBatch, failures: Iterable[Failure]) -> None:
        """Count a batch that is handed out, and what was replaced in it."""
        self._last_at = time.perf_counter()
        if self._awaits_first:
            self._awaits_first = False
            self._start_seconds += self._last_at - self._began_at
        self._visits.add(batch.ids)
        if self.tokens_of is not None:
            tokens, places = self.tokens_of(batch.ids)
            self._tokens += tokens
            self._token_places += places
        if self.sources is not None:
            self.sources.add(batch.ids, batch.outcomes)
        self.waits.add(self.last_stall)
        if self._bar is not None:
            self._bar.add(len(batch.ids), self.last_stall)
        for failure in failures:
            if failure.id not in self.failures:
                log.warning("skipped %s: %s", failure.name, failure.reason)
            self.failures[failure.id] = failure

    def add_stall(self, seconds: float, computed: float) -> None:
        """Count time that the training loop waited, of which its thread ``computed`` that much."""
        self._stall_seconds += seconds
        self._idle_seconds += seconds - computed
        self.last_stall = seconds

    def add_rescoring(self, seconds: float) -> None:
        """Count time spent on scoring samples again between epochs."""
        self._rescoring_seconds += seconds

    @property
    def by_source(self) -> dict[str, list[int]] | None:
        """What :meth:`restore` takes of the sources of a mixture; None: there is one source."""
        return None if self.sources is None else self.sources.state()

    def restore(
        self,
        saved: Stats,
        failures: Iterable[Failure],
        now: Stats,
        by_source: Mapping[str, Sequence[int]] | None,
    ) -> None:
        """Make the counts, which are ``now``, those of a saved state, and count on from there."""
        self._before = saved.since(now).plus(self._before)
        self.failures = {failure.id: failure for failure in failures}
        if self.sources is not None:
            self.sources.restore(by_source or {})


class Visits:
    """How often each sample was handed out in the epoch under way, ``u32[N]``, in one process."""

    def __init__(self, num_samples: int) -> None:
        # In shared memory, or workers would keep a copy of each page written after their fork.
        self._shared = SharedArray.create(num_samples, np.uint32, name="stoker-visits")
        self._counts = self._shared.array
        self._waiting: list[NDArray[np.uint32]] = []

    def begin_epoch(self) -> None:
        """Start again from zero."""
        self._waiting.clear()
        self._counts[:] = 0

    def add(self, ids: NDArray[np.uint32]) -> None:
        """Count ids ``u32[n]``; repeats count."""
        # Many batches at once: after a training step the counts are in no cache of the processor.
        self._waiting.append(ids)
        if len(self._waiting) == _AT_ONCE:
            self._count()

    def _count(self) -> None:
        for ids in self._waiting:
            np.add.at(self._counts, ids, _ONE)
        self._waiting.clear()

    def coverage(self, share: int) -> float:
        """Return the distinct samples / ``share``, how many samples could be."""
        self._count()
        return np.count_nonzero(self._counts) / share if share else 0.0

    def ess(self, share: int) -> float:
        """Return the effective sample size of the counts / ``share``; 0 for no visits."""
        self._count()
        if not share:
            return 0.0
        samples = np.bincount(self._counts)  # that were visited so often; BLAS would spin
        visits = np.arange(len(samples))
        squares = float(samples @ visits**2)
        return float(samples @ visits) ** 2 / squares / share if squares else 0.0


@dataclass(frozen=True)
class SourceStats:
    """What was handed out of one source of a mixture, by one rank since training began."""

    samples: int
    """Those of the source that are visited."""
    accesses: int
    """Samples handed out."""
    hits: int
    """Those that came from the cache without a read of the source."""
    bytes: int
    """Bytes of all of them, as they are cached; an estimate where sizes are."""
    bytes_fetched: int
    """Bytes of those for which the source was read."""
    epochs: float
    """How often all ranks together have visited each sample, in the mean."""

    @property
    def hit_ratio(self) -> float:
        """Hits / accesses, from 0 to 1."""
        return self.hits / self.accesses if self.accesses else 0.0


class _Counts(NamedTuple):
    accesses: NDArray[np.int64]
    hits: NDArray[np.int64]
    bytes: NDArray[np.int64]
    bytes_fetched: NDArray[np.int64]


class SourceBooks:
    """Counts what a rank is handed of each source of a mixture.

    ``sizes`` ``i64[N]`` are those of samples as they are cached. One thread.
    """

    def __init__(self, mixture: Mixture, seed: int, sizes: NDArray[np.int64]) -> None:
        self._mixture, self._sizes = mixture, sizes
        self._sampler = MixtureSampler(mixture, seed)
        self._counts = _Counts(*np.zeros((len(_Counts._fields), len(mixture.names)), np.int64))

    def add(self, ids: NDArray[np.uint32], outcomes: NDArray[np.int8]) -> None:
        """Count samples ``u32[n]`` that were handed out, and how they were served, ``i8[n]``."""
        origins, sizes = self._mixture.origins(ids), self._sizes[ids]
        fetched = outcomes == Outcome.FETCHED
        added = (1, outcomes == Outcome.HIT, sizes, sizes * fetched)
        for counts, values in zip(self._counts, added, strict=True):
            each = np.broadcast_to(values, origins.shape)
            counts += np.bincount(origins, each, len(counts)).astype(np.int64)

    def stats(self, epoch: int, served: NDArray[np.uint32]) -> dict[str, SourceStats]:
        """Return the counts by name.

        ``served`` u32[n] are what all ranks together have been handed in ``epoch``, before which
        all epochs are over.
        """
        planned = served[: self._mixture.accesses]  # what fills it up for ranks is no visit
        now = np.bincount(self._mixture.origins(planned), minlength=len(self._mixture.names))
        visited = (self._sampler.before(epoch) + now).tolist()
        lengths, counts = self._mixture.lengths, self.state()
        found = {}
        for place, (name, (accesses, hits, total, fetched)) in enumerate(counts.items()):
            times = visited[place] / lengths[place]
            found[name] = SourceStats(lengths[place], accesses, hits, total, fetched, times)
        return found

    def state(self) -> dict[str, list[int]]:
        """Return the counts by name, for :meth:`restore`."""
        columns = np.stack(self._counts, axis=1).tolist()
        return dict(zip(self._mixture.names, columns, strict=True))

    def restore(self, state: Mapping[str, Sequence[int]]) -> None:
        """Make the counts those of :meth:`state`, and count on from there."""
        none = [0] * len(_Counts._fields)
        for source, name in enumerate(self._mixture.names):
            for counts, value in zip(self._counts, state.get(name, none), strict=True):
                counts[source] = value


class Bar:
    """What ``progress=True`` shows on the terminal of standard error, or in a notebook.

    Nothing is shown where that is neither, nor in epochs for which ``is_wanted()`` is false. Used
    by the thread of the training loop; it starts no thread, and prints of the loop appear above it.
    Raises :class:`~stoker.errors.ConfigError` without rich.
    """

    def __init__(self, is_wanted: Callable[[], bool] = lambda: True) -> None:
        self._is_wanted = is_wanted
        try:
            from rich import progress
            from rich.console import Console
        except ImportError as error:
            raise ConfigError(
                f"progress=True needs rich ({error}): pip install 'stoker[tui]'"
            ) from error
        self._console = Console(stderr=True)
        self._rich = progress
        self._shown: Any = None
        self._task: Any = None

    def begin(self, epoch: int, batches: int | None) -> None:
        """Show a new epoch, from 0, of so many batches; None if that is not known."""
        self.end()
        is_seen = self._console.is_terminal or self._console.is_jupyter
        if not is_seen or not self._is_wanted():
            return
        rich = self._rich
        self._shown = rich.Progress(
            rich.TextColumn("{task.description}"),
            rich.BarColumn(),
            rich.MofNCompleteColumn(),
            rich.TextColumn("{task.fields[told]}"),
            rich.TimeRemainingColumn(),
            console=self._console,
            auto_refresh=False,
        )
        self._task = self._shown.add_task(f"epoch {epoch + 1}", total=batches, told="")
        self._samples = self._batches = 0
        self._waited = 0.0
        self._began = self._drawn = time.perf_counter()
        self._shown.start()

    def add(self, samples: int, waited: float) -> None:
        """Count a batch for which the loop ``waited`` so many seconds."""
        if self._shown is None:
            return
        self._samples += samples
        self._batches += 1
        self._waited += waited
        now = time.perf_counter()
        if now - self._drawn >= _EVERY:
            self._draw(now)

    def end(self) -> None:
        """Leave the bar as it is at the end of the epoch; may be called again."""
        if self._shown is not None:
            self._draw(time.perf_counter())
            self._shown.stop()
            self._shown = None

    def _draw(self, now: float) -> None:
        self._drawn = now
        seconds = max(1e-9, now - self._began)
        told = f"{self._samples / seconds:,.0f} samples/s, waits {self._waited / seconds:.0%}"
        self._shown.update(self._task, completed=self._batches, told=told, refresh=True)
