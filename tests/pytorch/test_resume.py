"""A loader goes on exactly where another one was."""

from __future__ import annotations

import io
import itertools
import multiprocessing
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.caches import gathered
from support.images import NUM_IMAGES
from support.parts import Squares, images, number_of, numbers, to_tensor, with_noise
from torch.utils.data import RandomSampler, SequentialSampler, Subset, WeightedRandomSampler

from stoker.errors import ConfigError, SegmentError, StateMismatch
from stoker.pytorch import Loader, SampleDataset, wrap

NUM = 101
SET = SampleDataset(numbers(NUM), number_of)


def loader_of(dataset: Any = SET, **arguments: Any) -> Loader:
    options = {"batch_size": 8, "cache": "50%", "prefetch": 0, **arguments}
    return Loader(dataset, **gathered(options))


def saved(loader: Loader) -> dict[str, Any]:
    """The state after a trip through a file, read as safely as torch reads."""
    buffer = io.BytesIO()
    torch.save(loader.state_dict(), buffer)
    buffer.seek(0)
    state: dict[str, Any] = torch.load(buffer, weights_only=True)
    return state


def batches(loader: Any, count: int | None = None) -> list[list[int]]:
    return [batch.tolist() for batch in itertools.islice(loader, count)]


def resumed(state: dict[str, Any], dataset: Any = SET, **arguments: Any) -> Loader:
    loader = loader_of(dataset, **arguments)
    loader.load_state_dict(state)
    return loader


def whole(epoch: int = 0, **arguments: Any) -> list[list[int]]:
    with loader_of(**arguments) as loader:
        loader.set_epoch(epoch)
        return batches(loader)


@pytest.mark.parametrize("steps", [0, 1, 5, 12, 13])
@pytest.mark.parametrize("workers", [0, 2])
def test_it_goes_on_with_exactly_the_samples_not_handed_out(steps: int, workers: int) -> None:
    with loader_of(num_workers=2) as loader:
        loader.set_epoch(1)
        iterator = iter(loader)
        begun = batches(iterator, steps)
        state = saved(loader)
    assert begun == whole(1)[:steps]
    with resumed(state, num_workers=workers) as loader:
        assert len(loader) == 13 - steps
        assert begun + batches(loader) == whole(1)
        assert len(loader) == 13
        assert batches(loader) == whole(2)


def test_after_the_last_batch_nothing_is_left_and_after_the_end_comes_the_next_epoch() -> None:
    with loader_of() as loader:
        iterator = iter(loader)
        batches(iterator, 13)
        before_the_end = saved(loader)
        assert next(iterator, None) is None
        after_the_end = saved(loader)
    with resumed(before_the_end) as loader:
        assert len(loader) == 0
        assert batches(loader) == []
        assert batches(loader) == whole(1)
    with resumed(after_the_end) as loader:
        assert batches(loader) == whole(1)


def test_twice_in_a_row_and_before_anything_was_read() -> None:
    with loader_of() as loader:
        parts = batches(loader, 3)
        state = saved(loader)
    for steps in (4, 0, 2):
        with resumed(state) as loader:
            assert saved(loader).keys() == state.keys()
            assert saved(loader)["consumed"] == state["consumed"]
            parts += batches(loader, steps) if steps else []
            state = saved(loader)
    with resumed(state) as loader:
        assert parts + batches(loader) == whole()


def test_length_of_the_iterator_and_of_the_epoch() -> None:
    with loader_of() as loader:
        batches(loader, 5)
        state = saved(loader)
    with resumed(state, epochs=3) as loader:
        assert (len(loader), len(loader.sampler), loader.total_steps()) == (8, 61, 39)
        iterator = iter(loader)
        assert (len(loader), len(iterator)) == (13, 8)
        batches(iterator)
        assert (len(loader), len(loader.sampler), len(iter(loader))) == (13, 101, 13)


