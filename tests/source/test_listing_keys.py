"""Keys: packed names behave as a list of names does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.source import ImageFolderSource, ImagePrefixSource
from stoker.source.listing import KeyTable, concatenate, pack_entries
from stoker.source.remote.backend import Entry

NAMES = st.lists(st.text(min_size=1, max_size=4).map(str.encode), max_size=20)


def entries(names: list[bytes]) -> list[Entry]:
    return [Entry(name, 1 + index, index) for index, name in enumerate(names)]


@given(NAMES, st.data())
def test_names_are_taken_and_cut(names: list[bytes], data: st.DataObject) -> None:
    keys = pack_entries(entries([b"pre/" + name for name in names]))
    cut = keys.without_prefix(4)
    assert [cut[i] for i in range(len(cut))] == names
    order = data.draw(st.lists(st.integers(0, len(names) - 1)) if names else st.just([]))
    taken = cut.take(order)
    assert [taken[i] for i in range(len(taken))] == [names[i] for i in order]
    assert taken.sizes.tolist() == [1 + i for i in order]
    joined = concatenate([cut, taken])
    assert [joined[i] for i in range(len(joined))] == names + [names[i] for i in order]
    with pytest.raises(IndexError):
        cut[len(names)]


@given(st.lists(NAMES, max_size=4))
def test_pages_in_any_order_end_up_sorted_and_once(pages: list[list[bytes]]) -> None:
    table = KeyTable()
    for page in pages:
        table.add(entries(page))
    keys = table.finish()
    assert [keys[i] for i in range(len(keys))] == sorted({name for page in pages for name in page})


def test_markers_of_folders_are_left_out() -> None:
    table = KeyTable()
    sizes = {b"a": 0, b"a-b": 1, b"a/x": 1, b"b/": 0, b"b/y": 2, b"c": 0, b"d": 5, b"d/z": 1}
    table.add([Entry(name, size, 1) for name, size in sizes.items()])
    keys = table.finish()
    assert [keys[i] for i in range(len(keys))] == [b"a-b", b"a/x", b"b/y", b"c", b"d", b"d/z"]


def test_fingerprints_tell_names_sizes_and_versions_apart() -> None:
    base = [Entry(b"ab", 1, 1), Entry(b"c", 2, 2)]
    others = [
        [Entry(b"a", 1, 1), Entry(b"bc", 2, 2)],
        [Entry(b"ab", 2, 1), Entry(b"c", 1, 2)],
        [Entry(b"ab", 1, 1), Entry(b"c", 2, 3)],
        base[::-1],
        base[:1],
    ]
    fingerprints = {pack_entries(each).fingerprint for each in [base, *others]}
    assert len(fingerprints) == 1 + len(others)
    assert pack_entries(base).tags.dtype == np.uint64


PARTS = st.text("aB-._0é", min_size=1, max_size=2).filter(lambda name: name not in (".", ".."))
PATHS = st.builds(
    lambda folders, name, ending: "/".join([*folders, name + ending]),
    st.lists(PARTS, min_size=1, max_size=3),
    PARTS,
    st.sampled_from([".jpg", ".JPEG", ".txt"]),
)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=12, deadline=None
)
@given(files=st.sets(PATHS, min_size=1, max_size=8))
def test_a_prefix_has_the_order_of_a_local_copy(
    files: set[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("root")
    for number, name in enumerate({"cls/always.jpg", *files}):
        path = root / name
        if any(parent.is_file() for parent in path.parents) or path.exists():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"%d" % number)
    local = ImageFolderSource(root, allow_empty=True, cache_listing=False)
    there = ImagePrefixSource(f"file://{root}")
    names = [Path(local.name(i)).relative_to(root) for i in range(len(local))]
    assert [
        Path(there.name(i).removeprefix("file://")).relative_to(root) for i in range(len(there))
    ] == names
    ids = range(len(local))
    assert there.read(ids) == local.read(ids)
    assert [there.classes[t] for t in there.targets] == [local.classes[t] for t in local.targets]
