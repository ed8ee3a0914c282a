"""What was served in an epoch, and what is left of its plan."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stoker.store.claims import NOBODY, Claims, Turns, still_due
from stoker.store.registry import open_arrays


def claims_of(num_samples: int = 10, accesses: int = 20) -> Claims:
    return Claims(open_arrays("", Claims.layout(num_samples, accesses), share=False))


def ids_of(*ids: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
    return np.array(ids, np.uint32)


def turns(claims: Claims, *positions: int) -> Turns:
    return Turns(claims.stamp, np.array(positions))


@given(st.data())
def test_what_was_served_and_what_is_left_are_together_the_plan(data: st.DataObject) -> None:
    """Also with repeats, and as far as possible where samples from outside stood in."""
    plan = data.draw(st.lists(st.integers(0, 15), max_size=25), label="plan")
    consumed = data.draw(st.integers(0, len(plan)), label="consumed")
    strangers = data.draw(st.integers(0, consumed), label="strangers")
    served = data.draw(st.permutations(plan), label="served")[: consumed - strangers]
    served += [100] * (strangers // 2) + [NOBODY] * (strangers - strangers // 2)
    left = still_due(ids_of(*plan), consumed, served)
    assert len(left) == len(plan) - consumed
    assert len(set(left.tolist())) == len(left)
    rest = Counter(plan[place] for place in left)
    due = Counter(plan) - Counter(served)
    assert rest <= due
    assert rest == due or strangers
    # Those that come anyway stay where they are.
    for place, taken in zip(range(consumed, len(plan)), left.tolist(), strict=True):
        assert taken == place or taken < consumed


def test_as_planned_the_rest_is_the_rest() -> None:
    plan = ids_of(3, 1, 2, 1, 0)
    assert still_due(plan, 2, [3, 1]).tolist() == [2, 3, 4]
    assert still_due(plan, 2, [0, 3]).tolist() == [2, 3, 1]
    assert still_due(plan, 5, plan).tolist() == []


def test_a_batch_asked_for_in_an_earlier_epoch_is_not_noted() -> None:
    claims = claims_of()
    assert not claims.holds(None), "before the first epoch"
    claims.begin(0, 0, ids_of())
    late = turns(claims, 0, 1)
    claims.log(late, ids_of(4, 5))
    assert claims.logged(0, 3, 0).tolist() == [4, 5, NOBODY]
    claims.begin(0, 0, ids_of())
    assert not claims.holds(late)
    claims.log(late, ids_of(4, 5))
    assert claims.logged(0, 2, 0).tolist() == [NOBODY, NOBODY]


def test_what_another_process_is_about_to_serve_is_waited_for() -> None:
    claims = claims_of()
    claims.begin(3, 0, ids_of())
    claims.log(turns(claims, 0), ids_of(7))
    found: list[list[int]] = []
    waiting = threading.Thread(target=lambda: found.append(claims.logged(0, 2, 60).tolist()))
    waiting.start()
    claims.log(turns(claims, 1), ids_of(9))
    waiting.join(60)
    assert found == [[7, 9]]


def test_what_was_served_before_is_claimed() -> None:
    claims = claims_of()
    claims.begin(0, 5, ids_of(1, 2))
    assert claims.claim(ids_of(1, 3), claims.stamp).tolist() == [False, True]
    assert claims.are_free(np.arange(5, dtype=np.uint32), claims.stamp).tolist() == [
        True,
        False,
        False,
        False,
        True,
    ]
    turns, told = claims.take_turns(ids_of(2), claims.stamp)
    assert (turns.tolist(), told.tolist()) == ([2], [True])  # it had its own


def test_a_turn_goes_to_the_end_of_the_chain_of_displaced_samples() -> None:
    claims = claims_of()
    claims.begin(0, 5, ids_of())
    claims.claim(ids_of(0, 1, 2), claims.stamp)
    claims.note_turns(ids_of(0, 1), ids_of(1, 4), claims.stamp)
    turns, told = claims.take_turns(ids_of(0, 0, 2), claims.stamp)
    assert turns.tolist()[:2] == [4, 0]  # once
    assert told.tolist() == [True, True, False]  # nothing is noted of 2
    assert not claims.claim(ids_of(4), claims.stamp).any()
