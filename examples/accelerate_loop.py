"""Accelerate trains on a Loader, whose state its checkpoints hold.

    python examples/accelerate_loop.py /mnt/nfs/train 8

Resumes at the exact sample, with any number of workers. Needs ``pip install accelerate``.
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator

import stoker
from stoker.images import Train
from stoker.pytorch import Normalize
from stoker.pytorch.integrations.accelerate import prepare

SAVED = Path("accelerate")


def main(folder, workers):
    """Train two epochs; resume where the last run stopped."""
    data, accelerator = stoker.ImageFolder(folder, Train(32)), Accelerator()
    loader = stoker.Loader(data, 8, num_workers=int(workers), return_meta=True)
    model = torch.nn.Sequential(Normalize(), torch.nn.Flatten(), torch.nn.Linear(3072, 1000))
    model, optimiser = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.01))
    batches = prepare(loader, accelerator)
    accelerator.register_for_checkpointing(batches)
    if SAVED.exists():
        accelerator.load_state(SAVED)
    for epoch in range(batches.state_dict()["epoch"], 2):
        for images, classes, _ in batches:
            accelerator.backward(torch.nn.functional.cross_entropy(model(images), classes))
            optimiser.step()
            optimiser.zero_grad()
            accelerator.save_state(SAVED)
            print(f"classes in epoch {epoch}:", *classes.tolist())


if __name__ == "__main__":
    main(*sys.argv[1:])
