"""fastai trains on a Loader, by Learner.fit.

    python examples/fastai_learner.py /mnt/nfs/train 8

Resumes at the exact sample, with any number of workers. Needs ``pip install fastai``.
"""

import sys
from pathlib import Path

import torch
from fastai.callback.core import Callback
from fastai.data.core import DataLoaders
from fastai.learner import Learner

import stoker
from stoker.images import Train

SAVED = Path("fastai.pt")


class Keep(Callback):
    """Saves where the loader is after each batch."""

    def after_batch(self):
        """Save it; fastai calls this."""
        if self.training:
            torch.save((self.epoch, self.dl.state_dict()), SAVED)
            print(f"classes in epoch {self.epoch}:", *self.y.tolist())


def main(folder, workers):
    """Train on images in class folders, two epochs; resume where the last run stopped."""
    dataset = stoker.ImageFolder(folder, [Train(32), torch.Tensor.float])
    check = torch.utils.data.DataLoader(dataset, 8)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LazyLinear(len(dataset.classes)))
    with stoker.Loader(dataset, 8, num_workers=int(workers)) as loader:
        learner = Learner(
            DataLoaders(loader, check), model, torch.nn.CrossEntropyLoss(), cbs=Keep()
        )
        first = 0
        if SAVED.exists():
            first, state = torch.load(SAVED)
            loader.load_state_dict(state)
        learner.fit(2, 1e-4, start_epoch=first)


if __name__ == "__main__":
    main(*sys.argv[1:])
