"""Small batches travel by value, all others as torch sends them; what arrives is the same."""

from __future__ import annotations

import pickle
from collections import namedtuple
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch

import stoker
from stoker.pytorch.compact import same
from stoker.pytorch.hand_over import by_value_if_small
from stoker.pytorch.meta import Envelope, Meta
from stoker.source.memory import MemorySource

Pair = namedtuple("Pair", "left right")
META = Meta(7, 1, np.arange(2, dtype=np.uint32), np.zeros(2, np.int8), np.arange(2))


class Own:
    """Something of the user's."""


def enveloped(batch: Any) -> Envelope:
    return Envelope(batch, META, ())


def arrived(batch: Any) -> Envelope:
    return pickle.loads(ForkingPickler.dumps(by_value_if_small(enveloped(batch))))


SMALL = {
    "a tensor": torch.arange(12.0).reshape(3, 4),
    "a view": torch.arange(12).reshape(3, 4).t()[1:, ::2],
    "expanded": torch.ones(1).expand(5),
    "no elements": torch.empty(0, 3),
    "no dimensions": torch.tensor(3),
    "bfloat16": torch.ones(3, dtype=torch.bfloat16),
    "bool": torch.tensor([True, False]),
    "nested": {"x": [torch.ones(2), 1, 2.5, None], "y": ("text", b"bytes", np.ones(3, np.int16))},
    "a named tuple": Pair(torch.zeros(2), 5),
}


@pytest.mark.parametrize("batch", SMALL.values(), ids=SMALL.keys())
def test_small_batches_arrive_by_value(batch: Any) -> None:
    sent = enveloped(batch)
    assert by_value_if_small(sent) is not sent
    envelope = arrived(batch)
    assert type(envelope) is Envelope
    assert same(envelope.batch, batch)
    assert envelope.meta.token == META.token
    assert envelope.meta.ids.tolist() == META.ids.tolist()
    assert (envelope.failures, envelope.missed) == ((), None)


def test_what_arrives_may_be_written_to_and_is_a_copy() -> None:
    sent = torch.zeros(4)
    batch = arrived(sent).batch
    batch += 1
    assert batch.tolist() == [1, 1, 1, 1]
    assert sent.tolist() == [0, 0, 0, 0]
    assert not batch.is_shared()


def test_a_tensor_that_stands_twice_in_a_batch_arrives_once() -> None:
    one = torch.zeros(2)
    left, right = arrived((one, one)).batch
    left += 1
    assert right.tolist() == [1, 1]


OTHERS = {
    "large": torch.zeros(1 << 18),
    "large together": [torch.zeros(1 << 12) for _ in range(64)],
    "many": list(range(10_000)),
    "shared on purpose": torch.zeros(4).share_memory_(),
    "with a gradient": torch.zeros(4, requires_grad=True),
    "sparse": torch.eye(3).to_sparse(),
    "a subclass": torch.nn.Parameter(torch.zeros(2), requires_grad=False),
    "objects": np.array([Own()], object),
    "one's own": {"x": Own()},
}


@pytest.mark.parametrize("batch", OTHERS.values(), ids=OTHERS.keys())
def test_everything_else_is_left_to_torch(batch: Any) -> None:
    sent = enveloped(batch)
    assert by_value_if_small(sent) is sent


def doubled(samples: list[bytes]) -> torch.Tensor:
    return torch.tensor([2 * sample[0] for sample in samples])


def test_workers_hand_over_what_the_training_process_would_make() -> None:
    dataset = stoker.SampleDataset(MemorySource([bytes([i]) * 9 for i in range(20)]))
    batches = {}
    for workers in (0, 2):
        with stoker.Loader(
            dataset, batch_size=8, num_workers=workers, collate_fn=doubled, cache="100%"
        ) as loader:
            batches[workers] = list(loader)
    assert [b.tolist() for b in batches[2]] == [b.tolist() for b in batches[0]]
    assert not any(batch.is_shared() for batch in batches[2])
