"""Composer trains on a Loader, and has its checkpoints hold where that is.

    python examples/composer_trainer.py /mnt/nfs/train 8

Resumes at the exact sample, with any number of workers. Composer itself would draw what the epoch
has had once more, so ``spin_dataloaders`` is off. Needs ``pip install mosaicml`` (0.32).
"""

import sys
from pathlib import Path

import torch
from composer import Trainer
from composer.callbacks import CheckpointSaver
from composer.models import ComposerClassifier

import stoker
from stoker.images import Train
from stoker.pytorch import Normalize

SAVED = Path("composer/latest-rank0.pt")


class Saver(CheckpointSaver):
    """Saves after each batch, the Loader's state too."""

    def __init__(self, loader):
        super().__init__("composer", save_interval="1ba", overwrite=True)
        self.loader = loader

    def state_dict(self):
        """Return what a checkpoint holds of this callback."""
        return {**super().state_dict(), "loader": self.loader.state_dict()}

    def load_state_dict(self, state):
        """Have the Loader resume there."""
        self.loader.load_state_dict(state["loader"])

    def batch_checkpoint(self, state, logger):
        """Save, and say what was trained on."""
        super().batch_checkpoint(state, logger)
        print(f"classes in epoch {state.timestamp.epoch.value}:", *state.batch[1].tolist())


def main(folder, workers):
    """Train two epochs; resume where the last run stopped."""
    loader = stoker.Loader(stoker.ImageFolder(folder, Train(32)), 8, num_workers=int(workers))
    layers = Normalize(), torch.nn.Flatten(), torch.nn.Linear(3072, 1000)
    model = ComposerClassifier(torch.nn.Sequential(*layers), num_classes=1000)
    how = {"max_duration": "2ep", "callbacks": Saver(loader), "spin_dataloaders": False}
    how["load_path"] = str(SAVED) if SAVED.exists() else None
    Trainer(model=model, train_dataloader=loader, **how).fit()


if __name__ == "__main__":
    main(*sys.argv[1:])
