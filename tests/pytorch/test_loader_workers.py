"""Worker processes of every start method, and what survives the way to them and back."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.caches import gathered
from support.parts import as_dict, dict_collate, ids_in, images, number_of, numbers, with_noise
from torch.utils.data import get_worker_info

from stoker.pytorch import ImageFolder, Loader, SampleDataset
from stoker.pytorch.hand_over import Envelope, Meta
from stoker.source import MemorySource

# This machine may have fewer cores than the workers that a test needs.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


def batches(root: Path, **arguments: Any) -> list[torch.Tensor]:
    options = gathered({"batch_size": 7, "cache": "40%", **arguments})
    with Loader(images(root, with_noise), **options) as loader:
        found = [batch for _ in range(2) for batch, _ in loader]
        stats = loader.stats
        assert stats.accesses == stats.hits + stats.fetched == 120
        assert stats.failed == stats.bypassed == 0
        return found


@pytest.mark.parametrize(
    ("method", "persistent"),
    [
        *(("fork", persistent) for persistent in (False, True)),
        *(("forkserver", persistent) for persistent in (False, True)),
        ("spawn", True),  # as by a fork server, but each worker imports torch
    ],
)
def test_batches_do_not_depend_on_the_workers(
    image_root: Path, method: str, persistent: bool
) -> None:
    expected = batches(image_root)
    found = batches(
        image_root,
        num_workers=2,
        multiprocessing_context=method,
        persistent_workers=persistent,
    )
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_many_workers_and_decoded_stage(image_root: Path) -> None:
    expected = batches(image_root)
    found = batches(image_root, num_workers=4, prefetch_factor=3, stage="decoded")
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_out_of_order_batches_keep_their_meta(image_root: Path) -> None:
    with Loader(
        images(image_root), batch_size=4, num_workers=2, in_order=False, return_meta=True
    ) as loader:
        seen = []
        for batch, _, meta in loader:
            assert ids_in(batch) == meta.ids.tolist()
            seen += meta.ids.tolist()
        assert sorted(seen) == list(range(60))


def test_dict_batches_from_workers(image_root: Path) -> None:
    with Loader(
        images(image_root), batch_size=8, num_workers=2, collate_fn=dict_collate, return_meta=True
    ) as loader:
        for batch in loader:
            assert batch["meta"].ids.tolist() == ids_in(batch["image"])
            assert len(batch["label"]) == len(batch["meta"])


def test_an_abandoned_iterator_of_persistent_workers(image_root: Path) -> None:
    with Loader(
        images(image_root), batch_size=6, num_workers=2, persistent_workers=True, return_meta=True
    ) as loader:
        next(iter(loader))
        found = list(loader)
        assert sorted(i for batch, _, _ in found for i in ids_in(batch)) == list(range(60))
        assert {meta.epoch for _, _, meta in found} == {1}


def test_close_in_the_middle_ends_the_workers(image_root: Path) -> None:
    loader = Loader(images(image_root), batch_size=4, num_workers=2, persistent_workers=True)
    iterator = iter(loader)
    next(iterator)
    assert loader._torch.inner is not None and loader._torch.inner._iterator is not None
    workers = loader._torch.inner._iterator._workers
    loader.close()
    for worker in workers:
        worker.join(60)
        assert not worker.is_alive()


def test_worker_init_fn_finds_the_users_data_set(image_root: Path) -> None:
    with Loader(
        images(image_root), batch_size=30, num_workers=1, worker_init_fn=_check_dataset
    ) as loader:
        assert len(list(loader)) == 2


def _check_dataset(worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert info.dataset.classes == ["class0", "class1", "class2"]
    assert len(info.dataset) == 60


def test_errors_of_a_transform_come_through(image_root: Path) -> None:
    with (
        Loader(images(image_root, _broken), batch_size=8, num_workers=1) as loader,
        pytest.raises(ZeroDivisionError),
    ):
        list(loader)


def _broken(image: Any) -> float:
    return 1 / 0


def test_torch_pins_the_batch_and_leaves_the_meta_alone() -> None:
    from torch.utils.data._utils.pin_memory import pin_memory

    class Pinned(torch.Tensor):
        def pin_memory(self) -> str:  # type: ignore[override]
            return "pinned"

    meta = Meta(0, 0, np.arange(2, dtype=np.uint32), np.zeros(2, np.int8), np.arange(2))
    image = torch.zeros(2).as_subclass(Pinned)
    envelope = pin_memory(Envelope({"image": image}, meta, ()))
    assert isinstance(envelope, Envelope)
    assert envelope.batch == {"image": "pinned"}
    assert envelope.meta is meta


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")
def test_pin_memory_is_accepted_without_an_accelerator(image_root: Path) -> None:
    with Loader(images(image_root), batch_size=8, num_workers=1, pin_memory=True) as loader:
        assert sum(len(targets) for _, targets in loader) == 60


def test_single_samples_from_workers(image_root: Path) -> None:
    with Loader(
        images(image_root), batch_size=None, num_workers=2, collate_fn=as_dict, return_meta=True
    ) as loader:
        found = [(int(item["image"][0, 0, 0]), item["meta"].ids.tolist()) for item in loader]
        assert sorted(i for i, _ in found) == list(range(60))
        assert all(ids == [i] for i, ids in found)


def test_what_workers_receive_does_not_grow_with_the_data_set() -> None:
    from multiprocessing import context
    from multiprocessing.reduction import ForkingPickler

    def pickled(dataset: Any) -> int:
        # As in a spawn: shared memory goes by descriptor.
        context.set_spawning_popen(_Popen())
        try:
            return len(ForkingPickler.dumps(dataset))
        finally:
            context.set_spawning_popen(None)

    class _Popen:
        DupFd = staticmethod(int)

        def duplicate_for_child(self, fd: int) -> int:
            return fd

    small, large = (
        SampleDataset(numbers(count), number_of, targets=np.arange(count)) for count in (10, 20_000)
    )
    assert pickled(large) < pickled(small) + 100


def test_image_folder_travels_by_descriptor(image_root: Path) -> None:
    dataset = ImageFolder(image_root)
    assert dataset.__getstate__()["_targets"] is None


class Freed:
    """Garbage, in a cycle, that says in which process it is freed; as a tensor on a device ends a
    worker that frees it."""

    def __init__(self, log: Path) -> None:
        self._log, self._itself = log, self

    def __del__(self) -> None:
        with self._log.open("a") as log:
            log.write(f"{os.getpid()}\n")


def collecting(data: bytes) -> int:
    gc.collect()
    return os.getpid()


def is_collecting(data: bytes) -> bool:
    return gc.isenabled()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_collect_their_garbage(method: str) -> None:
    dataset = SampleDataset(MemorySource([b"a", b"b"]), is_collecting)
    with Loader(dataset, 1, num_workers=1, multiprocessing_context=method) as loader:
        assert [batch.tolist() for batch in loader] == [[True], [True]]
    assert gc.isenabled()


@pytest.mark.parametrize("is_frozen", [False, True])
def test_garbage_of_training_is_not_freed_by_workers(tmp_path: Path, is_frozen: bool) -> None:
    was_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    gc.disable()  # the garbage is still there when workers are forked
    try:
        if is_frozen:
            gc.freeze()
        Freed(tmp_path / "freed")
        dataset = SampleDataset(MemorySource([b"a", b"b"]), collecting)
        with Loader(dataset, 1, num_workers=1, multiprocessing_context="fork") as loader:
            workers = {int(pid) for batch in loader for pid in batch}
        assert (gc.get_freeze_count() > 0) == is_frozen
    finally:
        gc.unfreeze()
        gc.enable()
    gc.collect()
    if was_frozen:
        gc.freeze()
    assert workers and os.getpid() not in workers
    assert (tmp_path / "freed").read_text() == f"{os.getpid()}\n"
