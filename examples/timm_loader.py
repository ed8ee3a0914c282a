"""timm's create_loader with a Loader inside: its augmentation, collation and prefetcher stay.

    python examples/timm_loader.py /mnt/nfs/train 8

Resumes at the exact sample, with any number of workers. Needs ``pip install timm``.
"""

import sys
from pathlib import Path

import timm.data
import torch

import stoker

SAVED = Path("timm.pt")


def main(folder, workers):
    """Train on images in class folders, two epochs; resume where the last run stopped."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dataset = stoker.ImageFolder(folder)
    batches = timm.data.create_loader(dataset, (3, 32, 32), 8, is_training=True, device=device)
    collate = batches.loader.collate_fn
    with stoker.Loader(dataset, 8, num_workers=int(workers), collate_fn=collate) as loader:
        batches.loader = loader
        first = 0
        if SAVED.exists():
            first, state = torch.load(SAVED)
            loader.load_state_dict(state)
        for epoch in range(first, 2):
            for step, (_images, labels) in enumerate(batches):  # train on them here
                # The prefetcher has drawn one batch more.
                torch.save((epoch, loader.state_dict(batches=step + 1)), SAVED)
                print(f"classes in epoch {epoch}:", *labels.tolist())


if __name__ == "__main__":
    main(*sys.argv[1:])
