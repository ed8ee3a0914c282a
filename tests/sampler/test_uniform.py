import os
import subprocess
import sys
import time

import numpy as np
import pytest

from stoker.errors import ConfigError
from stoker.sampler import Sampler, UniformSampler
from stoker.testing.sampler_conformance import SamplerConformance


class TestShuffled(SamplerConformance):
    def make_sampler(self, pad_to: int) -> Sampler:
        return UniformSampler(self.num_samples, seed=7, pad_to=pad_to)


class TestCut(SamplerConformance):
    def make_sampler(self, pad_to: int) -> Sampler:
        return UniformSampler(self.num_samples, seed=7, pad_to=pad_to, drop_last=True)


class TestMoreRanksThanSamples(SamplerConformance):
    num_samples = 3
    world_size = 8

    def make_sampler(self, pad_to: int) -> Sampler:
        return UniformSampler(3, pad_to=pad_to)


class TestInOrder(SamplerConformance):
    world_size = 1

    def make_sampler(self, pad_to: int) -> Sampler:
        return UniformSampler(self.num_samples, shuffle=False, pad_to=pad_to)


def test_each_sample_once() -> None:
    plan = UniformSampler(1000, seed=3).plan(None, 0)
    np.testing.assert_array_equal(np.sort(plan.ids), np.arange(1000))


def test_padding_repeats_the_start_of_the_permutation() -> None:
    plan = UniformSampler(10, pad_to=4).plan(None, 0)
    assert len(plan) == 12
    np.testing.assert_array_equal(plan.ids[10:], plan.ids[:2])
    bare = UniformSampler(10).plan(None, 0)
    np.testing.assert_array_equal(plan.ids[:10], bare.ids)


def test_drop_last_cuts_the_same_permutation() -> None:
    plan = UniformSampler(10, pad_to=4, drop_last=True).plan(None, 0)
    np.testing.assert_array_equal(plan.ids, UniformSampler(10).plan(None, 0).ids[:8])


def test_in_order_is_never_padded() -> None:
    plan = UniformSampler(10, shuffle=False, pad_to=4).plan(None, 5)
    np.testing.assert_array_equal(plan.ids, np.arange(10))
    assert plan.start == 50


def test_seed_and_epoch_both_matter() -> None:
    plans = [UniformSampler(100, seed=s).plan(None, e).ids.tolist() for s in (0, 1) for e in (0, 1)]
    assert len({tuple(plan) for plan in plans}) == 4


def test_positions_are_uniform() -> None:
    """Over 4,000 epochs of 10 samples, each sample is first about equally often."""
    sampler = UniformSampler(10, seed=11)
    first = np.bincount([sampler.plan(None, e).ids[0] for e in range(4000)], minlength=10)
    assert float(((first - 400) ** 2 / 400).sum()) < 27.9  # 9 degrees of freedom, p = 0.001


def test_same_plan_in_another_process() -> None:
    code = "from stoker.sampler import UniformSampler as U; print(U(99, 5).plan(None, 3).identity)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    assert done.stdout.strip() == UniformSampler(99, 5).plan(None, 3).identity


def test_ten_million_ids_in_about_a_second() -> None:
    began = time.process_time()
    plan = UniformSampler(10_000_000).plan(None, 0)
    assert time.process_time() - began < 4  # 0.7 s here; the margin is for busy machines
    assert len(plan) == 10_000_000


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"num_samples": 0}, "num_samples=0"),
        ({"num_samples": 2**32}, "num_samples=4294967296"),
        ({"num_samples": 5, "seed": -1}, "seed=-1"),
        ({"num_samples": 5, "pad_to": 0}, "pad_to=0"),
        ({"num_samples": 5, "pad_to": 8, "drop_last": True}, "none of 5 samples to 8 ranks"),
    ],
)
def test_refuses_bad_arguments(arguments: dict[str, int], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        UniformSampler(**arguments)
