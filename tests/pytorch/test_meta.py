from __future__ import annotations

import pickle
from collections import UserDict
from types import MappingProxyType

import numpy as np
import pytest

from stoker.epoch.batch import Request
from stoker.errors import ConfigError
from stoker.pytorch.meta import Meta, attach

META = Meta(7, 1, np.arange(3, dtype=np.uint32), np.zeros(3, np.int8), np.arange(3))


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
