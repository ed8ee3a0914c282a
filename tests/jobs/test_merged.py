"""Merged keys of jobs in one process with a clock of their own, against plain rules."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.jobs.board import Board, Kind
from stoker.jobs.merged import Merged, kind_of
from stoker.plan import Plan
from stoker.policy import LRU, NextUse, OnceAnEpoch, Policy, Score
from stoker.sampler.uniform import UniformSampler
from stoker.scores import Scores
from stoker.store.arena import Arena
from stoker.testing.policy_conformance import PolicyConformance


class TestMergedAlone(PolicyConformance):
    def make_policy(self) -> Policy:
        return Merged(NextUse())


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def shared(board: Board, policy: Policy, slot: int) -> Merged:
    merged = Merged(policy)
    board.enter(slot, 100 + slot, kind_of(policy), f"job {slot}", 0, 1.5)
    merged.share(board, slot)
    return merged


@dataclass
class Training:
    """A job that visits batches of uniform epochs at a pace of its own."""

    policy: Merged
    board: Board
    slot: int
    sampler: UniformSampler
    seconds: float
    batch: int = 10
    epoch: int = -1
    done: int = 0
    plan: Plan | None = None

    def begin(self, arena: Arena) -> None:
        self.epoch += 1
        self.done = 0
        here, there = self.sampler.plan(None, self.epoch), self.sampler.plan(None, self.epoch + 1)
        self.plan = Plan(here.epoch, here.start, here.ids, None, there)
        self.policy.begin_plan(self.plan, len(self.plan))
        self.board.jobs["rate"][self.slot] = self.batch / self.seconds
        self.board.jobs["noted"][self.slot] = self.board.clock()
        everything = np.arange(self.board.num_samples, dtype=np.uint32)
        cached = everything[arena.contains(everything)]
        keys = self.policy.keys(cached, None, self.plan, None)
        assert keys is not None
        arena.set_keys(cached, keys)

    def step(self, arena: Arena) -> np.ndarray:
        """Visit a batch; return which were hits."""
        if self.plan is None or self.done == len(self.plan):
            self.begin(arena)
        assert self.plan is not None
        places = np.arange(self.done, min(self.done + self.batch, len(self.plan)))
        ids = self.plan.ids[places]
        hits = arena.contains(ids)
        keys = self.policy.keys(ids, None, self.plan, places)
        assert keys is not None
        arena.set_keys(ids[hits], keys[hits])
        arena.put_many(ids[~hits], [b"x"] * int((~hits).sum()), keys[~hits])
        self.done += len(places)
        self.board.jobs["position"][self.slot] = self.plan.start + self.done
        self.board.jobs["noted"][self.slot] = self.board.clock()
        self.policy.pass_by(self.plan, places)
        return hits


def play(paces: list[float], num: int, share: float, epochs: int) -> tuple[float, list[int]]:
    """Return the hit ratio after the first epoch of the slowest, and all accesses in order."""
    clock = Clock()
    board = Board.of_its_own(num, clock)
    jobs = [
        Training(shared(board, NextUse(), slot), board, slot, UniformSampler(num, slot), pace)
        for slot, pace in enumerate(paces)
    ]
    due = np.array(paces)
    end = epochs * (num / 10) * max(paces)
    hits: list[tuple[float, float]] = []
    accesses: list[int] = []
    with Arena(num, int(share * num), 1.0, exact=True) as arena:
        arena.configure(NextUse().regions())
        while (at := due.min()) <= end:
            clock.now = float(at)
            turn = int(due.argmin())
            found = jobs[turn].step(arena)
            plan = jobs[turn].plan
            assert plan is not None
            accesses += plan.ids[jobs[turn].done - len(found) : jobs[turn].done].tolist()
            hits += [(at, hit) for hit in found]
            due[turn] += paces[turn]
    later = [hit for at, hit in hits if at > end / epochs]
    return float(np.mean(later)), accesses


def belady(accesses: list[int], capacity: int, skip: int) -> float:
    """Hits of the textbook rule, which may refuse a newcomer, over one known stream."""
    upcoming, later = [0] * len(accesses), {}
    for at in range(len(accesses) - 1, -1, -1):
        upcoming[at] = later.get(accesses[at], len(accesses) * 2)
        later[accesses[at]] = at
    cached: dict[int, int] = {}
    hits = []
    for at, sample in enumerate(accesses):
        hits.append(sample in cached)
        cached[sample] = upcoming[at]
        if len(cached) > capacity:
            del cached[max(cached, key=cached.__getitem__)]
    return float(np.mean(hits[skip:]))


@pytest.mark.parametrize("paces", [[1.0] * 4, [1.0, 3.0], [0.7, 1.0, 1.6]])
def test_merged_plans_hit_nearly_as_much_as_belady_over_all_jobs(paces: list[float]) -> None:
    num, share, epochs = 600, 0.2, 3
    found, accesses = play(paces, num, share, epochs)
    skip = len(accesses) // epochs
    best = belady(accesses, int(share * num), skip)
    assert best - 0.03 < found < best + 0.03


def test_one_job_on_a_board_has_the_keys_of_its_policy() -> None:
    num = 50
    sizes = np.arange(1, num + 1)
    for policy in (NextUse(), NextUse(100.0).for_sizes(sizes), OnceAnEpoch(100.0).for_sizes(sizes)):
        merged = shared(Board.of_its_own(num, Clock()), policy, 3)
        sampler = UniformSampler(num, 1)
        plan = Plan(0, 0, sampler.plan(None, 0).ids, None, sampler.plan(None, 1))
        merged.begin_plan(plan, num)
        every = np.arange(num, dtype=np.uint32)
        expected = policy.keys(every, None, plan, None)
        np.testing.assert_array_equal(merged.keys(every, None, plan, None), expected)
        np.testing.assert_array_equal(merged.keys_now(every, None, plan), expected)
        places = np.arange(10, 20)
        np.testing.assert_array_equal(
            merged.keys(plan.ids[places], None, plan, places),
            policy.keys(plan.ids[places], None, plan, places),
        )


def plain_time(jobs: list[dict[str, float | list[int]]], sample: int, own_after: float) -> float:
    """Seconds until the first job uses a sample, not before ``own_after``, said plainly."""
    found = []
    for job in jobs:
        rate, now, period = (float(job[name]) for name in ("rate", "now", "period"))  # type: ignore[arg-type]
        at = (job["next"][sample] - now) / rate  # type: ignore[index]
        while at < own_after:
            at += period / rate
        found.append(at)
    return min(found)


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_times_against_a_plain_reference(data: st.DataObject) -> None:
    num = data.draw(st.integers(2, 12))
    count = data.draw(st.integers(2, 4))
    jobs = []
    board = Board.of_its_own(num, lambda: 5.0)
    policies = [shared(board, NextUse(), slot) for slot in range(count)]
    board.head["base"] = 0.0
    for slot in range(count):
        now = data.draw(st.integers(0, 3 * 2**32))
        job = {
            "rate": data.draw(st.sampled_from([0.5, 1.0, 4.0])),
            "now": now,
            "period": data.draw(st.integers(num, 40)),
            "next": [now + data.draw(st.integers(0, 60)) for _ in range(num)],
        }
        jobs.append(job)
        board.jobs["rate"][slot], board.jobs["position"][slot] = job["rate"], now
        board.jobs["period"][slot], board.jobs["noted"][slot] = job["period"], 5.0
        board.next_use[slot] = np.array(job["next"], np.int64).astype(np.uint32)
    gone = data.draw(st.booleans())
    if gone:
        board.leave(count - 1)
        jobs.pop()
    every = np.arange(num, dtype=np.uint32)
    keys = policies[0].keys_now(every, None, Plan(0, 0, every))
    if len(jobs) == 1:
        expected = [-float(at) for at in jobs[0]["next"]]
    else:
        expected = [-(5.0 + plain_time(jobs, i, 0.0)) for i in range(num)]
    np.testing.assert_allclose(keys, expected)


def test_jobs_weigh_sizes_alike_by_what_the_first_of_them_takes_a_request_to_cost() -> None:
    sizes = np.array([100, 2_000, 30_000], np.int64)
    board, every = Board.of_its_own(3, lambda: 5.0), np.arange(3, dtype=np.uint32)
    policies = [OnceAnEpoch(1e3, sizes), NextUse(), NextUse(1e6)]
    jobs = []
    for slot, policy in enumerate(policies):
        merged = Merged(policy, sizes)
        board.enter(slot, 100 + slot, Kind.TIME, "", 0, 1.5)
        merged.share(board, slot)
        jobs.append(merged)
    board.jobs["since"][:3] = np.arange(3)
    board.jobs["rate"], board.jobs["period"], board.jobs["noted"] = 1.0, 3, 5.0
    board.next_use[:] = [4, 6, 8]

    def keys() -> list[list[float]]:
        present = [job for slot, job in enumerate(jobs) if board.jobs["token"][slot]]
        plan = Plan(0, 0, every)
        return [np.asarray(job.keys_now(every, None, plan)).tolist() for job in present]

    first, second, third = keys()
    times = board.clock() - board.head["base"][0] + np.array([4, 6, 8])
    assert first == second == third
    assert first == pytest.approx(-times * sizes / (sizes + 1e3))
    board.leave(0)
    second, third = keys()
    assert second == third == pytest.approx(-times)


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_values_against_a_plain_reference(data: st.DataObject) -> None:
    num, count = data.draw(st.integers(1, 10)), data.draw(st.integers(2, 4))
    board = Board.of_its_own(num, Clock())
    merged = [shared(board, Score(), slot) for slot in range(count)]
    tables = []
    every = np.arange(num, dtype=np.uint32)
    for slot in range(count):
        scores = Scores(num)
        seen = data.draw(st.lists(st.integers(0, num - 1), unique=True, max_size=num))
        values = [data.draw(st.integers(-5, 5)) for _ in seen]
        scores.update(seen, values, 0)
        board.jobs["gain"][slot] = data.draw(st.sampled_from([1.0, 1.4, 1.5, 2.0, 3.0]))
        tables.append((dict(zip(seen, values, strict=True)), float(board.jobs["gain"][slot])))
        merged[slot].keys(every, scores, None, None)
    keys = merged[0].keys_now(every, _scores_of(tables[0][0], num), None)
    eligible = [table for table in tables if table[1] >= 1.5] or tables
    for sample in range(num):
        total, known = 0.0, False
        for values_of, gain in eligible:
            if sample in values_of:
                known = True
                at_most = sum(v <= values_of[sample] for v in values_of.values())
                total += gain * at_most / len(values_of) / sum(gain for _, gain in eligible)
        assert keys is not None
        assert keys[sample] == pytest.approx(total if known else -np.inf, abs=1e-6)


def test_a_job_that_left_just_now_is_worth_nothing() -> None:
    num = 4
    board = Board.of_its_own(num, Clock())
    first, second = shared(board, Score(), 0), shared(board, Score(), 1)
    scores = _scores_of({i: i for i in range(num)}, num)
    every = np.arange(num, dtype=np.uint32)
    second.keys(every, scores, None, None)
    first._others = lambda board: np.array([1])  # type: ignore[method-assign]
    board.leave(1)
    keys = first.keys(every, scores, None, None)
    assert keys is not None and np.isfinite(keys).all()


def _scores_of(values: dict[int, int], num: int) -> Scores:
    scores = Scores(num)
    scores.update(list(values), list(values.values()), 0)
    return scores


def test_a_job_of_another_kind_takes_the_keys_of_those_that_came_first() -> None:
    num = 20
    board = Board.of_its_own(num, Clock())
    score, plain = shared(board, Score(), 0), shared(board, LRU(), 1)
    every = np.arange(num, dtype=np.uint32)
    scores = _scores_of({i: i for i in range(num)}, num)
    score.keys(every, scores, None, None)
    assert not plain.natural_keys
    keys = plain.keys(every, None, None, None)
    assert keys is not None
    assert (np.diff(keys) > 0).all()
    # And where keys are times, a job that has only scores says when it needs samples.
    board = Board.of_its_own(num, Clock())
    timed, other = shared(board, NextUse(), 0), shared(board, Score(), 1)
    plans = []
    for merged, seed in ((timed, 0), (other, 1)):
        sampler = UniformSampler(num, seed)
        plans.append(Plan(0, 0, sampler.plan(None, 0).ids, None, sampler.plan(None, 1)))
        merged.begin_plan(plans[-1], num)
    assert other.looks_ahead
    assert not other.follows_scores
    both = [m.keys(every, None, p, None) for m, p in zip((timed, other), plans, strict=True)]
    np.testing.assert_allclose(both[0], both[1])
    soonest = np.minimum(plans[0].first_use(num), plans[1].first_use(num))
    np.testing.assert_allclose(both[0], -soonest.astype(float))


def test_a_cache_that_orders_itself_is_left_alone() -> None:
    board = Board.of_its_own(5, Clock())
    first, second = shared(board, LRU(), 0), shared(board, NextUse(), 1)
    assert board.kind is Kind.NONE
    assert first.natural_keys
    plan = Plan(0, 0, np.arange(5))
    own = NextUse().keys(plan.ids, None, plan, None)
    np.testing.assert_array_equal(second.keys(plan.ids, None, plan, None), own)


def test_ranks_of_a_job_are_one_job() -> None:
    num = 30
    board = Board.of_its_own(num, Clock())
    ranks = [Merged(NextUse()) for _ in range(2)]
    for slot, merged in enumerate(ranks):
        board.enter(slot, 7, Kind.TIME, "ranks", 0, 1.5)
        merged.share(board, slot)
    sampler = UniformSampler(num, 0)
    plan = Plan(0, 0, sampler.plan(None, 0).ids, None, sampler.plan(None, 1))
    ranks[0].begin_plan(plan, num)
    every = np.arange(num, dtype=np.uint32)
    for merged in ranks:
        np.testing.assert_array_equal(
            merged.keys(every, None, plan, None), NextUse().keys(every, None, plan, None)
        )
    ranks[1].pass_by(plan, np.array([1]))
    assert board.next_use[0, plan.ids[1]] == plan.next_use[1]  # in the row of the first
