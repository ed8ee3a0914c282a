"""Batches travel in messages or in slots, or as torch sends them; what arrives is the same."""

from __future__ import annotations

import gc
import itertools
import os
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
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

import stoker
from stoker.epoch.batch import Request
from stoker.errors import ConfigError
from stoker.images import Train
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
    under_way = [sent(hand_over, large) for _ in range(5)]
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


def test_a_slot_is_free_again_when_there_is_no_memory_for_its_batch() -> None:
    def copy_of(part: Any) -> Any:
        if is_full:
            raise MemoryError
        return part.copy()

    hand_over, is_full = HandOver(workers=1, each=2, copy_of=copy_of), True
    large = torch.zeros(1 << 16)
    for _ in range(3):
        with pytest.raises(MemoryError):
            pickle.loads(sent(hand_over, large))
    is_full = False
    assert torch.equal(pickle.loads(sent(hand_over, large)).batch, large)


def lies_in_slot(hand_over: HandOver, tensor: torch.Tensor) -> bool:
    return np.shares_memory(tensor.numpy(), hand_over._memory.array)


def test_training_gets_three_large_batches_without_a_copy_and_more_as_copies(
    hand_over: HandOver,
) -> None:
    batches = [torch.full((1 << 16,), i) for i in range(5)]
    arrived = [pickle.loads(sent(hand_over, batch)).batch for batch in batches]
    assert [lies_in_slot(hand_over, batch) for batch in arrived] == [True] * 3 + [False] * 2
    for batch in arrived:
        batch += 10
    assert [int(batch[-1]) for batch in arrived] == [10, 11, 12, 13, 14]
    del arrived[0], batch
    assert lies_in_slot(hand_over, pickle.loads(sent(hand_over, batches[0])).batch)


def test_a_batch_that_training_keeps_has_no_other_copied(hand_over: HandOver) -> None:
    """A benchmark kept its first batch, and half of those after it were copied."""
    batch = torch.zeros(1 << 16)
    first = pickle.loads(sent(hand_over, batch)).batch
    for _ in range(6):
        arrived = pickle.loads(sent(hand_over, batch)).batch  # only then is the one before let go
        assert lies_in_slot(hand_over, arrived)
    assert lies_in_slot(hand_over, first)


def test_a_view_keeps_the_slot_of_its_batch(hand_over: HandOver) -> None:
    kept = pickle.loads(sent(hand_over, torch.arange(1 << 16))).batch[5:9:2].numpy()
    for _ in range(9):
        pickle.loads(sent(hand_over, torch.zeros(1 << 16, dtype=torch.int64)))
    assert kept.tolist() == [5, 7]


def test_small_parts_are_copied_out_of_a_batch_without_a_copy(hand_over: HandOver) -> None:
    large, small = pickle.loads(sent(hand_over, (torch.zeros(1 << 16), torch.ones(100)))).batch
    assert lies_in_slot(hand_over, large)
    assert not lies_in_slot(hand_over, small)


def test_a_forked_child_frees_no_slot_of_its_parents(hand_over: HandOver) -> None:
    batch = pickle.loads(sent(hand_over, torch.ones(1 << 16))).batch
    child = os.fork()
    if child == 0:
        del batch
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    assert hand_over._is_taken.array.sum() == 1
    del batch
    assert hand_over._is_taken.array.sum() == 0