@pytest.mark.parametrize("batch_size", [3, 16, None])
def test_another_batch_size(batch_size: int | None) -> None:
    with loader_of() as loader:
        batches(loader, 5)
        state = saved(loader)
    with resumed(state, batch_size=batch_size) as loader:
        expected = [i for batch in whole()[5:] for i in batch]
        count = len(loader)
        rest = [batch.reshape(-1).tolist() if batch_size else [int(batch)] for batch in loader]
        assert [i for batch in rest for i in batch] == expected
        assert len(rest) == count == -(-61 // (batch_size or 1))


def test_drop_last_and_order_without_shuffling() -> None:
    for options in ({"drop_last": True}, {"shuffle": False}):
        with loader_of(**options) as loader:
            begun = batches(loader, 4)
            state = saved(loader)
        with resumed(state, **options) as loader:
            assert begun + batches(loader) == whole(**options)


def test_batches_that_workers_have_ready_are_not_counted() -> None:
    with loader_of(num_workers=2, prefetch_factor=4) as loader:
        iterator = iter(loader)
        next(iterator)
        assert loader.state_dict()["consumed"] == 8


def test_a_wrapper_one_batch_ahead_takes_the_state_before_it_draws() -> None:
    """As accelerate does; the state must not change afterwards."""

    def one_ahead(loader: Loader) -> Any:
        iterator = iter(loader)
        current = next(iterator)
        while current is not None:
            state = loader.state_dict()
            state["_iterator_finished"] = False  # it marks them
            following = next(iterator, None)
            yield current, state
            current = following

    for workers in (0, 2):
        with loader_of(num_workers=workers) as loader:
            begun = []
            for batch, snapshot in itertools.islice(one_ahead(loader), 4):
                begun.append(batch.tolist())
                state = snapshot
        with resumed(state) as loader:
            assert begun + batches(loader) == whole()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_wrapper_some_batches_ahead_says_how_many_count(workers: int) -> None:
    with loader_of(num_workers=workers) as loader:
        begun = batches(loader, 9)
        state = loader.state_dict(batches=6)
    with resumed(state, num_workers=2 - workers) as loader:
        iterator = iter(loader)
        assert begun[6:8] == batches(iterator, 2)
        again = loader.state_dict(batches=1)  # of this iteration
        with pytest.raises(ConfigError, match="batches=3: 2 were handed out"):
            loader.state_dict(batches=3)
    with resumed(again) as loader:
        assert begun[:7] + batches(loader) == whole()
        assert loader.state_dict(batches=6)["epoch"] == 1, "of 13, 7 were before"
        with pytest.raises(ConfigError, match="has ended after 6"):
            loader.state_dict(batches=5)


def test_a_wrapper_ahead_with_substitution() -> None:
    with loader_of(recipe="quiver") as loader:
        batches(loader)
        begun = batches(loader, 9)
        assert loader.stats.substituted
        state = loader.state_dict(batches=6)
    with resumed(state, recipe="quiver") as loader:
        seen = begun[:6] + batches(loader)
    assert sorted(i for batch in seen for i in batch) == list(range(NUM))


def test_a_wrapper_ahead_of_a_sampler_of_ones_own_is_refused() -> None:
    with loader_of(sampler=range(40)) as loader:
        batches(loader, 3)
        assert loader.state_dict(batches=3)["consumed"] == 24
        with pytest.raises(ConfigError, match="sampler of your own"):
            loader.state_dict(batches=2)


@pytest.mark.parametrize("workers", [0, 2])
def test_augmentation_is_that_of_the_uninterrupted_run(image_root: Path, workers: int) -> None:
    def noisy(**arguments: Any) -> Loader:
        return loader_of(images(image_root, with_noise), batch_size=7, **arguments)

    with noisy() as loader:
        expected = [batch for batch, _ in loader]
    with noisy(num_workers=2) as loader:
        found = [batch for batch, _ in itertools.islice(loader, 3)]
        state = saved(loader)
    with noisy(num_workers=workers) as loader:
        loader.load_state_dict(state)
        found += [batch for batch, _ in loader]
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_scores_counts_and_quarantine_survive(own_images: Path) -> None:
    dataset = images(own_images)
    (own_images / "class1" / "025.png").unlink()

    def careful() -> Loader:
        return loader_of(dataset, batch_size=10, on_error="skip")

    with careful() as loader:
        for batch, _ in itertools.islice(loader, 6):
            loader.observe(batch[:, 0, 0, 0] * 0.5)
        state = saved(loader)
        scores, stats, failures = loader.scores.snapshot(), loader.stats, loader.quarantine
        assert [failure.id for failure in failures] == [25]
    with careful() as loader:
        loader.load_state_dict(state)
        for name in ("values", "last", "seen"):
            assert (getattr(loader.scores, name) == getattr(scores, name)).all()
        assert loader.quarantine == failures
        assert loader.stats.accesses == stats.accesses == 60
        assert loader.stats.stall_seconds == stats.stall_seconds
        for batch, _ in itertools.islice(itertools.chain(loader, loader), 3):
            loader.observe(batch[:, 0, 0, 0] * 0.5)
        assert loader.stats.accesses == 90
        assert loader.scores.last.max() == 8  # steps are counted on
        assert loader.scores.seen.sum() == 90
        assert loader.epoch_stats[0].accesses == 0


def test_coverage_is_that_of_the_whole_epoch() -> None:
    with loader_of() as loader:
        batches(loader, 5)
        state = saved(loader)
    with resumed(state) as loader:
        batches(loader)
        assert loader.stats.coverage == loader.stats.ess == 1.0


def test_a_replacement_is_that_of_the_uninterrupted_run(own_images: Path) -> None:
    dataset = images(own_images)
    (own_images / "class1" / "025.png").unlink()
    options: dict[str, Any] = {"batch_size": 4, "on_error": "skip", "shuffle": False}
    with loader_of(dataset, **options) as loader:
        expected = [loader.last_ids.tolist() for _ in loader]
    with loader_of(dataset, **options) as loader:
        found = [loader.last_ids.tolist() for _ in itertools.islice(loader, 6)]
        state = saved(loader)
    with loader_of(dataset, **options) as loader:
        loader.load_state_dict(state)
        assert found + [loader.last_ids.tolist() for _ in loader] == expected


def test_set_epoch_keeps_the_restored_one_and_warns_of_another() -> None:
    with loader_of() as loader:
        loader.set_epoch(2)
        begun = batches(loader, 5)
        state = saved(loader)
        loader.set_epoch(2)  # for the next iteration, this one goes on
        assert loader.state_dict()["consumed"] == 40
    with resumed(state) as loader:
        loader.set_epoch(2)
        loader.sampler.set_epoch(2)
        assert begun + batches(loader) == whole(2)
        loader.set_epoch(2)
        assert batches(loader) == whole(2)
    with resumed(state) as loader:
        with pytest.warns(RuntimeWarning, match=r"set_epoch\(3\) leaves out the rest .* epoch 2"):
            loader.set_epoch(3)
        assert len(loader) == 13
        assert batches(loader) == whole(3)
        loader.sampler.set_epoch(5)
        assert batches(loader) == whole(5)


def test_no_warning_where_nothing_is_left() -> None:
    with loader_of() as loader:
        batches(loader, 13)
        state = saved(loader)
    with resumed(state) as loader:
        loader.set_epoch(1)
        assert batches(loader) == whole(1)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_an_epoch_that_is_named_between_the_iterator_and_its_first_batch(
    workers: int, persistent: bool
) -> None:
    """As Lightning does when it resumes at the end of an epoch."""
    options: dict[str, Any] = {
        "num_workers": workers,
        "persistent_workers": persistent and bool(workers),
    }
    with loader_of() as loader:
        batches(loader, 13)
        state = saved(loader)
    with resumed(state, **options) as loader:
        iterator = iter(loader)
        loader.sampler.set_epoch(1)
        assert batches(iterator) == whole(1)
        assert (batches(loader), len(loader.epoch_stats)) == (whole(2), 2)
        iterator = iter(loader)
        loader.set_epoch(3)  # which it is
        assert batches(iterator) == whole(3)


def test_loading_into_a_loader_that_is_under_way() -> None:
    with loader_of(num_workers=2, persistent_workers=True) as loader:
        batches(loader, 5)
        state = saved(loader)
        batches(loader)
        batches(loader, 2)
        loader.load_state_dict(state)
        assert batches(loader) == whole()[5:]
        assert batches(loader) == whole(1)


def test_an_abandoned_epoch_goes_on_until_it_is_said_to_be_over() -> None:
    with loader_of() as loader:
        batches(loader, 5)
        assert (loader.state_dict()["epoch"], loader.state_dict()["consumed"]) == (0, 40)
        loader.end_epoch()
        assert (loader.state_dict()["epoch"], loader.state_dict()["consumed"]) == (1, 0)
    with pytest.raises(SegmentError, match="closed"):
        loader.state_dict()
    with pytest.raises(SegmentError, match="closed"):
        loader.load_state_dict({})


@pytest.mark.parametrize("ranks", [(1, 2), (2, 1), (2, 3), (4, 2), (3, 4)])
@pytest.mark.parametrize("drop_last", [False, True])
def test_another_number_of_ranks(ranks: tuple[int, int], drop_last: bool) -> None:
    before, after = ranks
    options: dict[str, Any] = {"batch_size": 4, "cache": 0, "drop_last": drop_last}
    seen, states = [], []
    for rank in range(before):
        with loader_of(rank=rank, world_size=before, **options) as loader:
            seen += [i for batch in batches(loader, 3) for i in batch]
            states.append(saved(loader))
    assert {state["consumed"] for state in states} == {12 * before}
    parts = []
    for rank in range(after):
        loader = resumed(states[rank % before], rank=rank, world_size=after, **options)
        with loader:
            length = len(loader)
            parts.append(batches(loader))
            assert len(parts[-1]) == length
    assert len({tuple(map(len, part)) for part in parts}) == 1
    rest = [i for part in parts for batch in part for i in batch]
    left = NUM - 12 * before
    if drop_last:
        assert len(rest) == left - left % (4 * after)
        assert len(set(seen + rest)) == len(seen) + len(rest)
    else:
        assert len(rest) == -(-left // after) * after
        assert set(seen + rest) == set(range(NUM))
        # Places that fill up repeat the start of the epoch.
        first = [i for batch in whole()[:1] for i in batch]
        extra = sorted(seen + rest)
        for i in range(NUM):
            extra.remove(i)
        assert sorted(extra) == sorted(first[: len(extra)])


def test_ranks_of_unequal_length_say_the_same() -> None:
    """Without shuffling nothing is filled up: 11 samples on 4 ranks."""
    small = SampleDataset(numbers(11), number_of)
    for batch_size, consumed in ((2, [8, 11]), (4, [11])):
        for rank in range(4):
            options: dict[str, Any] = {"rank": rank, "world_size": 4, "batch_size": batch_size}
            with loader_of(small, shuffle=False, cache=0, **options) as loader:
                found = [loader.state_dict()["consumed"] for _ in loader]
                assert found == consumed[: len(found)]


def test_subsets_and_weights_of_the_plan() -> None:
    half = Subset(SET, range(0, NUM, 2))
    with loader_of(half) as loader:
        expected = batches(loader)
    with loader_of(half) as loader:
        begun = batches(loader, 2)
        state = saved(loader)
    with resumed(state, half) as loader:
        assert begun + batches(loader) == expected
    with resumed(state, half) as loader, pytest.raises(StateMismatch, match="subset"):
        loader.load_state_dict(loader_of(Subset(SET, range(0, NUM - 1, 2))).state_dict())


def test_a_policy_that_looks_ahead_and_prefetch_follow_the_cursor() -> None:
    from stoker.testing.sources import SlowSource

    slow = SampleDataset(SlowSource(numbers(NUM), latency=0.001), number_of)
    options: dict[str, Any] = {"recipe": "belady", "cache": "40%", "prefetch": "1MiB"}
    with loader_of(slow, **options) as loader:
        expected = [batches(loader) for _ in range(3)]
    with loader_of(slow, **options) as loader:
        batches(loader)
        begun = batches(loader, 5)
        state = saved(loader)
        batches(loader, 2)
        loader.load_state_dict(state)  # also in a loader whose prefetch is elsewhere
        assert begun + batches(loader) == expected[1]
        assert batches(loader) == expected[2]
        assert loader._session.controller.opened.ahead is not None
        assert loader.epoch_stats[-1].hit_ratio > 0.3
    with resumed(state, slow, num_workers=2, **options) as loader:
        assert begun + batches(loader) == expected[1]
        assert batches(loader) == expected[2]


# --- where other samples are served than asked for ---


@pytest.mark.parametrize("after", ["quiver", "minio", "no cache"])
@pytest.mark.parametrize("workers", [0, 2])
def test_s1_resume_with_substitution(workers: int, after: str) -> None:
    """What was really served does not come again, whoever goes on, and the rest does."""
    with loader_of(recipe="quiver", num_workers=workers) as loader:
        assert sorted(i for batch in batches(loader) for i in batch) == list(range(NUM))
        seen = batches(loader, 5)
        assert loader.stats.substituted
        state = saved(loader)
    options = {"cache": 0} if after == "no cache" else {"recipe": after}
    for steps in (3, 0, 2, None):
        with resumed(state, num_workers=2 - workers, **options) as loader:
            assert len(loader) == 13 - len(seen)
            seen += batches(loader, steps)
            state = saved(loader)
    assert sorted(i for batch in seen for i in batch) == list(range(NUM))
    assert state["epoch"] == 2


@pytest.mark.parametrize("workers", [0, 2])
def test_s1_a_state_loaded_into_a_running_loader_takes_its_claims_back(workers: int) -> None:
    """Also those of batches that workers have ready."""
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0}
    with loader_of(recipe="quiver", **options) as loader:
        batches(loader)
        begun = batches(loader, 4)
        state = saved(loader)
        for steps in (5, 1, 3):
            batches(iter(loader), steps)
            loader.load_state_dict(state)
        again = saved(loader)
        assert sorted(i for batch in begun + batches(loader) for i in batch) == list(range(NUM))
        assert sorted(i for batch in batches(loader) for i in batch) == list(range(NUM))
        assert again["served"].equal(state["served"])


class Held:
    """A decoder that stops once it has decoded as many samples as it may."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("fork")
        self.may, self.free = context.Semaphore(0), context.Event()
        self.free.set()

    def __call__(self, raw: bytes) -> int:
        if not self.free.is_set():
            self.may.acquire()
        return number_of(raw)

    def hold(self, after: int) -> None:
        self.free.clear()
        for _ in range(after):
            self.may.release()

    def let_go(self) -> None:
        self.free.set()
        for _ in range(NUM):
            self.may.release()


def test_s1_batches_of_an_abandoned_epoch_claim_nothing_in_the_next() -> None:
    """A worker that stays may take up what was asked for in it when the next one has begun."""
    held = Held()
    options: dict[str, Any] = {"num_workers": 1, "persistent_workers": True, "prefetch_factor": 6}
    options |= {"multiprocessing_context": "fork", "recipe": "quiver"}
    with loader_of(SampleDataset(numbers(NUM), held), **options) as loader:
        batches(loader)
        held.hold(after=8)
        batches(iter(loader), 1)  # the worker stands in the second batch, with others to come
        session: Any = loader._session
        begin = session._placing.begin_epoch

        def begin_and_let_go(*arguments: Any) -> None:
            begin(*arguments)
            held.let_go()

        session._placing.begin_epoch = begin_and_let_go
        assert sorted(i for batch in batches(loader) for i in batch) == list(range(NUM))


def test_replacements_of_failing_samples_take_nobodys_turn(own_images: Path) -> None:
    dataset = images(own_images)
    for number in (21, 25, 38):
        (own_images / "class1" / f"{number:03}.png").unlink()
    options: dict[str, Any] = {"recipe": "quiver", "batch_size": 4, "on_error": "skip"}
    with loader_of(dataset, **options) as loader:
        for _ in range(3):
            served = [i for _ in loader for i in loader.last_ids.tolist()]
            assert set(served) == set(range(60)) - {21, 25, 38}
            assert len(served) == 60


def test_batches_out_of_order_have_no_state_in_the_middle() -> None:
    with loader_of(num_workers=2, in_order=False) as loader:
        batches(loader, 3)
        with pytest.raises(ConfigError, match="in_order=False"):
            loader.state_dict()
        loader.end_epoch()
        state = saved(loader)
    with resumed(state) as loader:
        assert batches(loader) == whole(1)


# --- samplers of one's own ---


def own_orders(kind: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(7)
    if kind == "random":
        return {"sampler": RandomSampler(SET, generator=generator), "generator": generator}
    if kind == "batches":
        batch_sampler = torch.utils.data.BatchSampler(SequentialSampler(SET), 8, False)
        return {"batch_size": 1, "batch_sampler": batch_sampler}
    return {"sampler": range(50, 90)}


@pytest.mark.parametrize("kind", ["random", "batches", "range"])
@pytest.mark.parametrize("steps", [0, 3])
def test_a_sampler_of_ones_own_is_wound_forward(kind: str, steps: int) -> None:
    with loader_of(**own_orders(kind)) as loader:
        expected = [batches(loader) for _ in range(3)]
    with loader_of(num_workers=2, **own_orders(kind)) as loader:
        batches(loader)
        begun = batches(iter(loader), steps)
        state = saved(loader)
    with resumed(state, **own_orders(kind)) as loader:
        assert len(loader) == len(expected[0]) - steps
        iterator = iter(loader)
        assert (len(iterator), len(loader)) == (len(expected[0]) - steps, len(expected[0]))
        assert begun + batches(iterator) == expected[1]
        assert batches(loader) == expected[2]


def test_a_sampler_of_ones_own_with_another_batch_size_and_another_number_of_ranks() -> None:
    with loader_of(sampler=range(40)) as loader:
        batches(loader, 3)
        state = saved(loader)
    with resumed(state, sampler=range(40), batch_size=10) as loader:
        assert len(loader) == 2
        assert batches(loader) == [list(range(24, 30)), list(range(30, 40))]
    with pytest.raises(StateMismatch, match="world_size 1 and this loader has 2"):
        resumed(state, sampler=range(40), rank=0, world_size=2)
    with pytest.raises(StateMismatch, match=r"own sampler.*plan"):
        resumed(state)


def test_a_sampler_of_ones_own_is_told_the_epoch() -> None:
    class Shifted:
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __len__(self) -> int:
            return 40

        def __iter__(self) -> Any:
            return iter(range(self.epoch, self.epoch + 40))

    with loader_of(sampler=Shifted()) as loader:
        loader.set_epoch(3)
        batches(loader, 2)
        state = saved(loader)
    with resumed(state, sampler=Shifted()) as loader:
        assert [i for batch in batches(loader) for i in batch] == list(range(19, 43))


# --- generators ---


def test_the_state_of_a_generator() -> None:
    def seeded(seed: int = 3) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(seed)
        return {"sampler": RandomSampler(SET, generator=generator), "generator": generator}

    with loader_of(**seeded()) as loader:
        expected = batches(loader) + batches(loader)
    with loader_of(**seeded()) as loader:
        begun = batches(loader) + batches(loader, 4)
        state = saved(loader)
    with resumed(state, **seeded(4)) as loader:  # its state is restored, whatever it began with
        assert begun + batches(loader) == expected


def test_the_state_of_another_seed() -> None:
    with loader_of(seed=3) as loader:
        expected = batches(loader) + batches(loader)
    with loader_of(seed=3) as loader:
        begun = batches(loader) + batches(loader, 4)
        state = saved(loader)
    with resumed(state, seed=3) as loader:
        assert begun + batches(loader) == expected
    with pytest.raises(StateMismatch, match="seed 3 and this loader has 4"):
        resumed(state, seed=4)


# --- refusals ---


def test_what_does_not_belong_is_refused_and_changes_nothing() -> None:
    with loader_of() as loader:
        batches(loader, 3)
        state = saved(loader)

    def refused(match: str, dataset: Any = SET, **arguments: Any) -> None:
        with loader_of(dataset, **arguments) as other:
            before = other.state_dict()
            with pytest.raises(StateMismatch, match=match):
                other.load_state_dict(state)
            after = other.state_dict()
            assert all(before[name] == after[name] for name in ("epoch", "consumed", "plan"))

    other_set = SampleDataset(numbers(NUM + 1), number_of)
    fingerprints = f"{SET.source.fingerprint}' and .*{other_set.source.fingerprint}'"
    refused(f"data set '{fingerprints}", other_set)
    refused("data set", Subset(SET, range(50)))
    refused("seed 0 and this loader has 9", seed=9)
    refused("order 'plan .* recipe foresight' and this loader has 'plan .*", shuffle=False)
    refused("order 'plan .* recipe foresight' and this loader has 'own sampler", sampler=range(9))
    state["version"] = 2
    refused("version 2, and this Stoker reads version 3")


@pytest.mark.parametrize("recipe", ["lru", "belady"])
def test_another_recipe_with_the_same_order_is_welcome(recipe: str) -> None:
    expected = whole()
    with loader_of() as loader:
        begun = batches(loader, 3)
        state = saved(loader)
    with resumed(state, recipe=recipe) as loader:
        assert begun + batches(loader) == expected


def test_damaged_states() -> None:
    with loader_of() as loader:
        state = saved(loader)
        del state["scores"]
        with pytest.raises(StateMismatch, match=r"damaged.*scores"):
            loader.load_state_dict(state)
        state["scores"] = {name: torch.zeros(3) for name in ("values", "last", "seen")}
        with pytest.raises(StateMismatch, match="shape of scores"):
            loader.load_state_dict(state)
        for nothing in ({}, None, 3):
            with pytest.raises(StateMismatch, match="version None"):
                loader.load_state_dict(nothing)  # type: ignore[arg-type]


def test_wrapped_sets_are_known_by_class_and_length() -> None:
    with loader_of(wrap(Squares(40))) as loader:
        expected = [loader.last_ids.tolist() for _ in loader]
    with loader_of(wrap(Squares(40))) as loader:
        found = [loader.last_ids.tolist() for _ in itertools.islice(loader, 2)]
        state = saved(loader)
    with loader_of(wrap(Squares(40))) as loader:
        loader.load_state_dict(state)
        assert found + [loader.last_ids.tolist() for _ in loader] == expected
    with loader_of(wrap(Squares(41))) as loader, pytest.raises(StateMismatch, match="Squares-40"):
        loader.load_state_dict(state)


def test_a_random_sampler_without_a_generator_cannot_be_wound_forward_exactly() -> None:
    """Documented: without a generator or epochs of its own, its order is its own affair."""
    weighted = WeightedRandomSampler([1.0] * NUM, 40)
    with loader_of(sampler=weighted) as loader:
        batches(loader, 3)
        state = saved(loader)
    with resumed(state, sampler=weighted) as loader:
        assert sum(map(len, batches(loader))) == 16


def test_the_state_holds_tensors_and_primitives_only(image_root: Path) -> None:
    dataset, generator = images(image_root, to_tensor), torch.Generator()
    with loader_of(dataset, sampler=range(NUM_IMAGES), generator=generator) as loader:
        for batch, _ in itertools.islice(loader, 2):
            loader.observe(batch[:, 0, 0, 0])
        state = loader.state_dict()

    def kinds(value: Any) -> set[type]:
        if isinstance(value, dict):
            return set().union(*map(kinds, value.values()), *map(kinds, value))
        if isinstance(value, (list, tuple)):
            return {type(value)}.union(*map(kinds, value))
        return {type(value)}

    assert kinds(state) <= {torch.Tensor, int, float, str, bool, type(None), list}
    assert state["scores"]["values"].dtype == torch.float64
    assert np.count_nonzero(state["scores"]["seen"]) == 16


def test_nothing_warns_in_a_resumed_run() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with loader_of() as loader:
            batches(loader, 2)
            state = saved(loader)
        with resumed(state) as loader:
            batches(loader)


WINDOWS = {"recipe": "foresight:repeat=3:static=0.3:annealed=0", "cache": "40%", "batch_size": 6}


@pytest.mark.parametrize("steps", [0, 1, 7, 16])
@pytest.mark.parametrize("epoch", [0, 1, 2, 4])
def test_windows_go_on_in_the_middle(epoch: int, steps: int) -> None:
    """On another number of ranks too, whose batches are then the same samples."""
    with loader_of(**WINDOWS) as loader:
        loader.set_epoch(epoch)
        expected = batches(loader)
        loader.set_epoch(epoch + 1)
        later = batches(loader)
    with loader_of(**WINDOWS) as loader:
        loader.set_epoch(epoch)
        iterator = iter(loader)
        done = [next(iterator).tolist() for _ in range(steps)]
        state = saved(loader)
    with resumed(state, **WINDOWS) as loader:
        assert done + batches(loader) == expected
        assert batches(loader) == later
    left = []
    for rank in range(2):
        with resumed(state, **WINDOWS, rank=rank, world_size=2) as loader:
            left += itertools.chain.from_iterable(batches(loader))
    assert set(left) >= set(itertools.chain.from_iterable(expected[steps:]))


@pytest.mark.parametrize("cache", ["20%", "80%", 0])
def test_windows_stay_those_of_the_saved_state_in_another_cache(cache: str | int) -> None:
    with loader_of(**WINDOWS) as loader:
        loader.set_epoch(1)
        expected = batches(loader)
        later = [batches(loader) for _ in range(3)]
    with loader_of(**WINDOWS) as loader:
        loader.set_epoch(1)
        iterator = iter(loader)
        done = [next(iterator).tolist() for _ in range(4)]
        state = saved(loader)
    other = {**WINDOWS, "cache": cache}
    with resumed(state, **other) as loader:
        assert done + batches(loader) == expected
        again = saved(loader)
        assert batches(loader) == later[0]
    with resumed(again, **other) as loader:  # a state of a resumed run continues the same plan
        assert [batches(loader) for _ in range(3)] == later


def test_a_state_that_does_not_say_for_which_cache_is_of_this_one() -> None:
    with loader_of(**WINDOWS) as loader:
        loader.set_epoch(1)
        next(iter(loader))
        state = saved(loader)
    del state["planned_bytes"]
    with resumed(state, **WINDOWS) as loader:
        next(iter(loader))
    with pytest.raises(StateMismatch, match="order"):
        resumed(state, **{**WINDOWS, "cache": "20%"})


def test_a_state_that_is_refused_leaves_the_plan_as_it_was() -> None:
    with loader_of(**WINDOWS, seed=5) as loader:
        loader.set_epoch(1)
        next(iter(loader))
        state = saved(loader)
    other = {**WINDOWS, "cache": "20%"}
    with loader_of(**other) as loader:
        loader.set_epoch(1)
        expected = batches(loader)
    with loader_of(**other) as loader:
        with pytest.raises(StateMismatch, match="seed"):
            loader.load_state_dict(state)
        loader.set_epoch(1)
        assert batches(loader) == expected


def test_windows_that_are_given_are_the_same_for_any_cache() -> None:
    given = {**WINDOWS, "recipe": "foresight:repeat=3:window=0.9:static=0:annealed=0"}
    with loader_of(**given) as loader:
        loader.set_epoch(1)
        expected = batches(loader)
    with loader_of(**given) as loader:
        loader.set_epoch(1)
        iterator = iter(loader)
        done = [next(iterator).tolist() for _ in range(4)]
        state = saved(loader)
    with resumed(state, **{**given, "cache": "20%"}) as loader:
        assert done + batches(loader) == expected
