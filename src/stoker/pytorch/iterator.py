"""One epoch in progress."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from stoker.errors import SegmentError
from stoker.pytorch.engine import Engine
from stoker.pytorch.meta import Envelope


class LoaderIterator:
    """Yields the batches of one epoch, and measures how long the training loop waits for them.

    The epoch is that which comes next, or which ``set_epoch`` names before the first batch:
    Lightning tells it only then when it resumes.
    """

    def __init__(self, engine: Engine, loader: DataLoader[Any]) -> None:
        self._engine, self._loader = engine, loader
        self._envelopes: Iterator[Envelope] | None
        self._envelopes, self._walk = engine.begin_epoch(loader)
        self._is_fresh = True

    def __iter__(self) -> LoaderIterator:
        return self

    def __len__(self) -> int:
        """Batches that this iterator gives in all."""
        return self._engine.batches_from(self._loader, self._walk.start)

    def __next__(self) -> Any:
        if self._envelopes is None:
            raise SegmentError("the loader is closed: make a new one to read on")
        begin, computed = time.perf_counter(), time.thread_time()
        try:
            envelope = next(self._directed(self._envelopes))
        except StopIteration:
            self._engine.finish_epoch()
            raise
        finally:
            waited = time.perf_counter() - begin
            self._engine.add_stall(waited, min(waited, time.thread_time() - computed))
        batch = self._engine.receive(envelope)
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

    def _directed(self, envelopes: Iterator[Envelope]) -> Iterator[Envelope]:
        """Return the batches, begun again if they are not those of the epoch that is wanted."""
        if self._is_fresh and self._engine.is_redirected(self._walk):
            if not self._loader.persistent_workers:
                self.stop()
            envelopes, self._walk = self._engine.begin_epoch(self._loader)
            self._envelopes = envelopes
        self._is_fresh = False
        return envelopes
