"""The Loader with a disk cache below its memory."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.caches import gathered
from support.numbered import NUM, SAMPLES, epoch, number_of, reads_of, slow_dataset

from stoker import Cache
from stoker.errors import ConfigError, StateMismatch
from stoker.pytorch import Loader, SampleDataset, with_cache, wrap
from stoker.source import FileSource
from stoker.store import disk


def loader_of(dataset: Any, place: Path, **options: Any) -> Loader:
    given = {"batch_size": 16, "cache": "20%", "disk": place}
    return Loader(dataset, **gathered(given | options))


@pytest.mark.parametrize("recipe", ["minio", "belady"])
@pytest.mark.parametrize(("num_workers", "ahead"), [(0, "1MiB"), (2, "1MiB"), (2, 0)])
def test_memory_and_disk_add_up(
    recipe: str, num_workers: int, ahead: int | str, tmp_path: Path
) -> None:
    dataset = slow_dataset()
    options = {"recipe": recipe, "num_workers": num_workers, "prefetch": ahead, "epochs": 3}
    options["disk_size"] = "50%"
    with loader_of(dataset, tmp_path / "cache", **options) as loader:
        for _ in range(3):
            assert epoch(loader) == list(range(NUM))
            loader.end_epoch()
        if not ahead:  # what was read ahead in vain is not counted as fetched
            assert loader.stats.fetched == reads_of(dataset)
        assert loader.stats.accesses == loader.stats.hits + loader.stats.fetched
        last = loader.epoch_stats[-1]
        assert last.byte_hit_ratio == pytest.approx(0.7, abs=0.05)
        assert last.disk_hits > 0.4 * NUM
        assert last.bytes_from_disk > 0
        assert loader.stats.disk_errors == 0


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_warm_start_reads_nothing(num_workers: int, tmp_path: Path) -> None:
    with loader_of(slow_dataset(), tmp_path / "cache") as cold:
        assert epoch(cold) == list(range(NUM))
        assert cold.stats.fetched == NUM
    dataset = slow_dataset()
    with loader_of(dataset, tmp_path / "cache", recipe="lru", num_workers=num_workers) as warm:
        for _ in range(2):
            assert epoch(warm) == list(range(NUM))
        assert (warm.stats.hits, warm.stats.fetched) == (2 * NUM, 0)
        assert warm.stats.disk_hits >= NUM
    assert reads_of(dataset) == 0


def rebuilt(folder: Path, content: int, how: str = "new") -> list[Path]:
    """Files whose names, sizes and times say nothing of their content."""
    if how == "new":
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    paths = [folder / f"{number:03d}" for number in range(32)]
    for path in paths:
        path.write_bytes(np.full(100, content, np.int32).tobytes())
        os.utime(path, ns=(10**18, 10**18))
    return paths


@pytest.mark.parametrize("how", ["new", "in place"])
def test_s12_files_rebuilt_with_the_same_sizes_and_times_are_read_anew(
    tmp_path: Path, how: str
) -> None:
    def served(place: Path) -> set[int]:
        with loader_of(SampleDataset(FileSource(paths), number_of), place) as loader:
            return set(epoch(loader))

    paths = rebuilt(tmp_path / "data", 1)
    assert served(tmp_path / "cache") == {1}
    assert served(tmp_path / "cache") == {1}, "they are those that the directory is for"
    before = FileSource(paths).fingerprint
    rebuilt(tmp_path / "data", 2, how)
    assert FileSource(paths).fingerprint == before, "it is the same wherever the files are"
    try:
        assert served(tmp_path / "cache") == {2}
    except StateMismatch as error:
        assert "stoker clean " in str(error)
    assert served(tmp_path / "other") == {2}


def test_s12_a_job_does_not_join_the_cache_of_files_that_are_gone(tmp_path: Path) -> None:
    paths = rebuilt(tmp_path / "data", 1)
    with Loader(SampleDataset(FileSource(paths), number_of), 16, cache="100%") as earlier:
        assert set(epoch(earlier)) == {1}
        rebuilt(tmp_path / "data", 2)
        with Loader(SampleDataset(FileSource(paths), number_of), 16, cache="100%") as later:
            assert set(epoch(later)) == {2}


def test_a_warm_start_on_a_part_of_it(tmp_path: Path) -> None:
    dataset = slow_dataset()
    for run in range(2):
        with loader_of(dataset, tmp_path / "cache", disk_size="50%", cache="10%") as loader:
            epoch(loader)
            share = loader.stats.byte_hit_ratio
        assert share == pytest.approx([0, 0.5][run], abs=0.03)


def test_the_disk_alone(tmp_path: Path) -> None:
    dataset = slow_dataset()
    with loader_of(dataset, tmp_path / "cache", cache=0) as loader:
        for _ in range(2):
            assert epoch(loader) == list(range(NUM))
        assert (loader.stats.hits, reads_of(dataset)) == (NUM, NUM)


def test_two_jobs_share_it(tmp_path: Path) -> None:
    dataset = slow_dataset()
    with (
        loader_of(dataset, tmp_path / "cache", seed=1) as one,
        loader_of(dataset, tmp_path / "cache", seed=2) as two,
    ):
        for _ in zip(one, two, strict=True):
            pass
        assert one.stats.fetched + two.stats.fetched == reads_of(dataset) == NUM


def test_without_a_loader(tmp_path: Path) -> None:
    for hits in (0, NUM):
        cached = with_cache(slow_dataset(), cache=Cache(disk=tmp_path / "cache"))
        assert cached.__getitems__(range(NUM)) == list(range(NUM))
        assert cached.store.stats()["hits"] == hits
        cached.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"disk_size": "1GiB", "disk": None}, "needs a directory: give disk too"),
        ({"disk_size": 100}, "disk_size=100 is 100 bytes and the largest sample has 596"),
        ({"disk_size": "much"}, "disk_size='much' is not a size"),
        ({"disk": "/etc"}, "not empty and not Stoker's"),
        ({"stage": "decoded"}, "nothing tells the next run"),
    ],
)
def test_refusals(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        loader_of(slow_dataset(), tmp_path / "cache", **options)
    assert not (tmp_path / "cache").exists()


def test_a_data_set_without_a_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"give wrap\(\) a name"):
        loader_of(wrap(list(range(50))), tmp_path / "cache")  # type: ignore[arg-type]


def test_no_disk_cache_is_made_for_0(tmp_path: Path) -> None:
    with loader_of(slow_dataset(), tmp_path / "cache", disk_size=0) as loader:
        epoch(loader)
    assert not (tmp_path / "cache").exists()


def test_another_data_set_or_size_is_refused_at_construction(tmp_path: Path) -> None:
    with loader_of(slow_dataset(), tmp_path / "cache", disk_size="50%") as loader:
        epoch(loader)
    changed = slow_dataset([*SAMPLES[:-1], b"1234"])
    for dataset, options in ((changed, {}), (slow_dataset(), {"disk_size": "60%"})):
        with pytest.raises(StateMismatch, match=r"stoker clean "):
            loader_of(dataset, tmp_path / "cache", **options)
    with loader_of(slow_dataset(), tmp_path / "cache") as loader:  # as it was made
        epoch(loader)
        assert loader.stats.byte_hit_ratio == pytest.approx(0.5, abs=0.03)


def test_one_in_use_elsewhere_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_PATIENCE", 0.1)
    with loader_of(slow_dataset(), tmp_path / "cache") as mine:
        epoch(mine)
        monkeypatch.setenv("STOKER_RUNTIME_DIR", str(tmp_path / "run"))
        with loader_of(slow_dataset(), tmp_path / "cache") as other:
            with pytest.warns(RuntimeWarning, match=r"no disk cache: .* in use by another"):
                assert epoch(other) == list(range(NUM))
            assert other.stats.fetched == NUM
