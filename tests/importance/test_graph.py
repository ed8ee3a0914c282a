"""Scores from neighbours: worked by hand, and against a plain reference."""

import numpy as np
import pytest

from stoker.errors import ConfigError
from stoker.importance.base import Observation
from stoker.importance.graph import EXACT_UP_TO, Graph
from stoker.importance.knn import FlatIndex, HnswIndex
from stoker.scores import Scores


def shown(
    ids: object, embeddings: object, labels: object, step: int = 0, epoch: int = 0
) -> Observation:
    return Observation(
        np.array(ids, np.uint32),
        step,
        epoch,
        embeddings=np.array(embeddings, np.float32),
        labels=np.array(labels, np.int64),
    )


# Samples on a line: three dogs close together, a cat among them, a cat alone, a far dog.
LINE = [[0.0], [1.0], [2.0], [1.5], [10.0], [30.0]]
PETS = [0, 0, 0, 1, 1, 0]


def test_four_cases_by_hand() -> None:
    """Radius 2.5 (decay 2, threshold exp(-5)): counts of x_same with itself, and of x_other."""
    scores = Scores(6)
    graph = Graph(6, neighbor_max=10, target_degree=1, decay=2.0, threshold=float(np.exp(-5)))
    graph.update(scores, shown(range(6), LINE, PETS))
    x_same, x_other = np.array([3, 3, 3, 1, 1, 1]), np.array([1, 1, 1, 3, 0, 0])
    np.testing.assert_allclose(scores.values, np.log(1 / x_same + x_other / 10 + 1))
    assert scores.values[3] > scores.values[4] == scores.values[5] > scores.values[0]
    assert graph.threshold == pytest.approx(np.exp(-5))


def test_neighbours_of_the_batch() -> None:
    scores = Scores(6)
    graph = Graph(6, neighbor_max=10, target_degree=1, threshold=float(np.exp(-2.5)))
    assert graph.neighbours is None
    graph.update(scores, shown(range(6), LINE, PETS))
    graph.update(scores, shown([5, 3], [[3.9], [1.5]], [0, 1], step=8))
    found = graph.neighbours
    assert found is not None and found.step == 8
    assert found.ids.tolist() == [3, 5]
    assert found.degree.tolist() == [4, 2]
    assert set(found.of(0)[:2].tolist()) == {1, 2}
    assert found.of(0)[2:].tolist() == [0, 5]
    assert found.of(1).tolist() == [2, 3]
    assert found.all.tolist() == [*found.of(0), *found.of(1)]
    assert found.all.dtype == np.uint32


def test_at_most_neighbor_max_nearest_count() -> None:
    scores = Scores(6)
    graph = Graph(6, neighbor_max=2, target_degree=1, threshold=float(np.exp(-2.5)))
    graph.update(scores, shown(range(6), LINE, PETS))
    assert graph.neighbours is not None
    assert graph.neighbours.degree.tolist() == [2, 2, 2, 2, 0, 0]
    assert graph.neighbours.of(0).tolist() == [1, 3]
    assert scores.values[0] == pytest.approx(np.log(1 / 2 + 1 / 2 + 1))


def reference(
    own: int, embeddings: dict[int, np.ndarray], labels: np.ndarray, radius: float, most: int
) -> float:
    """Return the score of one sample as the equation says."""
    here = embeddings[own]
    near = sorted((float(np.linalg.norm(here - there)), k) for k, there in embeddings.items())
    edges = [k for d, k in near if k != own][:most]
    edges = [k for k in edges if np.linalg.norm(here - embeddings[k]) < radius]
    same = 1 + sum(labels[k] == labels[own] for k in edges)
    other = sum(labels[k] != labels[own] for k in edges)
    return float(np.log(1 / same + other / most + 1))


def test_scores_are_those_of_the_equation_while_embeddings_move() -> None:
    """Sampling with replacement for 30 steps; each batch sees all latest embeddings."""
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 3, 80)
    scores, known = Scores(80), {}
    graph = Graph(80, neighbor_max=12, target_degree=5)
    for step in range(30):
        ids = rng.integers(0, 80, 9)
        embeddings = (rng.standard_normal((9, 4)) + 2 * np.eye(4)[labels[ids]]).astype(np.float32)
        known.update(zip(ids.tolist(), embeddings, strict=True))
        graph.update(scores, shown(ids, embeddings, labels[ids], step))
        radius = -np.log(graph.threshold)
        for one in ids.tolist():
            expected = reference(one, known, labels, radius, 12)
            assert scores.values[one] == pytest.approx(expected)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_the_mean_degree_hits_its_target_at_any_scale(scale: float) -> None:
    rng = np.random.default_rng(0)
    scores, graph = Scores(1000), Graph(1000, neighbor_max=100, target_degree=20)
    ids = rng.permutation(1000)
    embeddings = scale * rng.standard_normal((1000, 6))
    degrees = []
    for epoch in range(2):
        for step, batch in enumerate(np.split(ids, 10)):
            graph.update(
                scores, shown(batch, embeddings[batch], np.zeros(100), 10 * epoch + step, epoch)
            )
            assert graph.neighbours is not None
            degrees.append(graph.neighbours.degree.mean())
    assert np.mean(degrees[10:]) == pytest.approx(20, rel=0.15)


