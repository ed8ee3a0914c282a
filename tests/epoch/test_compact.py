from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from stoker.epoch.compact import dumps, loads, same

SAMPLES: list[Any] = [
    (torch.arange(6).reshape(2, 3), 3),
    torch.tensor(2.5),
    torch.zeros(3, dtype=torch.bfloat16),
    torch.ones(3, 4).t(),
    torch.eye(3).to_sparse(),
    {"x": np.arange(5.0), "y": [1, "two", None], "z": b"raw"},
    OrderedDict(a=1),
    np.array(["text"]),
    float("nan"),
    Image.new("RGB", (3, 2), (1, 2, 3)),
    {1, 2},
]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: type(sample).__name__)
def test_samples_come_back_the_same(sample: Any) -> None:
    back = loads(memoryview(dumps(sample)))
    if isinstance(sample, torch.Tensor) and sample.is_sparse:
        assert torch.equal(back.to_dense(), sample.to_dense())
    else:
        assert same(sample, back)


def test_a_view_is_stored_without_what_it_views() -> None:
    large = torch.zeros(100_000)
    assert len(dumps(large[:10])) < 500
    assert len(dumps(torch.zeros(100_000, dtype=torch.bfloat16)[:10])) < 1000


def test_what_comes_back_is_writable_and_its_own() -> None:
    raw = bytearray(dumps((torch.zeros(3), np.zeros(3))))
    tensor, array = loads(memoryview(raw))
    tensor += 1
    array += 1
    assert [part.sum() for part in loads(memoryview(raw))] == [0, 0]


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (torch.zeros(2), torch.zeros(3)),
        (torch.zeros(2), torch.zeros(2).double()),
        (torch.zeros(2), torch.ones(2)),
        (np.zeros(2), np.zeros(2, np.float32)),
        (np.zeros(2), np.ones(2)),
        ((1, 2), [1, 2]),
        ((1, 2), (1, 2, 3)),
        ({"a": 1}, {"b": 1}),
        ({"a": 1}, {"a": 2}),
        (1, 1.0),
        (Image.new("RGB", (2, 2)), Image.new("RGB", (2, 2), (0, 0, 1))),
    ],
)
def test_differences_are_seen(left: Any, right: Any) -> None:
    assert not same(left, right)
    assert same(left, left) and same(right, right)


def test_nan_equals_nan() -> None:
    assert same(torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")]))
    assert same(np.array([float("nan")]), np.array([float("nan")]))
