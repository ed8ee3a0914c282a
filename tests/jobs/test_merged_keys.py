"""The formulas, on numbers worked out by hand."""

from __future__ import annotations

import numpy as np

from stoker.jobs.merged import counted, joint_value, known_rates, soonest

THRESHOLDS = np.array([1.5, 1.5, 1.5])


def test_a_worked_example_of_the_joint_value() -> None:
    # Of three jobs the second gains too little to count (iCache, HPCA 2023: from 1.5 on).
    gains = np.array([2.0, 1.2, 1.6])
    values = np.array([[1.0, 0.5, 0.0, 0.25], [1.0, 1.0, 1.0, 1.0], [0.5, 1.0, 0.0, 0.0]])
    expected = np.array([2 * 1.0 + 1.6 * 0.5, 2 * 0.5 + 1.6 * 1.0, -np.inf, 2 * 0.25])
    np.testing.assert_allclose(joint_value(values, gains, THRESHOLDS), expected / 3.6)


def test_where_no_job_gains_enough_all_count() -> None:
    gains = np.array([1.1, 1.0, 1.4])
    assert counted(gains, THRESHOLDS).all()
    values = np.array([[1.0, 0.0], [1.0, 0.5], [1.0, 0.0]])
    np.testing.assert_allclose(joint_value(values, gains, THRESHOLDS), [1.0, 0.5 / 3.5])
    assert counted(np.array([1.5, 1.0]), THRESHOLDS[:2]).tolist() == [True, False]


def test_keys_of_other_times_compare() -> None:
    values = np.array([[1.0, 0.25], [1.0, 0.25], [1.0, 0.25]])
    for gains in ([1.0, 1.0, 1.0], [3.0, 1.6, 1.0], [1.6, 1.0, 1.0]):
        np.testing.assert_allclose(joint_value(values, np.array(gains), THRESHOLDS), [1.0, 0.25])


def test_a_worked_example_of_the_soonest_use() -> None:
    # The first job makes 10 accesses a second and is at 100, the second 2 a second and at 7.
    positions = np.array([[130, 100, 180], [9, 27, 8]])
    now, rates, periods = np.array([100, 7]), np.array([10.0, 2.0]), np.array([100.0, 40.0])
    np.testing.assert_allclose(soonest(positions, now, rates, periods), [1.0, 0.0, 0.5])
    # After 2 s, uses before that are an epoch later: 10 s and 20 s.
    np.testing.assert_allclose(soonest(positions, now, rates, periods, 2.0), [3.0, 10.0, 8.0])
    later = np.array([0.5, 20.0, 30.0])
    np.testing.assert_allclose(soonest(positions, now, rates, periods, later), [1.0, 20.0, 38.0])


def test_a_pace_that_is_not_known_is_that_of_the_others() -> None:
    assert known_rates(np.array([0.0, 2.0, 4.0])).tolist() == [3.0, 2.0, 4.0]
    assert known_rates(np.zeros(2)).tolist() == [1.0, 1.0]
