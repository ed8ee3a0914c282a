"""What the training loop shows in tensors, on the way to those who score."""

from __future__ import annotations

import time
from typing import Any

import torch

from stoker.epoch.batch import ServedBatch
from stoker.epoch.observer import Observer
from stoker.errors import ConfigError
from stoker.pytorch.knn import search_on
from stoker.pytorch.meta import weights_of
from stoker.pytorch.signals import Shown, start_copy


class TensorObserver:
    """Computes the signals of a batch where its tensors lie, and copies them to an Observer.

    Used by the training process only, from one thread at a time.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._dimension: int | None = None
        self._device: torch.device | None = None

    def observe(self, shown: Shown, meta: ServedBatch | None = None) -> None:
        """Take what the training loop shows of one batch; see ``Loader.observe``."""
        began = time.perf_counter()
        batch = self._observer.batch(meta)
        signals = shown.signals(self._observer.scorer.needs, len(batch))
        self._check_dimension(signals.get("embeddings"))
        self._device = next(iter(signals.values())).device
        self._observer.add(batch, start_copy(signals), began)

    def rescore(self, meta: ServedBatch, losses: Any) -> None:
        """Have a batch that is none of training's scored by its losses ``[n]``."""
        signals = start_copy(Shown(losses).signals(frozenset(), len(meta))).arrays()
        self._observer.rescore(meta.ids, meta.epoch, signals)

    def weights(self) -> torch.Tensor:
        """Return the loss weights of the batch that is spoken of; see ``Loader.weights``."""
        weights = weights_of(self._observer.weighed())
        return weights if self._device is None else weights.to(self._device, non_blocking=True)

    def _check_dimension(self, embeddings: torch.Tensor | None) -> None:
        if embeddings is None:
            return
        dimension = embeddings.shape[1]
        if self._dimension is None:
            self._dimension = dimension
            search_on(embeddings.device, self._observer.scorer)
        if dimension != self._dimension:
            raise ConfigError(
                f"observe() got embeddings of dimension {dimension}, and before of "
                f"{self._dimension}: give the output of one layer throughout"
            )
