"""The Trainer of Hugging Face Transformers, fed by a Loader.

::

    loader = stoker.Loader(dataset, 16, collate_fn=collate, return_meta=True, recipe="icache")
    LoaderTrainer(model, args, train_loader=loader).train()

Checkpoints hold the state of the Loader, one file a rank, so that
``train(resume_from_checkpoint=True)`` resumes in the middle of an epoch with the samples that are
missing, with another number of workers too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from stoker.errors import ConfigError, StateMismatch
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

    Raises :class:`~stoker.errors.ConfigError` for a Loader without ``return_meta=True``;
    ``train()`` raises :class:`~stoker.errors.StateMismatch` for a checkpoint without the Loader's
    state, or with that of another one.
    """

    def __init__(self, *args: Any, train_loader: Loader, shift: bool = False, **options: Any):
        check_returns_meta(train_loader)
        self.train_loader = train_loader
        self._shift = shift
        self._prepared: PreparedLoader | None = None
        self._resumed: dict[str, Any] | None = None
        super().__init__(*args, train_dataset=train_loader.dataset, **options)
        self.add_callback(_Saver(self))
        # Losses are means of batches, which the Trainer is to divide by the accumulated steps.
        self.model_accepts_loss_kwargs = False
        self.loss_is_scaled_for_ga = False

    def get_train_dataloader(self) -> PreparedLoader:
        """Return the Loader, prepared for the Trainer's accelerator."""
        self._prepared = prepare(self.train_loader, self.accelerator)
        if self._resumed is not None:
            self._prepared.load_state_dict(self._resumed)
        return self._prepared

    def train(self, resume_from_checkpoint: str | bool | None = None, **options: Any) -> Any:
        """Train as Trainer does; from a checkpoint, with what the Loader had not given yet."""
        found = resume_from_checkpoint
        if found is True:
            found = get_last_checkpoint(self.args.output_dir)
        if not found:
            return super().train(resume_from_checkpoint=resume_from_checkpoint, **options)
        file = self.state_file(Path(found))
        if not file.exists():
            raise StateMismatch(
                f"{found} has no state of the Loader ({file.name}), so that it is not known which "
                "samples come next: resume from a checkpoint that LoaderTrainer wrote on as many "
                "ranks"
            )
        self._resumed = torch.load(file, weights_only=True)
        skips, self.args.ignore_data_skip = self.args.ignore_data_skip, True  # the Loader does
        try:
            return super().train(resume_from_checkpoint=found, **options)
        finally:
            self.args.ignore_data_skip, self._resumed = skips, None

    def _run_epoch(self, **told: Any) -> Any:
        """Tell Trainer how long the rest of an epoch is, for the last steps of its gradients."""
        if self._resumed is not None and told["epoch"] == told["epochs_trained"]:
            steps = self.state.global_step % told["num_update_steps_per_epoch"]
            told["steps_in_epoch"] -= steps * self.args.gradient_accumulation_steps
        return super()._run_epoch(**told)

    @property
    def has_resumed(self) -> bool:
        """Whether this training began at a checkpoint."""
        return self._resumed is not None

    def state_file(self, checkpoint: Path) -> Path:
        """Return where the Loader's state of this rank is in a checkpoint."""
        return checkpoint / f"stoker-loader-{self.args.process_index}.pt"

    def save_loader(self) -> None:
        """Write the Loader's state into the checkpoint of the current step."""
        assert self._prepared is not None
        folder = Path(self.args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(self._prepared.state_dict(), self.state_file(folder))

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


class _Saver(TrainerCallback):  # type: ignore[misc]
    """Adds the Loader's state to each checkpoint, and says which epoch it is after a resume."""

    def __init__(self, trainer: LoaderTrainer) -> None:
        self._trainer = trainer

    def on_step_end(self, arguments: Any, state: Any, *_: Any, **__: Any) -> None:
        """Called before the step is logged: Trainer takes the rest of an epoch for a whole one."""
        if self._trainer.has_resumed:
            batches = len(self._trainer.train_loader)
            accumulated = arguments.gradient_accumulation_steps
            updates = -(-batches // accumulated)
            epoch = (state.global_step - 1) // updates
            done = (state.global_step - epoch * updates) * accumulated
            state.epoch = epoch + min(done, batches) / batches

    def on_save(self, *_: Any, **__: Any) -> None:
        """Called by each rank once the rest of the checkpoint is written."""
        self._trainer.save_loader()
