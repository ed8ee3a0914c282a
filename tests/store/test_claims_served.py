import numpy as np
import pytest

from stoker.store.claims import Served


def test_it_is_a_sequence_of_views():
    data = np.arange(5, dtype=np.uint8)
    served = Served(
        np.array([7, 9, 3], np.uint32), data, np.array([0, 2, 2, 5]), np.zeros(3, np.int8)
    )
    assert len(served) == 3
    assert [sample.tolist() for sample in served] == [[0, 1], [], [2, 3, 4]]
    assert np.shares_memory(served[2], data)
    for wrong in (3, -1):
        with pytest.raises(IndexError):
            served[wrong]
