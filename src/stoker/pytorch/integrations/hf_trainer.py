"""The Trainer of Hugging Face Transformers, fed by a Loader.

::

    loader = stoker.Loader(dataset, 16, collate_fn=collate, return_meta=True, recipe="icache")
    LoaderTrainer(model, args, train_loader=loader).train()
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Trainer

from stoker.errors import ConfigError
from stoker.pytorch.integrations import check_returns_meta, observe_and_weigh
from stoker.pytorch.integrations.accelerate import PreparedLoader, prepare
from stoker.pytorch.loader import Loader
from stoker.pytorch.observe import per_sample_loss


class LoaderTrainer(Trainer):  # type: ignore[misc]
    """A Trainer that trains on the batches of ``train_loader`` and observes their losses.

    Batches are dicts, as the Trainer wants them, with ``labels``. ``shift=True`` is for causal
    language models whose labels are their inputs. Batch size, order and workers are the Loader's:
    those among the training arguments do not count. Whatever trains on something else than the
    cross entropy of ``logits`` and ``labels`` overrides :meth:`signals`. Other arguments are
    Trainer's.

    Raises :class:`~stoker.errors.ConfigError` for a Loader without ``return_meta=True``.
    """

    def __init__(self, *args: Any, train_loader: Loader, shift: bool = False, **options: Any):
        check_returns_meta(train_loader)
        self.train_loader = train_loader
        self._shift = shift
        super().__init__(*args, train_dataset=train_loader.dataset, **options)
        # Losses are means of batches, which the Trainer is to divide by the accumulated steps.
        self.model_accepts_loss_kwargs = False
        self.loss_is_scaled_for_ga = False

    def get_train_dataloader(self) -> PreparedLoader:
        """Return the Loader, prepared for the Trainer's accelerator."""
        return prepare(self.train_loader, self.accelerator)

    def signals(self, outputs: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of ``Loader.observe``: ``losses`` ``[n]``, differentiable, and more.

        By default with logits and labels, for scores from the gradient.
        """
        logits, labels = outputs["logits"], inputs["labels"]
        losses = per_sample_loss(logits, labels, shift=self._shift)
        return {"losses": losses, "logits": logits, "labels": labels}

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        **options: Any,
    ) -> Any:
        """Return the weighted mean of the batch's losses; evaluation is Trainer's own."""
        inputs = dict(inputs)
        meta = inputs.pop("meta", None)
        if meta is None:
            return super().compute_loss(model, inputs, return_outputs, **options)
        if "labels" not in inputs:
            raise ConfigError(
                f"the batch has {', '.join(inputs)} and no 'labels': make the Loader's collate_fn "
                "name them so"
            )
        outputs = model(**inputs)
        loss = observe_and_weigh(self.train_loader, meta=meta, **self.signals(outputs, inputs))
        return (loss, outputs) if return_outputs else loss
