"""Lightning: what a Loader needs to know of the Trainer that runs it.

::

    loader = stoker.Loader(dataset, 64, return_meta=True, recipe="spidercache", epochs=30)
    trainer = Trainer(max_epochs=30, callbacks=[LoaderCallback(loader, accuracy="val_acc")],
                      use_distributed_sampler=False)
    trainer.fit(module, loader)    # whose training_step returns observe_and_weigh(...)
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from stoker.errors import ConfigError
from stoker.pytorch.loader import Loader


class LoaderCallback(Callback):  # type: ignore[misc]
    """Tells ``loader`` when an epoch is over, and how accurate the model is then.

    ``accuracy`` names a logged metric; it is that of the latest validation. Raises
    :class:`~stoker.errors.ConfigError` before training begins where Lightning would make another
    loader of it, because it has several processes and ``use_distributed_sampler=True``.
    """

    def __init__(self, loader: Loader, accuracy: str | None = None) -> None:
        self.loader = loader
        self._metric = accuracy

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a Trainer that would divide the samples once more."""
        connector: Any = trainer._accelerator_connector
        if trainer.world_size > 1 and connector.use_distributed_sampler:
            raise ConfigError(
                "the Loader divides samples among ranks itself: give the Trainer "
                "use_distributed_sampler=False"
            )

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the epoch's books."""
        known = None if self._metric is None else trainer.callback_metrics.get(self._metric)
        self.loader.end_epoch(accuracy=None if known is None else float(known))
