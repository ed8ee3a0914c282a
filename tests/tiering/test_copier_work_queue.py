"""The queue of work: each thing once at a time, urgent first, nothing lost."""

from __future__ import annotations

import os
import threading
from collections import Counter

import pytest
from support.waiting import some_time, until

from stoker.tiering.copier import WorkQueue


def wait_until(queue: WorkQueue[int]) -> None:
    until(queue.is_idle)


def test_urgent_first_then_in_order() -> None:
    done: list[int] = []
    gate = threading.Event()

    def work(item: int) -> None:
        gate.wait(60)
        done.append(item)

    queue = WorkQueue(1, work, key=lambda item: item)
    queue.put(0)
    until(lambda: queue._running)  # the first is at work, the others wait
    for item, urgency in ((5, 1), (101, 0), (4, 0), (3, 0), (102, 1)):
        queue.put(item, urgency)
    queue.put(4)  # waits already
    gate.set()
    wait_until(queue)
    queue.close()
    assert done == [0, 101, 4, 3, 5, 102]


def test_never_two_of_a_key_at_once_and_none_is_lost() -> None:
    running: Counter[int] = Counter()
    seen: Counter[int] = Counter()
    mutex = threading.Lock()

    def work(item: int) -> None:
        with mutex:
            running[item % 7] += 1
            assert running[item % 7] == 1
        some_time(0.001, 0.001)
        with mutex:
            running[item % 7] -= 1
            seen[item % 7] += 1

    queue = WorkQueue(4, work, key=lambda item: item % 7)
    for item in range(200):
        queue.put(item)
    wait_until(queue)
    queue.close()
    assert set(seen) == set(range(7))


def test_one_that_comes_while_it_is_at_work_follows() -> None:
    started, gate = threading.Event(), threading.Event()
    done: list[int] = []

    def work(item: int) -> None:
        started.set()
        gate.wait(60)
        done.append(item)

    queue = WorkQueue(2, work, key=lambda item: 0)
    queue.put(1)
    assert started.wait(60)
    queue.put(2)
    queue.put(3)
    gate.set()
    wait_until(queue)
    queue.close()
    assert done == [1, 3]


def test_an_exception_costs_no_thread(caplog: pytest.LogCaptureFixture) -> None:
    done: list[int] = []

    def work(item: int) -> None:
        if item == 0:
            raise ValueError("on purpose")
        done.append(item)

    queue = WorkQueue(1, work, key=lambda item: item)
    queue.put(0)
    queue.put(1)
    wait_until(queue)
    queue.close()
    assert done == [1] and "on purpose" in caplog.text


def test_closing_forgets_what_waits() -> None:
    gate = threading.Event()
    done: list[int] = []

    def work(item: int) -> None:
        gate.wait(60)
        done.append(item)

    queue = WorkQueue(1, work, key=lambda item: item)
    queue.put(0)
    until(lambda: queue._running)
    queue.put(1)
    threading.Timer(0.05, gate.set).start()
    queue.close()
    assert done == [0]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
def test_beside_programs_it_keeps_to_one_processor_until_much_waits() -> None:
    every, at_work, gate = os.sched_getaffinity(0), threading.Semaphore(0), threading.Semaphore(0)
    seen: list[tuple[set[int], int]] = []

    def work(item: int) -> None:
        me = threading.get_native_id()
        seen.append((os.sched_getaffinity(me), os.getpriority(os.PRIO_PROCESS, me)))
        at_work.release()
        gate.acquire(timeout=60)

    queue = WorkQueue(1, work, key=lambda item: item, beside=True)
    queue.put(0)
    assert at_work.acquire(timeout=60)
    for item in range(1, 300):
        queue.put(item)
    for _ in range(300):
        gate.release()
    wait_until(queue)
    queue.close()
    numbers = [len(processors) for processors, _ in seen]
    assert numbers[0] == numbers[-1] == 1 and numbers[1] == len(every)
    assert all(processors <= every for processors, _ in seen)
    assert {niceness for _, niceness in seen} == {19}
    assert os.sched_getaffinity(0) == every, "only its own threads"
