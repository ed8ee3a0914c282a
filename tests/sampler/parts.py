"""Scores that training might have left."""

import numpy as np

from stoker.scores import Scores


def scores_of(values, *, unseen=(), accuracies=(), losses=None) -> Scores:
    """Return a snapshot with ``values``, each seen once but for the ids ``unseen``."""
    values = np.asarray(values, np.float64)
    scores = Scores(len(values))
    seen = np.setdiff1d(np.arange(len(values)), unseen)
    scores.update(seen, values[seen], step=0)
    losses = [1.0] * len(accuracies) if losses is None else losses
    for epoch, (accuracy, loss) in enumerate(zip(accuracies, losses, strict=True)):
        scores.record_epoch(epoch, accuracy=accuracy, loss=loss)
    return scores.snapshot()
