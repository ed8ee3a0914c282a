"""Feed: batches without torch, on the Loader's plans, cache and prefetch."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import islice, pairwise
from pathlib import Path
from threading import Event, get_ident
from typing import Any

import numpy as np
import pytest
from numpy.typing import ArrayLike
from PIL import Image

import stoker
from stoker import Cache
from stoker.errors import (
    CapacityError,
    ConfigError,
    SampleCorrupt,
    SegmentError,
    SourceUnavailable,
    StateMismatch,
)
from stoker.feed import Batch, Feed
from stoker.source.base import BaseSource
from stoker.source.held import MemorySource
from stoker.source.packed import Packed

N = 300


def number(raw: bytes) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return the four numbers that a sample of `source` holds."""
    return np.frombuffer(raw, np.int32)


def source() -> MemorySource:
    return MemorySource([np.full(4, i, np.int32).tobytes() for i in range(N)])


def feed_of(**options: Any) -> Feed:
    options = {"batch_size": 32, "decode": number, **options}
    return Feed(source(), **options)


def ids_of(feed: Feed) -> list[int]:
    return [int(i) for batch in feed for i in batch.ids]


def test_every_sample_comes_once_with_its_own_data_target_and_weight() -> None:
    targets = np.arange(N) * 7
    with feed_of(targets=targets) as feed:
        for _ in range(3):
            seen: list[int] = []
            for batch in feed:
                assert batch.data.shape == (len(batch), 4) and batch.data.dtype == np.int32
                assert (batch.data == batch.ids[:, None].astype(np.int32)).all()
                assert batch.targets is not None and (batch.targets == targets[batch.ids]).all()
                assert batch.weights.dtype == np.float32 and (batch.weights == 1).all()
                assert len(batch.outcomes) == len(batch)
                seen += batch.ids.tolist()
            assert sorted(seen) == list(range(N))
        assert feed.stats.accesses == 3 * N
        assert len(feed.epoch_stats) == 3
        assert feed.epoch_stats[-1].hits > 0


def test_without_a_decoder_samples_are_bytes() -> None:
    with Feed(source(), 10) as feed:
        batch = next(iter(feed))
        assert batch.data == [np.full(4, i, np.int32).tobytes() for i in batch.ids]
        assert batch.targets is None


@pytest.mark.parametrize("threads", [0, 2])
def test_packed_batches_are_the_same_bytes_in_one_piece(threads: int) -> None:
    source = MemorySource([bytes([i]) * (i % 7) for i in range(40)])
    plain = Feed(source, 8, decode_threads=threads, cache="50%")
    packed = Feed(source, 8, decode="packed", decode_threads=threads, cache="50%")
    with plain, packed:
        for _ in range(2):
            for one, other in zip(plain, packed, strict=True):
                data, offsets = other.data
                assert isinstance(other.data, Packed) and list(one.ids) == list(other.ids)
                assert data.dtype == np.uint8 and offsets.dtype == np.int64
                rows = [data[a:b].tobytes() for a, b in pairwise(offsets.tolist())]
                assert rows == one.data
        assert packed.stats.hits > 0


def test_packed_batches_have_other_samples_where_some_cannot_be_read() -> None:
    with Feed(Broken(), 32, decode="packed", on_error="skip") as feed:
        for batch in feed:
            assert 7 not in batch.ids and len(batch.data.offsets) == len(batch) + 1
            rows = np.frombuffer(batch.data.data, np.int32).reshape(len(batch), 4)
            assert (rows == batch.ids[:, None].astype(np.int32)).all()
        assert [failure.id for failure in feed.quarantine] == [7]


@pytest.mark.parametrize(
    "options",
    [
        {"transform": lambda sample, rng: sample},
        {"cache": Cache("20%", stage="decoded")},
        {"batch_size": None, "batching": stoker.TokenBudget(64)},
    ],
    ids=["transform", "stage", "batching"],
)
def test_packed_batches_have_no_decoded_samples(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="decode='packed' leaves samples as bytes"):
        Feed(source(), **{"batch_size": 4, **options}, decode="packed")


