"""Random numbers of augmentation, tied to the place of a sample in the plan.

Python's, NumPy's and torch's global generators are seeded before each sample, so that an
augmentation depends on (seed, epoch, position) and not on which worker ran it or how many there
were. Costs 7 µs a sample, and nothing for data sets without transforms. Generators that a
transform owns itself are its own affair.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

_WORD = (1 << 64) - 1


def sample_seeds(seed: int, epoch: int, positions: NDArray[np.int64]) -> list[int]:
    """Return a 64-bit seed for each of ``positions``, ``i64[n]``, the places in the epoch's plan.

    SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) of a counter, keyed by seed and epoch.
    """
    key = _mix(np.array([seed & _WORD, epoch & _WORD], np.uint64))
    base = key[0] ^ _mix(key[1:])[0]
    mixed: list[int] = _mix(
        base + positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    ).tolist()
    return mixed


def seed_generators(seed: int) -> None:
    """Seed Python's, NumPy's and torch's CPU generators of this process with 64 bits."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002 (users' transforms draw from the global one)
    # torch.manual_seed would also visit every accelerator: 130 µs instead of 1.
    torch.default_generator.manual_seed(seed)


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Give this process's global generators back as they were."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()  # noqa: NPY002
    torch_state = torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        torch.default_generator.set_state(torch_state)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        values = values + np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))
