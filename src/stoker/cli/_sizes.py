"""The option ``--sizes``: how large the samples of a replay are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError
from stoker.sim.replay import IMAGENET_MEAN

SIZES_HELP = (
    "equal; lognormal:MEAN,SIGMA in bytes (ImageNet: 110000,0.6); or a FILE, .npy or text with a "
    "number in each line, from which sizes are drawn where it has not just as many."
)
_WAY_OUT = "give equal, lognormal:MEAN,SIGMA or a file of sizes"


def draw_sizes(text: str, num_samples: int, seed: int) -> NDArray[np.int64]:
    """Return i64[num_samples] bytes as ``--sizes`` says; ConfigError for what says nothing."""
    kind, _, rest = text.partition(":")
    rng = np.random.default_rng([seed, 0x512E])
    if text == "equal":
        return np.full(num_samples, IMAGENET_MEAN, np.int64)
    if kind == "lognormal":
        mean, sigma = _two_numbers(text, rest)
        drawn = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, num_samples)
        return np.maximum(1, np.rint(drawn)).astype(np.int64)
    known = _read(text)
    return known if len(known) == num_samples else rng.choice(known, num_samples)


def _two_numbers(text: str, rest: str) -> tuple[float, float]:
    try:
        mean, sigma = (float(part) for part in rest.split(","))
    except ValueError:
        mean = sigma = -1.0
    if not (0 < mean < 2**32 and 0 <= sigma <= 4):
        raise ConfigError(f"--sizes {text!r} is refused: {_WAY_OUT}, with bytes and 0 to 4")
    return mean, sigma


def _read(text: str) -> NDArray[np.int64]:
    path = Path(text)
    if not path.is_file():
        raise ConfigError(f"--sizes {text!r} is refused: {_WAY_OUT}")
    try:
        found = np.load(path) if path.suffix == ".npy" else np.loadtxt(path, ndmin=1)
    except ValueError as error:
        raise ConfigError(f"--sizes {text!r} cannot be read ({error}): {_WAY_OUT}") from error
    if found.ndim != 1 or not len(found) or not (found >= 1).all():
        raise ConfigError(f"--sizes {text!r} has no sizes of 1 byte or more: {_WAY_OUT}")
    return np.rint(found).astype(np.int64)
