from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.parts import number_of, numbers
from torch.nn import functional

from stoker.errors import ConfigError
from stoker.importance.base import Background, Observation
from stoker.importance.baselines import LossHistory
from stoker.importance.graph import Graph
from stoker.importance.knn import FlatIndex, VectorTable
from stoker.pytorch import Loader, Meta, SampleDataset, per_sample_loss
from stoker.pytorch.observe import TorchIndex, search_on
from stoker.scores import Scores


@pytest.fixture
def loader() -> Any:
    dataset = SampleDataset(numbers(40), number_of, targets=np.arange(40) % 4)
    with Loader(dataset, batch_size=8, cache=0) as made:
        yield made


@pytest.fixture
def with_meta() -> Any:
    dataset = SampleDataset(numbers(40), number_of, targets=np.arange(40) % 4)
    with Loader(dataset, batch_size=8, cache=0, return_meta=True) as made:
        yield made


def test_losses_become_scores(loader: Loader) -> None:
    for batch, _ in loader:
        losses = (batch * 0.25).requires_grad_()
        loader.observe(losses)
        assert loader.weights.tolist() == [1.0] * 8
        (losses * loader.weights).mean().backward()
    assert loader.scores.values.tolist() == [i * 0.25 for i in range(40)]
    assert loader.scores.seen.tolist() == [1] * 40
    assert sorted(set(loader.scores.last.tolist())) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float64])
def test_losses_of_any_type(loader: Loader, kind: torch.dtype) -> None:
    batch, _ = next(iter(loader))
    loader.observe(torch.full((8,), 1.5, dtype=kind))
    assert (loader.scores.values[batch.numpy()] == 1.5).all()


def test_losses_may_be_an_array_or_a_list(loader: Loader) -> None:
    iterator = iter(loader)
    for make in (np.asarray, list):
        batch, _ = next(iterator)
        loader.observe(make([2.0] * 8))
        assert (loader.scores.values[batch.numpy()] == 2).all()


def test_logits_and_labels_instead_of_losses(loader: Loader) -> None:
    batch, labels = next(iter(loader))
    logits = torch.randn(8, 4, requires_grad=True)
    loader.observe(logits=logits, labels=labels, embeddings=torch.zeros(8, 3))
    expected = functional.cross_entropy(logits.detach(), labels, reduction="none")
    np.testing.assert_allclose(loader.scores.values[batch.numpy()], expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"losses": torch.ones(7)}, r"\[7\] for a batch of 8"),
        ({"losses": torch.ones(8, 1)}, r"\[8, 1\]"),
        ({"losses": torch.tensor(1.0)}, "reduction='none'"),
        ({}, "no losses"),
        ({"logits": torch.ones(8, 4)}, "no losses"),
        ({"logits": torch.ones(8, 4), "labels": torch.zeros(5).long()}, "do not fit"),
        ({"losses": torch.ones(8), "embeddings": torch.ones(3, 2)}, "3 embeddings"),
        ({"losses": torch.ones(8), "meta": 3}, "return_meta=True"),
    ],
)
def test_what_does_not_fit_is_refused_and_may_be_put_right(
    loader: Loader, arguments: dict[str, Any], message: str
) -> None:
    next(iter(loader))
    with pytest.raises(ConfigError, match=message):
        loader.observe(**arguments)
    loader.observe(torch.ones(8))
    assert loader.scores.seen.sum() == 8


def test_batches_drawn_ahead_make_it_ambiguous(loader: Loader) -> None:
    iterator = iter(loader)
    next(iterator)
    assert len(loader.weights) == 8
    next(iterator)
    with pytest.raises(ConfigError, match="2 are unobserved"):
        loader.observe(torch.ones(8))
    with pytest.raises(ConfigError, match=r"weights .* 2 are unobserved"):
        _ = loader.weights


def test_a_new_epoch_starts_clean(loader: Loader) -> None:
    iterator = iter(loader)
    next(iterator)
    next(iterator)
    next(iter(loader))
    loader.observe(torch.ones(8))


def test_nothing_to_observe(loader: Loader) -> None:
    with pytest.raises(ConfigError, match="no unobserved batch"):
        loader.observe(torch.ones(8))
    with pytest.raises(ConfigError, match="iterate first"):
        _ = loader.weights
    with pytest.raises(ConfigError, match="iterate first"):
        _ = loader.last_ids
    next(iter(loader))
    loader.observe(torch.ones(8))
    with pytest.raises(ConfigError, match="once after each batch"):
        loader.observe(torch.ones(8))


def test_meta_says_which_batch(with_meta: Loader) -> None:
    metas: list[Meta] = []
    for batch, labels, meta in with_meta:
        assert meta.ids.tolist() == batch.tolist()
        assert (meta.ids % 4 == labels.numpy()).all()
        assert meta.weights.tolist() == [1.0] * 8
        metas.append(meta)
    for meta in reversed(metas):
        with_meta.observe(meta.ids * 3.0, meta=meta)
    assert with_meta.scores.values.tolist() == [i * 3.0 for i in range(40)]
    with pytest.raises(ConfigError, match="observed before"):
        with_meta.observe(metas[0].ids * 1.0, meta=metas[0])


