"""Sources that a library of their own reads: LMDB, HDF5, Zarr."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker.errors import ConfigError, SourceError, StokerError
from stoker.source import HDF5Source, LMDBSource, Source, ZarrSource, open_source
from stoker.testing import SourceConformance

lmdb = pytest.importorskip("lmdb", reason="lmdb is not installed: pip install 'stoker[lmdb]'")
h5py = pytest.importorskip("h5py", reason="h5py is not installed: pip install 'stoker[hdf5]'")
zarr = pytest.importorskip("zarr", reason="zarr is not installed: pip install 'stoker[zarr]'")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
    # Zarr has no final specification of texts of variable length.
    pytest.mark.filterwarnings("ignore::zarr.errors.UnstableSpecificationWarning"),
]
ROWS = 50
IMAGES = np.random.default_rng(0).integers(0, 255, (ROWS, 4, 3), dtype=np.uint8)
LABELS = np.arange(ROWS, dtype=np.int64) % 7
TEXTS = [f"å{i}" * (i % 4) for i in range(ROWS)]


def write_lmdb(path: Path, items: dict[bytes, bytes], **how: Any) -> Path:
    with (
        lmdb.open(str(path), map_size=1 << 24, **how) as database,
        database.begin(write=True) as tx,
    ):
        for key, value in items.items():
            tx.put(key, value)
    return path


def write_hdf5(path: Path, **how: Any) -> Path:
    with h5py.File(path, "w") as file:
        file.create_dataset("train/images", data=IMAGES, **how)
        file.create_dataset("labels", data=LABELS)
        file.create_dataset("texts", data=TEXTS, dtype=h5py.string_dtype())
        file.create_dataset("other", data=np.zeros(3))
    return path


def write_zarr(path: Path, **how: Any) -> Path:
    group = zarr.open_group(path, mode="w", **how)
    group.create_array("train/images", data=IMAGES, chunks=(8, 4, 3))
    group.create_array("labels", data=LABELS, chunks=(16,))
    return path


@pytest.mark.exact("LMDB", "a source, of local files")
class TestLMDB(SourceConformance):
    def make(self, samples: list[bytes], tmp_path: Path) -> Source:
        items = {b"%08d" % number: sample for number, sample in enumerate(samples)}
        return LMDBSource(write_lmdb(tmp_path / "x", items))


@pytest.mark.exact("HDF5", "a source, of local files")
class TestHDF5(SourceConformance):
    def make(self, samples: list[bytes], tmp_path: Path) -> Source:
        with h5py.File(tmp_path / "x.h5", "w") as file:
            file.create_dataset("x", (len(samples),), h5py.vlen_dtype(np.uint8), chunks=(7,))[:] = (
                np.array([np.frombuffer(s, np.uint8) for s in samples] + [None], object)[:-1]
            )
        return HDF5Source(tmp_path / "x.h5")


@pytest.mark.exact("HDF5", "rows of arrays as h5py reads them")
@pytest.mark.parametrize("how", [{}, {"chunks": (8, 4, 3)}, {"compression": "gzip"}])
def test_rows_of_hdf5(tmp_path: Path, how: dict[str, Any]) -> None:
    path = write_hdf5(tmp_path / "x.h5", **how)
    source = open_source(path, columns=["train/images", "labels", "texts"])
    assert isinstance(source, HDF5Source)
    order = np.random.default_rng(1).permutation(ROWS)
    for row, sample in zip(order.tolist(), source.read(order), strict=True):
        found = source.decode(sample)
        assert np.array_equal(found["train/images"], IMAGES[row])
        assert (found["labels"], found["texts"]) == (LABELS[row], TEXTS[row])
    images = HDF5Source(path, columns="train/images")
    assert images.sizes_are_exact and images.read([7]) == [IMAGES[7].tobytes()]
    assert np.array_equal(images.values(), IMAGES)
    with pytest.raises(ConfigError, match="'other': 3"):
        HDF5Source(path)


@pytest.mark.exact("Zarr 2 and 3", "rows of arrays of both versions as zarr reads them")
@pytest.mark.parametrize("version", [2, 3])
def test_rows_of_zarr(tmp_path: Path, version: int) -> None:
    path = write_zarr(tmp_path / "store", zarr_format=version)
    source = open_source(path)
    assert isinstance(source, ZarrSource) and source.sizes_are_exact
    order = np.random.default_rng(1).permutation(ROWS)
    for row, sample in zip(order.tolist(), source.read(order), strict=True):
        found = source.decode(sample)
        assert list(found) == ["labels", "train/images"]
        assert np.array_equal(found["train/images"], IMAGES[row]) and found["labels"] == LABELS[row]
        assert len(sample) == source.sizes[row]
    assert ZarrSource(path, columns="labels").values().tolist() == LABELS.tolist()
    zarr.save_array(tmp_path / "one.zarr", IMAGES)
    one = open_source(tmp_path / "one.zarr")
    assert isinstance(one, ZarrSource) and one.read([3]) == [IMAGES[3].tobytes()]


def test_a_forked_child_reads_zarr(tmp_path: Path) -> None:
    source = ZarrSource(write_zarr(tmp_path / "store"), columns="labels", kept_bytes=0)
    source.read([1])
    child = os.fork()
    if child == 0:
        os._exit(0 if source.read([5]) == [LABELS[5].tobytes()] else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_chunk_is_read_once_for_all_its_rows(tmp_path: Path) -> None:
    path = write_zarr(tmp_path / "store")
    source = ZarrSource(path, columns="labels")
    source.read([1])
    for file in (path / "labels").rglob("*"):
        if file.is_file() and file.name != "zarr.json":
            file.write_bytes(b"damaged")
    assert source.read([3, 15]) == [LABELS[3].tobytes(), LABELS[15].tobytes()]
    samples, errors = source.read_each([2, 20])
    assert samples[0] == LABELS[2].tobytes() and isinstance(errors[1], SourceError)
    assert errors[1].ids == [20]


@pytest.mark.exact("LMDB", "values in the order of their keys")
def test_lmdb_by_keys(tmp_path: Path) -> None:
    items = {b"b": b"2", b"a": b"1", b"__len__": b"2", b"c": b""}
    folder = write_lmdb(tmp_path / "folder", items)
    file = write_lmdb(tmp_path / "x.lmdb", items, subdir=False)
    for where in (folder, file):
        source = open_source(where)
        assert isinstance(source, LMDBSource)
        assert source.read(range(3)) == [b"1", b"2", b""]
        assert source.key(1) == b"b" and source.name(1).endswith("#b")
    assert len(LMDBSource(file, skip=())) == 4
    with pytest.raises(ConfigError, match="no samples"):
        LMDBSource(write_lmdb(tmp_path / "empty", {b"length": b"0"}))


def test_several_paths_are_refused(tmp_path: Path) -> None:
    path = write_hdf5(tmp_path / "x.h5")
    with pytest.raises(ConfigError, match="HDF5Source takes one path"):
        open_source([path, path])


@pytest.mark.parametrize("kind", [LMDBSource, HDF5Source, ZarrSource])
def test_what_is_none_is_refused(tmp_path: Path, kind: Any) -> None:
    (tmp_path / "garbage").write_bytes(b"garbage" * 5000)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(b"garbage")
    for name in ("garbage", "folder", "gone"):
        with pytest.raises(ConfigError, match=name):
            kind(tmp_path / name)


@pytest.mark.parametrize("cut", [100, 2000, 4000, 6000])
def test_hdf5_that_is_cut_off(tmp_path: Path, cut: int) -> None:
    path = write_hdf5(tmp_path / "x.h5", compression="gzip")
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(StokerError, match=r"x\.h5"):
        HDF5Source(path, columns=["labels", "texts"]).read(range(ROWS))
