"""Product-quantized embeddings: what codes find, how they follow, and what they take."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.errors import ConfigError
from stoker.importance import knn
from stoker.importance.base import Observation
from stoker.importance.graph import Graph
from stoker.importance.knn import FlatIndex, VectorTable
from stoker.importance.quantized import CodeIndex, CodeTable
from stoker.scores import Scores

pytest.importorskip("faiss", reason="faiss is not installed")

N, D, BYTES = 600, 16, 8


@pytest.fixture(autouse=True)
def few_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.importance.quantized._LEARN_FROM", 300)


def clusters(count: int, rng: np.random.Generator, groups: int = 12) -> np.ndarray:
    centres = 3 * np.random.default_rng(99).standard_normal((groups, D))
    drawn = centres[np.arange(count) % groups] + rng.standard_normal((count, D))
    return drawn.astype(np.float32)


def batches(vectors: np.ndarray, size: int = 50) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    order = np.random.default_rng(1).permutation(len(vectors)).astype(np.uint32)
    for start in range(0, len(order), size):
        ids = order[start : start + size]
        yield ids, vectors[ids]


def filled(vectors: np.ndarray, code_bytes: int = BYTES) -> CodeTable:
    table = CodeTable(len(vectors), code_bytes)
    for ids, some in batches(vectors):
        table.put(ids, some)
    return table


def found_share(table: CodeTable, vectors: np.ndarray, near: int = 10, most: int = 40) -> float:
    exact = VectorTable(len(vectors))
    exact.put(table.ids, vectors[table.ids])
    true = FlatIndex(exact).search(vectors[:50], near).rows
    found = CodeIndex(table).search(vectors[:50], most).rows
    return float(np.mean([np.isin(t, f).mean() for t, f in zip(true, found, strict=True)]))


def test_until_enough_came_the_search_is_exact() -> None:
    vectors = clusters(N, np.random.default_rng(0))
    table, exact = CodeTable(N, BYTES), VectorTable(N)
    for ids in (np.arange(100, 200), np.arange(150, 250), np.arange(20)):
        rows = table.put(ids.astype(np.uint32), vectors[ids])
        assert rows.tolist() == exact.put(ids.astype(np.uint32), vectors[ids]).tolist()
    index = CodeIndex(table)
    got, wanted = index.search(vectors[:9], 7), FlatIndex(exact).search(vectors[:9], 7)
    assert got.rows.tolist() == wanted.rows.tolist()
    np.testing.assert_allclose(got.distances, wanted.distances)
    np.testing.assert_array_equal(table.vectors, exact.vectors)
    assert index.recall(5, 10) == 1


def test_codes_find_most_neighbours_in_few_bytes() -> None:
    vectors = clusters(N, np.random.default_rng(0))
    table = filled(vectors)
    state = table.arrays()
    assert state["codes"].nbytes == N * BYTES < vectors.nbytes / 7
    assert state["vectors"].size == 0, "none are kept whole but the latest"
    assert found_share(table, vectors) > 0.9
    assert CodeIndex(table).recall(10, 40) > 0.9
    error = np.linalg.norm(table.vectors - vectors[table.ids], axis=1)
    assert np.mean(error) < 0.5 * np.mean(np.linalg.norm(vectors, axis=1))
    fewer = found_share(filled(vectors, 2), vectors, 10, 10)
    assert 0.2 < fewer < found_share(table, vectors, 10, 10)


def test_distances_are_those_to_what_codes_stand_for() -> None:
    vectors = clusters(N, np.random.default_rng(0))
    table = filled(vectors)
    found = table.search(vectors[:5], 30)
    away = np.linalg.norm(table.vectors[found.rows] - vectors[:5, None], axis=2)
    np.testing.assert_allclose(found.distances, away, rtol=1e-3, atol=1e-2)
    assert (np.diff(found.distances, axis=1) >= 0).all()


def test_centroids_are_learned_again_as_vectors_drift() -> None:
    rng = np.random.default_rng(0)
    vectors = clusters(N, rng)
    table = filled(vectors)
    moved = 4 * clusters(N, rng)[:, ::-1] + 20
    for _ in range(2):
        for ids, some in batches(np.ascontiguousarray(moved)):
            table.put(ids, some)
    assert found_share(table, moved) > 0.9
    error = np.linalg.norm(table.vectors - moved[table.ids], axis=1)
    assert np.mean(error) < 0.15 * np.mean(np.linalg.norm(moved, axis=1))


def test_dimensions_that_do_not_divide_are_filled_up() -> None:
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((N, 13)).astype(np.float32)
    table = filled(vectors, 5)
    assert table.vectors.shape == (N, 13)
    assert found_share(table, vectors, 1, 40) > 0.5


def test_small_data_are_kept_whole() -> None:
    vectors = clusters(100, np.random.default_rng(0))
    table = filled(vectors)
    np.testing.assert_array_equal(table.vectors, vectors[table.ids])


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(1, 290), min_size=1, max_size=6), st.integers(0, 2**32 - 1))
def test_a_batch_of_any_size_may_bring_the_last_one_wanted(sizes: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    table, exact = CodeTable(400, 4), VectorTable(400)
    for size in sizes:
        ids = rng.choice(400, size, replace=False).astype(np.uint32)
        vectors = rng.standard_normal((size, 8)).astype(np.float32)
        assert table.put(ids, vectors).tolist() == exact.put(ids, vectors).tolist()
    assert table.ids.tolist() == exact.ids.tolist()
    assert table.vectors.shape == exact.vectors.shape
    far = np.linalg.norm(table.vectors - exact.vectors, axis=1).mean()
    assert far < 0.8 * np.linalg.norm(exact.vectors, axis=1).mean()


@pytest.mark.parametrize("before", [100, N, N + 400])
def test_a_state_continues_exactly(before: int) -> None:
    rng = np.random.default_rng(3)
    vectors = clusters(before + 700, rng)
    ids = (rng.permutation(before + 700) % N).astype(np.uint32)

    def put(table: CodeTable, start: int, end: int) -> None:
        for at in range(start, end, 50):
            chosen = np.unique(ids[at : at + 50])
            table.put(chosen, vectors[at : at + len(chosen)])

    table = CodeTable(N, BYTES)
    put(table, 0, before)
    other = CodeTable(N, BYTES)
    other.restore(table.arrays())
    for one in (table, other):
        put(one, before, before + 700)
    assert table.ids.tolist() == other.ids.tolist()
    np.testing.assert_array_equal(table.vectors, other.vectors)
    assert table.recall(5, 20) == other.recall(5, 20)


def test_a_state_of_another_kind_is_refused() -> None:
    state = filled(clusters(N, np.random.default_rng(0))).arrays()
    with pytest.raises(ConfigError, match="code_bytes of before"):
        CodeTable(N, BYTES + 1).restore(state)
    with pytest.raises(ConfigError, match="code_bytes of before"):
        VectorTable(N).restore(state)
    with pytest.raises(ConfigError, match="out of range"):
        CodeTable(N - 1, BYTES).restore(state)


@pytest.mark.parametrize("code_bytes", [0, -1, 2.5])
def test_sizes_of_codes_that_make_no_sense_are_refused(code_bytes: float) -> None:
    with pytest.raises(ConfigError, match=f"code_bytes={code_bytes}"):
        CodeTable(N, code_bytes)  # type: ignore[arg-type]


def test_codes_need_a_table_of_codes_faiss_and_no_other_index(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match="VectorTable has no codes"):
        CodeIndex(VectorTable(N))
    with pytest.raises(ConfigError, match="exclude each other"):
        Graph(N, index=FlatIndex, code_bytes=4)

    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(knn, "import_module", missing)
    with pytest.raises(ConfigError, match=r"stoker\[importance\]"):
        CodeTable(N, 4)


def test_graph_scores_of_codes_are_near_those_of_embeddings() -> None:
    rng = np.random.default_rng(0)
    vectors = clusters(N, rng)
    labels = np.arange(N) % 12 // 2 % 5
    scores = {}
    for code_bytes in (None, BYTES):
        graph, kept = Graph(N, neighbor_max=60, target_degree=20, code_bytes=code_bytes), Scores(N)
        for epoch in range(2):
            graph.begin_epoch(kept, epoch)
            for step, (ids, some) in enumerate(batches(vectors)):
                seen = Observation(ids, step, epoch, embeddings=some, labels=labels[ids])
                graph.update(kept, seen)
        assert graph.neighbours is not None
        assert graph.neighbours.degree.mean() == pytest.approx(20, rel=0.4)
        scores[code_bytes] = kept.values.copy()
    assert np.corrcoef(scores[None], scores[BYTES])[0, 1] > 0.8
