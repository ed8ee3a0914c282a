"""Corrupt and vanished samples, with each ``on_error``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.parts import ids_in, images

from stoker import Cache
from stoker.errors import ConfigError, SampleCorrupt, SampleNotFound
from stoker.pytorch import Failure, Loader
from stoker.types import Outcome

CORRUPT, SHRUNK, VANISHED = 7, 23, 41


def damaged(root: Path, make_jpeg: Callable[..., bytes]) -> Any:
    """A data set with a truncated JPEG, and files that shrink and vanish after it was listed."""
    path = root / "class0" / f"{CORRUPT:03}.png"
    raw = make_jpeg(8, 8)
    path.unlink()
    path.with_suffix(".jpg").write_bytes(raw[: len(raw) // 2])
    dataset = images(root)
    shrunk = root / "class1" / f"{SHRUNK:03}.png"
    shrunk.write_bytes(shrunk.read_bytes()[:40])
    (root / "class2" / f"{VANISHED:03}.png").unlink()
    return dataset


@pytest.fixture
def dataset(own_images: Path, jpeg: Callable[..., bytes]) -> Any:
    return damaged(own_images, jpeg)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("index", "error", "name"),
    [
        (CORRUPT, SampleCorrupt, r"007\.jpg"),
        (SHRUNK, SampleCorrupt, r"023\.png"),
        (VANISHED, SampleNotFound, r"041\.png"),
    ],
)
def test_raise_names_the_sample(
    dataset: Any, workers: int, index: int, error: type[Exception], name: str
) -> None:
    with (
        Loader(dataset, batch_size=2, sampler=[0, 1, index, 2], num_workers=workers) as loader,
        pytest.raises(error, match=name),
    ):
        list(loader)


def skipped(dataset: Any, on_error: Any = "skip", **arguments: Any) -> tuple[list[Any], Loader]:
    with Loader(dataset, batch_size=5, on_error=on_error, return_meta=True, **arguments) as loader:
        return list(loader), loader


@pytest.mark.parametrize("stage", ["encoded", "decoded"])
def test_skip_keeps_lengths_and_is_deterministic(dataset: Any, stage: str) -> None:
    batches, loader = skipped(dataset, cache=Cache(stage=stage))
    assert [len(targets) for _, targets, _ in batches] == [5] * 12
    served = [i for batch, _, _ in batches for i in ids_in(batch)]
    assert served == [i for _, _, meta in batches for i in meta.ids]
    assert not {CORRUPT, SHRUNK, VANISHED} & set(served)
    assert [t for _, targets, _ in batches for t in targets.tolist()] == [i // 20 for i in served]
    outcomes = torch.cat([torch.from_numpy(meta.outcomes) for _, _, meta in batches])
    assert (outcomes == Outcome.SUBSTITUTED).sum() == 3
    assert sorted(failure.id for failure in loader.quarantine) == [CORRUPT, SHRUNK, VANISHED]
    for failure in loader.quarantine:
        assert f"{failure.id:03}." in failure.name and failure.reason
    again, _ = skipped(dataset, num_workers=2, cache=Cache(stage=stage))
    assert [ids_in(a) for a, _, _ in again] == [ids_in(b) for b, _, _ in batches]


def test_replacements_come_from_the_same_plan(dataset: Any) -> None:
    order = [10, 11, 12, 13, 14, CORRUPT, VANISHED, 15, 16, 17]
    batches, _ = skipped(dataset, sampler=order)
    assert [ids_in(batch) for batch, _, _ in batches] == [
        [10, 11, 12, 13, 14],
        [10, 11, 15, 16, 17],  # the oldest of those before it first
    ]


def test_the_first_batch_takes_from_the_second(dataset: Any) -> None:
    batches, _ = skipped(dataset, sampler=[VANISHED, 1, 2, 3, 4, 50, 51, 52, 53, 54])
    assert ids_in(batches[0][0]) == [50, 1, 2, 3, 4]


def test_a_batch_alone_takes_from_itself(dataset: Any) -> None:
    batches, _ = skipped(dataset, sampler=[VANISHED, SHRUNK, 9])
    assert ids_in(batches[0][0]) == [9, 9, 9]


def test_nothing_to_take_from(dataset: Any) -> None:
    with pytest.raises(SampleNotFound):
        skipped(dataset, sampler=[VANISHED])


def test_a_function_decides(dataset: Any) -> None:
    told: list[Failure] = []
    _, loader = skipped(dataset, told.append)
    assert sorted(failure.id for failure in told) == [CORRUPT, SHRUNK, VANISHED]
    assert sorted(loader.quarantine) == sorted(told)


def test_a_function_may_raise(dataset: Any) -> None:
    with pytest.raises(_Stop, match=r"041\.png"):
        skipped(dataset, _stop_if_vanished, num_workers=1)


class _Stop(Exception):
    pass


def _stop_if_vanished(failure: Failure) -> None:
    if failure.id == VANISHED:
        raise _Stop(failure.name)


def test_other_words_are_refused(image_root: Path) -> None:
    with pytest.raises(ConfigError, match="on_error='ignore'"):
        Loader(images(image_root), on_error="ignore")  # type: ignore[arg-type]


def test_scores_belong_to_the_replacement(dataset: Any) -> None:
    with Loader(dataset, batch_size=5, on_error="skip", cache=0) as loader:
        for batch, _ in loader:
            loader.observe(torch.tensor(ids_in(batch)) * 2.0)
        scores = loader.scores
        for index in (CORRUPT, SHRUNK, VANISHED):
            assert scores.seen[index] == 0
        seen = scores.seen > 0
        assert (scores.values[seen] == seen.nonzero()[0] * 2).all()
