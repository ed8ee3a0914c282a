"""Fitted populations: the distributions and the persistence they were fitted to, and their hits."""

import numpy as np
import pytest
import torch

import stoker
from stoker.errors import ConfigError
from stoker.sim import Trace, replay
from stoker.sim.played import RecordedLosses
from stoker.sim.signals import LossModel, _least_squares, fit_losses
from stoker.source.held import MemorySource

N, EPOCHS, BATCH, SHARE = 1200, 10, 16, 0.2


def spearman(one, other):
    return np.corrcoef(np.argsort(np.argsort(one)), np.argsort(np.argsort(other)))[0, 1]


def recorded(path, recipe, epochs=EPOCHS, classes=4, noisy=0.15):
    """Train a real model on blobs, of which some have wrong labels; return the hit ratio."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(classes, (N,), generator=generator)
    centres = 1.2 * torch.randn(classes, 8, generator=generator)
    inputs = centres[labels] + torch.randn(N, 8, generator=generator)
    wrong = torch.rand(N, generator=generator) < noisy
    labels[wrong] = torch.randint(classes, (int(wrong.sum()),), generator=generator)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, classes)
        )
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    dataset = stoker.SampleDataset(MemorySource([b"x" * 50] * N), decode=len)
    with stoker.Loader(
        dataset,
        batch_size=BATCH,
        cache=stoker.Cache(f"{SHARE:.0%}", prefetch=0),
        recipe=recipe,
        epochs=epochs,
        return_meta=True,
        trace=path,
    ) as loader:
        for _ in range(epochs):
            right = seen = 0
            for _, meta in loader:
                ids = torch.as_tensor(meta.ids.astype(np.int64))
                logits = model(inputs[ids])
                losses = torch.nn.functional.cross_entropy(logits, labels[ids], reduction="none")
                right += int((logits.argmax(1) == labels[ids]).sum())
                seen += len(ids)
                loader.observe(losses, meta=meta)
                optimizer.zero_grad()
                losses.mean().backward()
                optimizer.step()
            loader.end_epoch(right / seen)
        late = loader.epoch_stats[epochs // 2 :] if epochs > 2 else []
        return sum(e.hits for e in late) / max(1, sum(e.accesses for e in late))


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Keep the small model from waiting for cores that others use."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=["shade", "lru"])
def run(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "t"
    hits = recorded(path, request.param)
    with Trace(path) as trace:
        yield request.param, hits, trace


def test_distributions_are_those_of_the_epochs(run):
    trace = run[2]
    losses = fit_losses(trace).population(N, seed=1)
    ids, own = np.arange(N, dtype=np.uint32), RecordedLosses(trace)
    for epoch in (0, 3, EPOCHS - 1):
        seen = np.unique(np.concatenate([shown.ids for shown in trace.epoch(epoch).shown]))
        for share in (0.1, 0.5, 0.9, 0.99):
            expected = np.quantile(own(seen, epoch), share)
            assert np.quantile(losses(ids, epoch), share) == pytest.approx(expected, rel=0.05)


def test_ranks_persist_as_they_did(run):
    trace = run[2]
    model = fit_losses(trace)
    losses, ids = model.population(N, seed=2), np.arange(N, dtype=np.uint32)
    for e, later in [(3, 4), (4, 8)]:
        tables = []
        for epoch in (e, later):
            table = np.full(N, np.nan)
            for shown in trace.epoch(epoch).shown:
                table[shown.ids] = shown.losses
            tables.append(table)
        both = ~np.isnan(tables[0] + tables[1])
        expected = spearman(tables[0][both], tables[1][both])
        assert spearman(losses(ids, e), losses(ids, later)) == pytest.approx(expected, abs=0.15)


def test_a_fitted_population_hits_what_the_recorded_training_did(run):
    name, hits, trace = run
    if name != "shade":
        pytest.skip("only what follows scores depends on losses")
    losses = fit_losses(trace).population(N, seed=3)
    found = replay("shade", N, EPOCHS, SHARE, losses=losses, batch_size=BATCH).after(EPOCHS // 2)
    assert found.hit_ratio == pytest.approx(hits, abs=0.04)


def test_a_model_of_one_training_says_what_another_recipe_of_it_hits(run, tmp_path):
    name, _, trace = run
    if name != "lru":
        pytest.skip("the other way round")
    hits = recorded(tmp_path / "t", "shade")
    losses = fit_losses(trace).population(N, seed=3)
    found = replay("shade", N, EPOCHS, SHARE, losses=losses, batch_size=BATCH).after(EPOCHS // 2)
    assert found.hit_ratio == pytest.approx(hits, abs=0.05)


def test_draws_depend_on_nothing_but_seed_epoch_and_sample():
    model = LossModel(np.array([[0.0, 1.0], [2.0, 5.0]]), 0.4, 0.3, 0.8)
    ids, one = np.arange(500, dtype=np.uint32), model.population(500, 4)
    tables = [one(ids, epoch) for epoch in range(4)]
    again = model.population(500, 4)
    for epoch in (2, 0, 3, 1):
        assert again(ids, epoch).tolist() == tables[epoch].tolist()
        assert again(ids[::7], epoch).tolist() == tables[epoch][::7].tolist()
    assert model.population(500, 5)(ids, 0).tolist() != tables[0].tolist()
    assert 0 <= tables[0].min() < tables[0].max() <= 1
    assert 2 <= tables[3].min() < tables[3].max() <= 5  # goes on as the last one


@pytest.mark.parametrize("lag", [1, 2, 5])
def test_places_correlate_as_the_model_says(lag):
    model = LossModel(np.array([[0.0, 1.0]]), 0.3, 0.5, 0.8)
    losses, ids = model.population(40_000, 0), np.arange(40_000, dtype=np.uint32)
    found = 2 * np.sin(np.pi / 6 * spearman(losses(ids, 2), losses(ids, 2 + lag)))
    assert found == pytest.approx(model.correlation(lag), abs=0.02)


@pytest.mark.parametrize("wanted", [(0.3, 0.5, 0.8), (0.6, 0.0, 0.0), (0.0, 0.9, 0.95), (1, 0, 0)])
def test_persistence_is_found_again(wanted):
    a, b, phi = wanted
    lags = np.array([1, 2, 3, 4, 6, 8, 12, 16])
    found = _least_squares(lags, a + b * phi**lags * (phi > 0), np.ones(len(lags)))
    assert found[0] + found[1] * found[2] ** lags == pytest.approx(
        a + b * phi**lags * (phi > 0), abs=0.01
    )


def test_what_cannot_be_fitted_is_refused(tmp_path):
    recorded(tmp_path / "short", "lru", epochs=1)
    with Trace(tmp_path / "short") as trace, pytest.raises(ConfigError, match="1 epochs"):
        fit_losses(trace)
    with pytest.raises(ConfigError, match="num_samples=0"):
        LossModel(np.array([[0.0, 1.0]]), 0.3, 0.5, 0.8).population(0)
