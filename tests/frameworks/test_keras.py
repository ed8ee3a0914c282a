"""An epoch of a Feed as Keras' PyDataset, and the training of a real model on it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("keras") is None or importlib.util.find_spec("jax") is None,
    reason="keras or jax is not installed: pip install 'stoker[frameworks-tests]'",
)

BEFORE = """
import keras, numpy as np, stoker
from stoker.feed.keras import Epoch, fit_epoch
from stoker.source import MemorySource
source = MemorySource([np.full(4, i, np.float32).tobytes() for i in range(50)])
feed = stoker.Feed(source, 8, decode=lambda raw: np.frombuffer(raw, np.float32), targets=range(50))
"""


def run(script: str) -> None:
    """Apart, for Keras takes its backend from the environment and imports much."""
    done = subprocess.run(
        [sys.executable, "-c", BEFORE + script + "\nfeed.close()\n"],
        env={**os.environ, "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_batch_may_be_looked_at_again_until_it_is_dropped() -> None:
    run("""
epoch = Epoch(feed)
assert len(epoch) == 7
seen = [epoch[i][1] for i in (0, 1, 0, 1, 2, 3, 4, 5, 6)]
assert (seen[0] == seen[2]).all() and sorted(np.concatenate(seen[2:])) == [*range(50)]
epoch.drop(1)
for index, message in (1, "was trained on already"), (7, "out of range"):
    try:
        epoch[index]
    except IndexError as error:
        assert message in str(error)
    else:
        raise AssertionError
assert epoch[2][0].shape == (8, 4)
""")


def test_losses_are_observed_and_several_steps_make_one() -> None:
    run("""
model = keras.Sequential([keras.layers.Dense(1)])
model.compile("sgd", "mse", steps_per_execution=2)
counts = []
def after(batch, batches):
    counts.append(batches)
    feed.observe(np.ones(len(batch)), batch=batch)
for epoch in range(2):
    history = fit_epoch(model, feed, after, initial_epoch=epoch, epochs=epoch + 1, verbose=0)
    assert history.epoch == [epoch] and len(history.history["loss"]) == 1
assert counts == [2, 4, 6, 7] * 2, counts
assert feed.stats.accesses == 100
""")
