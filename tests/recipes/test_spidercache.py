"""SpiderCache's key samples: for whom they stand, and for how long, with any number of processes.

The cache is made as the Loader and the simulator make theirs.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker import recipes
from stoker.recipes.base import make_store
from stoker.source.held import MemorySource
from stoker.store import substitutes
from stoker.store.arena import Arena
from stoker.store.memory_tier import MemoryTier
from stoker.store.store import Store
from stoker.types import Outcome

N, SIZE = 60, 100
SAMPLES = [bytes([i]) * SIZE for i in range(N)]
RECIPE = recipes.spidercache(start=0.5, end=0.5, parts="importance+homophily")


def store_of(tier_type: type[MemoryTier] = MemoryTier, num_cached: int = 40) -> Store:
    """A store with room for so many samples, about half of them key samples."""
    arena = Arena(N, num_cached * SIZE, SIZE, exact=True)
    policy: Any = RECIPE.policy
    arena.configure(policy.regions())
    tier = tier_type(arena, "importance", overflow=policy.overflow)
    return make_store(RECIPE, policy, MemorySource(SAMPLES), tier)


def keep(store: Store, *lists: tuple[int, list[int]]) -> int | None:
    """Have one of a batch become a key sample, given each one's neighbours."""
    return store.keep_key_sample(
        np.array([sample for sample, _ in lists], np.uint32),
        np.array([len(near) for _, near in lists], np.int64),
        lambda index: np.array(lists[index][1], np.uint32),
    )


def keys_of(store: Store) -> list[int]:
    return store.tier.list("homophily").tolist()  # type: ignore[no-any-return]


@pytest.fixture
def store() -> Iterator[Store]:
    with store_of() as made:
        yield made
        made.tier.arena.verify()  # type: ignore[attr-defined]


# --- for how long ---


def test_s6_a_key_sample_that_came_back_serves_no_earlier_neighbour(store: Store) -> None:
    store.serve([2])
    assert keep(store, (2, [10, 11])) == 2
    assert store.serve([10, 11]).ids.tolist() == [2, 2]
    store.discard([2])
    store.serve([2])
    assert keep(store, (2, [11, 12])) == 2
    served = store.serve([10, 11, 12])
    assert served.ids.tolist() == [10, 2, 2]
    assert served.outcomes.tolist() == [Outcome.FETCHED, *[Outcome.SUBSTITUTED] * 2]


def test_s6_pushed_out_of_the_queue_and_back(store: Store) -> None:
    """As above, with nobody discarding: enough others enter the queue."""
    store.serve([2])
    assert keep(store, (2, [59])) == 2
    for other in range(3, 50):
        store.serve([other])
        keep(store, (other, [0]))
        if 2 not in keys_of(store):
            break
    assert 2 not in keys_of(store)
    store.serve([2])
    assert keep(store, (2, [58])) == 2
    assert store.serve([58, 59]).ids.tolist() == [2, 59]


FEW = st.integers(0, 5)  # so that they come and go, and come again
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("serve"), st.lists(FEW, min_size=1, max_size=3)),
        st.tuples(st.just("discard"), st.lists(FEW, min_size=1, max_size=2)),
        st.tuples(st.just("keep"), st.dictionaries(FEW, st.lists(FEW, max_size=3), min_size=1)),
    ),
    min_size=20,
    max_size=60,
)


@given(steps=STEPS)
@settings(max_examples=60, deadline=None)
def test_s6_stand_ins_match_a_dictionary_that_forgets_with_the_key(steps: list[Any]) -> None:
    stands: dict[int, int] = {}
    with store_of(num_cached=8) as store:
        arena = store.tier.arena  # type: ignore[attr-defined]
        for name, what in steps:
            if name == "serve":
                cached = arena.contains(np.arange(N)).tolist()
                served = store.serve(what).ids.tolist()
                wanted = [i if cached[i] else stands.get(i, i) for i in what]
                assert served == wanted
            elif name == "discard":
                store.discard(what)
            else:
                kept = keep(store, *what.items())
                stands |= {near: kept for near in what.get(kept, []) if kept is not None}
            keys = keys_of(store)
            stands = {sample: key for sample, key in stands.items() if key in keys}


