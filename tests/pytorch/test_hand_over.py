"""Batches travel in messages or in slots, or as torch sends them; what arrives is the same."""

from __future__ import annotations

import gc
import pickle
import tracemalloc
from collections import UserDict, namedtuple
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

import stoker
from stoker.epoch.batch import Request
from stoker.errors import ConfigError
from stoker.pytorch.hand_over import Envelope, HandOver, Meta, attach, private_collate
from stoker.pytorch.wrapped import same
from stoker.source.held import MemorySource

Pair = namedtuple("Pair", "left right")
META = Meta(7, 1, np.arange(3, dtype=np.uint32), np.zeros(3, np.int8), np.arange(3))


class Own:
    """Something of the user's."""


def enveloped(batch: Any) -> Envelope:
    return Envelope(batch, META, ())


@pytest.fixture
def hand_over() -> HandOver:
    return HandOver(workers=1, each=2)


def sent(hand_over: HandOver, batch: Any) -> Any:
    return ForkingPickler.dumps(hand_over(enveloped(batch)))


def is_left_to_torch(hand_over: HandOver, batch: Any) -> bool:
    envelope = enveloped(batch)
    return hand_over(envelope) is envelope


PLAIN = {
    "a tensor": torch.arange(12.0).reshape(3, 4),
    "a view": torch.arange(12).reshape(3, 4).t()[1:, ::2],
    "expanded": torch.ones(1).expand(5),
    "no elements": torch.empty(0, 3),
    "no dimensions": torch.tensor(3),
    "bfloat16": torch.ones(3, dtype=torch.bfloat16),
    "bool": torch.tensor([True, False]),
    "nested": {"x": [torch.ones(2), 1, 2.5, None], "y": ("text", b"bytes", np.ones(3, np.int16))},
    "a named tuple": Pair(torch.zeros(2), 5),
    "large": torch.arange(1 << 18),
    "a large view": torch.arange(1 << 18).reshape(512, 512).t()[1:, ::2],
    "large in Fortran's order": np.asfortranarray(np.arange(1 << 18).reshape(512, 512)),
    "large and bfloat16": torch.ones(1 << 18, dtype=torch.bfloat16),
    "large and float8": torch.ones(1 << 18).to(torch.float8_e4m3fn),
    "one in bfloat16": torch.tensor(3, dtype=torch.bfloat16),
    "much text": ["x" * 20_000, b"y" * 30_000],
    "many numbers": list(range(10_000)),
    "an array with gaps": np.arange(1 << 16)[::2],
    "shared": torch.arange(1 << 18).share_memory_(),
    "large together": [torch.full((1000 + i,), i) for i in range(64)],
    "large and small": {"x": torch.arange(1 << 16), "empty": torch.empty(0), "n": torch.tensor(1)},
}


@pytest.mark.parametrize("batch", PLAIN.values(), ids=PLAIN.keys())
def test_plain_batches_arrive_as_they_are(hand_over: HandOver, batch: Any) -> None:
    message = sent(hand_over, batch)
    assert len(message) < 1 << 15, "what is large is in a slot"
    envelope = pickle.loads(message)
    assert type(envelope) is Envelope
    assert same(envelope.batch, batch)
    if isinstance(batch, torch.Tensor):
        assert not envelope.batch.is_shared(), "torch shares what it sends"
        assert envelope.batch.dtype == batch.dtype
    assert envelope.meta.token == META.token
    assert envelope.meta.ids.tolist() == META.ids.tolist()
    assert (envelope.failures, envelope.missed) == ((), None)


