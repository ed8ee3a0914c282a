"""Parts that tests of packaging have in common.

This folder is no package on purpose: tests here import it by its own name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from stoker.bundles.depot import Depot, DirectoryDepot, location_of, open_depot
from stoker.bundles.packager import FIELDS, Flags, Job, Totals
from stoker.bundles.workshop import Epoch, Workshop
from stoker.policy.base import Region
from stoker.shared import SharedArray
from stoker.source.held import MemorySource
from stoker.store.arena import Arena
from stoker.testing.sources import SlowSource

NUM = 300
MIN_BYTES = 1000
H, L = 0, 1


def sample(number: int) -> bytes:
    return number.to_bytes(4, "little") * (5 + number % 40)


SAMPLES = [sample(number) for number in range(NUM)]
SIZES = np.array([len(s) for s in SAMPLES])


class CountingDepot(DirectoryDepot):
    """Counts whole reads, and fails when told to."""

    def __init__(self, path: Path, group: str) -> None:
        super().__init__(path, group, keep_free=0)
        self.reads: list[str] = []
        self.error: OSError | None = None

    def read(self, name: str, num_bytes: int = -1) -> memoryview:
        if num_bytes < 0:
            self.reads.append(name)
        return super().read(name, num_bytes)

    def publish(self, name: str, pieces: object) -> None:
        if self.error is not None:
            raise self.error
        super().publish(name, pieces)  # type: ignore[arg-type]


@dataclass
class Bench:
    """A workshop whose steps a test makes itself, over an arena with the regions H and L."""

    path: Path
    low_bytes: int = 3 * MIN_BYTES
    is_told: bool = False
    source: SlowSource = field(
        default_factory=lambda: SlowSource(MemorySource(SAMPLES), latency=0.0)
    )

    def __post_init__(self) -> None:
        self.arena = two_regions(self.low_bytes)
        self.served = SharedArray.create(NUM, np.uint32)
        self.flags, self.totals = Flags(NUM), Totals()
        self.packaged, self.sums = np.zeros(NUM, np.uint8), np.zeros(len(FIELDS))
        self.flags.join(self.packaged)
        self.totals.join(self.sums)
        self.job = Job(
            self.source,
            self.arena.handle,
            "L",
            L,
            self.served,
            self.path,
            False,
            "0",
            MIN_BYTES,
            seed=3,
            holder="ab",
        )
        self.depot = CountingDepot(self.path, self.job.group)
        self.workshop = self.another()
        self.low = np.zeros(NUM, np.bool_)
        self.stamp = 0

    def another(self) -> Workshop:
        """Return a new workshop over the same depot and cache."""
        parts = self.job, self.arena, self.depot, self.flags, self.totals
        return Workshop(*parts, is_told=self.is_told)

    def begin(self, low: np.ndarray, missed: np.ndarray | None = None) -> None:
        """Begin the next epoch and repack for it."""
        self.low = low
        self.stamp += 1
        none = np.zeros(NUM, np.bool_)
        epoch = Epoch(self.stamp - 1, self.stamp, low)
        self.workshop.begin(epoch, none if missed is None else missed)
        assert self.workshop.build()

    def settle(self) -> None:
        """Build and load until nothing is left to do but to wait for samples to be served."""
        for _ in range(10_000):
            built = self.workshop.build()
            loaded = self.workshop.load()
            if not built and (loaded is None or loaded.name in ("NO_ROOM", "TOO_LARGE")):
                return
        raise AssertionError("it never settles")

    @property
    def cached(self) -> np.ndarray:
        """The samples in L."""
        return self.arena.list("L")

    def serve(self, ids: np.ndarray) -> None:
        """Serve samples: right bytes only."""
        data, offsets, found = self.arena.get_many(ids)
        assert found.all()
        for place, number in enumerate(ids.tolist()):
            assert data[offsets[place] : offsets[place + 1]].tobytes() == SAMPLES[number]
        is_first = self.low[ids] & (self.served.array[ids] < self.stamp)
        self.served.array[ids] = self.stamp
        if self.is_told:
            self.workshop.note_served(ids[is_first])

    def count(self, name: str) -> int:
        """Return one of the totals."""
        return int(self.sums[FIELDS.index(name)])

    def close(self) -> None:
        """Let go."""
        self.depot.close()
        self.arena.close()


def two_regions(low_bytes: int, high_bytes: int = 4 * MIN_BYTES) -> Arena:
    """An arena with a region for each kind of samples."""
    total = low_bytes + high_bytes
    arena = Arena(NUM, total, 90)
    arena.configure(
        [
            Region("H", high_bytes / total, admission="beats_victims"),
            Region("L", low_bytes / total, order="insertion", admission="while_room"),
        ]
    )
    return arena


class FarDepot:
    """A depot in a process of its own, since clients of object stores do not survive a fork."""

    def __init__(self, far: Executor, url: str, options: Mapping[str, Any], group: str) -> None:
        self._far, self._which = far, (url, tuple(options.items()), group)
        self._do("names")

    def names(self) -> list[str]:
        return list(self._do("names"))

    def publish(self, name: str, pieces: Sequence[bytes | memoryview]) -> None:
        self._do("publish", name, [bytes(piece) for piece in pieces])

    def read(self, name: str, num_bytes: int = -1) -> memoryview:
        return memoryview(self._do("read", name, num_bytes))

    def remove(self, names: Sequence[str]) -> None:
        self._do("remove", names)

    def close(self) -> None:
        self._do("close")

    def _do(self, method: str, *arguments: Any) -> Any:
        return self._far.submit(_do_there, self._which, method, *arguments).result(60)


_there: dict[Any, Depot] = {}


def _do_there(which: tuple[str, Any, str], method: str, *arguments: Any) -> Any:
    if method == "close":
        if which in _there:
            _there.pop(which).close()
        return None
    if which not in _there:
        url, options, group = which
        _there[which] = open_depot(location_of(url, dict(options)), False, group, "ab")
    answer = getattr(_there[which], method)(*arguments)
    return bytes(answer) if isinstance(answer, memoryview) else answer
