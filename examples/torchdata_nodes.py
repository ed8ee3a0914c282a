"""A Loader as the first of torchdata's nodes, which others follow.

    python examples/torchdata_nodes.py /mnt/nfs/train 8

Resumes at the exact sample, with any number of workers. Needs ``pip install torchdata``.
"""

import sys
from pathlib import Path

import torch
from torchdata import nodes

import stoker
from stoker.images import Train

SAVED = Path("torchdata.pt")


def main(folder, workers):
    """Train on images in class folders, two epochs; resume where the last run stopped."""
    dataset = stoker.ImageFolder(folder, Train(32))
    with stoker.Loader(dataset, 8, num_workers=int(workers)) as loader:
        node = nodes.IterableWrapper(loader)  # it asks the loader for its state
        batches, first = nodes.Loader(nodes.Prefetcher(node, prefetch_factor=2)), 0
        if SAVED.exists():
            first, state = torch.load(SAVED)
            batches.load_state_dict(state)
        for epoch in range(first, 2):
            for _images, labels in batches:  # train on them here
                torch.save((epoch, batches.state_dict()), SAVED)
                print(f"classes in epoch {epoch}:", *labels.tolist())


if __name__ == "__main__":
    main(*sys.argv[1:])
