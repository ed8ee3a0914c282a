"""The closed forms against the policies themselves, on shuffled epochs."""

import numpy as np
import pytest
from reference.arena import ReferenceArena

from stoker import recipes

N, EPOCHS = 1000, 6


def measured(recipe, share):
    """Return the hit ratio from the third epoch on, with samples of one byte."""
    sampler = recipe.sampler(N, seed=0, shuffle=True, pad_to=1, drop_last=False)
    hits = accesses = 0
    with ReferenceArena(N, int(share * N), seed=0) as arena:
        arena.configure(recipe.policy.regions())
        for epoch in range(EPOCHS):
            for i in sampler.plan(None, epoch).ids:
                found = arena.get_many([i])[2][0]
                if not found:
                    arena.put_many([i], [b"x"])
                if epoch >= 2:
                    hits += found
                    accesses += 1
    return hits / accesses


@pytest.mark.parametrize("name", ["lru", "minio", "random"])
@pytest.mark.parametrize("share", [0.2, 0.6])
def test_the_prediction_holds(name, share):
    recipe = recipes.get(name)
    assert measured(recipe, share) == pytest.approx(recipe.predicted_hit_ratio(share), abs=0.015)


def test_lru_is_what_the_papers_measured():
    shares = np.array([0.2, 0.4, 0.6, 0.8])
    predicted = [recipes.lru().predicted_hit_ratio(c) for c in shares]
    assert np.round(np.multiply(predicted, 100), 1).tolist() == [2.1, 9.4, 23.3, 47.8]


@pytest.mark.parametrize("name", ["lru", "minio", "random"])
def test_nothing_cached_hits_nothing_and_everything_cached_hits_always(name):
    recipe = recipes.get(name)
    assert recipe.predicted_hit_ratio(0.0) == 0.0
    assert recipe.predicted_hit_ratio(1.0) == pytest.approx(1.0)
    curve = [recipe.predicted_hit_ratio(c) for c in np.linspace(0, 1, 101)]
    assert (np.diff(curve) > 0).all()
