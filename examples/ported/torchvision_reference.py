"""Trains on class folders as torchvision's references/classification/train.py does, without it.

    torchrun --nproc_per_node=8 torchvision_reference.py --data-path /mnt/nfs/imagenet

Plain ``python`` trains with one process.
"""

import argparse
import os
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--data-path", type=Path)
parser.add_argument("--epochs", type=int, default=90)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--workers", type=int, default=16)
args = parser.parse_args()


class ImageFolder(torch.utils.data.Dataset):
    """Images in one folder for each class."""

    def __init__(self, root, transform):
        self.classes = sorted(entry.name for entry in Path(root).iterdir() if entry.is_dir())
        labels = {name: label for label, name in enumerate(self.classes)}
        found = sorted(Path(root).glob("*/*.*"))
        self.samples = [(path, labels[path.parent.name]) for path in found]
        self.transform = transform

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        path, label = self.samples[index]
        with Image.open(path) as file:
            image = file.convert("RGB")
        return self.transform(image), label


def transform(image):
    """Return ``f32[3, 32, 32]``."""
    pixels = np.array(image.resize((32, 32)), np.float32)
    return torch.from_numpy(pixels).permute(2, 0, 1) / 255


def main():
    """Train."""
    distributed = "RANK" in os.environ
    if distributed:
        torch.distributed.init_process_group()
    dataset = ImageFolder(args.data_path / "train", transform)
    if distributed:
        train_sampler = torch.utils.data.distributed.DistributedSampler(dataset)
    else:
        train_sampler = torch.utils.data.RandomSampler(dataset)
    data_loader = torch.utils.data.DataLoader(
        dataset,
        batch_size=args.batch_size,
        sampler=train_sampler,
        num_workers=args.workers,
        pin_memory=torch.cuda.is_available(),
    )
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(512, len(dataset.classes))
    )
    if distributed:
        model = nn.parallel.DistributedDataParallel(model)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for epoch in range(args.epochs):
        if distributed:
            train_sampler.set_epoch(epoch)
        for step, (image, target) in enumerate(data_loader):
            loss = criterion(model(image), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"Epoch: [{epoch}]  [{step}/{len(data_loader)}]  loss: {loss.item():.4f}")
    if distributed:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
