"""One region of the reference arena: its members, its order and its pop rule."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container
from dataclasses import dataclass
from random import Random
from typing import Literal

from stoker.policy.base import MAX_VISITS, Region

Key = tuple[float, ...]
Popped = Literal["evicted", "promoted", "kept", "nothing"]


def turn_of(sample_id: int) -> int:
    """Return which of samples with equal keys leaves first: that of the smallest turn."""
    return sample_id * 0x9E3779B1 % 2**32


@dataclass(slots=True)
class Member:
    """A cached sample: its bytes, the key it is ordered by, and its hits since insertion."""

    sample: bytes
    key: Key
    visits: int = 0


class ReferenceRegion:
    """Members of one region, in plain Python, with a linear search for the smallest key.

    Not thread-safe: the arena's lock covers it. ``rules.share`` is not used here, the budget is
    in bytes.
    """

    def __init__(self, rules: Region, budget: int, random: Random) -> None:
        self.rules = rules
        self.budget = budget
        self.members: dict[int, Member] = {}
        self.bytes = 0
        # SIEVE: the pass over the queue in which the hand is now.
        self.round = 0
        self._random = random

    def __len__(self) -> int:
        return len(self.members)

    def key_at(self, clock: int, given: float | None) -> Key:
        """Return the key of a sample that enters at ``clock``."""
        if self.rules.order == "frequency":
            return (1, clock)
        if self.rules.pop == "sieve":
            return (self.round, clock)
        if self.rules.order == "key" and given is not None:
            return (given,)
        return (clock,)

    def public_key(self, sample_id: int) -> float:
        """Return the key as ``Arena.keys`` shows it: key, clock or count."""
        key = self.members[sample_id].key
        return float(key[-1] if self.rules.pop == "sieve" else key[0])

    def add(self, sample_id: int, member: Member) -> None:
        """Insert a member; the caller has made room."""
        self.members[sample_id] = member
        self.bytes += len(member.sample)

    def remove(self, sample_id: int) -> Member:
        """Take a member out and return it."""
        member = self.members.pop(sample_id)
        self.bytes -= len(member.sample)
        return member

    def touch(self, sample_id: int, clock: int) -> None:
        """Note a hit at ``clock``."""
        member = self.members[sample_id]
        if self.rules.order == "recency":
            member.key = (clock,)
        elif self.rules.order == "frequency":
            member.key = (member.key[0] + 1, clock)
        most = 1 if self.rules.pop == "sieve" else MAX_VISITS
        member.visits = min(member.visits + 1, most)

    def ordered(self, pinned: Container[int]) -> list[int]:
        """Return the ids that may leave, smallest key first, equal keys by their turns."""
        free = [i for i in self.members if i not in pinned]
        return sorted(free, key=self._order)

    def smallest(self, pinned: Container[int]) -> int | None:
        """Return the id that the pop rule looks at next, or None when all are pinned."""
        free = [i for i in self.members if i not in pinned]
        if not free:
            return None
        if self.rules.pop == "random":
            return self._random.choice(sorted(free))
        return min(free, key=self._order)

    def _order(self, sample_id: int) -> tuple[Key, int]:
        return self.members[sample_id].key, turn_of(sample_id)

    def pop(self, pinned: Container[int], tick: Callable[[], int]) -> tuple[Popped, int]:
        """Apply the pop rule once; return what it did, and to which id (-1 for nothing).

        A member that is evicted or promoted is still here: the caller moves it.
        """
        chosen = self.smallest(pinned)
        if chosen is None:
            return "nothing", -1
        member = self.members[chosen]
        if self.rules.pop == "promote" and member.visits >= self.rules.visits:
            return "promoted", chosen
        if self.rules.pop == "sieve" and member.visits:
            member.visits, member.key = 0, (member.key[0] + 1, member.key[1])
            return "kept", chosen
        if self.rules.pop == "second_chance" and member.visits:
            member.visits, member.key = member.visits - 1, (tick(),)
            return "kept", chosen
        return "evicted", chosen

    def after_eviction(self) -> None:
        """Note where the SIEVE hand stands: newcomers belong to the pass it is in."""
        if self.rules.pop == "sieve" and self.members:
            self.round = int(min(member.key for member in self.members.values())[0])


class ReferenceGhost:
    """Ids evicted lately, oldest first, within a budget counted in the samples' bytes."""

    def __init__(self, rules: Region, budget: int) -> None:
        self.rules = rules
        self.budget = budget
        self.lengths: OrderedDict[int, int] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self.lengths)

    def remember(self, sample_id: int, length: int) -> None:
        """Add an id, forgetting the oldest ones until its length fits."""
        if length > self.budget or sample_id in self.lengths:
            return
        self._forget_oldest(self.budget - length)
        self.lengths[sample_id] = length
        self.bytes += length

    def resize(self, budget: int) -> None:
        """Change the budget, forgetting the oldest ids beyond it."""
        self.budget = budget
        self._forget_oldest(budget)

    def _forget_oldest(self, down_to: int) -> None:
        while self.bytes > down_to:
            self.bytes -= self.lengths.popitem(last=False)[1]

    def forget(self, sample_id: int) -> bool:
        """Drop an id; True if it was remembered."""
        length = self.lengths.pop(sample_id, None)
        self.bytes -= length or 0
        return length is not None
