"""Scoring in the background: a thread that scores while the backward pass runs."""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError
from stoker.importance.base import Neighbours, Observation, Scored, Scorer, Signal, as_scorer
from stoker.importance.knn import MakeIndex
from stoker.scores import Scores

_Job = tuple[Scores, Observation]

_REMEMBERED = 256
"""Batches that :meth:`Background.take_scored` returns at most; older ones are forgotten."""


class Background(Scorer):
    """Hands batches to another scorer in a thread of its own.

    :meth:`update` returns at once, and waits only while ``depth`` batches wait for their scores.
    Scores are complete after :meth:`drain`. What goes wrong in the thread is raised by the next
    call of :meth:`update`, :meth:`drain` or :meth:`begin_epoch`; the batch it happened with keeps
    its scores, and later ones are scored. Worth it for scorers that spend their time in native
    code which releases the GIL.

    Used by one thread; in a forked child, not at all. Raises
    :class:`~stoker.errors.ConfigError` for a depth below 1.
    """

    def __init__(self, scorer: Scorer, depth: int = 4) -> None:
        if depth < 1:
            raise ConfigError(f"depth={depth} is out of range: let at least 1 batch wait")
        self.scorer = as_scorer(scorer)
        """The other scorer; what it only reads may be asked of it at any time."""
        self._jobs: queue.Queue[_Job | None] = queue.Queue(depth)
        self._failures: list[Exception] = []
        self._scored: deque[Scored] = deque(maxlen=_REMEMBERED)
        self._thread: threading.Thread | None = None

    @property
    def needs(self) -> frozenset[Signal]:
        """What the other scorer needs."""
        return self.scorer.needs

    def update(self, scores: Scores, observation: Observation) -> None:
        """Have the batch scored; raises what went wrong with an earlier one."""
        self._raise()
        if self._thread is None:
            self._start()
        self._jobs.put((scores, observation))

    def take_scored(self) -> list[Scored]:
        """Return the batches scored since the last call, in order; does not wait."""
        return [self._scored.popleft() for _ in range(len(self._scored))]

    def drain(self) -> None:
        """Return when all batches given so far are in the scores, or raise what went wrong."""
        self._jobs.join()
        self._raise()
        self.scorer.drain()

    def begin_epoch(self, scores: Scores, epoch: int) -> None:
        """Drain, then let the other scorer begin its epoch."""
        self.drain()
        self.scorer.begin_epoch(scores, epoch)

    @property
    def volatile(self) -> NDArray[np.uint32]:
        """``u32[m]``, those of the other scorer."""
        return self.scorer.volatile

    @property
    def rescores(self) -> bool:
        """Whether the other scorer does."""
        return self.scorer.rescores

    def cache_holds(self, samples: int) -> None:
        """Tell the other scorer."""
        self.scorer.cache_holds(samples)

    @property
    def neighbours(self) -> Neighbours | None:
        """Edges of the batch that the other scorer scored last; may be read at any time."""
        return self.scorer.neighbours

    def use_accelerator(self, index: MakeIndex) -> None:
        """Let the other scorer search with ``index``."""
        self.scorer.use_accelerator(index)

    def state_dict(self) -> dict[str, NDArray[Any]]:
        """Drain, then return the other scorer's state; empty if it has none."""
        self.drain()
        return self.scorer.state_dict()

    def load_state_dict(self, state: dict[str, NDArray[Any]]) -> None:
        """Drain, then let the other scorer continue from ``state``."""
        self.drain()
        self.scorer.load_state_dict(state)

    def close(self) -> None:
        """Drop what is waiting, end the thread, and close the other scorer."""
        if self._thread is not None:
            self._end()
            self._thread = None
        self.scorer.close()

    def _raise(self) -> None:
        if self._failures:
            raise self._failures.pop(0)

    def _start(self) -> None:
        self._thread = threading.Thread(
            target=_work,
            args=(self.scorer, self._jobs, self._scored, self._failures),
            name="stoker-scoring",
            daemon=True,
        )
        self._thread.start()
        # Native code must not run on while the interpreter is taken down.
        self._end = weakref.finalize(self, _end, self._thread, self._jobs, os.getpid())


def _work(
    scorer: Scorer,
    jobs: queue.Queue[_Job | None],
    scored: deque[Scored],
    failures: list[Exception],
) -> None:
    """Score until None comes; holds no reference to the Background, so that it can go away."""
    while (job := jobs.get()) is not None:
        try:
            scorer.update(*job)
            scored.append(Scored(job[1].ids, scorer.neighbours))
        except Exception as error:
            failures.append(error)
        finally:
            jobs.task_done()
    jobs.task_done()


def _end(thread: threading.Thread, jobs: queue.Queue[_Job | None], pid: int) -> None:
    if os.getpid() != pid:  # a forked child has no such thread
        return
    while not jobs.empty():
        try:
            jobs.get_nowait()
        except queue.Empty:
            break
        jobs.task_done()
    jobs.put(None)
    thread.join()
