"""All indexes of neighbours against a plain search."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest

from stoker.errors import ConfigError
from stoker.importance import knn
from stoker.importance.knn import FlatIndex, HnswIndex, NearestIndex, VectorTable
from stoker.pytorch.observe import TorchIndex

DIMENSION = 8
MAKERS = [FlatIndex, partial(TorchIndex, device="cpu"), HnswIndex]


def random(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, DIMENSION)).astype(np.float32)


def plain(vectors: np.ndarray, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return rows and distances in double precision."""
    difference = queries[:, None].astype(np.float64) - vectors[None]
    distances = np.sqrt((difference**2).sum(axis=-1))
    rows = np.argsort(distances, axis=1, kind="stable")[:, :k]
    return rows, np.take_along_axis(distances, rows, axis=1)


@pytest.fixture(params=MAKERS, ids=["flat", "torch", "hnsw"])
def make(request: pytest.FixtureRequest) -> Iterator[Callable[[VectorTable], NearestIndex]]:
    made: list[NearestIndex] = []

    def make(table: VectorTable) -> NearestIndex:
        made.append(request.param(table))
        return made[-1]

    yield make
    for index in made:
        index.close()


def test_finds_the_nearest_rows_as_they_are_now(
    make: Callable[[VectorTable], NearestIndex],
) -> None:
    """Rows come in two parts, then some move."""
    table = VectorTable(300)
    index = make(table)
    for part in np.split(np.arange(300, dtype=np.uint32), 2):
        index.changed(table.put(part, random(150, seed=int(part[0]))))
    moved = np.arange(0, 300, 7, dtype=np.uint32)
    index.changed(table.put(moved, random(len(moved), seed=9)))
    queries = np.concatenate((random(20, seed=3), table.vectors[:5]))
    rows, distances = index.search(queries, 12)
    true_rows, true_distances = plain(table.vectors, queries, 12)
    assert rows.dtype == np.int64 and distances.dtype == np.float32
    found = np.mean([np.isin(*both).mean() for both in zip(true_rows, rows, strict=True)])
    assert found == 1 or (isinstance(index, HnswIndex) and found > 0.7)
    assert (np.diff(distances, axis=1) >= 0).all()
    exact = np.linalg.norm(queries[:, None] - table.vectors[rows], axis=-1)
    np.testing.assert_allclose(distances, exact, atol=2e-3)
    assert (distances >= true_distances - 2e-3).all()


def test_no_more_rows_than_there_are(make: Callable[[VectorTable], NearestIndex]) -> None:
    table = VectorTable(300)
    index = make(table)
    index.changed(table.put(np.arange(3, dtype=np.uint32), random(3)))
    rows, distances = index.search(random(2, seed=1), 10)
    assert rows.shape == distances.shape == (2, 3)
    assert [sorted(row) for row in rows.tolist()] == [[0, 1, 2]] * 2
    assert index.search(random(1, seed=1), 10).rows.shape == (1, 3)


def test_batches_are_searched_by_products_of_matrices() -> None:
    table, queries = VectorTable(300), random(64)
    table.put(np.arange(300, dtype=np.uint32), random(300, seed=1))
    faiss = knn.load("faiss")
    faiss.cvar.distance_compute_blas_threshold = 10**9
    found = FlatIndex(table).search(queries, 2)
    assert faiss.cvar.distance_compute_blas_threshold <= 64  # else it takes three times as long
    assert found.rows.tolist() == plain(table.vectors, queries, 2)[0].tolist()


def test_an_empty_table_and_no_queries(make: Callable[[VectorTable], NearestIndex]) -> None:
    table = VectorTable(5)
    index = make(table)
    assert index.search(random(2), 4).rows.shape == (2, 0)
    index.changed(table.put(np.array([3], np.uint32), random(1)))
    assert index.search(random(0), 4).rows.shape[0] == 0
    assert index.recall(3, 4) == 1.0


def test_hnsw_is_built_anew_when_a_quarter_has_changed() -> None:
    table = VectorTable(400)
    index = HnswIndex(table)
    index.changed(table.put(np.arange(400, dtype=np.uint32), random(400)))
    few = np.arange(100, dtype=np.uint32)
    index.changed(table.put(few, random(100, seed=1)))
    index.changed(table.put(few, random(100, seed=2)))
    index.wait()
    assert index.rebuilds == 0
    index.changed(table.put(np.array([200], np.uint32), random(1, seed=3)))
    index.changed(table.put(np.array([300], np.uint32), random(1, seed=4)))
    index.wait()
    assert index.rebuilds == 1
    assert index.recall(10, 20) >= 0.95
    index.close()


def test_hnsw_keeps_what_comes_while_it_is_built() -> None:
    """Rows that are new, or change, during a build are found afterwards."""
    table = VectorTable(6000)
    index = HnswIndex(table)
    index.changed(table.put(np.arange(5000, dtype=np.uint32), random(5000)))
    index.changed(table.put(np.arange(2000, dtype=np.uint32), random(2000, seed=1)))
    index.changed(table.put(np.arange(4900, 5100, dtype=np.uint32), random(200, seed=2)))
    index.wait()
    assert index.rebuilds == 1
    rows = np.concatenate((np.arange(100), np.arange(5000, 5100)))
    assert (index.search(table.vectors[rows], 30).rows[:, 0] == rows).mean() > 0.95
    index.close()


def test_a_low_recall_is_measured_and_mended() -> None:
    """After all rows have moved, a graph over the old ones is worth little."""
    table = VectorTable(3000)
    index = HnswIndex(table, rebuild_share=2.0)
    ids = np.arange(3000, dtype=np.uint32)
    index.changed(table.put(ids, random(3000)))
    before = index.recall(10, 10)
    index.changed(table.put(ids, random(3000, seed=1)))
    low = index.recall(10, 10)
    index.wait()
    assert low < 0.5 < 0.9 < min(before, index.recall(10, 10))
    assert index.rebuilds == 1
    index.close()


def test_the_old_graph_stays_if_none_can_be_built() -> None:
    class Full:
        def add(self, keys: np.ndarray, vectors: np.ndarray, threads: int) -> None:
            raise MemoryError("no room")

    table = VectorTable(400)
    index = HnswIndex(table)
    ids = np.arange(400, dtype=np.uint32)
    index.changed(table.put(ids, random(400)))
    index._make = lambda **options: Full()
    index.changed(table.put(ids[:150], random(150)))
    with pytest.warns(RuntimeWarning, match="could not be rebuilt .MemoryError"):
        index.wait()
    index.changed(table.put(ids[:50], random(50)))
    index.wait()
    assert index.rebuilds == 0
    assert (index.search(random(400)[200:], 3).rows[:, 0] == np.arange(200, 400)).mean() > 0.95


def test_a_build_under_way_ends_with_its_index() -> None:
    table = VectorTable(30_000)
    index = HnswIndex(table)
    ids = np.arange(30_000, dtype=np.uint32)
    index.changed(table.put(ids[:50], random(50)))
    index._start_build()
    index.changed(table.put(ids[:50], random(50, seed=1)))
    index.close()
    assert index._build is None


@pytest.mark.parametrize("make", [FlatIndex, HnswIndex])
def test_a_missing_library_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, make: type[FlatIndex]
) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(knn, "import_module", missing)
    with pytest.raises(ConfigError, match=r"pip install 'stoker\[importance\]'"):
        make(VectorTable(3))
