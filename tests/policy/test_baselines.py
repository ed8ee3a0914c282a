import numpy as np

from policy.conftest import NewArena
from policy.traces import NUM_IDS, members, play, trace
from stoker.policy import Random


def test_one_leaves_for_one_that_comes(new_arena: NewArena) -> None:
    arena = new_arena(Random(), NUM_IDS, 500)
    accesses = trace(1, 1000, unequal=False)
    seen: set[int] = set()
    for access, hit in zip(accesses, play(arena, Random(), accesses), strict=True):
        assert hit <= (access.sample_id in seen)
        seen.add(access.sample_id)
        assert access.sample_id in members(arena)
        assert len(members(arena)) == min(50, len(seen))
    arena.verify()


def test_victims_are_uniform(new_arena: NewArena) -> None:
    """Of 10 samples, each is the victim of about a tenth of 2,000 evictions."""
    arena = new_arena(Random(), NUM_IDS, 10, seed=3)
    slots = list(range(10))
    arena.put_many(slots, [b"x"] * 10)
    left = np.zeros(10)
    for step in range(2000):
        newcomer = next(i for i in range(step % 50, NUM_IDS) if i not in slots)
        arena.put(newcomer, b"x")
        (victim,) = set(slots) - members(arena)
        left[slots.index(victim)] += 1
        slots[slots.index(victim)] = newcomer
    chi_square = float(((left - 200) ** 2 / 200).sum())
    assert chi_square < 27.9  # 9 degrees of freedom, p = 0.001


def test_the_seed_decides(new_arena: NewArena) -> None:
    accesses = trace(2, 600, unequal=True)
    kept = []
    for seed in (0, 0, 1):
        arena = new_arena(Random(), NUM_IDS, 500, seed=seed)
        list(play(arena, Random(), accesses))
        kept.append(members(arena))
    assert kept[0] == kept[1] != kept[2]
