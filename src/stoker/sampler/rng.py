"""The random numbers of an epoch."""

from __future__ import annotations

import numpy as np

from stoker.errors import ConfigError


def generator(seed: int, epoch: int, stream: int = 0) -> np.random.Generator:
    """Return the generator of ``epoch``: counter-based, so no epoch needs those before it.

    Philox keyed by (seed, epoch); streams, from 0, are far apart in its counter. Raises
    :class:`~stoker.errors.ConfigError` for an epoch below 0.
    """
    if not 0 <= epoch < 2**64:
        raise ConfigError(f"epoch={epoch} is refused: count from 0")
    key = np.array([seed, epoch], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 0, stream]))
