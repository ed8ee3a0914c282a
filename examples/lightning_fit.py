"""Lightning trains on a Loader, whose state its checkpoints hold.

    python examples/lightning_fit.py /mnt/nfs/train 8

Resumes at the exact sample, with any number of workers. Needs ``pip install lightning``.
"""

import sys
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer

import stoker
from stoker.images import Train

SAVED = Path("lightning.ckpt")


class Model(LightningModule):
    """A linear model."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3072, 1000)

    def training_step(self, batch):
        """Return the loss."""
        images, classes = batch
        return torch.nn.functional.cross_entropy(self.layer(images.flatten(1) / 255), classes)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        """Save, and say what was trained on."""
        self.trainer.save_checkpoint(SAVED)
        print(f"classes in epoch {self.current_epoch}:", *batch[1].tolist())

    def configure_optimizers(self):
        """Return the optimiser."""
        return torch.optim.SGD(self.parameters(), 0.01)


def main(folder, workers):
    """Train two epochs; resume where the last run stopped."""
    data = stoker.ImageFolder(folder, Train(32))
    loader = stoker.Loader(data, 8, num_workers=int(workers))
    trainer = Trainer(max_epochs=2, logger=False, enable_checkpointing=False)
    trainer.fit(Model(), loader, ckpt_path=SAVED if SAVED.exists() else None)


if __name__ == "__main__":
    main(*sys.argv[1:])