def filled(hand_over: HandOver, value: int, length: int = 1 << 17) -> torch.Tensor:
    """A batch made in a slot, or where a HandOver has none."""
    pixels = hand_over.pixels((length // 1024, 1024))
    pixels[:] = value
    return torch.from_numpy(pixels)


def test_what_is_made_in_a_slot_is_not_copied(hand_over: HandOver) -> None:
    batch = filled(hand_over, 3)
    assert lies_in_slot(hand_over, batch)
    images, labels, again = pickle.loads(sent(hand_over, (batch, torch.ones(3), batch[1:]))).batch
    assert images.shape == (128, 1024)
    assert images.data_ptr() == batch.data_ptr(), "in this process both are the same mapping"
    assert images.eq(3).all() and again.eq(3).all() and labels.tolist() == [1] * 3


def test_memory_that_no_batch_came_of_is_used_again(hand_over: HandOver) -> None:
    for _ in range(9):
        assert lies_in_slot(hand_over, filled(hand_over, 1))
    assert not is_left_to_torch(hand_over, torch.zeros(1 << 16)), "made elsewhere"
    assert hand_over._is_taken.array.sum() == 1


def test_memory_that_is_kept_where_it_was_made_is_not_used_again(hand_over: HandOver) -> None:
    kept = [filled(hand_over, i) for i in range(7)]
    assert [lies_in_slot(hand_over, each) for each in kept] == [True] * 5 + [False] * 2
    assert is_left_to_torch(hand_over, torch.zeros(1 << 16)), "no slot is free of them"
    assert [int(each[0, 0]) for each in kept] == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("length", [1024, 65 << 20])
def test_what_is_too_small_or_too_large_for_a_slot_is_made_elsewhere(
    hand_over: HandOver, length: int
) -> None:
    assert not lies_in_slot(hand_over, filled(hand_over, 1, length))
    assert hand_over.data(length) is None


def test_a_batch_that_has_no_room_beside_what_was_made_in_its_slot_is_left_to_torch(
    hand_over: HandOver,
) -> None:
    large = filled(hand_over, 1, 48 << 20)
    assert is_left_to_torch(hand_over, (large[: 1 << 10], torch.zeros(20 << 20)))
    assert hand_over._is_taken.array.sum() == 0


class Batches(RuleBasedStateMachine):
    """Batches on their way to training, which keeps some: none changes, whatever becomes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.hand_over = HandOver(workers=1, each=2)
        self.sent: list[tuple[int, bool, bytes]] = []
        self.held: list[tuple[int, torch.Tensor]] = []
        self.made = 0

    @rule(in_place=st.booleans(), large=st.booleans())
    def send(self, in_place: bool, large: bool) -> None:
        self.made = (self.made + 1) % 200
        length = 1 << (17 if large else 10)
        batch = torch.full((length,), self.made, dtype=torch.uint8)
        if in_place:
            batch = filled(self.hand_over, self.made, length)
        message = self.hand_over(enveloped(batch))
        del batch
        if isinstance(message, Envelope):  # torch sends it
            assert large and self.in_use == 5
            return
        self.sent.append((self.made, large, ForkingPickler.dumps(message)))

    @rule()
    def lose(self) -> None:
        filled(self.hand_over, 255)

    @precondition(lambda self: self.sent)
    @rule()
    def arrive(self) -> None:
        value, _, message = self.sent.pop(0)
        batch = pickle.loads(message).batch
        assert batch.eq(value).all()
        batch += 1
        self.held.append((value + 1, batch))

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99))
    def let_go(self, which: int) -> None:
        self.held.pop(which % len(self.held))

    @invariant()
    def what_is_held_stays(self) -> None:
        for value, batch in self.held:
            assert batch.eq(value).all()

    @property
    def in_use(self) -> int:
        return sum(large for _, large, _ in self.sent) + int(self.hand_over._is_lent.sum())

    @invariant()
    def no_slot_is_lost(self) -> None:
        begun = self.hand_over._begun is not None
        assert int(self.hand_over._is_taken.array.sum()) == self.in_use + begun
        assert int(self.hand_over._is_lent.sum()) <= min(3, len(self.held))


TestBatches = Batches.TestCase


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


def test_a_batch_that_outlives_its_hand_over_keeps_no_more_than_its_own_memory() -> None:
    held = HandOver(workers=1, each=2)
    batches = [pickle.loads(sent(held, torch.full((1 << 20,), i))).batch for i in range(2)]
    under_way = [sent(held, torch.zeros(1 << 20)) for _ in range(3)]
    assert held._is_taken.array.all()
    before = resident()
    del held, under_way, batches[0]
    gc.collect()
    assert batches[0].eq(1).all()
    assert before > 20 << 20 and resident() < 10 << 20


def resident() -> int:
    """Bytes that this process has of the memory of hand-overs."""
    total, is_own = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if "-" in name and not name.endswith(":"):
            is_own = "stoker:batches" in line
        elif name == "Rss:" and is_own:
            total += int(values[0]) << 10
    return total


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


class Keeping:
    """A transform that keeps images, and marks each with what an earlier one is like now."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        image[0, 0, 0] = self.kept[0].sum() % 251 if self.kept else 0
        self.kept.append(image)
        return image


@pytest.mark.parametrize("transform", [Train(128), Keeping])
@pytest.mark.parametrize("collate", [None, default_collate, lambda samples: samples[0]])
def test_what_training_changes_changes_nothing_in_workers(
    image_root: Path, transform: Any, collate: Any
) -> None:
    came: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    for is_changed, each in came.items():
        chain = [Train(128), transform()] if transform is Keeping else transform
        dataset = stoker.ImageFolder(image_root, transform=chain)
        with stoker.Loader(
            dataset, 4, num_workers=1, collate_fn=collate, persistent_workers=True, seed=1
        ) as loader:
            for images, _ in itertools.chain(loader, loader):
                each.append(images.clone())
                if is_changed:
                    images.fill_(255)
    assert all(torch.equal(*pair) for pair in zip(*came.values(), strict=True))


def test_images_and_packed_bytes_reach_training_without_a_copy(image_root: Path) -> None:
    images = stoker.ImageFolder(image_root, transform=Train(128))
    packed = stoker.SampleDataset(MemorySource([bytes([i]) * 30_000 for i in range(24)]), "packed")
    for dataset in (images, packed):
        with stoker.Loader(dataset, 8, num_workers=1, cache="100%") as loader:
            for _ in range(2):
                for batch, _ in loader:
                    mapped = named_mapping(batch.data_ptr())
                    assert "batches" in mapped, "a worker wrote it there"


def named_mapping(address: int) -> str:
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, _, end = line.split()[0].partition("-")
        if int(begin, 16) <= address < int(end, 16):
            return line
    raise AssertionError(f"{address} is not mapped")