def test_the_threshold_follows_embeddings_that_grow() -> None:
    """Early in training most embeddings are of a model with another scale."""
    rng = np.random.default_rng(0)
    scores, graph = Scores(1000), Graph(1000, neighbor_max=100, target_degree=20)
    embeddings, degrees = rng.standard_normal((1000, 6)), []
    for step in range(40):
        batch = rng.permutation(1000)[:100]
        shown_now = 1.05**step * embeddings[batch]
        graph.update(scores, shown(batch, shown_now, np.zeros(100), step))
        assert graph.neighbours is not None
        degrees.append(graph.neighbours.degree.mean())
    assert np.min(degrees[5:]) > 10
    assert np.max(degrees[5:]) < 40


def test_few_samples_are_all_neighbours() -> None:
    """Fewer samples than the target degree: each has all others."""
    scores, graph = Scores(100), Graph(100)
    graph.update(scores, shown([1, 2, 3], np.eye(3), [0, 0, 1]))
    assert graph.neighbours is not None
    assert graph.neighbours.degree.tolist() == [2, 2, 2]


def test_a_sample_alone_scores_ln_2() -> None:
    scores, graph = Scores(100), Graph(100)
    graph.update(scores, shown([7], [[1.0, 2.0]], [0]))
    assert scores.values[7] == pytest.approx(np.log(2))


def test_another_dimension_is_refused_and_changes_nothing() -> None:
    scores, graph = Scores(10), Graph(10)
    graph.update(scores, shown([1, 2], np.eye(2), [0, 0]))
    before = scores.snapshot()
    with pytest.raises(ConfigError, match=r"dimension 3 .2 before.*same layer"):
        graph.update(scores, shown([1, 3], np.eye(3)[:2], [0, 0], step=1))
    np.testing.assert_array_equal(scores.values, before.values)
    with pytest.raises(ConfigError, match="id 10"):
        graph.update(scores, shown([10], [[1.0, 1.0]], [0]))


def test_a_low_recall_is_warned_of_once_an_epoch() -> None:
    scores = Scores(10)

    class Poor(FlatIndex):
        def recall(self, k: int, m: int) -> float:
            assert (k, m) == (3, 9)
            return 0.5

    graph = Graph(10, index=Poor, neighbor_max=8, target_degree=3)
    with pytest.warns(RuntimeWarning, match="finds 50% of the true neighbours"):
        graph.begin_epoch(scores, 1)
    graph.begin_epoch(scores, 1)
    assert graph.recall == 0.5


def test_hnsw_takes_over_beyond_its_size() -> None:
    assert type(Graph(EXACT_UP_TO)._index) is FlatIndex
    assert type(Graph(EXACT_UP_TO + 1)._index) is HnswIndex


def test_scores_over_hnsw_are_near_the_exact_ones() -> None:
    rng = np.random.default_rng(2)
    labels = rng.integers(0, 5, 2000)
    embeddings = rng.standard_normal((2000, 16)) + 2 * np.eye(16)[labels]
    tables = []
    for index in (FlatIndex, HnswIndex):
        scores, graph = Scores(2000), Graph(2000, neighbor_max=100, target_degree=15, index=index)
        for epoch in range(2):
            drift = 0.1 * np.random.default_rng(epoch).standard_normal(embeddings.shape)
            for step, ids in enumerate(np.split(rng.permutation(2000), 20)):
                moved = (embeddings + drift)[ids]
                graph.update(scores, shown(ids, moved, labels[ids], step, epoch))
            graph.begin_epoch(scores, epoch + 1)
        assert graph.recall > 0.9
        tables.append(scores.values)
        graph.close()
    assert np.corrcoef(tables)[0, 1] > 0.9


@pytest.mark.parametrize("index", [FlatIndex, HnswIndex])
def test_a_state_takes_the_place_of_what_was_known(index: type[FlatIndex]) -> None:
    scores, graph = Scores(10), Graph(10, index=index)
    graph.update(scores, shown([1, 2], np.eye(2), [0, 1]))
    other = Graph(10, index=index)
    other.update(scores, shown([3, 4, 5], np.eye(3), [0, 0, 0]))
    other.load_state_dict(graph.state_dict())
    tables = []
    for one in (graph, other):
        one.update(scores, shown([7], [[1.0, 1.0]], [0], step=1))
        assert one.neighbours is not None and set(one.neighbours.all) == {1, 2}
        tables.append(scores.values[7])
    assert tables[0] == tables[1] == pytest.approx(np.log(1 / 2 + 1 / 500 + 1))
    other.load_state_dict(Graph(10).state_dict())
    other.update(scores, shown([1], np.eye(3)[:1], [0]))
    with pytest.raises(ConfigError, match="id 7 is out of range"):
        Graph(2).load_state_dict(graph.state_dict())


@pytest.mark.parametrize(
    "bad",
    [
        {"num_samples": 0},
        {"neighbor_max": 0},
        {"target_degree": 0},
        {"target_degree": 501},
        {"decay": 0.0},
        {"decay": np.inf},
        {"threshold": 1.0},
        {"threshold": 0.0},
    ],
)
def test_bad_arguments_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        Graph(**{"num_samples": 10, **bad})  # type: ignore[arg-type]
