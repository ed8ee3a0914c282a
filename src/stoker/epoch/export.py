"""Scores in a file, for what places files by them."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from stoker.scores import Scores
from stoker.source.base import Source


def export_scores(scores: Scores, source: Source, path: str | os.PathLike[str]) -> None:
    """Write the name and the score of every sample to ``path``, an ``.npz`` file.

    ``paths`` (``S[N]``) are what ``source`` calls its samples, ``scores`` (``f64[N]``) the latest
    ones, NaN for samples never seen: what ``stoker run --order`` takes. Raises OSError.
    """
    names = np.array([os.fsencode(source.name(sample)) for sample in range(len(source))])
    values = np.where(scores.seen > 0, scores.values, np.nan)
    with Path(path).open("wb") as file:  # by itself NumPy adds a suffix to other names
        np.savez(file, paths=names, scores=values)
