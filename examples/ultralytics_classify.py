"""Ultralytics trains a classifier on a Loader, by its own ClassificationTrainer.

    python examples/ultralytics_classify.py /mnt/nfs/images 8

The folder has ``train`` and ``val``, with class folders. Resumes at the exact sample, with any
number of workers. Needs ``pip install ultralytics``.
"""

import sys
from pathlib import Path

import torch
from ultralytics.models.yolo.classify import ClassificationTrainer

import stoker
from stoker.images import Train

SAVED = Path("ultralytics.pt")


class Batches(stoker.Loader):
    """Begins an epoch with its first batch: Ultralytics makes two iterators, and uses one."""

    def __iter__(self):
        yield from super().__iter__()


class Trainer(ClassificationTrainer):
    """Trains on images in class folders; validation stays as it is."""

    def get_dataloader(self, dataset_path, batch_size=16, rank=0, mode="train"):
        """Return a Loader for training, at the sample where the last run stopped."""
        if mode != "train":
            return super().get_dataloader(dataset_path, batch_size, rank, mode)
        dataset = stoker.ImageFolder(dataset_path, Train(self.args.imgsz))
        # Of its own workers Ultralytics uses none without a GPU.
        loader = Batches(dataset, batch_size, num_workers=int(sys.argv[2]))
        if SAVED.exists():
            self.start_epoch, state = torch.load(SAVED)
            loader.load_state_dict(state)
        return loader

    def preprocess_batch(self, batch):
        """Save where the loader is; Ultralytics calls this with each batch."""
        torch.save((self.epoch, self.train_loader.state_dict()), SAVED)
        print(f"classes in epoch {self.epoch}:", *batch[1].tolist())
        return super().preprocess_batch({"img": batch[0] / 255, "cls": batch[1]})


def main(folder):
    """Train two epochs; resume where the last run stopped."""
    what = {"model": "yolo11n-cls.yaml", "data": folder, "epochs": 2, "batch": 8, "imgsz": 32}
    how = {"project": Path.cwd(), "close_mosaic": 0, "val": False, "plots": False}
    Trainer(overrides={**what, **how}).train()


if __name__ == "__main__":
    main(sys.argv[1])