def test_meta_of_an_earlier_epoch_is_refused(with_meta: Loader) -> None:
    *_, meta = next(iter(with_meta))
    next(iter(with_meta))
    with pytest.raises(ConfigError, match="earlier epoch"):
        with_meta.observe(torch.ones(8), meta=meta)


def test_losses_that_are_not_finite_keep_the_old_score(loader: Loader) -> None:
    for batch, _ in loader:
        loader.observe(batch.float())
    bad = torch.tensor([float("nan"), float("inf"), -float("inf"), 5, 5, 5, 5, 5])
    iterator = iter(loader)
    batch, _ = next(iterator)
    with pytest.warns(RuntimeWarning, match="losses of 3 samples are not finite"):
        loader.observe(bad)
    assert loader.scores.values[batch.numpy()].tolist() == [*batch[:3].tolist(), 5, 5, 5, 5, 5]
    next(iterator)
    loader.observe(bad)  # warned of once
    assert loader.stats.non_finite == 6


def test_losses_elsewhere_are_copied_while_computing_goes_on(
    loader: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device whose copies arrive when we say so stands in for an accelerator."""
    from stoker.pytorch import observe

    arrived: set[int] = set()

    class Event:
        def __init__(self, number: int) -> None:
            self.number = number

        def query(self) -> bool:
            return self.number in arrived

        def synchronize(self) -> None:
            arrived.add(self.number)

    copies: list[observe.Copy] = []

    def start_copy(tensors: Any) -> observe.Copy:
        copies.append(observe.Copy(dict(tensors), [Event(len(copies))]))
        return copies[-1]

    monkeypatch.setattr(observe, "start_copy", start_copy)
    observer = loader._session.controller.observer
    iterator = iter(loader)
    for number in range(5):
        batch, _ = next(iterator)
        loader.observe(batch * 2.0)
        assert observer._scores.seen.sum() == 8 * len(arrived)
        if number == 2:
            arrived.add(0)  # noticed at the next observation
    assert observer._scores.seen.sum() == 8
    scores = loader.scores  # waits for the others
    assert scores.values.tolist() == [i * 2.0 for i in range(40)]


def test_classification() -> None:
    logits, labels = torch.randn(6, 4), torch.tensor([0, 1, 2, 3, 0, 1])
    expected = functional.cross_entropy(logits, labels, reduction="none")
    assert torch.allclose(per_sample_loss(logits, labels), expected)


def test_tokens_average_over_what_is_labelled() -> None:
    logits, labels = torch.randn(2, 5, 7), torch.tensor([[1, 2, -100, -100, -100], [3] * 5])
    found = per_sample_loss(logits, labels)
    assert torch.allclose(found[0], functional.cross_entropy(logits[0, :2], labels[0, :2]))
    assert torch.allclose(found[1], functional.cross_entropy(logits[1], labels[1]))


def test_shift_compares_with_the_next_token() -> None:
    logits, labels = torch.randn(2, 5, 7), torch.randint(0, 7, (2, 5))
    expected = [functional.cross_entropy(logits[i, :-1], labels[i, 1:]) for i in range(2)]
    assert torch.allclose(per_sample_loss(logits, labels, shift=True), torch.stack(expected))
    with pytest.raises(ConfigError, match="shift=True"):
        per_sample_loss(torch.randn(2, 7), torch.zeros(2).long(), shift=True)


def test_a_sample_without_labels_has_no_loss() -> None:
    found = per_sample_loss(torch.randn(2, 3, 7), torch.tensor([[0, 0, 0], [9, 9, 9]]), 9)
    assert found.isnan().tolist() == [False, True]


def test_half_precision_and_gradients() -> None:
    logits = torch.randn(3, 4, dtype=torch.bfloat16, requires_grad=True)
    found = per_sample_loss(logits, torch.zeros(3).long())
    assert found.dtype == torch.float32
    found.mean().backward()
    assert logits.grad is not None


def test_an_empty_batch() -> None:
    assert per_sample_loss(torch.randn(0, 3, 7), torch.zeros(0, 3).long()).shape == (0,)


def test_shapes_that_do_not_fit() -> None:
    for logits, labels in ((torch.ones(3, 4), torch.zeros(2)), (torch.ones(3), torch.zeros(3))):
        with pytest.raises(ConfigError, match="do not fit"):
            per_sample_loss(logits, labels)


DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def random(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, 8)).astype(np.float32)


@pytest.mark.parametrize("device", DEVICES)
def test_chunks_are_merged(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr("stoker.pytorch.observe._CHUNK", 16)
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

    monkeypatch.setattr("stoker.pytorch.observe._CHUNK", 16)
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
