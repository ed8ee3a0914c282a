"""The index on an accelerator; what all indexes do is tested in tests/importance/test_knn.py."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from stoker.importance.base import Background, Observation
from stoker.importance.baselines import LossHistory
from stoker.importance.graph import Graph
from stoker.importance.knn import FlatIndex, VectorTable
from stoker.pytorch.knn import TorchIndex, search_on
from stoker.scores import Scores

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def random(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, 8)).astype(np.float32)


@pytest.mark.parametrize("device", DEVICES)
def test_chunks_are_merged(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr("stoker.pytorch.knn._CHUNK", 16)
    table = VectorTable(50)
    index = TorchIndex(table, device)
    index.changed(table.put(np.arange(50, dtype=np.uint32), random(50)))
    queries = random(6, seed=1)
    rows, distances = index.search(queries, 20)
    true = np.linalg.norm(queries[:, None] - table.vectors[None], axis=-1)
    np.testing.assert_array_equal(rows, np.argsort(true, axis=1)[:, :20])
    np.testing.assert_allclose(distances, np.sort(true, axis=1)[:, :20], atol=1e-3)


@pytest.fixture
def low_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("low_precision")
@pytest.mark.parametrize("device", DEVICES)
def test_s15_neighbours_are_exact_whatever_precision_training_has(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """TF32, which only accelerators have, is a product of factors with 10 bits of mantissa."""
    addmm = torch.addmm

    def in_tf32(add: torch.Tensor, *factors: torch.Tensor, **options: Any) -> torch.Tensor:
        rounded = [(one.view(torch.int32) & ~0x1FFF).view(torch.float32) for one in factors]
        return addmm(add, *rounded, **options)

    monkeypatch.setattr("stoker.pytorch.knn._CHUNK", 16)
    monkeypatch.setattr(torch, "addmm", in_tf32)
    table = VectorTable(50)
    index = TorchIndex(table, device)
    vectors = 100 + 0.01 * random(50)  # close together, and far from the origin
    index.changed(table.put(np.arange(50, dtype=np.uint32), vectors))
    queries = 100 + 0.01 * random(6, seed=1)
    rows, distances = index.search(queries, 20)
    true = np.linalg.norm(queries[:, None].astype(float) - table.vectors[None], axis=-1)
    np.testing.assert_array_equal(rows, np.argsort(true, axis=1)[:, :20])
    np.testing.assert_allclose(distances, np.sort(true, axis=1)[:, :20], rtol=1e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_a_graph_scores_alike_with_it(device: str) -> None:
    labels = np.arange(60) % 3
    tables = []
    for index in (None, partial(TorchIndex, device=device)):
        scores, graph = Scores(60), Graph(60, neighbor_max=30, target_degree=8)
        for step, ids in enumerate(np.split(np.arange(60, dtype=np.uint32), 6)):
            if step == 2 and index is not None:
                graph.use_index(index)
            shown = random(60)[ids] + 2 * labels[ids, None].astype(np.float32)
            graph.update(scores, Observation(ids, step, 0, embeddings=shown, labels=labels[ids]))
        tables.append(scores.values)
    np.testing.assert_allclose(tables[0], tables[1], rtol=1e-4)


def test_what_does_not_fit_stays_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    table = VectorTable(5)
    index = TorchIndex(table, "cpu")
    empty, calls = torch.empty, []

    def full(*shape: int, **options: object) -> torch.Tensor:
        calls.append(shape)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("the accelerator is full")
        return empty(*shape, **options)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(torch, "empty", full)
    rows = table.put(np.arange(5, dtype=np.uint32), random(5))
    with pytest.warns(RuntimeWarning, match="do not fit on cpu .*is full.*on the CPU"):
        index.changed(rows)
    assert index.search(random(5), 1).rows[:, 0].tolist() == rows.tolist()


def test_an_accelerator_is_used_unless_an_index_was_asked_for() -> None:
    device = torch.device("meta")
    chosen, asked = Graph(5), Graph(5, index=FlatIndex)
    for scorer in (chosen, asked, Background(asked), LossHistory()):
        search_on(device, scorer)
    assert type(chosen._index) is TorchIndex and chosen._index.device == device
    assert type(asked._index) is FlatIndex
    inside = Graph(5)
    search_on(torch.device("cpu"), Background(inside))
    assert type(inside._index) is FlatIndex
    search_on(device, Background(inside))
    assert type(inside._index) is TorchIndex
