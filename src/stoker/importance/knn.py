"""What an index of nearest neighbours is, and how the parts that one needs are loaded."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError
from stoker.importance.vectors import VectorTable


class Nearest(NamedTuple):
    """Rows of a table that lie next to some queries, nearest first."""

    rows: NDArray[np.int64]
    """``i64[n, m]``, with -1 where fewer were found."""
    distances: NDArray[np.float32]
    """``f32[n, m]``, L2; infinite where fewer were found."""


class NearestIndex(Protocol):
    """Finds the rows of a table nearest to a query; used by one thread."""

    def changed(self, rows: NDArray[np.int64]) -> None:
        """Note that these rows ``i64[n]`` of the table are new or hold another vector."""
        ...

    def search(self, queries: NDArray[np.float32], k: int) -> Nearest:
        """Return the nearest rows to ``f32[n, d]``: m = min(k, rows of the table) for each."""
        ...

    def recall(self, k: int, m: int) -> float:
        """Return the share of the k nearest rows that a search for m >= k finds; 1 if exact."""
        ...

    def close(self) -> None:
        """Free what it holds; it is not used afterwards."""
        ...


MakeIndex = Callable[[VectorTable], NearestIndex]


def load(name: str) -> Any:
    """Return a module of the extra ``importance``; ConfigError if it is not installed."""
    try:
        return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ConfigError(
            f"scores from neighbours need {package} ({error}): pip install 'stoker[importance]'"
        ) from error
