"""Selective backward: fetch every sample, learn from the hard ones."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stoker.errors import ConfigError


class SelectiveBackward:
    """Keeps a sample of a batch with probability percentile(loss)^beta.

    Selective-Backprop (Jiang et al. 2019): the percentile is the share of the
    last ``history`` losses that are at most the own one, those of the batch included. This is
    "computing-oriented importance sampling" (CIS), the baseline of iCache (HPCA'23): it saves
    computing and no I/O. The draws come from the caller's generator; the history is the only
    state. Not thread-safe. Raises :class:`~stoker.errors.ConfigError` for a beta that is negative
    or not finite, and for a history below 1.
    """

    def __init__(self, beta: float = 1.0, history: int = 1024) -> None:
        if not 0 <= beta < np.inf:
            raise ConfigError(f"beta={beta!r} is out of range: give 0 (keep all) or more")
        if isinstance(history, bool) or not isinstance(history, int) or history < 1:
            raise ConfigError(
                f"history={history!r} is out of range: give a number of losses, 1 or more"
            )
        self.beta = beta
        self.history = history
        self._losses = np.empty(0)

    def weights(self, losses: ArrayLike, rng: np.random.Generator) -> NDArray[np.float32]:
        """Return f32[n] for ``losses`` f64[n]: 0 for a sample dropped, n / kept for one kept.

        So the mean of weighted losses is the mean over those kept. A loss that is NaN or infinite
        is kept, for the training loop to see, and does not enter the history.
        """
        given = np.asarray(losses, dtype=np.float64)
        if given.ndim != 1:
            raise ConfigError(f"losses have shape {given.shape}: give one per sample")
        finite = np.isfinite(given)
        self._losses = np.concatenate((self._losses, given[finite]))[-self.history :]
        known = np.sort(self._losses)
        share = np.searchsorted(known, given, side="right") / max(len(known), 1)
        kept = (rng.random(len(given)) < share**self.beta) | ~finite
        return (kept * (len(given) / max(int(kept.sum()), 1))).astype(np.float32)

    def state_dict(self) -> dict[str, NDArray[np.float64]]:
        """Return the history, oldest first."""
        return {"losses": self._losses.copy()}

    def load_state_dict(self, state: dict[str, NDArray[np.float64]]) -> None:
        """Continue from what :meth:`state_dict` returned."""
        self._losses = np.array(state["losses"], dtype=np.float64)[-self.history :]
