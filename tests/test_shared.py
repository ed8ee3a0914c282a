"""SharedArray: one memory in every kind of child, nothing left behind, nothing copied."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from stoker.errors import CapacityError, ConfigError
from stoker.shared import SharedArray, private_arrays, scratch

METHODS = ("fork", "spawn", "forkserver")
# CPython 3.12 and later warn of any fork in a process that has threads (OpenBLAS starts some).
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


def _private_bytes() -> int:
    """Memory of this process that it shares with nobody."""
    total = 0
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith(("Private_Clean", "Private_Dirty")):
            total += int(line.split()[1]) * 1024
    return total


def _double(shared: SharedArray) -> None:
    shared.array[:] *= 2


def _hand_on(shared: SharedArray) -> None:
    """A child that gives the array to a child of its own."""
    child = multiprocessing.get_context("spawn").Process(target=_double, args=(shared,))
    child.start()
    child.join()
    assert child.exitcode == 0


def _report_memory(shared: SharedArray, answers: multiprocessing.SimpleQueue[int]) -> None:
    before = _private_bytes()
    assert int(shared.array.sum()) == shared.array.size
    answers.put(_private_bytes() - before)


def _report_leaked_fds(shared: SharedArray, answers: multiprocessing.SimpleQueue[str]) -> None:
    code = "import os; print(os.popen('ls -l /proc/%d/fd' % os.getpid()).read().count('stoker:'))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, close_fds=False
    )
    answers.put(done.stdout.strip())


def _run(method: str, target: object, *args: object) -> None:
    child = multiprocessing.get_context(method).Process(target=target, args=args)
    child.start()
    child.join(60)
    assert child.exitcode == 0


def test_create_gives_zeros_of_the_shape_and_dtype() -> None:
    shared = SharedArray.create((3, 4), np.int16, "table")
    assert shared.array.shape == (3, 4)
    assert shared.array.dtype == np.int16
    assert not shared.array.any()
    assert shared.array.flags.writeable
    assert "table" in repr(shared)
    assert SharedArray.create(7).array.shape == (7,)
    assert SharedArray.create(np.int64(7)).array.shape == (7,)


def test_read_only_view_refuses_writing_and_sees_what_is_written() -> None:
    shared = SharedArray.create(3)
    view = shared.read_only
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1
    shared.array[0] = 5
    assert view[0] == 5


@given(npst.arrays(npst.scalar_dtypes(), npst.array_shapes(min_dims=0, min_side=0)))
def test_copy_of_keeps_every_array(array: np.ndarray) -> None:
    shared = SharedArray.copy_of(array)
    assert shared.array.dtype == array.dtype
    assert shared.array.shape == array.shape
    assert shared.array.tobytes() == array.tobytes()


@pytest.mark.parametrize("method", METHODS)
def test_a_child_sees_the_same_memory(method: str) -> None:
    shared = SharedArray.copy_of(np.arange(1000))
    _run(method, _double, shared)
    assert np.array_equal(shared.array, np.arange(1000) * 2)


@pytest.mark.parametrize("method", METHODS)
def test_a_child_can_hand_it_on(method: str) -> None:
    shared = SharedArray.copy_of(np.arange(10))
    _run(method, _hand_on, shared)
    assert np.array_equal(shared.array, np.arange(10) * 2)


@pytest.mark.parametrize("method", METHODS)
def test_private_memory_of_a_child_does_not_grow(method: str) -> None:
    shared = SharedArray.copy_of(np.ones(8 << 20, np.int64))  # 64 MiB
    answers = multiprocessing.get_context(method).SimpleQueue()
    _run(method, _report_memory, shared, answers)
    assert answers.get() < 8 << 20


@pytest.mark.parametrize("method", ("spawn", "forkserver"))
def test_descriptor_does_not_leak_into_programs_that_a_child_starts(method: str) -> None:
    shared = SharedArray.create(10)
    answers = multiprocessing.get_context(method).SimpleQueue()
    _run(method, _report_leaked_fds, shared, answers)
    assert answers.get() == "0"


_LAST_REFERENCE = """
import gc, os
from pathlib import Path
import numpy as np
from stoker.shared import SharedArray

def descriptors():
    return len(os.listdir("/proc/self/fd"))

before = descriptors()
for _ in range(100):
    shared = SharedArray.create(1 << 20, np.uint8)
    view = shared.array[10:20]
    view[:] = 7
    del shared
    assert view.tolist() == [7] * 10  # a view keeps the memory, not the descriptor
    assert "stoker:" in Path("/proc/self/maps").read_text()
    del view
gc.collect()
assert descriptors() == before, (before, descriptors())
assert "stoker:" not in Path("/proc/self/maps").read_text()
"""


def test_memory_and_descriptors_go_with_the_last_reference() -> None:
    # In a process of its own: other tests' descriptors and memory come and go in this one.
    subprocess.run([sys.executable, "-c", _LAST_REFERENCE], check=True)


def test_its_size_cannot_be_changed() -> None:
    shared = SharedArray.create(1000)
    with pytest.raises(PermissionError):
        os.truncate(shared.fileno(), 10)


def test_copies_are_independent_and_plain_pickling_is_refused() -> None:
    shared = SharedArray.copy_of([1, 2, 3])
    other = copy.deepcopy(shared)
    other.array[0] = 9
    assert shared.array.tolist() == [1, 2, 3]
    with pytest.raises(TypeError, match="child process is being started"):
        pickle.dumps(shared)
    with pytest.raises(TypeError, match=r"SharedArray\.create"):
        SharedArray()


def test_works_where_memfd_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    shared = SharedArray.copy_of(np.arange(5))
    _run("spawn", _double, shared)
    assert shared.array.tolist() == [0, 2, 4, 6, 8]


@st.composite
def _negative_shapes(draw: st.DrawFn) -> tuple[int, ...]:
    return (*draw(st.lists(st.integers(0, 5), max_size=2)), draw(st.integers(-5, -1)))


@given(_negative_shapes())
def test_negative_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="negative"):
        SharedArray.create(shape)


def test_python_objects_and_impossible_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="Python objects"):
        SharedArray.create(3, object)
    with pytest.raises(CapacityError, match="cannot map"):
        SharedArray.create(1 << 62, np.uint8)
    with pytest.raises(CapacityError, match="shared memory"):
        SharedArray.create((1 << 62, 1 << 10), np.uint8)


def test_private_arrays_are_those_of_one_process() -> None:
    with private_arrays(), ThreadPoolExecutor(1) as thread:
        arrays = [SharedArray.create(shape, np.int32) for shape in ((), 0, 5, (3, 4))]
        copied = SharedArray.copy_of([1, 2, 3])
        elsewhere = thread.submit(SharedArray.create, 5).result()
        with pytest.raises(CapacityError, match="cannot have"):
            SharedArray.create(1 << 62, np.uint8)
    assert [each.array.shape for each in arrays] == [(), (0,), (5,), (3, 4)]
    assert not any(each.array.any() for each in arrays)
    assert copied.is_private
    assert not elsewhere.is_private
    assert not SharedArray.create(5).is_private
    copied.array[0] = 9
    assert copied.read_only.tolist() == [9, 2, 3]
    with pytest.raises(TypeError, match="private"):
        copied.fileno()


@pytest.mark.parametrize("count", [0, 1, 1_000_003])
def test_scratch_is_zeros_to_write_to_that_leave_nothing(count):
    array = scratch(count, np.float64)
    assert array.shape == (count,) and array.dtype == np.float64 and not array.any()
    array.fill(1.0)
    before = _resident()
    del array
    assert before - _resident() >= 0.9 * 8 * count - (1 << 20)


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")
