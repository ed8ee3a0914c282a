"""What a scorer is, and what it is told about each batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError
from stoker.scores import Scores

Signal = Literal["losses", "gradient_norms", "embeddings", "labels"]


@dataclass(frozen=True)
class Observation:
    """What one training step showed about the samples of its batch.

    Row i of every signal belongs to ``ids[i]``, the sample really served. A frozen value over
    arrays that nobody writes any more, so it may go to another thread. Raises
    :class:`~stoker.errors.ConfigError` if a signal has not one row for each id.
    """

    ids: NDArray[np.uint32]
    """``u32[n]``; an id may come twice."""
    step: int
    """Batches observed before this one."""
    epoch: int
    losses: NDArray[np.float64] | None = None
    """``f64[n]``."""
    gradient_norms: NDArray[np.float64] | None = None
    """``f64[n]``, norms of the gradient of the loss by the logits."""
    embeddings: NDArray[np.float32] | None = None
    """``f32[n, d]``, outputs of the layer before the classifier."""
    labels: NDArray[np.int64] | None = None
    """``i64[n]``, classes."""

    def __post_init__(self) -> None:
        for name in get_args(Signal):
            rows = getattr(self, name)
            dimensions = 2 if name == "embeddings" else 1
            if rows is not None and (rows.ndim != dimensions or len(rows) != len(self.ids)):
                raise ConfigError(
                    f"{name} of shape {rows.shape} for {len(self.ids)} ids are refused: give one "
                    f"{'vector' if dimensions == 2 else 'number'} for each"
                )

    def signal(self, name: Signal) -> NDArray[Any]:
        """Return a signal that the scorer needs; ConfigError if the training loop gave none."""
        rows: NDArray[Any] | None = getattr(self, name)
        if rows is None:
            source = "logits= and labels=" if name == "gradient_norms" else f"{name}="
            raise ConfigError(
                f"this scorer needs {name} and observe() got none: pass {source} to observe()"
            )
        return rows

    def finite(self, name: Signal) -> tuple[NDArray[np.uint32], NDArray[Any]]:
        """Return the ids whose signal is finite, and their rows of it.

        A sample whose loss, gradient or embedding is NaN or infinite thus keeps its score. Raises
        as :meth:`signal`.
        """
        rows = self.signal(name)
        finite = np.isfinite(rows)
        if finite.all():
            return self.ids, rows
        keep = finite if rows.ndim == 1 else finite.all(axis=1)
        return self.ids[keep], rows[keep]


@runtime_checkable
class Scorer(Protocol):
    """Turns what training shows into scores; called in the training process, by one thread.

    A scorer may also have these, which the loader asks for by name:

    - ``begin_epoch(scores, epoch)``: called on every rank before the plan is made, when all ranks
      hold the same scores. It may set ``scores.ready`` to False, which asks for a full pass, and
      call ``scores.set_volatile``. A second call for the same epoch changes nothing.
    - ``volatile``: ``u32[m]``, ids to be scored anew before the plan is made.
    - ``cache_holds(samples)``: called before the first epoch with the number of samples of mean
      size that the caches of all nodes hold together.
    - ``drain()``: return when every observation given so far is in the scores. Called before
      scores are read at the end of an epoch. Raises what went wrong beside the training.
    - ``take_scored()``: the batches scored since the last call, with their ids and neighbours, for
      a scorer whose ``update`` returns before the scores are written.
    - ``close()``: end threads and free indexes; the scorer is not used afterwards.
    - ``neighbours``: :class:`~stoker.importance.neighbours.Neighbours` of a batch.
    - ``state_dict() -> dict[str, NDArray]`` and ``load_state_dict(state)``: for checkpoints; what
      is loaded goes on exactly where the other was.
    """

    @property
    def needs(self) -> frozenset[Signal]:
        """The signals that ``update`` reads; no other ones are copied from the accelerator."""
        ...

    def update(self, scores: Scores, observation: Observation) -> None:
        """Write the scores of the batch's samples: ``scores.update(ids, values, step)``.

        Values are finite. Raises :class:`~stoker.errors.ConfigError` if a needed signal is None.
        """
        ...
