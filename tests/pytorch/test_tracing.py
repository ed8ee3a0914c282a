"""What a Loader writes down: all that its training loop saw, whatever becomes of the process."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

import stoker
from stoker import recipes
from stoker.errors import ConfigError
from stoker.sim.trace import Trace
from stoker.source.held import MemorySource
from stoker.types import Outcome

N, BATCH = 500, 16
SIZES = np.random.default_rng(0).integers(40, 200, N)
LOSSES = np.random.default_rng(1).lognormal(0, 1, N)

# Validation is beside the point here.
pytestmark = pytest.mark.filterwarnings("ignore:the recipe goes by validation accuracy")


def dataset(n=N):
    samples = MemorySource([bytes(int(size)) for size in SIZES[:n]])
    return stoker.SampleDataset(samples, decode=len)


def make(path, recipe="minio", n=N, **arguments):
    defaults = {"batch_size": BATCH, "cache": stoker.Cache("30%", prefetch=0), "epochs": 3}
    chosen = {**defaults, "return_meta": True, "trace": path, **arguments}
    return stoker.Loader(dataset(n), recipe=recipe, **chosen)


def train(loader, epochs=1, steps=None):
    """Return the metas of all batches, which are observed."""
    metas = []
    for _ in range(epochs):
        for step, (_, meta) in enumerate(loader):
            loader.observe(torch.as_tensor(LOSSES[meta.ids]), meta=meta)
            metas.append(meta)
            if steps is not None and step + 1 == steps:
                break
    return metas


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("recipe", ["lru", "shade", "quiver"])
def test_what_the_loop_saw_is_there(tmp_path, recipe, num_workers):
    path = tmp_path / "trace"
    with make(path, recipe, num_workers=num_workers) as loader:
        metas = train(loader, 2)
        loader.end_epoch(0.75)
        scores = loader.scores.values.copy()
    with Trace(path) as trace:
        epochs = list(trace)
        assert trace.about["recipe"] == recipe
        assert trace.about["num_samples"] == N
        assert trace.batch_size == BATCH
        assert trace.sizes.tolist() == SIZES.tolist()
    assert [epoch.accuracy for epoch in epochs] == [None, 0.75]
    ids = np.concatenate([epoch.ids for epoch in epochs])
    assert ids.tolist() == np.concatenate([meta.ids for meta in metas]).tolist()
    outcomes = np.concatenate([epoch.outcomes for epoch in epochs])
    assert outcomes.tolist() == np.concatenate([meta.outcomes for meta in metas]).tolist()
    sizes = np.concatenate([epoch.batch_sizes for epoch in epochs])
    assert sizes.tolist() == [len(meta) for meta in metas]
    for shown, meta in zip((s for e in epochs for s in e.shown), metas, strict=True):
        assert shown.ids.tolist() == meta.ids.tolist()
        assert not shown.is_aside
        assert shown.losses.tolist() == LOSSES[meta.ids].tolist()
    played = np.zeros(N)
    for update in (u for e in epochs for u in e.updates):
        played[update.ids] = update.values
    assert played.tolist() == scores.tolist()
    times = np.concatenate([epoch.times for epoch in epochs])
    assert (np.diff(times) > 0).all()
    # Where another was served, it was a substitute, or stood in for one that had been one.
    same = np.concatenate([epoch.asked for epoch in epochs]) == ids
    assert same.all() == (recipe != "quiver")
    assert not (outcomes[same] == Outcome.SUBSTITUTED).any()
    assert all(sorted(epoch.asked) == list(range(N)) for epoch in epochs if recipe != "shade")


def test_graphs_bring_their_neighbours_and_rescoring_is_aside(tmp_path):
    pytest.importorskip("faiss")
    path = tmp_path / "trace"
    vectors = torch.randn(N, 8, generator=torch.Generator().manual_seed(0))
    with make(path, "spidercache", seed=1) as loader:
        for _, meta in loader:
            ids = torch.as_tensor(meta.ids.astype(np.int64))
            loader.observe(
                torch.as_tensor(LOSSES[meta.ids]),
                embeddings=vectors[ids],
                labels=ids % 3,
                meta=meta,
            )
    with Trace(path) as trace:
        epoch = trace.epoch(0)
    near = [u.neighbours for u in epoch.updates if u.neighbours is not None]
    assert len(near) > 10
    for found in near:
        assert [len(found.of(i)) for i in range(len(found.ids))] == found.degree.tolist()
        assert len(found.all) == found.degree.sum()
    assert any(len(found.all) for found in near)


def test_samples_scored_anew_are_aside(tmp_path):
    path = tmp_path / "trace"
    recipe = recipes.impact(max_warm_up=2, package_bytes=100)
    with make(path, recipe, rescore=lambda batch: torch.full((len(batch),), 9.0)) as loader:
        train(loader, 4)
    with Trace(path) as trace:
        epochs = list(trace)
    asides = [[u for u in epoch.updates if u.is_aside] for epoch in epochs]
    assert not asides[0]
    assert asides[3]
    rescored = np.concatenate([u.ids for u in asides[3]])
    assert set(rescored.tolist()) == set(epochs[3].volatile.tolist())
    assert {v for u in asides[3] for v in u.values.tolist()} == {9.0}


def test_ranks_write_a_file_each_and_are_read_as_one(tmp_path):
    path = tmp_path / "trace"
    loaders = [make(path, n=96, rank=rank, world_size=2) for rank in (0, 1)]
    for loader in loaders:
        train(loader, 2)
        loader.close()
    with make(None, n=96) as alone:
        metas = train(alone, 2)
    with Trace(path) as trace:
        assert trace.batch_size == 2 * BATCH
        ids = np.concatenate([epoch.ids for epoch in trace])
        assert ids.tolist() == np.concatenate([meta.ids for meta in metas]).tolist()
        assert trace.epoch(0).batch_sizes.tolist() == [2 * BATCH] * 3
        assert len(trace.epoch(0).shown) == 6
    second = tmp_path / "trace.1"
    os.truncate(second, second.stat().st_size - 1)
    with Trace(path) as trace:
        assert trace.epochs == [0]  # what both have


def test_a_resumed_run_goes_on_with_its_trace(tmp_path):
    path = tmp_path / "trace"
    with make(path, "shade") as loader:
        whole = train(loader, 1)
        train(loader, 1, steps=5)
        state = loader.state_dict()
        # Goes on after the checkpoint, and dies: it will be done again.
        for _, meta in loader:
            loader.observe(torch.as_tensor(LOSSES[meta.ids]) + 5, meta=meta)
    with make(path, "shade") as loader:
        loader.load_state_dict(state)
        metas = train(loader, 1)
    with Trace(path) as trace:
        assert trace.epochs == [0, 1]
        assert len(trace.epoch(0).ids) == sum(map(len, whole))
        epoch = trace.epoch(1)
        assert len(epoch.ids) == N
        assert epoch.ids[5 * BATCH :].tolist() == np.concatenate([m.ids for m in metas]).tolist()
        assert len(epoch.shown) == len(epoch.batch_sizes) == len(epoch.updates)
        assert max(shown.losses.max() for shown in epoch.shown) <= LOSSES.max()


def test_a_killed_run_leaves_whole_blocks(tmp_path):
    path = tmp_path / "trace"
    code = f"""
        import os, signal, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import test_tracing as t
        from stoker.epoch import tracing
        tracing._BLOCK_BYTES = 1000
        loader = t.make({str(path)!r})
        t.train(loader, 1)
        t.train(loader, 1, steps=20)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], timeout=120, check=False)
    assert ended.returncode == -signal.SIGKILL
    with Trace(path) as trace:
        assert len(trace.epoch(0).ids) == N
        begun = trace.epoch(1)
    assert 10 * BATCH <= len(begun.ids) <= 20 * BATCH
    with make(None) as loader:
        metas = train(loader, 2)
    expected = np.concatenate([meta.ids for meta in metas])[N:]
    assert begun.ids.tolist() == expected[: len(begun.ids)].tolist()


