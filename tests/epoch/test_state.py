"""Saved states as plain arrays and primitives: the same back, and typed errors for all else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stoker.epoch.batch import Failure
from stoker.epoch.planner import Cursor
from stoker.epoch.state import VERSION, Owner, RankState
from stoker.epoch.stats import Stats
from stoker.errors import StateMismatch
from stoker.scores import Scores
from stoker.store.claims import NOBODY

N = 10
OWNER = Owner("numbers", N, 0, "minio", "abc", 1, 4)


def state_of(**changes: Any) -> RankState:
    scores = Scores(N)
    scores.update(np.arange(4), np.arange(4.0), 3)
    fields: dict[str, Any] = {
        "owner": OWNER,
        "cursor": Cursor(2, 3, 1),
        "served": np.array([4, NOBODY, 0], np.uint32),
        "has_begun": True,
        "scores": scores.arrays(),
        "observed": 7,
        "losses": (2.5, 4),
        "agreed": None,
        "ended": (1, 0.5, float("nan"), 0.25),
        "is_uniform": False,
        "accesses": {"main": 5},
        "scorer": {"counts": np.arange(3, dtype=np.uint8)},
        "backward": None,
        "stats": Stats(accesses=8, hits=2),
        "failures": (Failure(3, "three", "gone"),),
        "generator": np.arange(16, dtype=np.uint8),
    }
    return RankState(**{**fields, **changes})


def test_what_was_saved_comes_back() -> None:
    saved = state_of()
    state = saved.to_dict()
    assert state["version"] == VERSION
    found = RankState.from_dict({**state, "added by another": object()})
    for name in ("owner", "cursor", "has_begun", "observed", "losses", "accesses", "failures"):
        assert getattr(found, name) == getattr(saved, name)
    assert found.stats.counts() == saved.stats.counts()
    np.testing.assert_array_equal(found.served, saved.served)
    np.testing.assert_array_equal(found.generator, saved.generator)
    restored = Scores(N)
    restored.restore(**found.scores)
    assert restored.values[:4].tolist() == [0, 1, 2, 3]


def test_arrays_are_copies_and_go_through_the_given_functions() -> None:
    saved = state_of()
    stored: list[Any] = []

    def store(array: Any) -> Any:
        stored.append(array)
        return array.tolist()

    state = saved.to_dict(store)
    assert not any(np.shares_memory(array, saved.scores["values"]) for array in stored)
    assert all(array.dtype.kind != "u" or array.dtype == np.uint8 for array in stored)
    assert isinstance(state["served"], list)
    found = RankState.from_dict(state, np.array)
    np.testing.assert_array_equal(found.served, saved.served)


@pytest.mark.parametrize("name", ["scores", "served", "generator", "cursor", "losses", "stats"])
def test_a_state_without_an_entry_is_damaged(name: str) -> None:
    state = state_of().to_dict()
    del state["consumed" if name == "cursor" else name]
    with pytest.raises(StateMismatch, match="damaged"):
        RankState.from_dict(state)


def test_other_versions_and_lengths_are_refused() -> None:
    state = state_of().to_dict()
    with pytest.raises(StateMismatch, match="version"):
        RankState.from_dict({**state, "version": VERSION - 1})
    with pytest.raises(StateMismatch, match="3 handed out"):
        RankState.from_dict({**state, "served": np.arange(2, dtype=np.int32)})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dataset": "others"}, "data set"),
        ({"seed": 1}, "seed"),
        ({"plan": "xyz"}, "order"),
    ],
)
def test_a_state_of_something_else_is_refused(change: dict[str, Any], said: str) -> None:
    state_of().refuse_other(OWNER, N)
    with pytest.raises(StateMismatch, match=said):
        state_of().refuse_other(OWNER._replace(**change), N)
