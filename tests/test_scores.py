import multiprocessing

import numpy as np
import pytest

from stoker.errors import ConfigError
from stoker.scores import Scores


def test_starts_unseen() -> None:
    scores = Scores(3)
    assert len(scores) == 3
    assert scores.values.tolist() == [0, 0, 0]
    assert scores.last.tolist() == [-1, -1, -1]
    assert scores.seen.tolist() == [0, 0, 0]
    assert [a.dtype for a in (scores.values, scores.last, scores.seen)] == ["f8", "i8", "i8"]


def test_update_writes_the_rows_of_its_ids() -> None:
    scores = Scores(4)
    scores.update(np.array([2, 0], dtype=np.uint32), np.array([1.5, -2.0]), step=7)
    assert scores.values.tolist() == [-2.0, 0, 1.5, 0]
    assert scores.last.tolist() == [7, -1, 7, -1]
    assert scores.seen.tolist() == [1, 0, 1, 0]


def test_a_repeated_id_counts_twice_and_keeps_its_later_value() -> None:
    scores = Scores(2)
    scores.update([1, 1], [3.0, 4.0], step=0)
    assert scores.values[1] == 4.0
    assert scores.seen[1] == 2


def test_an_empty_update_changes_nothing() -> None:
    scores = Scores(2)
    scores.update([], [], step=1)
    assert scores.last.tolist() == [-1, -1]


def test_views_cannot_be_written() -> None:
    scores = Scores(2)
    for array in (scores.values, scores.last, scores.seen):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_a_snapshot_stands_still() -> None:
    scores = Scores(2)
    scores.update([0], [1.0], step=0)
    snapshot = scores.snapshot()
    scores.update([0], [2.0], step=1)
    assert (snapshot.values[0], snapshot.last[0], snapshot.seen[0]) == (1.0, 0, 1)
    with pytest.raises(ConfigError, match="snapshot"):
        snapshot.update([0], [3.0], step=2)


@pytest.mark.parametrize(
    ("ids", "values", "named"),
    [
        ([0, 3], [1.0, 1.0], "id 3 is out of range"),
        ([-1], [1.0], "id -1 is out of range"),
        ([0, 1], [1.0], "one for each"),
        ([0.5], [1.0], "float64"),
        ([[0]], [[1.0]], "shape"),
        ([1, 2], [1.0, np.nan], "nan of id 2"),
        ([1], [np.inf], "inf of id 1"),
    ],
)
def test_a_refused_update_changes_nothing(ids: object, values: object, named: str) -> None:
    scores = Scores(3)
    with pytest.raises(ConfigError, match=named):
        scores.update(ids, values, step=1)  # type: ignore[arg-type]
    assert not scores.seen.any()
    assert not scores.values.any()


@pytest.mark.parametrize("num_samples", [0, -1, 1.5, True, "3"])
def test_refuses_a_bad_number_of_samples(num_samples: object) -> None:
    with pytest.raises(ConfigError, match="num_samples="):
        Scores(num_samples)  # type: ignore[arg-type]


def write(scores: Scores) -> None:
    scores.update([1], [5.0], step=9)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_share_the_rows(method: str) -> None:
    scores = Scores(2)
    child = multiprocessing.get_context(method).Process(target=write, args=(scores,))
    child.start()
    child.join(30)
    assert child.exitcode == 0
    assert (scores.values[1], scores.last[1], scores.seen[1]) == (5.0, 9, 1)


def test_rows_of_an_earlier_run_are_restored() -> None:
    earlier, scores = Scores(4), Scores(4)
    earlier.update([1, 3, 3], [0.5, 1.0, 2.0], step=7)
    scores.update([0], [9.0], step=1)
    scores.restore(earlier.values, earlier.last, earlier.seen)
    for name in ("values", "last", "seen"):
        assert (getattr(scores, name) == getattr(earlier, name)).all()
    scores.update([0], [1.0], step=8)
    assert earlier.seen[0] == 0


def test_rows_that_do_not_fit_are_refused_and_change_nothing() -> None:
    scores = Scores(2)
    with pytest.raises(ConfigError, match=r"rows of shape \(3,\).*give 2"):
        scores.restore([1.0, 2.0], [0, 0], [1, 1, 1])
    with pytest.raises(ConfigError, match="finite"):
        scores.restore([1.0, float("nan")], [0, 0], [1, 1])
    assert scores.values.tolist() == [0.0, 0.0]
    with pytest.raises(ConfigError, match="snapshot"):
        scores.snapshot().restore([1.0, 2.0], [0, 0], [1, 1])
