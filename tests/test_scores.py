import math
import multiprocessing

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import CapacityError, ConfigError
from stoker.scores import MAX_EPOCHS, Scores, counts_up_to, least_of_largest


def test_starts_unseen() -> None:
    scores = Scores(3)
    assert len(scores) == 3
    assert scores.values.tolist() == [0, 0, 0]
    assert scores.last.tolist() == [-1, -1, -1]
    assert scores.seen.tolist() == [0, 0, 0]
    assert [a.dtype for a in (scores.values, scores.last, scores.seen)] == ["f8", "i4", "i4"]


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


def test_each_row_may_have_a_step_of_its_own() -> None:
    scores = Scores(4)
    scores.update([2, 0, 2], [1.5, -2.0, 3.0], step=[7, 8, 9])
    assert scores.last.tolist() == [8, -1, 9, -1]
    with pytest.raises(ConfigError, match=r"\(2,\) steps for \(3,\) ids"):
        scores.update([2, 0, 2], [1.5, -2.0, 3.0], step=[7, 8])


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
    with pytest.raises(ConfigError, match=r"rows have shape \(3,\).*give 2"):
        scores.restore([1.0, 2.0], [0, 0], [1, 1, 1])
    with pytest.raises(ConfigError, match="finite"):
        scores.restore([1.0, float("nan")], [0, 0], [1, 1])
    assert scores.values.tolist() == [0.0, 0.0]
    with pytest.raises(ConfigError, match="snapshot"):
        scores.snapshot().restore([1.0, 2.0], [0, 0], [1, 1])


def test_ready_is_shared_with_children_and_refused_on_a_snapshot() -> None:
    scores = Scores(2)
    assert scores.ready
    scores.ready = False
    snapshot = scores.snapshot()
    scores.ready = True
    assert (scores.ready, snapshot.ready) == (True, False)
    with pytest.raises(ConfigError, match="snapshot"):
        snapshot.ready = True


def test_history_grows_with_epochs() -> None:
    scores = Scores(3)
    assert len(scores.accuracies) == len(scores.losses) == len(scores.deviations) == 0
    scores.record_epoch(0)
    scores.update([0, 1], [1.0, 3.0], step=0)
    scores.record_epoch(2, accuracy=0.5)
    scores.record_epoch(2, loss=1.5)
    np.testing.assert_array_equal(scores.accuracies, [np.nan, np.nan, 0.5])
    np.testing.assert_array_equal(scores.losses, [np.nan, np.nan, 1.5])
    np.testing.assert_array_equal(scores.deviations, [np.nan, np.nan, 1.0])
    with pytest.raises(ValueError, match="read-only"):
        scores.losses[0] = 1


def test_an_unknown_accuracy_leaves_the_earlier_record() -> None:
    scores = Scores(1)
    scores.record_epoch(0, accuracy=0.25)
    scores.record_epoch(0, accuracy=float("nan"), loss=float("inf"))
    assert scores.accuracies[0] == 0.25
    assert np.isnan(scores.losses[0])


def test_the_history_has_an_end() -> None:
    scores = Scores(1)
    scores.record_epoch(MAX_EPOCHS - 1, loss=1.0)
    assert len(scores.losses) == MAX_EPOCHS
    with pytest.raises(CapacityError, match=f"epoch={MAX_EPOCHS}"):
        scores.record_epoch(MAX_EPOCHS)
    with pytest.raises(ConfigError, match="epoch=-1"):
        scores.record_epoch(-1)


def test_volatile_samples_are_those_set_last() -> None:
    scores = Scores(4)
    assert not scores.volatile.any()
    scores.set_volatile([1, 2])
    scores.set_volatile(np.array([3, 1], np.uint32))
    assert np.flatnonzero(scores.volatile).tolist() == [1, 3]
    with pytest.raises(ConfigError, match="id 4"):
        scores.set_volatile([0, 4])
    assert np.flatnonzero(scores.volatile).tolist() == [1, 3]


def test_everything_goes_round_through_arrays() -> None:
    scores, again = Scores(3), Scores(3)
    scores.update([0, 2], [1.0, 2.0], step=4)
    scores.set_volatile([2])
    scores.record_epoch(1, accuracy=0.5, loss=0.75)
    scores.ready = False
    again.record_epoch(5, loss=1.0)
    again.restore(**scores.arrays())
    for name, array in scores.arrays().items():
        np.testing.assert_array_equal(again.arrays()[name], array, err_msg=name)
    for copied in (scores.snapshot(), again):
        np.testing.assert_array_equal(copied.losses, scores.losses)
        assert not copied.ready


def test_a_history_that_does_not_fit_is_refused() -> None:
    scores = Scores(1)
    with pytest.raises(ConfigError, match="histories"):
        scores.restore([1.0], [0], [1], accuracies=[0.5], losses=[1.0, 2.0], deviations=[0.0])
    assert scores.seen[0] == 0


def percentiles(values):
    return counts_up_to(values) / max(len(values), 1)


@given(st.lists(st.integers(-3, 3) | st.just(-math.inf), max_size=30), st.data())
def test_percentiles_and_the_largest_are_those_of_a_stable_sort(values, data):
    array = np.array(values, float)
    at_most = array <= array[:, None]
    assert percentiles(values).tolist() == (at_most.sum(axis=1) / max(len(values), 1)).tolist()
    count = data.draw(st.integers(0, len(values)))
    order = np.argsort(-array, kind="stable")
    floor = array[order[count - 1]] if count else math.inf
    every = np.ones(len(array), np.bool_)
    found, above = least_of_largest(array, every, count)
    assert (found, above) == (floor, int((array > floor).sum()))
    tied = np.flatnonzero(array == found)[: count - above]
    chosen = np.concatenate([np.flatnonzero(array > found), tied])
    assert sorted(chosen.tolist()) == sorted(order[:count].tolist())


def test_percentiles_are_shares_of_smaller_or_equal_values() -> None:
    assert percentiles([3.0, 1.0, 2.0, 1.0]).tolist() == [1.0, 0.5, 0.75, 0.5]
    assert percentiles([7.0, 7.0]).tolist() == [1.0, 1.0]
    assert percentiles([]).tolist() == []


def test_the_deviation_of_many_is_that_of_all_that_were_seen() -> None:
    scores = Scores(150_000)
    seen = np.flatnonzero(np.random.default_rng(0).random(150_000) < 0.7)
    seen = seen[(seen < 70_000) | (seen > 140_000)]
    values = np.random.default_rng(1).normal(1e3, 2, len(seen))
    scores.update(seen, values, 0)
    scores.record_epoch(0)
    assert scores.deviations[0] == pytest.approx(values.std(), rel=1e-9)