def test_samples_of_several_shapes_stay_a_list() -> None:
    ragged = MemorySource([bytes(1 + i % 3) for i in range(30)])
    with Feed(ragged, 10, decode=lambda raw: np.frombuffer(raw, np.uint8)) as feed:
        for batch in feed:
            assert [len(row) for row in batch.data] == (1 + batch.ids % 3).tolist()


@pytest.mark.parametrize("threads", [0, 1, 4])
def test_order_and_augmentation_do_not_depend_on_threads(threads: int) -> None:
    def noisy(sample: Any, rng: np.random.Generator) -> Any:
        return sample + rng.random()

    def run(threads: int) -> list[Any]:
        with feed_of(decode_threads=threads, transform=noisy, seed=3) as feed:
            return [batch.data for _ in range(2) for batch in feed]

    for one, other in zip(run(threads), run(2), strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_order_is_the_loaders(tmp_path: Path) -> None:
    from stoker.pytorch import SampleDataset

    with (
        feed_of(seed=5) as feed,
        stoker.Loader(SampleDataset(source()), 32, seed=5) as loader,
    ):
        for _ in range(2):
            fed = [batch.ids.tolist() for batch in feed]
            assert fed == [loader.last_ids.tolist() for _ in loader]


@pytest.mark.parametrize("recipe", ["shade", "icache", "infobatch", "foresight:repeat=2", "lru"])
def test_recipes_follow_what_is_observed(recipe: str) -> None:
    with feed_of(recipe=recipe, epochs=4, targets=np.arange(N)) as feed:
        for _ in range(4):
            for batch in feed:
                assert (batch.data[:, 0] == batch.ids).all()
                feed.observe((batch.ids % 10 + 1) / 10.0)
                assert batch.weights.shape == (len(batch),)
            feed.end_epoch(accuracy=0.5)
        assert (feed.scores.seen > 0).any()


def test_losses_come_from_logits_and_labels() -> None:
    rng = np.random.default_rng(0)
    with feed_of(recipe="shade", batch_size=50) as feed:
        for batch in feed:
            logits, labels = rng.normal(size=(len(batch), 5)), rng.integers(0, 5, len(batch))
            feed.observe(logits=logits, labels=labels, batch=batch)
        assert (feed.scores.seen == 1).all()


def test_samples_are_scored_again_by_the_users_function() -> None:
    scored: list[int] = []

    def rescore(batch: Batch) -> ArrayLike:
        assert (batch.data[:, 0] == batch.ids).all()
        scored.extend(batch.ids.tolist())
        return batch.ids / N

    with feed_of(recipe="impact", epochs=6, rescore=rescore) as feed:
        for _ in range(6):
            for batch in feed:
                feed.observe((batch.ids % 10 + 1) / 10.0)
            feed.end_epoch(accuracy=0.5)
        assert scored
        assert feed.stats.rescored == len(scored)


@pytest.mark.parametrize("recipe", ["foresight", "infobatch", "icache"])
@pytest.mark.parametrize("taken", [0, 1, 4, 6])
def test_a_saved_state_resumes_with_what_was_not_handed_out(recipe: str, taken: int) -> None:
    def train(feed: Feed, batches: int | None = None) -> list[int]:
        ids: list[int] = []
        for step, batch in enumerate(feed, start=1):
            ids += batch.ids.tolist()
            feed.observe((batch.ids % 10 + 1) / 10.0)
            if step == batches:
                break
        return ids

    with feed_of(recipe=recipe, epochs=3) as feed:
        train(feed)
        feed.end_epoch(accuracy=0.5)
        first = train(feed, taken) if taken else []
        state = feed.state_dict()
    with feed_of(recipe=recipe, epochs=3, decode_threads=1) as feed:
        feed.load_state_dict(state)
        rest = train(feed)
    with feed_of(recipe=recipe, epochs=3) as feed:
        train(feed)
        feed.end_epoch(accuracy=0.5)
        whole = train(feed)
    assert sorted(first + rest) == sorted(whole)


@pytest.mark.parametrize("recipe", ["foresight", "infobatch", "icache"])
@pytest.mark.parametrize("counted", [0, 1, 5, 10])
def test_a_state_counts_only_the_batches_that_it_is_told_of(recipe: str, counted: int) -> None:
    """A framework has drawn some ahead, here all of the epoch."""
    with feed_of(recipe=recipe, epochs=2) as feed:
        drawn = list(islice(feed, len(feed)))
        state = feed.state_dict(batches=counted)
        with pytest.raises(ConfigError, match=f"batches=11: {len(drawn)} were handed out"):
            feed.state_dict(batches=11)
    seen = [int(i) for batch in drawn[:counted] for i in batch.ids]
    with feed_of(recipe=recipe, epochs=2, batch_size=20, decode_threads=1) as feed:
        feed.load_state_dict(state)
        seen += ids_of(feed)
        assert sorted(seen) == list(range(N))
        assert sorted(ids_of(feed)) == list(range(N))


def test_once_an_iteration_has_ended_all_of_it_counts() -> None:
    with feed_of() as feed:
        length = len(ids_of(feed)) // 32 + 1
        assert feed.state_dict(batches=length)["epoch"] == 1
        with pytest.raises(ConfigError, match="has ended after 10: draw batches no further"):
            feed.state_dict(batches=length - 1)


@pytest.mark.parametrize("threads", [0, 2])
def test_arrays_are_placed_ahead_of_training(threads: int) -> None:
    placed: list[int] = []

    def place(arrays: Any) -> tuple[str, Any]:
        placed.append(get_ident())
        return "there", arrays

    with feed_of(targets=np.arange(N), to_device=place, decode_threads=threads) as feed:
        batch = next(iter(feed))
        assert batch.data[0] == batch.targets[0] == "there"
        assert (batch.data[1][:, 0] == batch.ids).all() and (batch.targets[1] == batch.ids).all()
        assert (get_ident() in placed) == (threads == 0)


def test_a_state_of_another_source_or_seed_is_refused() -> None:
    with feed_of() as feed:
        next(iter(feed))
        state = feed.state_dict()
    with feed_of(seed=1) as other, pytest.raises(StateMismatch, match="seed"):
        other.load_state_dict(state)
    with Feed(MemorySource([b"x"] * N), 32) as other, pytest.raises(StateMismatch):
        other.load_state_dict(state)


def test_ranks_divide_an_epoch() -> None:
    feeds = [feed_of(rank=rank, world_size=3) for rank in range(3)]
    parts = [ids_of(feed) for feed in feeds]
    for feed in feeds:
        feed.close()
    assert len({len(part) for part in parts}) == 1
    assert sorted(i for part in parts for i in part) == list(range(N))


def test_ranks_that_would_exchange_scores_are_refused() -> None:
    with (
        feed_of(recipe="shade", rank=0, world_size=2) as feed,
        pytest.raises(ConfigError, match="exchange scores"),
    ):
        iter(feed)


def test_an_epoch_left_early_is_used_up_and_its_threads_end() -> None:
    with feed_of() as feed:
        for _ in feed:
            break
        assert sorted(ids_of(feed)) == list(range(N))
        assert len(feed.epoch_stats) == 2


class Broken(BaseSource):
    """Sample 7 cannot be read."""

    fingerprint = "broken"

    def __len__(self) -> int:
        return N

    @property
    def sizes(self) -> Any:
        return np.full(N, 16, np.int64)

    def read(self, ids: ArrayLike) -> list[bytes]:
        if 7 in np.asarray(ids):
            raise SourceUnavailable("sample 7 is on a bad disk", [7])
        return [np.full(4, i, np.int32).tobytes() for i in np.asarray(ids)]


@pytest.mark.parametrize("threads", [0, 3])
def test_errors_are_raised_in_their_place_or_skipped(threads: int) -> None:
    with (
        Feed(Broken(), 32, decode=number, decode_threads=threads, shuffle=False) as feed,
        pytest.raises(SourceUnavailable, match="bad disk"),
    ):
        list(feed)
    with Feed(Broken(), 32, decode=number, decode_threads=threads, on_error="skip") as feed:
        seen = ids_of(feed)
        assert len(seen) == N and 7 not in seen
        assert [failure.id for failure in feed.quarantine] == [7]


def test_what_a_decoder_raises_is_a_corrupt_sample() -> None:
    def decode(raw: bytes) -> Any:
        raise ValueError("no such codec")

    with Feed(source(), 32, decode=decode) as feed, pytest.raises(SampleCorrupt, match="no such"):
        next(iter(feed))


def test_threads_really_work_beside_the_training_loop() -> None:
    both, seen = Event(), set()

    def meet(sample: Any, rng: np.random.Generator) -> Any:
        seen.add(get_ident())
        if len(seen) > 1:
            both.set()
        assert both.wait(30)
        return sample

    with feed_of(transform=meet, decode_threads=2) as feed:
        next(iter(feed))
    assert len(seen) == 2 and get_ident() not in seen


def test_class_folders_are_images_with_targets(tmp_path: Path) -> None:
    for place in range(12):
        folder = tmp_path / "ab"[place % 2]
        folder.mkdir(exist_ok=True)
        Image.new("RGB", (6, 4), (place, 0, 0)).save(folder / f"{place:02}.png")
    with stoker.Feed(tmp_path, 4, cache=stoker.Cache("100%", stage="decoded")) as feed:
        for _ in range(2):
            for batch in feed:
                assert batch.data.shape == (4, 4, 6, 3) and batch.data.dtype == np.uint8
                assert (batch.targets == batch.data[:, 0, 0, 0] % 2).all()
        assert feed.stats.hits == 12


def test_decoded_arrays_are_cached() -> None:
    calls: list[bytes] = []

    def decode(raw: bytes) -> Any:
        calls.append(raw)
        return number(raw)

    with Feed(source(), 32, decode=decode, cache=Cache("100%", stage="decoded")) as feed:
        ids_of(feed)
        before = len(calls)
        assert sorted(ids_of(feed)) == list(range(N))
        assert len(calls) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"decode_threads": -1}, "decode_threads=-1"),
        ({"ready": -2}, "ready=-2"),
        ({"targets": [1, 2]}, "targets of shape"),
        ({"recipe": "nosuch"}, "nosuch"),
        ({"epochs": 0}, "epochs=0"),
        ({"on_error": "ignore"}, "ignore"),
        ({"cache": "8 parsecs"}, "parsecs"),
        ({"rank": 2, "world_size": 2}, "rank=2"),
        ({"decode": "raw"}, "decode='raw' is not known"),
        ({"to_device": "cuda"}, "to_device='cuda' cannot be called"),
    ],
)
def test_bad_arguments_are_refused_at_construction(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        feed_of(**options)


def test_an_empty_source_is_refused() -> None:
    class Empty(Broken):
        def __len__(self) -> int:
            return 0

    with pytest.raises(ConfigError, match="0 samples"):
        Feed(Empty(), 4)


def test_a_closed_feed_says_so() -> None:
    feed = feed_of()
    next(iter(feed))
    feed.close()
    feed.close()
    for call in (lambda: iter(feed), feed.state_dict, lambda: feed.observe([1.0])):
        with pytest.raises(SegmentError, match="closed"):
            call()


def test_memory_that_is_not_there_comes_with_the_first_iteration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from stoker.epoch import setup

    def no_memory(*_: Any, **__: Any) -> None:
        raise CapacityError("no memory")

    monkeypatch.setattr(setup, "open_arena", no_memory)
    with feed_of() as feed, pytest.raises(CapacityError):
        iter(feed)


def test_torch_is_never_loaded(tmp_path: Path) -> None:
    Image.new("RGB", (6, 4)).save(tmp_path / "0.png")
    code = """
import json, sys
import numpy as np, stoker
from stoker.source.held import MemorySource
with stoker.Feed(MemorySource([bytes(8)] * 50), 10, recipe="shade", cache="50%") as feed:
    for _ in range(2):
        for batch in feed:
            feed.observe(np.ones(len(batch)))
    feed.load_state_dict(feed.state_dict())
print(json.dumps("torch" in sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) is False
