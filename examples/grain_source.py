"""Grain over images in class folders, read through a cache that its threads and processes share.

    python examples/grain_source.py /mnt/nfs/train 8

Grain chooses the order and keeps the position: its checkpoints resume at the exact sample, with
any number of read threads. Needs ``pip install grain``.
"""

import json
import sys
from pathlib import Path

import grain
import numpy as np
from PIL import Image

from stoker.feed import with_cache

SAVED = Path("grain.json")


def resized(sample):
    """Return an image as ``u8[32, 32, 3]``, and its class."""
    return np.asarray(Image.fromarray(sample[0]).resize((32, 32))), sample[1]


def main(folder, workers):
    """Train on images in class folders, two epochs; resume where the last run stopped."""
    samples = with_cache(folder, "20%")  # a RandomAccessDataSource
    order = grain.MapDataset.source(samples).seed(0).shuffle().map(resized).batch(8).repeat(2)
    batches = iter(order.to_iter_dataset(grain.ReadOptions(num_threads=int(workers))))
    if SAVED.exists():
        batches.set_state(json.loads(SAVED.read_text()))
    for step, (_images, labels) in enumerate(batches):  # train on them here
        SAVED.write_text(json.dumps(batches.get_state()))
        print(f"classes of batch {step}:", *labels)


if __name__ == "__main__":
    main(*sys.argv[1:])