# --- by several processes at once ---


class Meeting(MemoryTier):
    """A tier whose first move in each process waits for that of the others."""

    begin: Any = None

    def move(self, *arguments: Any) -> Any:
        begin, type(self).begin = type(self).begin, None
        if begin is not None:
            begin.wait(60)
        return super().move(*arguments)


def run_together(tasks: list[Callable[[], Any]]) -> list[Any]:
    """Return what each task returns, or what killed it, each in a process of its own."""
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in tasks]

    def run(task: Callable[[], Any], pipe: Any) -> None:
        pipe.send(task())

    started = [
        context.Process(target=run, args=(task, pipe))
        for task, (_, pipe) in zip(tasks, pipes, strict=True)
    ]
    for process in started:
        process.start()
    for _, pipe in pipes:
        pipe.close()
    results = []
    for process, (pipe, _) in zip(started, pipes, strict=True):
        try:
            results.append(pipe.recv())
        except EOFError:
            process.join()
            results.append(process.exitcode)
    for process in started:
        process.join()
    return results


@pytest.mark.parametrize("ranks", [2, 4])
def test_s5_ranks_that_score_alike_make_different_key_samples(ranks: int) -> None:
    """All of them find the same candidates, and move the first before any says so."""
    with store_of(Meeting) as store:
        store.serve(range(10))
        batch = [(i, list(range(20, 30 - i))) for i in range(8)]
        Meeting.begin = multiprocessing.get_context("fork").Barrier(ranks)
        made = run_together([lambda: keep(store, *batch)] * ranks)
        Meeting.begin = None
        assert sorted(made) == list(range(ranks))
        assert keys_of(store) == list(range(ranks))
        served = store.serve(range(20, 30)).ids
        assert set(served.tolist()) <= set(range(ranks)) and len(served) == 10


def test_s5_one_queue_and_one_table_for_all_ranks() -> None:
    """Many at once: each copy is made a key once, and all know of all."""
    ranks, each = 4, 12

    def work(rank: int) -> list[int | None]:
        mine = np.random.default_rng(rank).permutation(each)
        return [keep(store, *((int(i), [each + int(i)]) for i in mine)) for _ in mine]

    with store_of() as store:
        store.serve(range(each))
        made = run_together([lambda rank=rank: work(rank) for rank in range(ranks)])
        keys = [key for part in made for key in part if key is not None]
        assert sorted(keys) == list(range(each)) == keys_of(store)
        assert store.serve(range(each, 2 * each)).ids.tolist() == list(range(each))


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Deadly(MemoryTier):
    """A tier whose first move in the process that is to die is its last act."""

    dies = False

    def move(self, *arguments: Any) -> Any:
        moved = super().move(*arguments)
        if type(self).dies:
            die()
        return moved


def killed(store: Store, when: str) -> None:
    if when == "after the move":
        Deadly.dies = True
    else:
        substitutes.mark_once = die
    keep(store, (1, [20, 21]), (2, [30]))


@pytest.mark.parametrize("when", ["after the move", "before the entries"])
def test_s5_a_rank_killed_in_between_leaves_others_right(when: str) -> None:
    with store_of(Deadly) as store:
        store.serve([1, 2])
        assert run_together([lambda: killed(store, when)]) == [-signal.SIGKILL]
        assert keys_of(store) == [1]
        assert store.serve([20]).ids.tolist() == [20], "nobody knows of it"
        assert keep(store, (1, [20, 21]), (2, [30])) == 2, "the next one's turn"
        assert store.serve([30]).ids.tolist() == [2]
        store.discard([1])
        store.serve([1])
        assert keep(store, (1, [21])) == 1, "once it has left it may become one"
        assert store.serve([21]).ids.tolist() == [1]
        store.tier.arena.verify()  # type: ignore[attr-defined]
