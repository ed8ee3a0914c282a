"""What happens to samples that cannot be read or decoded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, Literal

import numpy as np

from stoker.epoch.batch import Failure, Request
from stoker.epoch.cached import CachedSamples, Fetched
from stoker.errors import ConfigError, SourceError
from stoker.store.claims import ASIDE, Turns
from stoker.types import Outcome

OnError = Literal["raise", "skip"] | Callable[[Failure], Any]
"""``"raise"``; ``"skip"``; or a function that is called in the worker and raises, or returns to
skip the sample."""


def check_on_error(on_error: Any) -> None:
    """Raise ConfigError unless it is an :data:`OnError`."""
    if on_error not in ("raise", "skip") and not callable(on_error):
        raise ConfigError(f"on_error={on_error!r} is not known: use 'raise', 'skip' or a function")


class Replacer:
    """Fetches a batch and puts other samples in the place of those that failed.

    A replacement is what the same rank's plan gave just before the batch, in that order, then
    the good samples of the batch itself: the same whatever the number of workers, never a sample
    that is not in the plan, and the batch keeps its length. Passed to worker processes with
    ``on_error``, which has to pickle for spawn and forkserver.
    """

    def __init__(self, cached: CachedSamples, on_error: OnError) -> None:
        self._cached = cached
        self._on_error = on_error

    def fetch(self, request: Request) -> tuple[Fetched, tuple[Failure, ...]]:
        """Return the samples really served, and what had to be replaced.

        Raises the :class:`~stoker.errors.SourceError` of a sample that is not to be skipped, or
        that nothing can replace.
        """
        turns = Turns(request.stamp, request.positions)
        fetched = self._cached.fetch(request.ids, request.keys, turns)
        if not fetched.errors:
            return fetched, ()
        ids = fetched.ids.copy()
        outcomes = fetched.outcomes.copy()
        failures = tuple(
            self._excused(int(ids[place]), error) for place, error in sorted(fetched.errors.items())
        )
        spares = self._spares(request, fetched)
        for place, error in sorted(fetched.errors.items()):
            ids[place], fetched.decoded[place] = self._next_good(spares, error)
            outcomes[place] = Outcome.SUBSTITUTED
        return Fetched(ids, fetched.decoded, outcomes, {}), failures

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

    def _next_good(self, spares: Iterator[int], error: SourceError) -> tuple[int, Any]:
        for spare in spares:
            fetched = self._cached.fetch(np.array([spare], np.uint32), turns=ASIDE)
            if not fetched.errors:
                return int(fetched.ids[0]), fetched.decoded[0]
        raise error
