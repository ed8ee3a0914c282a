"""Samplers of a user that derive from no class of ours."""

import numpy as np
import pytest

from stoker.errors import ConfigError
from stoker.plan import Plan
from stoker.sampler import Sampler, UniformSampler
from stoker.sampler.base import as_sampler
from stoker.scores import Scores
from stoker.testing import SamplerConformance


class Least:
    """The four required members and no more."""

    def __init__(self, num_samples=103, pad_to=1, uses_scores=False):
        self._all = UniformSampler(num_samples, pad_to=pad_to)
        self.uses_scores = uses_scores

    @property
    def longest(self):
        return self._all.longest

    def length_at(self, epoch, scores=None):
        return self.longest

    def plan(self, scores, epoch) -> Plan:
        return self._all.plan(scores, epoch)


class Most(Least):
    """Every optional member too."""

    apart = 7
    without_accuracy = "it stays as it is"

    def begin_epoch(self, scores, epoch):
        scores.set_basis(np.full(len(scores), 3.0), epoch)

    def foresees(self, scores, epoch):
        return epoch == 2

    def began(self, epoch):
        return epoch - epoch % 2

    def describe(self, scores, epoch):
        return f"epoch {epoch}"


class TestLeast(SamplerConformance):
    def make_sampler(self, pad_to):
        return Least(self.num_samples, pad_to)


def test_a_sampler_of_ours_is_returned_as_it_is():
    sampler = UniformSampler(5)
    assert as_sampler(sampler) is sampler


def test_what_a_sampler_lacks_has_defaults():
    sampler = as_sampler(Least())
    assert isinstance(sampler, Sampler) and sampler.apart is None
    assert (sampler.without_accuracy, sampler.describe(None, 1)) == ("", "")
    assert sampler.began(3) == 3 and sampler.foresees(None, 3)
    assert not as_sampler(Least(uses_scores=True)).foresees(None, 3)
    scores = Scores(103)
    sampler.begin_epoch(scores, 1)
    assert scores.basis_epoch == -1


def test_what_a_sampler_has_is_used():
    sampler, scores = as_sampler(Most(uses_scores=True)), Scores(103)
    assert (sampler.apart, sampler.without_accuracy) == (7, "it stays as it is")
    assert (sampler.began(3), sampler.describe(None, 1)) == (2, "epoch 1")
    assert sampler.foresees(None, 2) and not sampler.foresees(None, 3)
    sampler.begin_epoch(scores, 4)
    assert scores.basis_epoch == 4


def test_what_a_sampler_must_have_is_named():
    with pytest.raises(ConfigError, match="lacks uses_scores, longest, length_at, plan"):
        as_sampler(object())
