"""The queue that divides a link, in virtual time and beside a simple model."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.node.bandwidth import (
    BURST,
    FLOWS,
    INSTALMENT,
    LAG,
    PRESENT,
    QUANTUM,
    QUEUE_BYTES,
    FairQueue,
)

RATE = 10e6


class Link:
    """A limited link and its flows, which poll as jobs do, in a time of their own."""

    def __init__(self, weights: list[float], sizes: list[int], poll: float = 0.01) -> None:
        self.queue = FairQueue(np.zeros(QUEUE_BYTES, np.uint8))
        self.queue.limit(RATE, 0.0, 1e3)
        self.weights, self.sizes, self.poll = weights, sizes, poll
        self.now = 1.0
        self.sent = np.zeros(len(weights))
        self.balance = np.zeros(len(weights))
        self.due = 1.0 + np.linspace(0, poll, len(weights), endpoint=False)

    def run(self, seconds: float, hungry: list[int], pace: dict[int, float] | None = None) -> None:
        """Let flows read: those ``hungry`` all they get, those of ``pace`` so many bytes/s."""
        end, begin = self.now + seconds, self.now
        sent = self.sent.copy()
        pace = pace or {}
        self.due = np.maximum(self.due, self.now)
        while (flow := int(np.argmin(self.due)), self.due[flow])[1] < end:
            self.now = float(self.due[flow])
            self.due[flow] += self.poll
            while flow in hungry or (
                flow in pace and self.sent[flow] - sent[flow] < pace[flow] * (self.now - begin)
            ):
                if self.balance[flow] <= 0:
                    wanted = 1 - self.balance[flow]
                    turn = self.queue.ask(flow + 1, self.weights[flow], wanted, self.now)
                    if not turn.granted:
                        self.due[flow] = self.now + min(self.poll, turn.wait)
                        break
                    self.balance[flow] += turn.granted
                    continue
                self.balance[flow] -= self.sizes[flow]
                self.sent[flow] += self.sizes[flow]
        self.now = end


def test_flows_with_weights_4_2_1_1_get_shares_to_match():
    link = Link([4, 2, 1, 1], [100_000] * 4)
    link.run(10, [0, 1, 2, 3])
    assert link.sent / link.sent.sum() == pytest.approx([0.5, 0.25, 0.125, 0.125], rel=0.05)
    assert link.sent.sum() == pytest.approx(10 * RATE, rel=0.05)


def test_an_idle_flows_share_goes_to_the_others_and_comes_back_at_once():
    link = Link([4, 1, 1], [100_000] * 3)
    link.run(5, [0, 1, 2])
    before = link.sent.copy()
    link.run(2, [1, 2])
    assert (link.sent - before)[1:] == pytest.approx([RATE, RATE], rel=0.05)
    before = link.sent.copy()
    link.run(2, [0, 1, 2])
    # It had been idle, for which it gets no more than the catch-up that all may have.
    assert (link.sent - before)[0] == pytest.approx(2 * RATE * 4 / 6, rel=0.05 + LAG / 2)


def test_one_that_reads_much_at_once_does_not_hold_up_the_others() -> None:
    link = Link([1, 1], [20_000_000, 20_000])
    link.run(1, [0, 1])
    before = link.sent.copy()
    link.run(4, [0, 1])
    assert (link.sent - before)[1] == pytest.approx(2 * RATE, rel=0.1)


def test_what_a_flow_does_not_use_of_its_share_the_others_do():
    link = Link([8, 1, 1], [50_000] * 3)
    link.run(5, [1, 2], pace={0: 0.1 * RATE})
    assert link.sent == pytest.approx(np.array([0.1, 0.45, 0.45]) * 5 * RATE, rel=0.06)


def test_the_rate_is_not_exceeded_but_for_a_burst():
    link = Link([1, 1], [200_000] * 2)
    link.run(1, [0])
    link.run(1, [])
    before = link.sent.sum()
    link.run(1, [0, 1])
    slack = 2 * (200_000 + QUANTUM * RATE)
    assert link.sent.sum() - before <= RATE * (1 + BURST) + slack


def test_a_flow_that_died_while_it_waited_holds_others_up_for_a_moment_only():
    queue = FairQueue(np.zeros(QUEUE_BYTES, np.uint8))
    queue.limit(RATE, 0.0, 1e3)
    assert queue.ask(1, 1.0, RATE * BURST, 1.0).granted
    assert queue.ask(1, 1.0, RATE * 0.05, 1.0).granted
    assert not queue.ask(2, 1.0, 1.0, 1.01).granted, "and never asks again"
    assert not queue.ask(1, 1.0, 1.0, 1.06).granted, "the other one is first"
    assert queue.ask(1, 1.0, 1.0, 1.01 + PRESENT).granted


def test_a_limit_lapses_unless_it_is_renewed():
    queue = FairQueue(np.zeros(QUEUE_BYTES, np.uint8))
    assert queue.ask(1, 1.0, 1.0, 1.0).granted == np.inf
    queue.limit(RATE, 1.0, 5.0)
    assert queue.ask(1, 1.0, 3e6, 2.0).granted == RATE * INSTALMENT
    assert queue.ask(1, 1.0, 2e5, 2.0).granted == 2e5
    assert not queue.ask(1, 1.0, 1.0, 2.01).granted
    assert queue.ask(1, 1.0, 1.0, 6.5).granted == np.inf


def test_the_clock_of_an_earlier_boot_does_not_matter():
    queue = FairQueue(np.zeros(QUEUE_BYTES, np.uint8))
    queue.limit(RATE, 1e7, 1e3)
    assert queue.ask(1, 1.0, 1e6, 1e7).granted
    assert not queue.rate(5.0), "the limit was for then"
    queue.limit(RATE, 5.0, 1e3)
    assert queue.ask(1, 1.0, 1.0, 5.0).granted
    for token in range(2, FLOWS + 10):
        queue.ask(token, 1.0, 1.0, 5.0 + token)
    assert (queue.flows["token"] != 1).all(), "it gave way first"


@settings(max_examples=20)
@given(
    st.lists(st.floats(0.25, 8), min_size=2, max_size=6),
    st.lists(st.integers(1_000, 300_000), min_size=6, max_size=6),
    st.sampled_from([0.002, 0.01, 0.03]),
)
def test_whoever_asks_is_served_as_by_an_ideal_link(weights, sizes, poll):
    # The ideal: all the link, divided exactly (generalized processor sharing). Of two flows that
    # always ask, start-time fair queueing serves neither further, in bytes per weight, than by a
    # request of each; here by what v lags, too, as both poll.
    link = Link(weights, sizes, poll)
    assert link.queue.ask(99, 1.0, BURST * RATE, link.now).granted, "the burst of the first"
    link.run(1, list(range(len(weights))))
    assert link.sent.sum() == pytest.approx(RATE, rel=0.3)
    grants = np.maximum(np.array(sizes[: len(weights)]), QUANTUM * RATE) * 2 / weights
    served = link.sent / weights
    apart = served[:, None] - served
    assert (apart <= grants[:, None] + grants + LAG * RATE / sum(weights)).all()