def test_a_full_disk_ends_the_trace_and_not_the_training(tmp_path):
    link = tmp_path / "trace"
    with make(link) as loader:
        train(loader, 1)
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, loader._session._tracer._file._fd)
        os.close(full)
        with pytest.warns(RuntimeWarning, match="training continues") as told:
            assert len(train(loader, 2)) == 2 * -(-N // BATCH)
        assert len(told) == 1
    with Trace(link) as trace:
        assert trace.epochs == [0]


def test_a_folder_that_cannot_be_written_is_warned_of(tmp_path, monkeypatch):
    def refuse(*arguments, **named):
        raise PermissionError(13, "no")

    loader = make(tmp_path / "trace")
    monkeypatch.setattr("stoker.epoch.tracing.TraceWriter", refuse)
    with loader, pytest.warns(RuntimeWarning, match="training continues") as told:
        train(loader, 2)
    assert len(told) == 1


def test_what_makes_no_sense_is_refused(tmp_path):
    for given, match in [
        (5, "no path"),
        (tmp_path, "folder"),
        (tmp_path / "none" / "trace", "folder"),
        (__file__, "no trace"),
    ]:
        with pytest.raises(ConfigError, match=match):
            make(given)
    with make(tmp_path / "trace") as loader:
        train(loader, 1)
    with pytest.raises(ConfigError, match="seed=0"):
        make(tmp_path / "trace", seed=1)
