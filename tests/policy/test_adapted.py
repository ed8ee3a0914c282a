"""Policies and splits of a user that derive from no class of ours."""

import pickle

import numpy as np
import pytest

from stoker.errors import ConfigError
from stoker.plan import Plan
from stoker.policy import LRU, Policy, Region, Shares
from stoker.policy.base import as_policy
from stoker.policy.shares import FrequencySplit, as_shares
from stoker.recipes import Recipe, lru
from stoker.scores import Scores
from stoker.testing import PolicyConformance

PLAN = Plan(0, 0, np.arange(4, dtype=np.uint32))


class Least:
    """The three required members and no more."""

    name = "least"

    def regions(self):
        return (Region("main", 1.0),)

    def keys(self, ids, scores, plan, position):
        return ids.astype(np.float64)


class Most(Least):
    """Every optional member too."""

    natural_keys = False
    looks_ahead = follows_scores = True
    overflow = "spare"
    shared_request_bytes = 5.0

    def __init__(self, sizes=None):
        self.sizes = sizes

    def regions(self):
        return (Region("main", 0.5), Region("spare", 0.5))

    def places(self, scores, plan, num_samples):
        return np.ones(num_samples, np.uint8)

    def for_sizes(self, sizes):
        return Most(sizes)

    def for_batches(self, share):
        return Most(share)


class TestLeast(PolicyConformance):
    def make_policy(self):
        return Least()


class TestMost(PolicyConformance):
    def make_policy(self):
        return Most()


def test_a_policy_of_ours_is_returned_as_it_is():
    policy = LRU()
    assert as_policy(policy) is policy
    assert as_policy(as_policy(Least())).own.name == "least"


def test_what_a_policy_lacks_has_defaults():
    policy = as_policy(Least())
    assert isinstance(policy, Policy) and policy.name == "least"
    assert not (policy.natural_keys or policy.looks_ahead or policy.follows_scores)
    assert (policy.overflow, policy.shared_request_bytes, policy.has_places) == ("", 0.0, False)
    assert policy.places(Scores(4), PLAN, 4).tolist() == [0, 0, 0, 0]
    assert policy.for_sizes(np.ones(4, np.int64)) is policy
    assert policy.for_batches(0.1) is policy


def test_what_a_policy_has_is_used():
    policy = as_policy(Most())
    assert policy.looks_ahead and policy.follows_scores and policy.has_places
    assert (policy.overflow, policy.shared_request_bytes) == ("spare", 5.0)
    assert policy.places(Scores(4), PLAN, 4).tolist() == [1, 1, 1, 1]
    fitted = policy.for_sizes(np.arange(4))
    assert isinstance(fitted, Policy) and fitted.own.sizes.tolist() == [0, 1, 2, 3]
    assert policy.for_batches(0.1).own.sizes == 0.1


def test_what_a_policy_must_have_is_named():
    with pytest.raises(ConfigError, match="dict is not a policy: it lacks name, regions"):
        as_policy({})
    with pytest.raises(ConfigError, match=r"stoker\.policy\.Policy"):
        Recipe("mine", "", policy=object())


def test_a_recipe_completes_its_policy_and_stays_a_value():
    mine = Least()
    recipe = Recipe("mine", "", policy=mine)
    assert recipe == Recipe("mine", "", policy=mine) != lru()
    assert pickle.loads(pickle.dumps(recipe)).policy.name == "least"
    assert not recipe.needs_plan and Recipe("mine", "", policy=Most()).needs_plan


class Halves:
    """The one required member of a split."""

    def shares(self, scores, epoch, epochs, counts):
        return {"a": 0.5, "b": 0.5}


class Fitted(Halves):
    """Every optional member too."""

    without_epochs = "it is never fitted"
    without_accuracy = "it stays at halves"

    def for_cache(self, capacity, least_low):
        return Halves()


def test_a_split_is_completed_too():
    split = as_shares(FrequencySplit())
    assert as_shares(split) is split
    plain, fitted = as_shares(Halves()), as_shares(Fitted())
    assert isinstance(plain, Shares) and plain.shares(Scores(1), 0, None, {})["a"] == 0.5
    assert (plain.without_epochs, plain.without_accuracy) == ("", "")
    assert plain.for_cache(100, 10) is None
    assert fitted.without_epochs == "it is never fitted"
    assert fitted.without_accuracy == "it stays at halves"
    assert isinstance(fitted.for_cache(100, 10), Shares)
    with pytest.raises(ConfigError, match="int is not a split of a cache: it lacks shares"):
        as_shares(3)
