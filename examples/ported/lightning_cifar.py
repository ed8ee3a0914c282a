"""Trains on CIFAR-10 as PNG files in class folders as Lightning's examples do, by a data module.

python lightning_cifar.py /mnt/nfs/cifar10/train
"""

import sys
from pathlib import Path

import lightning
import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset


class CIFAR10(Dataset):
    """Images of 32 by 32 pixels in one folder for each class."""

    def __init__(self, root, transform):
        self.paths = sorted(Path(root).glob("*/*.png"))
        self.classes = sorted({path.parent.name for path in self.paths})
        self.transform = transform

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        path = self.paths[index]
        return self.transform(np.array(Image.open(path))), self.classes.index(path.parent.name)


def augment(pixels):
    """Return ``f32[3, 32, 32]``, mirrored half of the time."""
    image = torch.from_numpy(pixels).permute(2, 0, 1) / 255
    return image.flip(2) if torch.rand(()) < 0.5 else image


class CIFAR10DataModule(lightning.LightningDataModule):
    """The training set."""

    def __init__(self, root, batch_size=8, num_workers=2):
        super().__init__()
        self.root, self.batch_size, self.num_workers = root, batch_size, num_workers

    def setup(self, stage):
        """Open it."""
        self.train_set = CIFAR10(self.root, augment)

    def train_dataloader(self):
        """Return its batches."""
        return DataLoader(
            self.train_set, self.batch_size, shuffle=True, num_workers=self.num_workers
        )


class Classifier(lightning.LightningModule):
    """A small network of convolutions."""

    def __init__(self, classes):
        super().__init__()
        layers = nn.Conv2d(3, 8, 3, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(512, classes)
        self.model = nn.Sequential(*layers)

    def training_step(self, batch, _):
        """Return the loss of a batch."""
        images, labels = batch
        return nn.functional.cross_entropy(self.model(images), labels)

    def configure_optimizers(self):
        """Return SGD."""
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


if __name__ == "__main__":
    data = CIFAR10DataModule(sys.argv[1])
    classes = len(list(Path(sys.argv[1]).iterdir()))
    trainer = lightning.Trainer(max_epochs=2, logger=False, enable_checkpointing=False)
    trainer.fit(Classifier(classes), data)
