"""Arrays under a name: found by processes that are not related, zeros when new."""

from __future__ import annotations

import numpy as np
import pytest
from support.processes import warm

from stoker import _core
from stoker.errors import SegmentError
from stoker.shared import SharedArray
from stoker.store import registry
from stoker.store.arena import Handle
from stoker.store.registry import clean, list_arenas, open_arrays

LAYOUT = {"served": (1000, np.uint32), "displaced": (1000, np.uint64)}


@pytest.fixture(autouse=True)
def own_runtime_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("STOKER_RUNTIME_DIR", str(tmp_path / "runtime"))


def mark_all(results):
    with open_arrays("job", LAYOUT) as opened:
        ids = np.arange(1000, dtype=np.uint32)
        first = _core.mark_once(opened["served"].array, ids, 1)
        opened["displaced"].array[ids[first]] = ids[first]
        results.put(int(first.sum()))
        results.put(opened.shared)


def test_processes_find_the_same_memory():
    results = warm.Queue()
    with open_arrays("job", LAYOUT) as opened:
        assert opened.shared
        opened["served"].array[:10] = 1
        children = [warm.Process(target=mark_all, args=(results,)) for _ in range(2)]
        for child in children:
            child.start()
        said = [results.get(timeout=120) for _ in range(4)]
        for child in children:
            child.join(60)
        assert sum(said) == 990 + 2  # each id once, and all are shared
        assert opened["served"].array.tolist() == [1] * 1000
        assert opened["displaced"].array[10:].tolist() == list(range(10, 1000))


def test_other_names_and_other_layouts_are_other_memory():
    with (
        open_arrays("one", LAYOUT) as one,
        open_arrays("two", LAYOUT) as two,
        open_arrays("one", {"served": (999, np.uint32)}) as three,
        open_arrays("one", LAYOUT, share=False) as four,
        open_arrays("one", LAYOUT) as again,
    ):
        one["served"].array[:] = 7
        for other in (two, three, four):
            assert not other["served"].array.any()
        assert again["served"].array.all()
        assert not four.shared


def test_they_vanish_with_their_last_holder_and_are_usable_after_closing():
    first = open_arrays("job", LAYOUT)
    first["served"].array[:] = 3
    first.close()
    first.close()
    assert first["served"].array.all()
    with open_arrays("job", LAYOUT) as second:
        assert not second["served"].array.any()
    assert clean() == 0


def test_another_holder_takes_over():
    first, second = open_arrays("job", LAYOUT), open_arrays("job", LAYOUT)
    first["served"].array[5] = 5
    first.close()
    with second, open_arrays("job", LAYOUT) as third:
        assert third["served"].array[5] == 5


def test_they_are_no_caches():
    with open_arrays("job", LAYOUT):
        assert list_arenas() == []


def test_without_a_safe_directory_each_process_has_its_own(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("STOKER_RUNTIME_DIR", str(tmp_path / "file"))
    with pytest.warns(RuntimeWarning, match="cannot share served, displaced"):
        opened = open_arrays("job", LAYOUT)
    assert not opened.shared
    assert opened["displaced"].array.shape == (1000,)


@pytest.mark.parametrize(
    "arrays", [{}, {"served": [1001, "<u4"]}, {"a": [1, "<u4"], "b": [1, "<u4"]}]
)
def test_memory_that_is_not_what_it_says_is_refused(arrays):
    memory = SharedArray.create(1000, np.uint32)
    with pytest.raises(SegmentError):
        registry._attach(Handle((memory.fileno(),), {"arrays": arrays}))
