"""Who enters and who leaves the reference arena: admission, pop rules, ghosts, budgets."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from random import Random

from reference.region import Key, Member, ReferenceGhost, ReferenceRegion
from stoker.errors import ConfigError, SegmentError
from stoker.policy.base import Region


class ReferenceRules:
    """The regions of one arena, its clock, and the cached samples by id.

    Not thread-safe: the arena's lock covers it.
    """

    def __init__(self, capacity: int, seed: int) -> None:
        self.capacity = capacity
        self.counts: Counter[str] = Counter()
        self.home: dict[int, ReferenceRegion] = {}
        # Which insertion each sample came in by last.
        self.copy: dict[int, int] = {}
        self.regions: dict[str, ReferenceRegion] = {}
        self.ghosts: dict[str, ReferenceGhost] = {}
        # Names of both kinds, in the order in which they were given.
        self.names: dict[str, None] = {}
        # Samples that may not leave: leased ones, and those that a put has in flight.
        self.leased: set[int] = set()
        self.in_flight: set[int] = set()
        self._clock = 0
        self._random = Random(seed)

    # Regions

    def region(self, name: str) -> ReferenceRegion:
        """Return a region that holds samples; ConfigError for any other name."""
        if name not in self.regions:
            known = ", ".join(self.regions)
            raise ConfigError(f"region {name!r} holds no samples here: use one of {known}")
        return self.regions[name]

    def configure(self, regions: Sequence[Region]) -> None:
        """Replace all regions, shares becoming bytes; ConfigError unless nothing is cached."""
        if self.home:
            raise ConfigError("the arena is not empty: configure it before use")
        before = self.regions, self.ghosts, self.names
        self.regions, self.ghosts, self.names = {}, {}, {}
        try:
            for rules in regions:
                self.add(rules, int(rules.share * self.capacity))
            for rules in regions:
                self._check_references(rules)
        except ConfigError:
            self.regions, self.ghosts, self.names = before
            raise

    def add(self, rules: Region, budget: int) -> None:
        """Add a region; ConfigError for a name that is taken or a negative budget."""
        if rules.name in self.regions or rules.name in self.ghosts:
            raise ConfigError(f"region {rules.name!r} exists already: give another name")
        self._check_budget(rules.name, budget)
        self.names[rules.name] = None
        if rules.holds_bytes:
            self.regions[rules.name] = ReferenceRegion(rules, budget, self._random)
        else:
            self.ghosts[rules.name] = ReferenceGhost(rules, budget)

    def carve(self, rules: Region, budget: int) -> None:
        """Add a region; a strict one takes its budget from what is free in "main"."""
        self._check_references(rules)
        if rules.strict and rules.holds_bytes:
            main = self.region("main")
            if budget > main.budget - main.bytes:
                raise ConfigError(
                    f"region {rules.name!r}: {budget} bytes are more than the "
                    f"{main.budget - main.bytes} free in 'main': give less"
                )
        self.add(rules, budget)
        if rules.strict and rules.holds_bytes:
            self.region("main").budget -= budget

    def resize(self, name: str, budget: int) -> None:
        """Change a budget, the difference from or to a strict "main"; evict what is over."""
        self._check_budget(name, budget)
        if name in self.ghosts:
            self.ghosts[name].resize(budget)
            return
        resized = self.region(name)
        strict = [r for r in self.regions.values() if r.rules.strict and r is not resized]
        main = next((r for r in strict if r.rules.name == "main"), None)
        others = sum(r.budget for r in strict if r is not main)
        if resized.rules.strict:
            if others + budget > self.capacity:
                raise ConfigError(
                    f"region {name!r}: {budget} bytes and the other regions' {others} are more "
                    f"than the capacity of {self.capacity}: shrink another region first"
                )
            if main is not None:
                main.budget = self.capacity - others - budget
        resized.budget = budget
        self._shed(resized)
        if main is not None:
            self._shed(main)

    def divide(self, shares: Mapping[str, float]) -> None:
        """Share out anew what these strict regions have together; evict what is over."""
        regions = [self.region(name) for name in shares]
        whole = sum(shares.values())
        if not whole > 0 or not all(0 <= share < math.inf for share in shares.values()):
            raise ConfigError(f"shares {shares} are refused: give 0 or more, not all of them 0")
        for region in regions:
            if not region.rules.strict:
                raise ConfigError(f"region {region.rules.name!r} borrows: give strict regions")
        total = left = sum(region.budget for region in regions)
        for region in regions[1:]:
            region.budget = min(left, math.floor(total * (shares[region.rules.name] / whole)))
            left -= region.budget
        regions[0].budget = left
        for region in regions:
            self._shed(region)

    def _shed(self, region: ReferenceRegion) -> None:
        while region.bytes > region.budget and self._pop_one(region):
            pass

    def _check_references(self, rules: Region) -> None:
        if rules.promote_to is not None:
            self.region(rules.promote_to)
        if rules.ghost is not None and rules.ghost not in self.ghosts:
            raise ConfigError(f"region {rules.name!r}: ghost={rules.ghost!r} is not a ghost")

    @staticmethod
    def _check_budget(name: str, budget: int) -> None:
        if budget < 0:
            raise ConfigError(f"region {name!r}: bytes={budget} is refused: give at least 0")

    # Samples

    def payload_bytes(self) -> int:
        """Return the bytes of all cached samples."""
        return sum(region.bytes for region in self.regions.values())

    def sample(self, sample_id: int) -> bytes:
        """Return a sample's bytes, empty if it is not cached."""
        home = self.home.get(sample_id)
        return b"" if home is None else home.members[sample_id].sample

    def touch(self, sample_id: int) -> bool:
        """Note a hit, or a miss; True for a hit."""
        home = self.home.get(sample_id)
        if home is not None:
            home.touch(sample_id, self._tick())
        self.counts["misses" if home is None else "hits"] += 1
        return home is not None

    def set_key(self, sample_id: int, key: float | None) -> None:
        """Replace the key of a cached sample where the order is the caller's key."""
        home = self.home.get(sample_id)
        if home is not None and home.rules.order == "key" and key is not None:
            home.members[sample_id].key = (key,)

    def discard(self, sample_id: int) -> None:
        """Drop a cached sample, whether leased or not."""
        home = self.home.pop(sample_id, None)
        if home is not None:
            home.remove(sample_id)

    def put(
        self, sample_id: int, sample: bytes, given: float | None, asked: ReferenceRegion
    ) -> bool:
        """Insert one sample if the rules admit it; True if it is cached now."""
        if sample_id in self.home:
            self.set_key(sample_id, given)
            return True
        target = self._target(sample_id, asked, len(sample))
        if target is None or not self._admit(target, len(sample), given):
            self.counts["rejected"] += 1
            return False
        # The clock ticks after the evictions: the newcomer is younger than what they re-keyed.
        clock = self._tick()
        target.add(sample_id, Member(sample, target.key_at(clock, given)))
        self.home[sample_id] = target
        self.counts["inserts"] += 1
        self.copy[sample_id] = self.counts["inserts"]
        return True

    def index(self, sample_id: int) -> int:
        """Return the place of a sample's region among all of them; 255 if it is not cached."""
        home = self.home.get(sample_id)
        return 255 if home is None else [*self.names].index(home.rules.name)

    def move(self, sample_id: int, target: ReferenceRegion, given: float | None) -> bool:
        """Move a cached sample to another region if its rules admit it; True if it is there."""
        home = self.home.get(sample_id)
        if home is None or home is target:
            self.set_key(sample_id, given)
            return home is not None
        was = home.members[sample_id]
        if len(was.sample) > target.budget:
            return False
        if given is None and home.rules.order == target.rules.order == "key":
            given = was.key[0]
        # Out of everything while room is made: what it takes already is not in its way.
        home.remove(sample_id)
        del self.home[sample_id]
        admitted = self._admit(target, len(was.sample), given)
        new = Member(was.sample, target.key_at(self._tick(), given)) if admitted else was
        (target if admitted else home).add(sample_id, new)
        self.home[sample_id] = target if admitted else home
        return admitted

    def verify(self) -> None:
        """Raise SegmentError if a derived number differs from what it is derived from."""
        if self.payload_bytes() > self.capacity:
            raise SegmentError(f"{self.payload_bytes()} bytes exceed {self.capacity}")
        for name, region in self.regions.items():
            if region.bytes != sum(len(m.sample) for m in region.members.values()):
                raise SegmentError(f"region {name!r} counts {region.bytes} bytes wrongly")
            if any(self.home.get(i) is not region for i in region.members):
                raise SegmentError(f"region {name!r} holds samples listed elsewhere")
        if len(self.home) != sum(len(r.members) for r in self.regions.values()):
            raise SegmentError(f"{len(self.home)} samples are listed, regions hold others")

    # Admission

    def _target(
        self, sample_id: int, asked: ReferenceRegion, length: int
    ) -> ReferenceRegion | None:
        """Return the region a newcomer goes to; None if it could never fit there.

        The budget of the region asked for binds even where the ghost sends the sample on: so it
        is in S3-FIFO, and the cache does not treat an id differently the second time.
        """
        if length > self.capacity or length > asked.budget:
            return None
        forgotten = {name for name, ghost in self.ghosts.items() if ghost.forget(sample_id)}
        target = asked
        # An empty S3-FIFO fills both its queues.
        room = not self._crowded(asked, length)
        filling = room and not self.counts["evictions"] and asked.bytes >= asked.budget
        if asked.rules.pop == "promote" and (filling or asked.rules.ghost in forgotten):
            target = self.region(asked.rules.promote_to or "")
        return None if target.rules.strict and length > target.budget else target

    def _admit(self, target: ReferenceRegion, length: int, given: float | None) -> bool:
        """Make room if the region's admission rule lets the newcomer have it."""
        if target.rules.admission == "while_room":
            return not self._crowded(target, length)
        if target.rules.admission == "beats_victims":
            victims = self._beaten(target, length, target.key_at(self._clock + 1, given))
            for i in victims or ():
                self._evict(target, i)
            return victims is not None
        while self._crowded(target, length):
            if not (self._pop_one(target) if target.rules.strict else self._pop_borrowed()):
                return False
        return True

    def _crowded(self, region: ReferenceRegion, length: int) -> bool:
        if region.rules.strict:
            return region.bytes + length > region.budget
        # Those that borrow share what the strict ones leave.
        borrowed = sum(r.bytes for r in self.regions.values() if not r.rules.strict)
        lent = sum(r.budget for r in self.regions.values() if r.rules.strict)
        return borrowed + length > self.capacity - lent

    def _beaten(self, region: ReferenceRegion, length: int, key: Key) -> list[int] | None:
        """Return the victims, smallest key first, or None if one beats the newcomer.

        A newcomer of key -inf beats nobody.
        """
        short = max(
            region.bytes + length - region.budget,
            self.payload_bytes() + length - self.capacity,
        )
        victims: list[int] = []
        for i in region.ordered(self._fixed()):
            if short <= 0:
                break
            member = region.members[i]
            tie = region.rules.ties and key[0] > -math.inf
            if member.key > key or (member.key == key and not tie):
                return None
            victims.append(i)
            short -= len(member.sample)
        return victims if short <= 0 else None

    # Eviction

    def _pop_borrowed(self) -> bool:
        """Pop among the regions that are not strict; False if none can leave."""
        shared = [r for r in self.regions.values() if not r.rules.strict]
        over = [r for r in reversed(shared) if r.bytes > r.budget]
        # A region whose samples may not leave is passed over: nothing waits for room.
        for region in over + shared:
            if region.smallest(self._fixed()) is not None:
                return self._pop_one(region)
        return False

    def _pop_one(self, region: ReferenceRegion) -> bool:
        """Pop until a sample was evicted or none may leave; False if nothing changed."""
        changed = False
        while True:
            did, chosen = region.pop(self._fixed(), self._tick)
            if did == "evicted":
                self._evict(region, chosen)
                return True
            if did == "nothing":
                return changed
            if did == "promoted":
                self._promote(region, chosen)
            changed = True

    def _evict(self, region: ReferenceRegion, sample_id: int) -> None:
        member = region.remove(sample_id)
        del self.home[sample_id]
        region.after_eviction()
        self.counts["evictions"] += 1
        if region.rules.ghost is not None:
            self.ghosts[region.rules.ghost].remember(sample_id, len(member.sample))

    def _promote(self, region: ReferenceRegion, sample_id: int) -> None:
        target = self.region(region.rules.promote_to or "")
        member = region.remove(sample_id)
        target.add(sample_id, Member(member.sample, target.key_at(self._tick(), None)))
        self.home[sample_id] = target

    def _fixed(self) -> set[int]:
        return self.leased | self.in_flight

    def _tick(self) -> int:
        self._clock += 1
        return self._clock
