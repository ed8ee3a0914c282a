"""TensorFlow on a Feed, as a tf.data.Dataset.

    python examples/tensorflow_feed.py /mnt/nfs/train 8

Resumes at the exact sample, with any number of threads. Needs ``pip install tensorflow``.
"""

import pickle
import sys
from pathlib import Path

import tensorflow as tf

import stoker
from stoker.images import Train

SAVED = Path("tensorflow.pickle")

SIGNATURE = tf.TensorSpec((None, 3, 32, 32), tf.uint8), tf.TensorSpec((None,), tf.int64)


def epoch_of(feed):
    """Return an epoch of a Feed, which reads ahead itself, as a tf.data.Dataset."""

    def batches():
        for batch in feed:
            yield batch.data, batch.targets

    options = tf.data.Options()
    options.autotune.enabled = False  # else batches are drawn that a saved state then counts
    return tf.data.Dataset.from_generator(batches, output_signature=SIGNATURE).with_options(options)


def main(folder, workers):
    """Train on images in class folders, two epochs; resume where the last run stopped."""
    with stoker.Feed(folder, 8, transform=Train(32), decode_threads=int(workers)) as feed:
        first, state = pickle.loads(SAVED.read_bytes()) if SAVED.exists() else (0, None)
        if state:
            feed.load_state_dict(state)
        for epoch in range(first, 2):
            for _images, labels in epoch_of(feed):  # train on them here
                SAVED.write_bytes(pickle.dumps((epoch, feed.state_dict())))
                print(f"classes in epoch {epoch}:", *labels.numpy())


if __name__ == "__main__":
    main(*sys.argv[1:])
