"""The Trainer of Hugging Face Transformers on a Loader, whose state its checkpoints hold.

    python examples/hf_trainer.py /mnt/nfs/train 8

Resumes at the exact sample, with any number of workers. Needs ``pip install
transformers accelerate``.
"""

import sys

import torch
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import stoker
from stoker.images import Train
from stoker.pytorch.integrations.hf_trainer import LoaderTrainer


class Model(torch.nn.Linear):
    """Sees only colours."""

    def forward(self, images, labels):
        """Return what the Trainer takes the loss from."""
        self.labels = labels
        logits = super().forward(images.flatten(1) / 255)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


class Telling(TrainerCallback):
    """Says what was trained on when that is saved."""

    def on_save(self, args, state, control, model, **_):
        """Print the classes of the batch."""
        print(f"classes of batch {state.global_step}:", *model.labels.tolist())


def collate(samples):
    """Return a batch as the Trainer wants it."""
    images, labels = torch.utils.data.default_collate(samples)
    return {"images": images, "labels": labels}


def main(folder, workers):
    """Train two epochs; resume where the last run stopped."""
    data = stoker.ImageFolder(folder, Train(32))
    how = {"num_workers": int(workers), "collate_fn": collate, "return_meta": True}
    loader = stoker.Loader(data, 8, **how)
    args = TrainingArguments("hf", num_train_epochs=2, save_steps=1, save_total_limit=1)
    trainer = LoaderTrainer(Model(3072, 1000), args, train_loader=loader)
    trainer.add_callback(Telling())
    trainer.train(resume_from_checkpoint=get_last_checkpoint("hf"))


if __name__ == "__main__":
    main(*sys.argv[1:])
