"""Keras 3, with any backend: a Feed as a ``PyDataset``.

::

    for epoch in range(90):
        fit_epoch(model, feed, initial_epoch=epoch, epochs=epoch + 1)

Imported by name, and only where Keras is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from stoker.feed.batch import Batch
from stoker.feed.feed import Feed

AfterBatch = Callable[[Batch, int], Any]
"""The user's: takes a batch that the model was trained on, and the batches of the epoch so far."""


class Epoch(keras.utils.PyDataset):  # type: ignore[misc]
    """The coming epoch of ``feed``, or what is left of it, for one call of ``model.fit``.

    Keras looks at some batches before it trains on them, and asks for them again, so batches stay
    here until :meth:`drop`. Their order is the Feed's: call ``fit`` with ``shuffle=False``.
    Keras asks from one thread at a time. Items are ``(data, targets)``, or ``(data,)``.
    """

    def __init__(self, feed: Feed) -> None:
        super().__init__()  # one worker: the Feed has threads of its own
        self._batches = iter(feed)
        self._length = len(feed)
        self._drawn: list[Batch | None] = []

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        batch = self.batch(index)
        return (batch.data,) if batch.targets is None else (batch.data, batch.targets)

    def batch(self, index: int) -> Batch:
        """Return a batch of the epoch, drawn if need be; IndexError if there is none any more."""
        if index >= self._length:
            raise IndexError(f"batch {index} is out of range: the epoch has {self._length}")
        while len(self._drawn) <= index:
            self._drawn.append(next(self._batches))
        batch = self._drawn[index]
        if batch is None:
            raise IndexError(f"batch {index} was trained on already: each epoch needs its own fit")
        return batch

    def drop(self, index: int) -> None:
        """Let go of the batches up to this one."""
        for place in range(min(index + 1, len(self._drawn))):
            self._drawn[place] = None


class _AfterBatch(keras.callbacks.Callback):  # type: ignore[misc]
    """Says which batches were trained on."""

    def __init__(self, epoch: Epoch, after_batch: AfterBatch | None) -> None:
        super().__init__()
        self._epoch, self._after_batch = epoch, after_batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Tell the user, and let go of the batches."""
        # With steps_per_execution the last one may be counted beyond the end.
        done = min(batch + 1, len(self._epoch))
        if self._after_batch is not None:
            self._after_batch(self._epoch.batch(done - 1), done)
        self._epoch.drop(done - 1)


def fit_epoch(model: Any, feed: Feed, after_batch: AfterBatch | None = None, **options: Any) -> Any:
    """Train ``model`` for one epoch of ``feed``, or what is left of it; return Keras' history.

    ``after_batch(batch, batches)`` is called after each call of the model's train function, to
    save ``feed.state_dict(batches=batches)`` with the model's weights, say: Keras draws batches
    ahead, which must not count. ``options`` are those of ``model.fit``, such as ``initial_epoch``
    and ``epochs=initial_epoch + 1``, which number the epoch for other callbacks.
    """
    epoch = Epoch(feed)
    callbacks = [*options.pop("callbacks", ()), _AfterBatch(epoch, after_batch)]
    return model.fit(epoch, shuffle=False, callbacks=callbacks, **options)
