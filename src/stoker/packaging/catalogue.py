"""Which packages there are, and in which of them a sample is to be found."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from stoker.store.tier import Ids, Mask


class Catalogue:
    """The packages of one depot, by number, in the order in which they were made.

    A sample is *at home* in the latest package that holds it. Safe in any thread.
    """

    def __init__(self, num_samples: int) -> None:
        self._home = np.full(num_samples, -1, np.int64)
        self._packages: dict[int, tuple[str, Ids]] = {}
        self._next = 0
        self._lock = threading.Lock()

    def add(self, name: str, ids: Ids) -> int:
        """Note a package with ``ids`` (``u32[n]``), which are at home there, and number it."""
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._packages[number] = name, ids
            self._home[ids] = number
            return number

    def remove(self, numbers: Iterable[int]) -> list[str]:
        """Forget packages, and return the names of those that were there."""
        names = []
        with self._lock:
            for number in numbers:
                if number in self._packages:
                    name, ids = self._packages.pop(number)
                    self._home[ids[self._home[ids] == number]] = -1
                    names.append(name)
        return names

    def name(self, number: int) -> str | None:
        """Return the name of a package, None if it is not there any more."""
        with self._lock:
            return self._packages.get(number, (None,))[0]

    def ids(self, number: int) -> Ids:
        """Return the samples in a package, ``u32[n]``; none if it is not there any more."""
        with self._lock:
            found = self._packages.get(number)
            return np.empty(0, np.uint32) if found is None else found[1]

    def home(self, ids: Ids) -> NDArray[np.int64]:
        """Return the number of each sample's package, -1 where it is in none."""
        return self._home[ids]

    def numbers(self) -> list[int]:
        """Return the numbers of all packages, the oldest first."""
        with self._lock:
            return list(self._packages)

    def contents(self) -> list[Ids]:
        """Return, for each package, the samples that are at home there."""
        with self._lock:
            return [ids[self._home[ids] == number] for number, (_, ids) in self._packages.items()]

    def useless(self, low: Mask, numbers: Iterable[int]) -> list[int]:
        """Return those of ``numbers`` where no sample of ``low`` (``bool[N]``) is at home."""
        with self._lock:
            found = []
            for number in numbers:
                if number in self._packages:
                    ids = self._packages[number][1]
                    if not (low[ids] & (self._home[ids] == number)).any():
                        found.append(number)
            return found
