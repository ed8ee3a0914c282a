"""What the Loader and the Feed have in common: epochs, counts and scores of a Session."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from stoker.epoch.batch import Failure
from stoker.epoch.cached import CachedSamples
from stoker.epoch.records import SourceStats
from stoker.epoch.report import shown, write_report
from stoker.epoch.session import Session
from stoker.epoch.settings import check_accuracy
from stoker.epoch.stats import Stats
from stoker.errors import ConfigError, SegmentError
from stoker.scores import Scores

log = logging.getLogger("stoker")


class FrontEnd:
    """What shows the training loop its batches, on a :class:`Session`: the Loader, the Feed."""

    _session: Session
    _closed = False

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration that of ``epoch``, from 0; a sampler of one's own is told too.

        Optional: iterating again advances by itself. A restored epoch resumes; another one leaves
        its rest out, with a warning. ConfigError for a negative epoch.
        """
        self._session.controller.share.set_epoch(epoch)

    def total_steps(self) -> int:
        """Return the batches of this rank in all ``epochs``; ConfigError if they were not given.

        Where the length of an epoch depends on scores, what a schedule is best laid out by.
        """
        return self._session.controller.share.planned_batches(self._known_epochs())

    def end_epoch(self, accuracy: float | None = None) -> None:
        """Mark the end of an epoch, with the validation accuracy for recipes that adapt to it.

        ``accuracy`` is a share, from 0 to 1. Where only some ranks tell it, all take the mean of
        theirs when the next epoch begins. A recipe that adapts to it and is told none warns once.
        Waits for losses that are still being copied. Raises
        :class:`~stoker.errors.ConfigError` for an accuracy out of range.
        """
        self._check_open()
        accuracy = None if accuracy is None else check_accuracy(accuracy)
        self._session.controller.end()
        self._session.controller.tell(accuracy)
        records = self._session.records
        if records.epochs:
            told = "" if accuracy is None else f", accuracy {accuracy:.4f}"
            last = records.epochs[-1]
            log.info("epoch %d%s: %s; %s", records.epoch, told, last.summary, last.verdict)

    def close(self) -> None:
        """Stop what makes batches and let go of the cache, which lives on while another job has it.

        May be called again; also done by ``with``, and by the system when the process dies.
        """
        if self._closed:
            return
        self._stop()
        self._session.controller.end()
        self._closed = True
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _stop(self) -> None:
        """Stop the workers or threads, and abandon the batches on their way."""

    def _check_open(self) -> None:
        if self._closed:
            raise SegmentError(f"this {type(self).__name__} is closed: make a new one")

    def _known_epochs(self) -> int:
        """Return how many epochs the whole training has."""
        epochs = self._session.controller.settings.epochs
        if epochs is None:
            name = type(self).__name__
            raise ConfigError(f"total_steps() needs the number of epochs: give the {name} epochs=")
        return epochs

    # --- what is known of samples and counts ---

    @property
    def cache(self) -> CachedSamples | None:
        """The samples through the cache, for a look at what it holds; None before iterating."""
        return self._session.cached

    @property
    def scores(self) -> Scores:
        """Latest score of each sample (``values``), when (``last``) and how often (``seen``)."""
        return self._session.controller.observer.scores

    def export_scores(self, path: str | os.PathLike[str]) -> None:
        """Write names and scores of all samples to an ``.npz`` file, for ``stoker run --order``.

        ``paths`` (``S[N]``) are what the source calls its samples, ``scores`` (``f64[N]``) the
        latest ones, NaN for samples never seen. Of several ranks one is enough, once an epoch has
        begun: they agree then. Raises OSError.
        """
        scores, source = self.scores, self._session.setup.dataset.source
        names = np.array([os.fsencode(source.name(sample)) for sample in range(len(source))])
        values = np.where(scores.seen > 0, scores.values, np.nan)
        with Path(path).open("wb") as file:  # by itself NumPy adds a suffix to other names
            np.savez(file, paths=names, scores=values)

    @property
    def stats(self) -> Stats:
        """Counts since this was made, and before the state that it resumed was saved.

        Of this rank and its workers.
        """
        return self._session.controller.stats()

    @property
    def source_stats(self) -> dict[str, SourceStats]:
        """Counts of each source of a mixture, by name; likewise, of batches handed out.

        Draws the order of the epoch again, to know how often each source was visited. ConfigError
        for a data set that is no mixture.
        """
        controller, sources = self._session.controller, self._session.records.sources
        if sources is None:
            raise ConfigError("this is no mixture: stats counts its one source, or see stoker.mix")
        at = controller.share.coming if controller.walk is None else controller.walk.cursor
        return sources.stats(at.epoch, controller.planner.served(at))

    @property
    def epoch_stats(self) -> list[Stats]:
        """Stats of each epoch that has ended since this was made, abandoned ones included."""
        return list(self._session.records.epochs)

    def report(self, path: str | os.PathLike[str]) -> None:
        """Write what each epoch that has ended did to ``path``, an HTML page that loads nothing.

        Hits beside the most that are possible, the share of waiting, a histogram of the waits for
        batches and the sizes of samples; of this rank. Raises
        :class:`~stoker.errors.ConfigError` if no epoch has ended, and OSError.
        """
        setup, records = self._session.setup, self._session.records
        sizes = setup.population.sizes(setup.stage.source.sizes)
        facts = {"recipe": setup.recipe.name, "samples": len(setup.population)}
        waits = records.waits.counts
        write_report(path, facts, records.epochs, waits, sizes, setup.capacity)

    @property
    def quarantine(self) -> list[Failure]:
        """Samples that could not be served and were replaced, each once, with the last reason."""
        return list(self._session.records.failures.values())

    def _repr_html_(self) -> str:
        """Return a small table of the epochs that have ended, for notebooks."""
        return shown(repr(self), self.epoch_stats)
