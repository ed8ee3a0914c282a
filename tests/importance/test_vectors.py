import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.errors import ConfigError
from stoker.importance.knn import VectorTable


def vectors(*values: float) -> np.ndarray:
    return np.array([[value, -value] for value in values], np.float32)


def test_rows_are_numbered_as_samples_come() -> None:
    table = VectorTable(10)
    assert table.put(np.array([7, 2], np.uint32), vectors(1, 2)).tolist() == [0, 1]
    assert table.put(np.array([2, 5, 7], np.uint32), vectors(3, 4, 5)).tolist() == [1, 2, 0]
    assert table.ids.tolist() == [7, 2, 5]
    assert table.vectors.tolist() == vectors(5, 3, 4).tolist()
    assert table.count == 3
    assert table.put(np.array([], np.uint32), vectors()).tolist() == []


@pytest.mark.parametrize(
    ("ids", "shape", "named"),
    [
        ([3], (1, 3), "dimension 3 .2 before"),
        ([3], (1, 0), "dimension 0"),
        ([10], (1, 2), "id 10 is out of range"),
    ],
)
def test_what_does_not_fit_changes_nothing(ids: list[int], shape: tuple, named: str) -> None:
    table = VectorTable(10)
    table.put(np.array([1], np.uint32), vectors(1))
    with pytest.raises(ConfigError, match=named):
        table.put(np.array(ids, np.uint32), np.zeros(shape, np.float32))
    assert table.ids.tolist() == [1]


def test_a_table_without_room_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_samples=0"):
        VectorTable(0)


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 19), unique=True, max_size=8), max_size=10))
def test_holds_what_a_dictionary_would(batches: list[list[int]]) -> None:
    table, model, value = VectorTable(20), {}, 0.0
    for batch in batches:
        given = vectors(*(value + place for place in range(len(batch)))).reshape(-1, 2)
        rows = table.put(np.array(batch, np.uint32), given)
        assert table.ids[rows].tolist() == batch
        model.update(zip(batch, given.tolist(), strict=True))
        value += 100
    assert dict(zip(table.ids.tolist(), table.vectors.tolist(), strict=True)) == model
    assert table.count == len(model)
