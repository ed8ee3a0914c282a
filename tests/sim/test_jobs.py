"""Several jobs over one cache: one is as alone, equal ones follow each other, merged keys gain."""

import numpy as np
import pytest

from stoker import recipes
from stoker.errors import ConfigError
from stoker.sim import replay
from stoker.sim.jobs import replay_jobs

N, BATCH = 1500, 25


@pytest.mark.parametrize("name", ["lru", "belady", "shade", "quiver"])
@pytest.mark.parametrize("merge", [False, True])
def test_one_job_is_as_alone(name, merge):
    alone = replay(name, N, 3, 0.3, batch_size=BATCH, seed=5)
    found = replay_jobs([name], N, 3, 0.3, batch_size=BATCH, seeds=[5], merge=merge)
    assert found.jobs == (alone,) == (found.together,)
    assert found.joined == (0, 0, 0)
    assert found.reads == sum(epoch.fetched for epoch in alone.per_epoch)


def test_a_job_that_follows_another_hits_all_that_it_left():
    # The same order, one batch later: whatever the first one read is still there.
    found = replay_jobs(["lru", "lru"], N, 2, 0.3, batch_size=BATCH, seeds=[7, 7])
    first, second = found.jobs
    assert second.hit_ratio == 1
    assert first.hit_ratio < 0.2
    assert found.reads == sum(epoch.fetched for epoch in first.per_epoch)
    assert found.together.hit_ratio == pytest.approx((first.hit_ratio + 1) / 2)
    # They read at once, so the second one waits for each of these reads.
    assert sum(found.joined) == found.reads
    later = replay_jobs(
        ["lru", "lru"], N, 2, 0.3, batch_size=BATCH, seeds=[7, 7], flight_seconds=0.0
    )
    assert sum(later.joined) == 0
    assert later.jobs == found.jobs


def test_batches_take_place_by_rate():
    found = replay_jobs(
        ["lru", "lru"], N, 2, 1.0, batch_size=BATCH, seeds=[1, 2], rates=[3000.0, 1000.0]
    )
    quick, slow = found.jobs
    # A third of what the quick one needs first was read by the slow one's third of that time.
    assert quick.per_epoch[0].hits / N == pytest.approx(1 / 6, abs=0.03)
    assert slow.per_epoch[0].hits / N == pytest.approx(1 - 1 / 6, abs=0.03)
    assert found.reads == N


@pytest.mark.parametrize("count", [2, 4])
def test_keys_of_all_jobs_hit_more_than_each_job_s_own(count):
    jobs, sizes = ["belady"] * count, np.full(N, 10)
    own = replay_jobs(jobs, N, 4, 0.2, batch_size=BATCH, sizes=sizes, merge=False).after(1)
    merged = replay_jobs(jobs, N, 4, 0.2, batch_size=BATCH, sizes=sizes).after(1)
    apart = replay("belady", N, 4, 0.2, batch_size=BATCH, sizes=sizes).after(1)
    # Each sample is read once an epoch at least, unless it is kept.
    limit = 1 - (1 - 0.2) / count
    assert apart.hit_ratio < merged.together.hit_ratio <= limit + 0.01
    assert own.together.hit_ratio < merged.together.hit_ratio
    for epoch in merged.together.per_epoch:
        assert epoch.accesses == count * N


SIZES = np.random.default_rng(0).lognormal(11.4, 0.6, N).astype(np.int64)


@pytest.mark.parametrize("names", [("foresight", "belady"), ("belady", "foresight")])
def test_jobs_that_weigh_sizes_in_other_ways_get_the_same_of_the_cache(names):
    jobs = replay_jobs(names, N, 6, 0.2, batch_size=BATCH, sizes=SIZES).jobs
    assert jobs[0].hit_ratio == pytest.approx(jobs[1].hit_ratio, abs=0.03)


def test_small_samples_are_not_kept_at_the_expense_of_the_bytes_of_all_jobs():
    by_default, by_time, smallest = (
        replay_jobs([name] * 2, N, 6, 0.2, batch_size=BATCH, sizes=SIZES).together
        for name in ("foresight", "belady", "belady:request_bytes=1e7")
    )
    assert by_default.hit_ratio > max(by_time.hit_ratio, smallest.hit_ratio)
    assert by_default.byte_hit_ratio > smallest.byte_hit_ratio + 0.1


def test_scores_of_all_jobs_count():
    losses = np.random.default_rng(0).lognormal(0, 1.5, N)
    found = replay_jobs(["shade", "shade"], N, 6, 0.2, batch_size=BATCH, losses=losses).after(3)
    alone = replay("shade", N, 6, 0.2, batch_size=BATCH, losses=losses).after(3)
    assert found.together.hit_ratio > alone.hit_ratio - 0.01


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"recipes": []}, "0 jobs"),
        ({"recipes": ["lru"] * 9}, "9 jobs"),
        ({"rates": [1.0]}, "rates"),
        ({"rates": [1.0, 0.0]}, "rates"),
        ({"seeds": [1]}, "seeds"),
        ({"epochs": 0}, "epochs=0"),
        ({"flight_seconds": -1}, "flight_seconds"),
        ({"recipes": ["lru", "icache"]}, "packages"),
        ({"recipes": ["lru", recipes.get("quiver"), "nothing"]}, "nothing"),
    ],
)
def test_what_makes_no_sense_is_refused(changes, match):
    with pytest.raises(ConfigError, match=match):
        replay_jobs(
            **{"recipes": ["lru", "lru"], "num_samples": 50, "epochs": 1, "cache": 0.5, **changes}
        )
