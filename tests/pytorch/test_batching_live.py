"""Batches by lengths in the Loader: one run, however it is interrupted, divided and read ahead."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.parts import numbers
from support.texts import check_batch, lengths_of, texts, tokens_of
from torch.utils.data import Subset

import stoker
from stoker import Buckets, Cache, Packing, TokenBudget
from stoker.errors import ConfigError, StateMismatch
from stoker.pytorch import Loader, SampleDataset
from stoker.sampler.batching import Batching
from stoker.sim.trace import Trace
from stoker.source import MemorySource
from stoker.testing.sources import SlowSource

EPOCHS = 2
BATCHINGS = [
    TokenBudget(70, token_bytes=2, window=20),
    Buckets([10, 20, 30], 90, token_bytes=2),
    Packing(30, rows=3, token_bytes=2, window=25),
    Packing(30, rows=3, cut=True, token_bytes=2),
]


class Job(NamedTuple):
    """How the job is run until its next interruption."""

    steps: int
    world_size: int
    num_workers: int
    prefetch: bool


jobs = st.builds(
    Job,
    steps=st.integers(0, 6),
    world_size=st.sampled_from([1, 1, 2, 3, 7]),
    num_workers=st.sampled_from([0, 0, 0, 2]),
    prefetch=st.sampled_from([False, False, True]),
)


def loader_of(count: int, job: Job, rank: int, batching: Batching, **options: Any) -> Loader:
    return Loader(
        SampleDataset(SlowSource(texts(count), latency=0.0), tokens_of),
        batching=batching,
        num_workers=job.num_workers,
        cache=Cache("50%", prefetch="1MiB" if job.prefetch else 0),
        rank=rank,
        world_size=job.world_size,
        multiprocessing_context="fork" if job.num_workers else None,
        return_meta=True,
        **options,
    )


Places = dict[tuple[int, int], int]
"""Which sample was served at each place (epoch, position)."""


def run_rank(
    count: int, job: Job, rank: int, batching: Batching, state: Any, steps: int | None
) -> tuple[Places, Any, int]:
    """Return what each place gave, the state afterwards, and the steps done."""
    found: Places = {}
    done = 0
    with loader_of(count, job, rank, batching) as loader:
        if state is not None:
            loader.load_state_dict(state)
        first = 0 if state is None else state["epoch"]
        for epoch in range(first, EPOCHS):
            loader.set_epoch(epoch)
            expected, given_out = len(loader), 0
            for batch in loader:
                meta = batch.pop("meta")
                check_batch(batch, meta.ids, count)
                assert batching.places_of(lengths_of(count)[meta.ids]) <= batching.places
                for place, sample in zip(meta.positions.tolist(), meta.ids.tolist(), strict=True):
                    assert (epoch, place) not in found
                    found[epoch, place] = sample
                given_out += 1
                done += 1
                if done == steps:
                    return found, loader.state_dict(), done
            assert given_out == expected
        return found, None, done


def run(count: int, script: list[Job], batching: Batching) -> Places:
    """Run the jobs in turn, each from the state of the one before; the last to the end."""
    found: Places = {}
    state = None
    for number, job in enumerate(script):
        steps = job.steps if number + 1 < len(script) else None
        if steps == 0:
            continue
        ranks = [
            run_rank(count, job, rank, batching, state, steps) for rank in range(job.world_size)
        ]
        assert len({done for _, _, done in ranks}) == 1
        states = [after for _, after, _ in ranks]
        assert len({str((s["epoch"], s["consumed"], s["steps"])) for s in states if s}) <= 1
        for part, _, _ in ranks:
            assert not part.keys() & found.keys()
            found |= part
        state = states[0]
        if state is None:
            break
    return found


@pytest.mark.filterwarnings("ignore:a running job's cache")
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@settings(
    max_examples=8,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    batching=st.sampled_from(BATCHINGS),
    count=st.integers(7, 60),
    script=st.lists(jobs, min_size=2, max_size=4),
)
def test_interruptions_change_nothing(
    batching: Batching, count: int, script: list[Job], monkeypatch: Any, tmp_path: Path
) -> None:
    monkeypatch.setenv("STOKER_RUNTIME_DIR", str(tmp_path))
    expected = run(count, [Job(0, 1, 0, False)], batching)
    assert sorted(expected.keys()) == [(e, place) for e in range(EPOCHS) for place in range(count)]
    found = run(count, script, batching)
    assert expected.keys() <= found.keys()
    for (epoch, place), sample in found.items():  # what is beyond repeats the start of the epoch
        assert sample == expected[epoch, place % count]
    for epoch in range(EPOCHS):
        assert sorted(expected[epoch, place] for place in range(count)) == list(range(count))


@pytest.mark.parametrize("batching", BATCHINGS, ids=lambda batching: type(batching).__name__)
@pytest.mark.parametrize("drop_last", [False, True])
def test_ranks_take_equally_many_steps(batching: Batching, drop_last: bool) -> None:
    steps, seen = [], []
    for rank in range(3):
        with loader_of(200, Job(0, 3, 0, False), rank, batching, drop_last=drop_last) as loader:
            assert len(loader.batch_sampler) == len(loader)  # type: ignore[arg-type]
            batches = list(loader.batch_sampler)  # type: ignore[arg-type]
            got = [batch["meta"].ids.tolist() for batch in loader]
            assert got == batches
            steps.append(len(got))
            seen += [sample for batch in got for sample in batch]
    assert len(set(steps)) == 1
    assert len(set(seen)) == len(seen)
    assert drop_last or sorted(seen) == list(range(200))


def test_the_order_is_of_seed_and_epoch_alone() -> None:
    orders = set()
    for seed in (0, 1):
        with loader_of(100, Job(0, 1, 0, False), 0, BATCHINGS[0], seed=seed, epochs=3) as loader:
            epochs = [str([batch["meta"].ids.tolist() for batch in loader]) for _ in range(3)]
            assert loader.total_steps() == sum(epoch.count("], [") + 1 for epoch in epochs)
            orders.update(epochs)
    assert len(orders) == 6


def test_in_order_without_shuffling() -> None:
    with loader_of(50, Job(0, 1, 0, False), 0, BATCHINGS[3], shuffle=False) as loader:
        first, second = ([batch["meta"].ids.tolist() for batch in loader] for _ in range(2))
    assert first == second
    assert sorted(sample for batch in first for sample in batch) == list(range(50))


def test_padding_is_counted_and_survives_a_state() -> None:
    batching = Packing(64, rows=4, token_bytes=2)
    job, count = Job(0, 1, 0, False), 2000
    with loader_of(count, job, 0, batching) as loader:
        batches = iter(loader)
        shown = sum(int((next(batches)["documents"] >= 0).sum()) for _ in range(4))
        assert (loader.stats.tokens, loader.stats.token_places) == (shown, 4 * 256)
        state = loader.state_dict()
    with loader_of(count, job, 0, batching) as loader:
        loader.load_state_dict(state)
        for _ in loader:
            pass
        stats = loader.stats
    assert stats.tokens == lengths_of(count).sum()
    assert stats.token_places % 256 == 0
    assert stats.padding == 1 - stats.tokens / stats.token_places
    assert 0 <= stats.padding < 0.03
    assert "padding" in stats.summary


def test_a_subset_keeps_its_ids_and_lengths() -> None:
    dataset = SampleDataset(texts(100), tokens_of)
    chosen = list(range(90, 10, -3))
    batching = TokenBudget(70, lengths=lengths_of(100))
    with Loader(Subset(dataset, chosen), batching=batching, return_meta=True) as loader:
        seen = []
        for batch in loader:
            meta = batch.pop("meta")
            check_batch(batch, meta.ids, 100)
            seen += meta.ids.tolist()
    assert sorted(seen) == sorted(chosen)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_are_tensors_of_int64_with_targets(num_workers: int) -> None:
    dataset = SampleDataset(texts(40), tokens_of, targets=np.arange(40) % 3)
    with Loader(
        dataset, batching=BATCHINGS[1], num_workers=num_workers, return_meta=True
    ) as loader:
        for batch in loader:
            assert batch["tokens"].dtype == torch.int64
            assert batch["targets"].tolist() == (batch["meta"].ids % 3).tolist()
            assert batch["tokens"].shape[1] in {10, 20, 30}


def test_a_collate_function_of_ones_own_gets_the_samples() -> None:
    dataset = SampleDataset(texts(40), tokens_of)
    with Loader(dataset, batching=BATCHINGS[0], collate_fn=len) as loader:
        assert sum(loader) == 40


def test_recipes_with_weights_are_batched_too() -> None:
    with loader_of(120, Job(0, 1, 0, False), 0, BATCHINGS[0], recipe="shade", epochs=2) as loader:
        for _ in range(2):
            for batch in loader:
                meta = batch.pop("meta")
                check = np.unique(meta.ids, return_counts=True)
                assert batch["tokens"].shape[0] == check[1].sum() == len(meta.weights)
                loader.observe(torch.ones(len(meta)) + torch.from_numpy(meta.ids % 5), meta=meta)
            loader.end_epoch(accuracy=0.5)


def test_a_trace_of_several_ranks_is_in_the_order_of_the_plan(tmp_path: Path) -> None:
    path = tmp_path / "run.trace"
    with loader_of(80, Job(0, 1, 0, False), 0, BATCHINGS[2]) as alone:
        expected = [sample for batch in alone for sample in batch["meta"].ids.tolist()]
    for rank in range(2):
        with loader_of(80, Job(0, 2, 0, False), rank, BATCHINGS[2], trace=path) as loader:
            for _ in loader:
                pass
    with Trace(path) as trace:
        assert trace.epoch(0).ids.tolist() == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_is_read_ahead_is_what_the_batches_of_the_rank_need(num_workers: int) -> None:
    dataset = SampleDataset(SlowSource(texts(600), latency=0.002), tokens_of)
    with Loader(
        dataset,
        batching=BATCHINGS[2],
        cache="50%",
        epochs=1,
        rank=1,
        world_size=2,
        num_workers=num_workers,
    ) as loader:
        assert len(list(loader)) > 10
        assert loader._session.controller.opened.ahead is not None
        stats, reads = loader.stats, int(dataset.source.reads.sum())  # type: ignore[attr-defined]
    assert 0 < stats.accesses < 600 and reads == stats.fetched == stats.accesses


def refused(data: Any) -> Any:
    tokens = tokens_of(data)
    if tokens[0] % 10 == 1:
        raise ValueError("every tenth")
    return tokens


@pytest.mark.parametrize("batching", BATCHINGS, ids=lambda batching: type(batching).__name__)
def test_samples_that_fail_are_replaced_by_the_shortest(batching: Batching) -> None:
    shortest = set(np.argsort(lengths_of(60), kind="stable")[:8].tolist())
    with loader_of(60, Job(0, 1, 0, False), 0, batching) as loader:
        planned = [batch["meta"].ids.tolist() for batch in loader]
    dataset = SampleDataset(texts(60), refused)
    with Loader(dataset, batching=batching, on_error="skip", return_meta=True) as loader:
        for batch, wanted in zip(loader, planned, strict=True):
            ids = batch.pop("meta").ids.tolist()
            assert len(ids) == len(wanted) and batch["tokens"].numel() <= batching.places
            for served, asked in zip(ids, wanted, strict=True):
                assert served == asked if asked % 10 else served in shortest
        assert len(loader.quarantine) == 6


def mixed(rank: int = 0, world_size: int = 1) -> Loader:
    parts = {name: SampleDataset(texts(60), tokens_of) for name in ("web", "code")}
    dataset = stoker.mix(parts, {"web": 0.75, "code": 0.25}, epoch_samples=40)
    batching = Packing(30, rows=2, token_bytes=2)
    return Loader(
        dataset, batching=batching, rank=rank, world_size=world_size, cache="50%", return_meta=True
    )


def test_mixtures_are_packed_and_resumed() -> None:
    with mixed() as loader:
        epochs = [[batch["meta"].ids.tolist() for batch in loader] for _ in range(2)]
        assert loader.source_stats["code"].accesses == 20
    for epoch in epochs:
        assert sum(sample >= 60 for batch in epoch for sample in batch) == 10
    with mixed() as loader:
        loader.set_epoch(1)
        next(iter(loader))
        state = loader.state_dict()
    rest = []
    for rank in range(3):
        with mixed(rank, 3) as loader:
            loader.load_state_dict(state)
            rest += [sample for batch in loader for sample in batch["meta"].ids.tolist()]
    assert sorted(rest) == sorted(sample for batch in epochs[1][1:] for sample in batch)


def test_other_batches_are_not_resumed_with() -> None:
    with loader_of(40, Job(0, 1, 0, False), 0, BATCHINGS[0]) as loader:
        next(iter(loader))
        state = loader.state_dict()
    other = loader_of(40, Job(0, 1, 0, False), 0, BATCHINGS[1])
    with other as loader, pytest.raises(StateMismatch, match="order"):
        loader.load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batch_size": 4}, "batch_size=: leave one out"),
        ({"batch_size": None}, "batch_size=: leave one out"),
        ({"sampler": [1, 2]}, "leave out sampler"),
        ({"recipe": "icache"}, "in the place of others"),
        ({"recipe": "foresight:repeat=2"}, "block= or repeat="),
        ({"batching": 8192}, "batching=8192 is not known"),
        ({"batching": TokenBudget(4)}, "too long"),
        ({"batching": TokenBudget(64, lengths=[1, 2])}, "do not fit 40 samples"),
    ],
)
@pytest.mark.filterwarnings("ignore:recipe")
def test_what_does_not_go_together_raises(options: dict[str, Any], says: str) -> None:
    given = {"batching": TokenBudget(64), "recipe": None, **options}
    with pytest.raises(ConfigError, match=says):
        Loader(SampleDataset(texts(40), tokens_of), **given)


def test_lengths_are_told_where_collate_finds_others() -> None:
    batching = Packing(16, lengths=np.full(20, 4))
    longer = Loader(SampleDataset(numbers(20), list), batching=batching)
    with longer as loader, pytest.raises(ConfigError, match="lengths= has to say"):
        next(iter(loader))


def test_empty_samples_are_served() -> None:
    source = MemorySource([b"", b"ab", b"", b"c"])
    with Loader(
        SampleDataset(source, lambda data: np.frombuffer(data, np.uint8)),
        batching=Packing(2, rows=3),
    ) as loader:
        (batch,) = list(loader)
    assert np.count_nonzero(batch["tokens"]) == 3
