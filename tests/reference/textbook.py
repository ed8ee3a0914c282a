"""Caches as the textbooks describe them, in plain Python: oracles for the policies.

They share no code with the arena and none of its ideas: queues are queues here, and SIEVE's hand
is a hand. Slow, single-threaded, and counted in bytes; a sample larger than the cache is not kept.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, OrderedDict, deque
from collections.abc import Collection
from dataclasses import dataclass


class TextbookCache(ABC):
    """A read-through cache: ``access`` says hit or miss, and a miss brings the sample in.

    Ids are integers, sizes bytes; a sample has the same size at each access.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.sizes: dict[int, int] = {}

    def access(self, sample_id: int, size: int) -> bool:
        """Ask for a sample of ``size`` bytes; True for a hit."""
        if sample_id in self.sizes:
            self._hit(sample_id)
            return True
        if self._refuses(size):
            return False
        self._before(sample_id)
        while self.used + size > self.capacity:
            del self.sizes[self._victim()]
        self.sizes[sample_id] = size
        self._insert(sample_id)
        return False

    @property
    def used(self) -> int:
        """Bytes kept now."""
        return sum(self.sizes.values())

    @property
    def members(self) -> Collection[int]:
        """Ids kept now."""
        return self.sizes.keys()

    def _refuses(self, size: int) -> bool:
        return size > self.capacity

    def _before(self, sample_id: int) -> None:  # noqa: B027 - most caches have nothing to do
        """Look at a missing sample before room is made for it."""

    def _hit(self, sample_id: int) -> None:  # noqa: B027 - most caches have nothing to do
        """Note a hit."""

    @abstractmethod
    def _insert(self, sample_id: int) -> None:
        """Note a new sample."""

    @abstractmethod
    def _victim(self) -> int:
        """Choose, and forget, the sample that leaves."""


class TextbookFIFO(TextbookCache):
    """One queue."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.queue: deque[int] = deque()

    def _insert(self, sample_id: int) -> None:
        self.queue.append(sample_id)

    def _victim(self) -> int:
        return self.queue.popleft()


class TextbookLRU(TextbookCache):
    """An ordered dictionary; a hit moves to the end."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.recent: OrderedDict[int, None] = OrderedDict()

    def _hit(self, sample_id: int) -> None:
        self.recent.move_to_end(sample_id)

    def _insert(self, sample_id: int) -> None:
        self.recent[sample_id] = None

    def _victim(self) -> int:
        return self.recent.popitem(last=False)[0]


class TextbookLFU(TextbookCache):
    """Counts, and within one count the least recently used first."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.by_count: dict[int, OrderedDict[int, None]] = {}
        self.count: dict[int, int] = {}

    def _hit(self, sample_id: int) -> None:
        del self.by_count[self.count[sample_id]][sample_id]
        self._file(sample_id, self.count[sample_id] + 1)

    def _insert(self, sample_id: int) -> None:
        self._file(sample_id, 1)

    def _file(self, sample_id: int, count: int) -> None:
        self.count[sample_id] = count
        self.by_count.setdefault(count, OrderedDict())[sample_id] = None

    def _victim(self) -> int:
        least = min(count for count, ids in self.by_count.items() if ids)
        sample_id = self.by_count[least].popitem(last=False)[0]
        del self.count[sample_id]
        return sample_id


class TextbookStatic(TextbookCache):
    """MinIO: what came first stays, nothing leaves."""

    def _refuses(self, size: int) -> bool:
        return self.used + size > self.capacity

    def _insert(self, sample_id: int) -> None:
        """Nothing to note: there is no order."""

    def _victim(self) -> int:
        raise AssertionError("a static cache evicts nothing")


@dataclass(eq=False)
class _Node:
    sample_id: int
    visited: bool = False
    newer: _Node | None = None
    older: _Node | None = None


class TextbookSieve(TextbookCache):
    """A doubly linked list from old to new and a hand (NSDI 2024, algorithm 1)."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.nodes: dict[int, _Node] = {}
        self.head: _Node | None = None
        self.tail: _Node | None = None
        self.hand: _Node | None = None

    def _hit(self, sample_id: int) -> None:
        self.nodes[sample_id].visited = True

    def _insert(self, sample_id: int) -> None:
        node = self.nodes[sample_id] = _Node(sample_id, older=self.head)
        if self.head is not None:
            self.head.newer = node
        self.head = node
        self.tail = self.tail or node

    def _victim(self) -> int:
        node = self.hand or self.tail
        assert node is not None
        while node.visited:
            node.visited = False
            node = node.newer or self.tail
            assert node is not None
        self.hand = node.newer
        self._unlink(node)
        return node.sample_id

    def _unlink(self, node: _Node) -> None:
        del self.nodes[node.sample_id]
        if node.older is None:
            self.tail = node.newer
        else:
            node.older.newer = node.newer
        if node.newer is None:
            self.head = node.older
        else:
            node.newer.older = node.older


class TextbookS3FIFO(TextbookCache):
    """Three queues (SOSP 2023, algorithm 1), in bytes.

    Until something is evicted, newcomers go to main once the small queue has its share, so that
    an empty cache fills both: the authors' libcachesim does so, the paper does not say it.
    """

    def __init__(self, capacity: int, small: int, ghost: int) -> None:
        super().__init__(capacity)
        self.small_share, self.ghost_share = small, ghost
        self.small: deque[int] = deque()
        self.main: deque[int] = deque()
        self.ghost: deque[tuple[int, int]] = deque()
        self.visits: Counter[int] = Counter()
        self.into_main = self.evicted = False

    def _refuses(self, size: int) -> bool:
        return size > self.small_share

    def _before(self, sample_id: int) -> None:
        known = [entry for entry in self.ghost if entry[0] == sample_id]
        self.into_main = bool(known)
        for entry in known:
            self.ghost.remove(entry)

    def _hit(self, sample_id: int) -> None:
        self.visits[sample_id] = min(self.visits[sample_id] + 1, 3)

    def _insert(self, sample_id: int) -> None:
        small_is_full = self._bytes(self.small) >= self.small_share
        spills = not self.evicted and small_is_full
        (self.main if self.into_main or spills else self.small).append(sample_id)
        self.visits[sample_id] = 0

    def _bytes(self, queue: Collection[int]) -> int:
        return sum(self.sizes[sample_id] for sample_id in queue)

    def _victim(self) -> int:
        self.evicted = True
        while True:
            main_over = self._bytes(self.main) > self.capacity - self.small_share
            victim = self._from_main() if main_over or not self.small else self._from_small()
            if victim is not None:
                return victim

    def _from_small(self) -> int | None:
        while self.small:
            sample_id = self.small.popleft()
            if self.visits[sample_id] < 2:
                self._remember(sample_id)
                return sample_id
            self.visits[sample_id] = 0
            self.main.append(sample_id)
        return None

    def _from_main(self) -> int:
        while self.visits[self.main[0]]:
            self.visits[self.main[0]] -= 1
            self.main.rotate(-1)
        return self.main.popleft()

    def _remember(self, sample_id: int) -> None:
        size = self.sizes[sample_id]
        if size > self.ghost_share:
            return
        while sum(length for _, length in self.ghost) + size > self.ghost_share:
            self.ghost.popleft()
        self.ghost.append((sample_id, size))
