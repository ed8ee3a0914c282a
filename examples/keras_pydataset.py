"""Keras 3 trains on a Feed by model.fit, with any backend.

    python examples/keras_pydataset.py /mnt/nfs/train 8

Resumes at the exact sample, with any number of threads. Needs ``pip install keras`` and JAX,
TensorFlow or PyTorch.
"""

import pickle
import sys
from pathlib import Path

import keras

import stoker
from stoker.feed.keras import fit_epoch
from stoker.images import Train

SAVED = Path("keras.pickle")


def main(folder, workers):
    """Train on images in class folders, two epochs; resume where the last run stopped."""
    model = keras.Sequential([keras.layers.Rescaling(1 / 255), keras.layers.Flatten()])
    model.add(keras.layers.Dense(100))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with stoker.Feed(folder, 8, transform=Train(32), decode_threads=int(workers)) as feed:
        first, state = pickle.loads(SAVED.read_bytes()) if SAVED.exists() else (0, None)
        if state:
            feed.load_state_dict(state)

        def save(batch, batches):
            state = feed.state_dict(batches=batches)  # Keras has drawn more
            SAVED.write_bytes(pickle.dumps((epoch, state)))
            print(f"classes in epoch {epoch}:", *batch.targets)

        for epoch in range(first, 2):
            fit_epoch(model, feed, save, initial_epoch=epoch, epochs=epoch + 1, verbose=0)


if __name__ == "__main__":
    main(*sys.argv[1:])