@pytest.mark.parametrize("size", [2, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_channels_that_lie_last_stay_last(
    hand_over: HandOver, size: int, dtype: torch.dtype
) -> None:
    batch = torch.rand(4, 3, size, size).to(dtype).to(memory_format=torch.channels_last)
    arrived = pickle.loads(sent(hand_over, batch)).batch
    assert arrived.stride() == batch.stride()
    assert torch.equal(arrived, batch)


@pytest.mark.parametrize("size", [4, 1 << 18])
def test_what_arrives_may_be_written_to_and_is_a_copy(hand_over: HandOver, size: int) -> None:
    given = torch.zeros(size)
    batch = pickle.loads(sent(hand_over, given)).batch
    batch += 1
    assert batch.sum() == size
    assert given.sum() == 0
    assert not batch.is_shared()


@pytest.mark.parametrize("size", [2, 1 << 18])
def test_a_tensor_that_stands_twice_in_a_batch_arrives_once(hand_over: HandOver, size: int) -> None:
    one = torch.zeros(size)
    left, right = pickle.loads(sent(hand_over, (one, one))).batch
    left += 1
    assert right.sum() == size


def test_a_slot_is_free_again_when_its_batch_has_arrived(hand_over: HandOver) -> None:
    batches = [torch.full((1 << 16,), i) for i in range(9)]
    arrived = [pickle.loads(sent(hand_over, batch)).batch for batch in batches]
    assert all(torch.equal(*pair) for pair in zip(arrived, batches, strict=True))
    assert not any(batch.is_shared() for batch in arrived), "torch shares what it sends"


def test_batches_that_find_no_free_slot_are_left_to_torch(hand_over: HandOver) -> None:
    large = torch.zeros(1 << 16)
    under_way = [sent(hand_over, large) for _ in range(2)]
    assert is_left_to_torch(hand_over, large)
    assert not is_left_to_torch(hand_over, torch.zeros(4)), "needs no slot"
    pickle.loads(under_way[1])
    assert not is_left_to_torch(hand_over, large)


def test_who_keeps_a_small_part_does_not_keep_the_large_one(hand_over: HandOver) -> None:
    tracemalloc.start()
    try:
        batch = torch.zeros(1 << 18), torch.zeros(2)
        kept = [pickle.loads(sent(hand_over, batch)).batch[1] for _ in range(8)]
        assert tracemalloc.get_traced_memory()[0] < 2 << 20, "one is kept to be used again"
    finally:
        tracemalloc.stop()
    assert len(kept) == 8


def test_what_cannot_be_pickled_takes_no_slot(hand_over: HandOver) -> None:
    Nameless = namedtuple("Nameless", "large")
    large = torch.zeros(1 << 16)
    for _ in range(3):
        with pytest.raises((pickle.PicklingError, AttributeError)):
            hand_over(enveloped(Nameless(large)))
    assert not is_left_to_torch(hand_over, large)


def test_a_slot_is_free_again_when_there_is_no_memory_for_its_batch(
    hand_over: HandOver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(part: Any) -> Any:
        raise MemoryError

    large = torch.zeros(1 << 16)
    with monkeypatch.context() as patched:
        patched.setattr(hand_over, "_copy_of", fail)
        for _ in range(3):
            with pytest.raises(MemoryError):
                pickle.loads(sent(hand_over, large))
    assert torch.equal(pickle.loads(sent(hand_over, large)).batch, large)


def test_a_message_that_comes_when_the_loader_is_gone_is_dropped() -> None:
    held = HandOver(workers=1, each=1)
    message = sent(held, torch.zeros(1 << 16))
    del held
    gc.collect()
    assert pickle.loads(message).batch is None


def test_it_takes_no_batches_along_into_a_worker_that_is_spawned(hand_over: HandOver) -> None:
    pickle.loads(sent(hand_over, torch.zeros(1 << 20)))
    assert len(pickle.dumps(hand_over._copy_of)) < 200


OTHERS = {
    "larger than a slot": torch.zeros((64 << 20) + 1, dtype=torch.uint8),
    "an array that cannot be written to": np.broadcast_to(np.zeros(1), 5),
    "a tuple with more": type("More", (tuple,), {})([1]),
    "with a gradient": torch.zeros(4, requires_grad=True),
    "sparse": torch.eye(3).to_sparse(),
    "a subclass": torch.nn.Parameter(torch.zeros(2), requires_grad=False),
    "objects": np.array([Own()], object),
    "one's own": {"x": Own()},
}


@pytest.mark.parametrize("batch", OTHERS.values(), ids=OTHERS.keys())
def test_everything_else_is_left_to_torch(hand_over: HandOver, batch: Any) -> None:
    assert is_left_to_torch(hand_over, batch)


def repeated(samples: list[bytes]) -> torch.Tensor:
    return torch.tensor([2 * sample[0] for sample in samples]).repeat(2_000, 1)


def square(sample: bytes) -> torch.Tensor:
    return torch.full((80, 80), sample[0], dtype=torch.uint8)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_default_collate_function_makes_what_torch_makes(workers: int) -> None:
    dataset = stoker.SampleDataset(
        MemorySource([bytes([i]) * 9 for i in range(40)]), square, targets=np.arange(40)
    )
    with stoker.Loader(dataset, 8, num_workers=workers, cache="100%", shuffle=False) as loader:
        for number, (images, labels) in enumerate(loader):
            ids = range(8 * number, 8 * number + 8)
            expected = default_collate([(square(bytes([i])), i) for i in ids])
            assert torch.equal(images, expected[0]) and torch.equal(labels, expected[1])
            assert not images.is_shared() and not labels.is_shared()


def test_a_collate_function_of_the_users_own_for_tensors_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def negated(batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
        return -torch.stack(batch)

    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, negated)
    assert private_collate([torch.ones(2), torch.ones(2)]).tolist() == [[-1, -1], [-1, -1]]


def once(samples: list[bytes]) -> torch.Tensor:
    return torch.tensor([2 * sample[0] for sample in samples])


@pytest.mark.parametrize("collate", [once, repeated])
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_workers_hand_over_what_the_training_process_would_make(
    collate: Callable[[list[bytes]], torch.Tensor], method: str
) -> None:
    dataset = stoker.SampleDataset(MemorySource([bytes([i]) * 9 for i in range(40)]))
    batches = {}
    for workers in (0, 2):
        with stoker.Loader(
            dataset,
            batch_size=4,
            num_workers=workers,
            collate_fn=collate,
            cache="100%",
            multiprocessing_context=method if workers else None,
        ) as loader:
            batches[workers] = list(loader)
    assert all(torch.equal(*pair) for pair in zip(batches[2], batches[0], strict=True))
    assert not any(batch.is_shared() for batch in batches[2])


def test_epochs_that_are_left_early_lose_no_slots() -> None:
    dataset = stoker.SampleDataset(MemorySource([bytes([i]) * 9 for i in range(40)]))
    with stoker.Loader(
        dataset, 4, num_workers=2, collate_fn=repeated, cache="100%", persistent_workers=True
    ) as loader:
        for _ in range(6):
            next(iter(loader))
        assert not any(batch.is_shared() for batch in loader)


def test_the_memory_goes_with_the_loader() -> None:
    held = HandOver(workers=2, each=2)
    pickle.loads(sent(held, torch.zeros(1 << 16)))
    memory = Path(f"/proc/self/fd/{held._memory.fileno()}")
    assert "batches" in str(memory.readlink())
    del held
    gc.collect()
    assert not memory.exists() or "batches" not in str(memory.readlink())


def test_meta_goes_where_the_batch_has_room() -> None:
    assert attach((1, 2), META) == (1, 2, META)
    assert attach([1, 2], META) == [1, 2, META]
    assert attach({"a": 1}, META) == {"a": 1, "meta": META}
    assert attach(UserDict(a=1), META)["meta"] is META
    assert attach(MappingProxyType({"a": 1}), META) == {"a": 1, "meta": META}
    assert attach("batch", META) == ("batch", META)


def test_a_key_of_that_name_is_not_overwritten() -> None:
    with pytest.raises(ConfigError, match="key 'meta' already"):
        attach({"meta": 1}, META)


def test_weights_are_ones_unless_the_plan_has_some() -> None:
    assert META.weights.tolist() == [1, 1, 1]
    weighted = Meta(7, 1, META.ids, META.outcomes, META.positions, np.array([1, 0, 2], np.float32))
    assert weighted.weights.tolist() == [1, 0, 2]
    assert len(weighted) == 3


def test_what_travels_is_small() -> None:
    ids = np.arange(256, dtype=np.uint32)
    request = Request(0, 0, ids, np.arange(256), None, None, ids[:8])
    assert len(pickle.dumps(request)) < 256 * 12 + 700
