"""A fixed set where each sample comes once an epoch, and next use where jobs share."""

import numpy as np
import pytest

from stoker.errors import ConfigError
from stoker.jobs.merged import kind_of
from stoker.policy import NextUse, OnceAnEpoch, Policy
from stoker.sim import limits, replay
from stoker.testing.policy_conformance import PolicyConformance


class TestOnceAnEpoch(PolicyConformance):
    def make_policy(self) -> Policy:
        return OnceAnEpoch(100.0).for_sizes(np.arange(1, self.num_samples + 1))


def test_the_smallest_stay_the_most_in_number_that_fit() -> None:
    sizes = np.random.default_rng(0).lognormal(11, 0.6, 5_000).astype(np.int64)
    found = replay("foresight", len(sizes), 5, 0.2, sizes=sizes).after(2)
    most = limits.smallest_first(sizes, 0.2 * float(sizes.sum()))
    assert most - 0.002 < found.hit_ratio <= most
    assert found.byte_hit_ratio == pytest.approx(0.2, abs=0.002)


@pytest.mark.parametrize("request_bytes", [0.0, 1e7])
def test_of_equal_ones_the_first_stay_and_hits_are_spread(request_bytes: float) -> None:
    num = 2_000
    epochs = [np.random.default_rng(epoch).permutation(num) for epoch in range(3)]
    hits = []
    for name in ("minio", "foresight"):
        params = {} if name == "minio" else {"request_bytes": request_bytes}
        found = replay(name, num, 3, 0.2, trace=epochs, batch_size=1, **params)
        hits.append([epoch.hits for epoch in found.per_epoch])
    assert hits[0] == hits[1] == [0, 400, 400]


def test_times_count_only_where_other_jobs_use_the_cache() -> None:
    ids, times = np.arange(4, dtype=np.uint32), np.array([4.0, 1.0, 3.0, 2.0])
    sizes = np.array([10, 20, 30, 40])
    policy = OnceAnEpoch(1e3).for_sizes(sizes)
    assert np.argsort(policy.keys_alone(ids, times)).tolist() == [3, 2, 1, 0]
    assert (policy.keys_alone(ids, times) == policy.keys(ids, None, None, None)).all()
    assert (
        policy.keys_after(ids, times) == NextUse(1e3).for_sizes(sizes).keys_after(ids, times)
    ).all()
    assert kind_of(policy) is kind_of(NextUse())


def test_refuses_negative_costs() -> None:
    with pytest.raises(ConfigError, match="request_bytes=-1"):
        OnceAnEpoch(request_bytes=-1)
