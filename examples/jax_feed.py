"""JAX on batches of a Feed, whose threads copy them to the device ahead of training.

    python examples/jax_feed.py /mnt/nfs/train 8

Resumes at the exact sample, with any number of threads. Needs ``pip install jax``.
"""

import pickle
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

import stoker
from stoker.images import Train

SAVED = Path("jax.pickle")


@jax.jit
def step(weights, images, labels):
    """Return better weights: of a linear model for the class number."""

    def loss(weights):
        return jnp.mean((images.reshape(len(images), -1) / 255 @ weights - labels) ** 2)

    return weights - 1e-4 * jax.grad(loss)(weights)


def main(folder, workers):
    """Train on images in class folders, two epochs; resume where the last run stopped."""
    options = {"decode_threads": int(workers), "ready": 4, "to_device": jax.device_put}
    with stoker.Feed(folder, 8, transform=Train(32), **options) as feed:
        first, weights = 0, jnp.zeros(3 * 32 * 32)
        if SAVED.exists():
            first, weights, state = pickle.loads(SAVED.read_bytes())
            feed.load_state_dict(state)
        for epoch in range(first, 2):
            for batch in feed:  # batch.data is a jax.Array
                weights = step(weights, batch.data, batch.targets)
                SAVED.write_bytes(pickle.dumps((epoch, weights, feed.state_dict())))
                print(f"classes in epoch {epoch}:", *batch.targets)


if __name__ == "__main__":
    main(*sys.argv[1:])
